"""Statistics of rows and maps: what a kernel reduces along other axes than its rows leaves with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transconv.compute import examine, execute, kernels, parse, why_not_lowered
from transconv.ir import VerifyError, verify
from transconv.runtime import build_compute
from transconv.schedule import Schedule, carried, why_not
from transconv.selection.proposals import heuristics
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass

SM90, INTERPRETER = TARGETS["sm_90"], TARGETS["interpreter"]
ROWS = """compute gradient
    tensor X f16 [n=20, k=12]
    tensor G f16 [n=20, k=12]
    tensor Y f16 [n=20, k=12]
    tensor W f32 [k=12]
    axes   n=20 | k=12
    read   x = X[n, k]
    read   g = G[n, k]
    let    a = sum(x*g; k)
    store  Y[n, k] = g - a*x
    store  W[k] sum= g*x
"""
MAP = """compute relu
    tensor X f16 [n=20, k=12]
    tensor Y f16 [n=20, k=12]
    tensor T f32 [k=12]
    tensor L f32 [n=20]
    axes   n=20 k=12
    read   x = X[n, k]
    let    y = max(x, 0.0)
    store  Y[n, k] = y
    store  T[k] sum= y
"""
EACH = "    store  L[n] max= y\n"
NORM = """compute norm
    tensor X f16 [n=20, k=12]
    tensor G f16 [n=20, k=12]
    tensor Y f16 [n=20, k=12]
    tensor dW f16 [k=12]
    tensor dB f32 [k=12]
    axes   n=20 k=12
    read   x = X[n, k]
    read   g = G[n, k]
    let    a = sum(g; k) / 8
    let    c = sum(g*x; k) / 8
    store  Y[n, k] = g - a - x*c
    let    dw = sum(g*x; n)
    let    db = sum(g; n)
    store  dW[k] = dw
    store  dB[k] = db
"""
WEIGHED = """compute weighed
    tensor X f16 [n=20, k=12]
    tensor W f16 [k=12]
    tensor Y f16 [n=20, k=12]
    axes   n=20 | k=12
    read   x = X[n, k]
    read   w = W[k]
    let    a = sum(x; k)
    store  Y[n, k] = (x - a)*w
"""
CARRIED = "n:4 k:16 | fma | warps=1 stages=1 programs=2"
LATE = "n:8 k:16 | fma | late=1 warps=1 stages=1 programs=2"  # the last tile ends beyond the last row
AHEAD = "n:2 k:16 | fma | warps=1 stages=3 programs=3"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "schedule", "parts"),
    [
        (ROWS, "n:8 k:16 | fma | warps=1 stages=1", (3, 12)),
        (ROWS, "n:8 k:8 | fma | warps=1 stages=1", (3, 12)),
        (ROWS, "k:16 | fma | warps=1", (20, 12)),
        (ROWS, CARRIED, (2, 12)),
        (ROWS, "k:16 | fma | warps=1 stages=1 programs=3", (3, 12)),
        (ROWS, AHEAD, (3, 12)),
        (ROWS, LATE, (2, 12)),
        (MAP, LATE, (2, 12)),
        (MAP, CARRIED, (2, 12)),
        (MAP + EACH, "n:8 k:16 | fma | warps=1 stages=1", (3, 12)),
    ],
)
def test_every_pass_and_parts_of_tiles_and_programs(
    text: str, schedule: str, parts: tuple[int, ...]
) -> None:
    """Tiles that end beyond the last row add nothing from there."""
    made, chosen = parse(text), Schedule.parse(schedule)
    plan = build_compute(made, SM90, chosen)
    assert next(iter(plan.workspaces.values())).shape == parts
    assert carried(made, chosen) == (" programs=" in schedule)
    assert [j.problem for _, j in after_every_pass(made, plan) if j.problem] == []


@pytest.mark.parametrize(
    ("text", "schedule"),
    [(ROWS, "n:8 k:8 | fma | warps=1 stages=1"), (ROWS, CARRIED), (ROWS, AHEAD), (MAP, LATE)],
)
def test_results_in_tritons_interpreter(text: str, schedule: str) -> None:
    plan = build_compute(parse(text), INTERPRETER, Schedule.parse(schedule))
    for data in ("exact", "float"):
        assert not ComputationCase(parse(text), data).launched(plan, "cpu").problem


def test_what_cannot_be_left() -> None:
    lost = ROWS.replace("W[k] sum=", "W[0] sum=")
    assert "reduces k, as rows are; expected it in the coordinates" in str(why_not_lowered(parse(lost)))
    wide = parse(ROWS.replace("12", "4096").replace("20", "16384").replace("f16", "f32"))
    deep = Schedule.parse("n:4 k:4096 | fma | programs=132 stages=3 warps=32")
    assert "3 stages of a tile need 262144 bytes of shared memory" in str(why_not(deep, wide, SM90))
    split = Schedule.parse("n:4 k:4 | fma | warps=1 split_k=2")
    assert "elements of a row are needed again" in str(why_not(split, parse(ROWS), SM90))


def test_long_rows_are_carried_by_persistent_programs() -> None:
    """A part of every tile would be as much to store as is read."""
    text = ROWS.replace("12", "4096").replace("20", "16384")
    chosen = heuristics.default(parse(text), SM90)
    assert carried(parse(text), chosen)
    source = build_compute(parse(text), SM90, chosen).steps[0].source
    assert (
        source.index("W_parts_all = tl.full")
        < source.index("for pid in")
        < source.index("tl.store(W_parts")
    )


@pytest.mark.slow
def test_tiles_ahead_and_what_all_tiles_read() -> None:
    """The next tiles' loads are in flight, without statistics, too; a weight is loaded once."""
    for text in (WEIGHED, WEIGHED + "    store  D[k] sum= x\n"):
        made = parse(text)
        plan = build_compute(made, SM90, Schedule.parse(AHEAD))
        assert [j.problem for _, j in after_every_pass(made, plan) if j.problem] == []
        source = plan.steps[0].source
        assert source.index("tl.load(W") < source.index("num_stages=3") < source.index("tl.load(X")
        assert "num_stages=3)" in source
        again = build_compute(made, SM90, Schedule.parse(AHEAD.replace("k:16", "k:4"))).steps[0].source
        assert "flatten=True" in again  # the loop over a row's steps has the stages


def test_sums_over_rows_leave_with_them() -> None:
    """Unless a row is too short or too long for a program to carry them."""
    text = NORM.replace("12", "600")
    first, rounded = kernels(parse(text))
    assert [(w.op, w.view.tensor.name) for w in first.statistics] == [("sum", "dw_kept"), ("sum", "dB")]
    assert {r.view.tensor.name for r in rounded.reads} == {"dw_kept"}
    plan = build_compute(parse(text), INTERPRETER)
    assert not ComputationCase(parse(text), "float").launched(plan, "cpu").problem
    for size in ("128", "8192"):
        assert kernels(parse(NORM.replace("12", size)))[0].statistics
    for size in ("12", "40000"):
        first, sums = kernels(parse(NORM.replace("12", size)))
        assert not first.statistics and {r.view.tensor.name for r in sums.reads} == {"X", "G"}


def test_first_results_are_examined() -> None:
    made = parse(ROWS)
    drawn = np.random.default_rng(0)
    given = {n: drawn.standard_normal((20, 12)) for n in "XG"}
    tensors = {n: torch.from_numpy(x).half() for n, x in given.items()}
    want = execute(made, {n: t.double().numpy() for n, t in tensors.items()})
    for name, dtype in (("Y", torch.float16), ("W", torch.float32)):
        tensors[name] = torch.from_numpy(want[name].value).to(dtype)
    found = examine(made, tensors)
    assert not found.reason and found.checked > 12
    tensors["W"][5] += 1
    assert "element" in examine(made, tensors).reason


def test_tiles_are_dealt_in_the_grid_alone() -> None:
    import transconv.ir as ir

    i, j = ir.Var("i"), ir.Var("j")
    out = ir.Tensor("out", ("x",), (8,), ir.Layout.dense(ir.f32, (8,)))
    dealt = ir.For(j, 8, ir.Store(out, j, ir.Const(1.0, ir.f32)), "dealt", start=i, programs=2)
    verify(ir.Kernel("right", (out,), ir.For(i, 2, dealt, "grid")), "lanes")
    inner = ir.For(ir.Var("k"), 3, dealt)
    with pytest.raises(VerifyError, match="the tiles of j are dealt out inside of a loop"):
        verify(ir.Kernel("wrong", (out,), ir.For(i, 2, inner, "grid")), "lanes")
