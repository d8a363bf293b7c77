"""Products of 8-bit types in explicit kernels, and with what chips multiply them."""

from __future__ import annotations

import pytest

from transconv.backend_triton import Resources
from transconv.backend_triton.offline_compilation import compile_offline
from transconv.conv import ConvProblem, Prop, compiler
from transconv.errors import ScheduleError
from transconv.runtime import job_of
from transconv.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.target import TARGETS
from transconv.verify.case import ProblemCase
from transconv.verify.data import allocate, fill

BOXES = "oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box swap=1 via=gluon stages=4 warps=4"


@pytest.mark.parametrize(
    ("types", "words"), [("s8:s8:s8", "zero:src+bias+relu"), ("f8e4m3:f8e5m2:bf16", "")]
)
def test_explicit_kernels(types: str, words: str) -> None:
    problem = ConvProblem.parse(f"mb1ic64ih16oc64oh16kh3ph1 dt={types} tag=nhwc")
    case = ProblemCase(
        problem, Prop.FWD, words, "cpu", target=TARGETS["sm_90"], numpy=True, bia="f32" if words else ""
    )
    assert case.judge(case.plan(BOXES), "exact", 1).reason == ""


@pytest.mark.every(2)
@pytest.mark.parametrize("types", ["u8:s8:s32", "s8:u8:s32", "u8:u8:s32"])
def test_every_number_of_8_bits_is_multiplied(types: str) -> None:
    """Shifted to what matrix units take, also the smallest and the largest one: operands have all."""
    problem = ConvProblem.parse(f"mb2ic32ih8oc32oh8kh3ph1 dt={types}")
    case = ProblemCase(problem, Prop.FWD, "", "cpu", target=TARGETS["sm_80"], numpy=True)
    plan = case.plan("mb.oh.ow:64 oc:32 ic:32 | mma | stages=2 warps=4")
    assert "near_" in plan.source
    assert case.judge(plan, "exact", 1).reason == ""
    tensors = {**allocate(problem, "cpu")}
    fill(tensors, problem, Prop.FWD, "exact", 1)
    for name in Prop.FWD.operands:
        low, high = tensors[name].layout.dtype.limits
        assert {low, high} <= {*tensors[name].view.reshape(-1).tolist()}


def test_merged_groups_share_a_scale() -> None:
    problem = ConvProblem.parse("g8mb2ic64ih4oc64oh4kh3ph1 dt=s8:s8:s8 tag=nhwc")
    case = ProblemCase(
        problem, Prop.FWD, "mul:f32:per_oc+add:s32:common", "cpu", target=TARGETS["sm_90"], numpy=True
    )
    plan = case.plan("mb:2 oh:4 ow:4 oc:32 ic:32 | mma | merge=4 stages=4 warps=4")
    assert case.judge(plan, "exact", 1).reason == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "word", "via"),
    [
        ("s8:s8:s32", "IGMMA", "gluon"),
        ("f8e4m3:f8e5m2:bf16", "QGMMA", "gluon"),
        ("u8:s8:s8", "IGMMA", "tl"),
        ("u8:u8:s32", "IGMMA", "tl"),
        ("bf16:s8:bf16", "HGMMA", "tl"),
    ],
)
def test_what_sm_90_chooses_is_asynchronous(types: str, word: str, via: str) -> None:
    plan = compiler.build(
        ConvProblem.parse(f"mb32ic64ih56oc64oh56kh3ph1 dt={types} tag=nhwc"),
        Prop.FWD,
        TARGETS["sm_90"],
        choose=heuristics.default,
    )
    assert plan.schedule.via == via
    *_, found = compile_offline([job_of(s, TARGETS["sm_90"]) for s in plan.steps])
    assert isinstance(found, Resources) and any(w.startswith(word) for w in found.words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "types", "word"),
    [
        ("sm_80", "s8:s8:s32", "IMMA.16832.S8.S8"),
        ("sm_89", "f8e4m3:f8e5m2:bf16", "QMMA.16832.F32.E4M3.E5M2"),
        ("gfx942", "s8:s8:s32", "v_mfma_i32_32x32x16_i8"),
        ("gfx950", "f8e4m3:f8e4m3:bf16", "_f8f6f4"),
    ],
)
def test_what_other_chips_multiply_with(target: str, types: str, word: str) -> None:
    chip = TARGETS[target]
    problem = ConvProblem.parse(f"mb32ic64ih56oc64oh56kh3ph1 dt={types} tag=nhwc")
    schedule = Schedule.parse("mb.oh.ow:128 oc:64 ic:64 | mma | stages=2 warps=4")
    plan = compiler.build(problem, Prop.FWD, chip, schedule)
    text = "sass" if target.startswith("sm") else "amdgcn"
    *_, found = compile_offline([job_of(s, chip, text) for s in plan.steps])
    assert isinstance(found, Resources) and word in found.texts[text]


@pytest.mark.parametrize(
    ("problem", "prop", "reason"),
    [
        ("mb1ic64ih16oc64oh16kh3ph1 dt=u8:s8:s32 tag=nhwc", "fwd", "near_a is computed from it before"),
        ("mb1ic64ih16oc8oh16kh3ph1 dt=u8:s8:s32 tag=nhwc", "fwd", "element by element"),
    ],
)
def test_refused_explicit_kernels(problem: str, prop: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        ProblemCase(ConvProblem.parse(problem), Prop(prop), "", "cpu", target=TARGETS["sm_90"]).plan(BOXES)
