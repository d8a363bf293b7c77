"""The schedule word ``subtiles``: a tile's columns in several products, each with an accumulator of its
own. Results stay the same to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transconv.backend_triton import Resources, compile_offline
from transconv.compute import parse
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop, computes
from transconv.ir import Alloc, find
from transconv.runtime import build, build_compute, job_of
from transconv.schedule import Schedule, why_not
from transconv.support import ScheduleError
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass
from transconv.verify.fuzz import conv_trial

SM90 = TARGETS["sm_90"]
LAYER = "mb1ic16ih5oc48oh5kh3ph1 dt=f16 tag=nhwc"


@pytest.mark.parametrize(
    "words",
    [
        "mb.oh.ow:16 oc:64 ic:16 | mma | subtiles=2",
        "mb.oh.ow:16 oc:64 ic:16 | mma | subtiles=4 split_k=3",
        "mb.oh.ow:32 oc:32 ic:16 | mma | subtiles=2 swap=1 programs=2",
    ],
)
def test_each_part_has_its_columns(words: str) -> None:
    """After every pass, of a tile that exceeds the columns."""
    (compute,) = computes(ConvProblem.parse(LAYER), Prop.FWD)
    plan = build_compute(compute, SM90, Schedule.parse(words))
    accumulators = find(plan.steps[0].kernel, Alloc)
    assert len(accumulators) == plan.steps[0].schedule.subtiles
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(compute, plan) if j.problem] == []


def divided(seed: int) -> list[tuple[conv_trial.ConvTrial, Schedule]]:
    """Drawn convolutions whose schedules may have several products for each step, and have them."""
    found = []
    for number in range(40 * seed, 40 * seed + 40):
        trial = conv_trial.draw_trial("subtiles", number)
        if trial.schedule is None or trial.schedule.unit != "mma":
            continue
        for parts in (4, 2):
            chosen = replace(trial.schedule, subtiles=parts)
            if not any(why_not(chosen, c, trial.chip) for c in trial.computes):
                found.append((trial, chosen))
                break
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_drawn_convolutions_stay_exact(seed: int) -> None:
    """All directions, layouts, groups, epilogues, split sums; the interpreter of the IR, bit for bit."""
    checked = 0
    for trial, schedule in divided(seed):
        try:
            plan = build(
                ConvWorkload(trial.problem, trial.prop, Epilogue.parse(trial.epilogue)),
                trial.chip, schedule, None, False, CompiledDirection,
            )  # fmt: skip
        except ScheduleError:  # of another of its kernels
            continue
        assert trial.case("numpy").judge(plan, "exact").reason == "", f"{trial} {schedule}"
        checked += 1
    assert checked >= 1


def test_in_tritons_interpreter() -> None:
    (compute,) = computes(ConvProblem.parse(LAYER), Prop.FWD)
    schedule = Schedule.parse("mb.oh.ow:16 oc:64 ic:16 | mma | subtiles=2 stages=2")
    plan = build_compute(compute, TARGETS["interpreter"], schedule)
    assert plan.source.count("tl.dot(") == 2
    assert ComputationCase(compute).launched(plan, "cpu").problem == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("mb.oh.ow:16 oc:64 | fma | subtiles=2", "only plain products by the matrix unit"),
        ("oh:4 ow:4 oc:64 ic:16 | mma | a=box b=box | subtiles=2", "a box is a tile whole"),
        ("mb.oh.ow:16 oc:16 ic:16 | mma | subtiles=2", "8 columns each, the matrix unit takes 16 or more"),
        ("mb.oh.ow:16 oc:64 ic:16 | mma | subtiles=3", "subtiles=3"),
    ],
)
def test_where_it_is_not_legal(words: str, reason: str) -> None:
    (compute,) = computes(ConvProblem.parse(LAYER), Prop.FWD)
    with pytest.raises(ScheduleError, match=reason):
        build_compute(compute, SM90, Schedule.parse(words))


@pytest.mark.slow
def test_registers_of_a_blackwell() -> None:
    """With two products the accumulator leaves tensor memory in halves: fewer registers on sm_100; on
    sm_90, where accumulators are registers, as many."""
    whole = "mb.oh.ow:128 oc:128 ic:32 | mma | a=gather b=gather | stages=3 warps=4"
    work = ConvWorkload(ConvProblem.parse("mb32ic256ih14oc256oh14kh3ph1 dt=f16 tag=nhwc"), Prop.FWD)
    found = {}
    for chip in ("sm_90", "sm_100"):
        jobs = []
        for words in (whole, whole.replace("stages", "subtiles=2 stages")):
            plan = build(work, TARGETS[chip], Schedule.parse(words), None, False, CompiledDirection)
            jobs.append(job_of(plan.steps[0], TARGETS[chip], words=False))
        one, two = compile_offline(jobs)
        assert isinstance(one, Resources) and isinstance(two, Resources)
        assert one.spill_bytes == two.spill_bytes == 0
        found[chip] = (one.registers, two.registers)
    assert found["sm_100"][1] <= 0.85 * found["sm_100"][0], found
    assert abs(found["sm_90"][1] - found["sm_90"][0]) <= 8, found


def test_a_statistic_has_the_tile_whole() -> None:
    text = (
        "compute summed\ntensor A f16 [32, 16]\ntensor B f16 [16, 32]\naxes m=32 n=32 k=16\n"
        "read a = A[m, k]\nread b = B[k, n]\nlet s = sum(a*b; k)\nstore Y[m, n] = s\nstore M[m] sum= s"
    )
    with pytest.raises(ScheduleError, match="subtiles=2: only plain products"):
        build_compute(parse(text), SM90, Schedule.parse("m:32 n:32 k:16 | mma | subtiles=2"))
