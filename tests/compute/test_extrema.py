"""Where extremes lie: torch's rules, every pass, rows in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transconv.compute import Compute, execute, kernels, library, parse, parted
from transconv.ir import f32, i64
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass

ROWS = """compute rows
    tensor I i64 [5]
    axes   n=5 | k=20
    read   x = X[n, k]
    let    m = {op}(x; k)
    store  M[n] = m
    store  I[n] = arg{op}(x; k)"""


def rows() -> torch.Tensor:
    """With ties, NaN, infinities, and rows of one value."""
    x = torch.randint(-3, 4, (5, 20)).double()
    x[0, 7] = x[0, 4] = float("nan")
    x[1, 3:], x[2, 5], x[2, 9], x[3] = float("-inf"), float("inf"), float("inf"), 0.0
    x[3, ::2] = -0.0
    return x


@pytest.mark.parametrize("op", ["max", "min"])
def test_the_first_extreme_is_meant_and_nan_is_one(op: str) -> None:
    made, x = parse(ROWS.format(op=op)), rows()
    assert parse(str(made)) == made and str(made).count(f"{op}(x; k)") == 1  # one
    want = getattr(torch, op)(x, 1)
    for compute in (made, parted(made, "k", 5), parted(made, "k", 10)):
        got = execute(compute, {"X": x.numpy()})
        np.testing.assert_array_equal(got["I"].value, want.indices.numpy())
        np.testing.assert_array_equal(got["M"].value, want.values.numpy())
    plan = build_compute(made, TARGETS["interpreter"])
    given = {"X": x.float(), "M": torch.empty(5), "I": torch.empty(5, dtype=torch.int64)}
    plan.launch(**given)
    assert torch.equal(given["I"], want.indices)


@pytest.mark.parametrize("schedule", [None, "n:4 k:32 | fma", "n:2 k:8 | fma | late=1"])
def test_after_every_pass(schedule: str | None) -> None:
    made = parse(ROWS.format(op="max"))
    plan = build_compute(made, TARGETS["sm_90"], Schedule.parse(schedule) if schedule else None)
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []


def test_parts_read_a_row_once() -> None:
    """Each part tells of its own extreme: no kernel behind the first reads X."""
    first, *rest = kernels(parted(parse(ROWS.format(op="min")), "k", 5))
    assert next(t.name for t in first.tensors) == "X" and rest
    assert all(t.name != "X" for k in rest for t in k.tensors)
    made = parted(parse(ROWS.format(op="min")), "k", 5)
    plan = build_compute(made, TARGETS["sm_90"])
    assert [j.problem for _, j in after_every_pass(made, plan) if j.problem] == []


def test_several_axes_and_what_is_computed() -> None:
    made = parse(
        "compute p\n axes n=3 j=4 k=5\n read x = X[n, j, k]\n read y = Y[n]\n"
        "store I[n] = argmin(abs(x); k j)\n store Z[n, k] = where(j0 == 1, y, x)".replace(
            "store Z[n, k] = where(j0 == 1, y, x)", "store Z[n] = y"
        )
    )
    x = np.random.default_rng(0).integers(-9, 9, (3, 4, 5)).astype(float)
    want = np.abs(x).transpose(0, 2, 1).reshape(3, -1).argmin(1)
    np.testing.assert_array_equal(execute(made, {"X": x, "Y": x[:, 0, 0]})["I"].value, want)
    assert not ComputationCase(made).launched(build_compute(made, TARGETS["interpreter"]), "cpu").problem


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (2, 3, 2, 5)])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_the_library_has_torchs_numbers(shape: tuple[int, ...], dim: int | None) -> None:
    """Of tensors in any order of memory; over all dims places are counted in the order of the dims."""
    x = torch.randint(0, 5, shape).double()
    for t in (x, x.transpose(0, -1).contiguous().transpose(0, -1), x.flip(-1)[..., ::2]):
        over = range(t.dim()) if dim is None else [dim % t.dim()]
        want = t.argmax(dim)
        at = library.Strided.dense(tuple(want.shape) or (1,), i64)
        spec = library.Strided(tuple(t.shape), t.stride(), f32)
        formula = library.extreme("argmax", spec, list(over), at)
        made: Compute = parse(formula.text)
        seen = formula.page.seen["X"]
        given = t.reshape(seen.shape).permute(seen.order).reshape(seen.sizes)
        got = execute(made, {"X": given.numpy()})["I"].value
        np.testing.assert_array_equal(got.ravel(), want.numpy().ravel())
