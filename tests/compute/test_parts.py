"""Reductions of rows split into parts give the same results, and are chosen where there are few rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.compute.test_sweeps import BACKWARD, INTERPRETER, LAYER_NORM, MOMENTS, SM90, SOFTMAX
from transconv.backend_triton import TritonKernel
from transconv.compute import Compute, execute, for_batches, kernels, parse, parted, with_examples
from transconv.runtime import build_compute, first_run_check
from transconv.schedule import Schedule
from transconv.selection import spread
from transconv.selection.proposals import heuristics
from transconv.verify.computation import ComputationCase, after_every_pass

SHORT = {
    SOFTMAX: ("k", 11, ()),
    LAYER_NORM: ("h", 5, ("c",)),
    MOMENTS: ("k", 8, ()),
    BACKWARD: ("k", 3, ()),
}
GROUP_NORM = """compute group_norm
    tensor X bf16 [s=65536, g=8, c=4]
    tensor Y bf16 [s=65536, g=8, c=4]
    axes   g=8 | s=65536 c=4
    read   x = X[s, g, c]
    let    mean = sum(x; s c) / 262144
    let    d = x - mean
    let    r = rsqrt(sum(d*d; s c) / 262144 + 0.00001)
    store  Y[s, g, c] = d * r"""


@pytest.mark.every(2)
@pytest.mark.parametrize("text", SHORT, ids=lambda x: x.split("\n")[0][8:])
def test_parts_mean_the_same(text: str) -> None:
    whole = parse(text)
    axis, within, late = SHORT[text]
    made = parted(whole, axis, within, late)
    case = ComputationCase(whole, "float")
    for name, answer in execute(made, case.given).items():
        np.testing.assert_allclose(answer.value, case.answers[name].value, rtol=1e-9, atol=1e-9)
    assert parse(str(made)) == replace(made, axes=parse(str(made)).axes)
    plan = build_compute(made, SM90)
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []


def test_deviations_take_no_sweep_of_their_own() -> None:
    """Mean and deviations of every part, those of the row, and what is done with them."""
    made = kernels(parted(parse(GROUP_NORM), "s", 128, ("c",)))
    assert [{x.name for x in k.axes_of("K")} for k in made] == [{"s"}, {"s_part", "c"}, set()]
    reads = [[r.name for r in k.reads if r.view.tensor.name == "X"] for k in made]
    assert reads == [["x", "x_first"], [], ["x"]]


def test_powers_of_e_are_taken_from_the_largest_of_a_part() -> None:
    """The row is read twice in all; parts and rows of -inf give what torch gives."""
    whole = parse(SOFTMAX)
    made = parted(whole, "k", 11)
    reads = [sum(r.view.tensor.name == "X" for r in k.reads) for k in kernels(made)]
    assert reads == [1, 0, 1]
    x = np.random.default_rng(0).standard_normal((5, 77)) * 100
    x[1, :22], x[2], x[3, 7], x[4, 7] = -np.inf, -np.inf, np.inf, np.nan
    with np.errstate(all="ignore"):
        got, want = (execute(c, {"X": x})["Y"].value for c in (made, whole))
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert np.isfinite(got[1]).all() and np.isnan(got[2:]).all(1).all()


@pytest.mark.every(2)
@pytest.mark.parametrize("outlier", [0, 5, 127])
def test_the_shift_of_a_part_costs_few_digits(outlier: int) -> None:
    """In f32, with a mean far from zero and an element far from the others, first or not."""
    text = GROUP_NORM.replace("bf16", "f32").replace("65536", "128").replace("262144", "512")
    x = np.random.default_rng(1).standard_normal((128, 8, 4)).astype(np.float32) + 1000
    x[outlier] += 5000
    plan = build_compute(parted(parse(text), "s", 64, ("c",)), INTERPRETER)
    import torch

    y = torch.empty(128, 8, 4)
    plan.launch(X=torch.from_numpy(x), Y=y)
    wide = x.astype(np.float64)
    d = wide - wide.mean((0, 2), keepdims=True)
    want = d / np.sqrt((d * d).mean((0, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.numpy(), want, rtol=0, atol=5e-5 * np.abs(want).max())


def test_deviations_from_something_else_are_summed_as_they_are() -> None:
    made = kernels(parted(parse(GROUP_NORM.replace("d = x - mean", "d = x - mean / 2")), "s", 128, ("c",)))
    assert sum(any(r.view.tensor.name == "X" for r in k.reads) for k in made) == 3


@pytest.mark.slow
def test_few_long_rows_are_spread_and_many_are_not() -> None:
    def count(c: Compute) -> int:
        return len(spread(c, SM90))

    assert count(parse(GROUP_NORM)) == 3
    assert count(parse(GROUP_NORM.replace("65536", "64").replace("262144", "256"))) == 1
    assert count(parse(GROUP_NORM.replace("65536", "65537").replace("262144", "262148"))) == 1  # a prime
    assert (
        count(parse(SOFTMAX))
        == count(parse("compute s\n axes n=2 | k=9\n read x = X[n, k]\nstore Y[n] = sum(x; k)"))
        == 1
    )
    plan = build_compute(parse(GROUP_NORM), SM90)
    assert len(plan.steps) == 3
    assert {*plan.workspaces} == {"sum_1_of_kept", "sum_4_of_kept", "sum_1_kept", "sum_4_kept"}


LOG_SOFTMAX = """compute log_softmax
    tensor X bf16 [n=4096, k={k}]
    tensor Y bf16 [n=4096, k={k}]
    axes   n=4096 | k={k}
    read   x = X[n, k]
    let    top = max(x; k)
    store  Y[n, k] = x - top - log(sum(exp(x - top); k))"""


def test_rows_that_registers_do_not_hold_are_spread_although_they_are_many() -> None:
    assert [len(spread(parse(LOG_SOFTMAX.format(k=k)), SM90)) for k in (4096, 128256)] == [1, 3]


OF_ANY_BATCH = """compute norm
    sizes  BATCH=8 in 1..65535
    tensor X f32 [n=BATCH, g={g}, c={c}, p={p}]
    tensor Y f32 [n=BATCH, g={g}, c={c}, p={p}]
    axes   n=BATCH g={g} | c={c} p={p}
    read   x = X[n, g, c, p]
    let    mean = sum(x; c p) / {count}
    let    d = x - mean
    store  Y[n, g, c, p] = d * rsqrt(sum(d*d; c p) / {count} + 0.00001)"""


def of_any_batch(g: int, c: int, p: int) -> Compute:
    return parse(OF_ANY_BATCH.format(g=g, c=c, p=p, count=c * p))


@pytest.mark.parametrize(("g", "c", "p"), [(2, 4, 512), (3, 2, 2048)])
def test_parts_of_any_number_of_samples(g: int, c: int, p: int) -> None:
    """What lies between the kernels has as many rows as the call has samples, and the bits of a sample are
    those that it has alone."""
    import torch

    plan = build_compute(of_any_batch(g, c, p), INTERPRETER, Schedule.parse("red=split"))
    assert len(plan.steps) == 3 and len(plan.workspaces) == 4 and len(plan.formulas()) == 3
    x = torch.randn(9, g, c, p, generator=torch.Generator().manual_seed(0)) + 10
    made = {}
    for count in (1, 2, 9):
        made[count] = torch.empty(count, g, c, p)
        plan.launch(X=x[:count].contiguous(), Y=made[count])
        want = torch.nn.functional.group_norm(x[:count].flatten(1, 2).double(), g).view(count, g, c, p)
        torch.testing.assert_close(made[count].double(), want, rtol=0, atol=2e-5)
    assert torch.equal(made[1], made[9][:1]) and torch.equal(made[2], made[9][:2])


def test_parts_of_any_number_of_samples_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As first results of a GPU's kernels are, with sizes of a call; a kernel that is wrong is found."""
    import torch

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    plan = build_compute(of_any_batch(2, 4, 512), INTERPRETER, Schedule.parse("red=split"))
    assert not first_run_check.is_trusted(plan, True)
    right = TritonKernel.run
    monkeypatch.setattr(
        TritonKernel,
        "run",
        lambda self, tensors, *a, **k: right(self, tensors, *a, **k) or tensors[-1].add_(1),
    )
    assert not first_run_check.rehearse(plan, torch.device("cpu"), True, (5,))
    monkeypatch.setattr(TritonKernel, "run", right)
    assert first_run_check.rehearse(plan, torch.device("cpu"), True, (5,))
    assert first_run_check.is_trusted(plan, True)


def test_parts_are_those_of_one_sample_for_any_number() -> None:
    """Another choice for many samples would give a sample other bits."""
    compute = of_any_batch(32, 16, 16384)
    made = [spread(c, SM90) for c in for_batches(compute)]
    assert len(made) > 1 and {len(each) for each in made} == {3}
    assert len({tuple(str(with_examples(k, {"BATCH": 8})) for k in each) for each in made}) == 1
    assert len(spread(of_any_batch(32, 2, 8), SM90)) == 1  # short rows
    for axis in "pg":  # a sum of any length; a size beside the number of samples
        size = compute.size(axis)
        text = (
            str(compute)
            .replace(f"{axis}={size}", f"{axis}=N")
            .replace("65535", f"9, N={size} in 1..{size}")
        )
        assert len(spread(parse(text), SM90)) == 1


def test_lanes_beyond_a_row_cost_no_bytes() -> None:
    """Rows of 96 elements are held by 128 lanes; three steps of 32 lanes would load them twice."""
    rows = parse("""compute rms_norm
    tensor X bf16 [n=1996800, k=96]
    tensor Y bf16 [n=1996800, k=96]
    axes   n=1996800 | k=96
    read   x = X[n, k]
    let    r = rsqrt(sum(x*x; k) / 96.0 + 1e-06)
    store  Y[n, k] = x * r""")
    block = heuristics.default(rows, SM90).block_of("k")
    assert block is not None and block.extent == 128


def test_what_cannot_be_parted() -> None:
    with pytest.raises(ValueError, match="k=77 has no parts of 10; expected a reduced axis"):
        parted(parse(SOFTMAX), "k", 10)
    with pytest.raises(ValueError, match="n=5 has no parts of 5"):
        parted(parse(SOFTMAX), "n", 5)


def test_names_that_are_taken_already() -> None:
    text = SOFTMAX.replace("n=5", "k_part=5").replace("[n, ", "[k_part, ").replace("top", "total_of")
    made = parted(parse(text), "k", 11)
    names = [*(x.name for x in made.axes), *(s.name for s in made.steps[:-1])]
    assert len({*names}) == len(names) and {"k_part", "k_part_", "total_of", "total_of_"} < {*names}
    case = ComputationCase(parse(text), "float")
    np.testing.assert_allclose(execute(made, case.given)["Y"].value, case.answers["Y"].value, rtol=1e-9)
    kept = parse(
        "compute kept\n axes m=3 k=8\n read x = s_kept[m, k]\n let s = sum(x; k)\nstore Y[0] = max(s; m)"
    )
    plan = build_compute(kept, SM90)
    assert [*plan.workspaces] == ["s_kept_"]
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(kept, plan) if j.problem] == []
