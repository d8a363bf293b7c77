"""The pass ``upright``: which tiles are turned behind sums, and what a compiler sees of neighbours."""

from __future__ import annotations

import pytest

from transconv.backend_triton import Resources, compile_offline
from transconv.compute import Compute
from transconv.conv import ConvProblem, Epilogue, Prop, any_size, computes, marked
from transconv.ir import Const, FloorDiv, Kernel, Lane, Mod, Var, index
from transconv.passes import lower
from transconv.passes.lowering.lanewise import LaneRun, run_of, steps_of
from transconv.runtime import build_compute, job_of
from transconv.schedule import Schedule
from transconv.target import Target
from transconv.verify.computation import after_every_pass

SM90 = Target.parse("sm_90")
M, N = Lane("m", 128, 3, "M"), Lane("n", 64, 1, "N")
AT, SIZE = Var("at", index), Var("W", index)
PLACE = AT * 128 + M
TILE = "mb.oh.ow:32 oc:16 ic:16 | mma | {}stages=2 warps=4"


def layer(text: str, epilogue: str = "", prop: Prop = Prop.FWD) -> Compute:
    plain, names = marked(text)
    behind = Epilogue.parse(epilogue)
    problem = ConvProblem.parse(plain)
    return (any_size(problem, prop, names, behind) if names else computes(problem, prop, behind))[0]


def turns(compute: Compute, words: str) -> bool:
    """Whether the pass changes something."""
    kernels: dict[str, Kernel] = dict(lower(compute, Schedule.parse(words), SM90, "k"))
    return kernels["upright"] != kernels["widen"]


@pytest.mark.parametrize(
    ("e", "run", "step"),
    [
        (PLACE, LaneRun(1, 128), 1),
        (Mod(PLACE, Const(56, index)), LaneRun(1, 8), 1),
        (Mod(PLACE, Const(49, index)), LaneRun(1, 1), 1),
        (FloorDiv(PLACE, Const(56, index)), LaneRun(8, 1), None),
        (Mod(PLACE, SIZE), LaneRun(1, 1), 1),
        (SIZE * 7 + N * SIZE + Mod(PLACE, Const(4, index)) * 2, LaneRun(1, 1), 2),
        (FloorDiv(PLACE, Const(8, index)) * 56 + Mod(PLACE, Const(8, index)), LaneRun(1, 8), 1),
        (AT - M, LaneRun(1, 1), None),
    ],
)
def test_what_is_seen_of_neighbours(e: object, run: LaneRun, step: int | None) -> None:
    at = Var("place", index)
    assert run_of(at, M, {at: e}) == run and steps_of(at, {at: e}).get(M) == step


@pytest.mark.parametrize(
    ("text", "swap", "turned"),
    [
        ("mb2?ic16ih5?iw6?oc16oh5ow6kh1kw1 dt=f16", 1, True),
        ("mb2?ic16ih5?iw6?oc16oh5ow6kh1kw1 dt=f16", 0, False),  # positions come first
        ("mb2?ic16ih5?iw6?oc16oh5ow6kh1kw1 dt=f16 tag=nhwc", 1, False),  # features follow one another
        ("mb2ic16ih7oc16oh7kh1 dt=f16", 1, True),
        ("mb2ic16ih8oc16oh8kh1 dt=f16", 1, False),
    ],
)  # eight positions do
def test_what_is_turned(text: str, swap: int, turned: bool) -> None:
    assert turns(layer(text), TILE.format("swap=1 " * swap)) is turned


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mb2?ic16ih5?iw6?oc16oh5ow6kh1kw1 dt=f16", "swap=1 programs=3 "),
        ("mb2ic32ih7oc16oh7kh1 dt=f32", "reduce=atomic split_k=2 swap=1 "),
    ],
)
def test_every_pass(text: str, words: str) -> None:
    """With a tile that is added and one that is a vector, and with sums that are added in memory."""
    compute = layer(text, "bias+res+relu" if "?" in text else "")
    plan = build_compute(compute, SM90, Schedule.parse(TILE.format(words)))
    assert "tl.permute(" in plan.source
    sizes = {"MB": 3, "IH": 4, "IW": 7} if "?" in text else None
    for stage, judged in after_every_pass(compute, plan, sizes):
        assert not judged.problem, (stage, judged.problem)


def test_registers_hold_what_is_stored() -> None:
    """Each thread would have the places of 128 positions otherwise."""
    compute = layer("mb8?ic128ih56?iw56?oc512oh56ow56kh1kw1 dt=bf16")
    plan = build_compute(
        compute,
        SM90,
        Schedule.parse(
            "mb.oh.ow:128 oc:128 ic:64 | mma | a=box b=box | pack=a swap=1 programs=132 stages=4 warps=4"
        ),
    )
    (found,) = compile_offline([job_of(plan.steps[-1], SM90, words=False)])
    assert isinstance(found, Resources) and found.spill_bytes == 0, found
