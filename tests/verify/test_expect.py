"""The rules about machine code, for kernels whose instructions are known."""

from __future__ import annotations

import pytest

from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS
from transconv.verify.expected_instructions import Expected, expected

DENSE = "mb32ic64ih56oc64oh56kh3ph1 tag=nhwc"
GATHER = "mb.oh.ow:128 oc:64 ic:32 | mma | stages=3 warps=4"
BOX = "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box swap=1 programs=132 stages=4 warps=4"

# target, element type and how f32 is multiplied, schedule: words that must be asked for, and not
CASES = {
    "gather on sm_80": (
        "sm_80",
        "bf16",
        "tf32",
        GATHER,
        {"HMMA", "LDGSTS", "LDGSTS.128"},
        {"HGMMA", "UTMALDG", "FFMA"},
    ),
    "gather on sm_90": ("sm_90", "bf16", "tf32", GATHER, {"HGMMA", "LDGSTS"}, {"UTMALDG"}),
    "boxes on sm_90": ("sm_90", "f16", "tf32", BOX, {"HGMMA", "UTMALDG", "UTMASTG"}, {"LDGSTS"}),
    "boxes on sm_100": ("sm_100", "f16", "tf32", BOX, {"UTCHMMA", "UTMALDG", "UTMASTG"}, {"LDGSTS"}),
    "tf32 on sm_90": ("sm_90", "f32", "tf32", GATHER, {"HGMMA", "LDGSTS"}, {"FFMA"}),
    "f32 as it is on sm_90": ("sm_90", "f32", "ieee", GATHER, {"FFMA", "LDGSTS"}, {"HGMMA", "HMMA"}),
    "wave 64": ("gfx942", "bf16", "tf32", GATHER, {"v_mfma", "global_load.128"}, {"v_wmma", "HMMA"}),
    "wave 32": ("gfx1100", "f16", "tf32", GATHER, {"v_wmma", "global_load.128"}, {"v_mfma"}),
    "f32 of wave 32": (
        "gfx1100",
        "f32",
        "tf32",
        GATHER.replace("stages=3", "stages=2"),
        {"global_load.128"},
        {"v_wmma"},
    ),
    "element by element": (
        "sm_90",
        "f32",
        "ieee",
        "mb.oh.ow:64 oc:64 | fma | warps=4",
        {"FFMA"},
        {"HGMMA", "HMMA", "LDGSTS"},
    ),
    "f64": ("sm_80", "f64", "tf32", "mb.oh.ow:64 oc:64 | fma | warps=4", {"DFMA"}, {"FFMA", "HMMA"}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_expected(name: str) -> None:
    target, dtype, math, schedule, asked, not_asked = CASES[name]
    problem = ConvProblem.parse(f"{DENSE} dt={dtype} math={math}")
    ((compute, chosen),) = compiler.plan_steps(
        problem, Prop.FWD, TARGETS[target], Schedule.parse(schedule), Epilogue()
    )
    found = expected(chosen, compute, TARGETS[target], math)
    assert asked <= {w for e in found for w in e.words}
    # Of each expectation one word is enough, so a word counts as asked for where nothing else helps.
    assert not not_asked & {w for e in found for w in e.words if len(e.words) == 1}


def test_channels_that_are_not_aligned_are_not_asked_to_be_wide() -> None:
    """17 channels of two bytes: no row begins at a multiple of 16."""
    problem = ConvProblem.parse("mb32ic17ih56oc17oh56kh3ph1 tag=nhwc dt=f16")
    sm80 = TARGETS["sm_80"]
    ((compute, chosen),) = compiler.plan_steps(problem, Prop.FWD, sm80, Schedule.parse(GATHER), Epilogue())
    words = {w for e in expected(chosen, compute, sm80, "tf32") for w in e.words}
    assert "HMMA" in words and "LDGSTS.128" not in words and "LDGSTS" not in words


def test_atomic_sums_meet_in_memory() -> None:
    problem = ConvProblem.parse("mb32ic64ih56oc64oh56kh3ph1 tag=nhwc dt=f32")
    schedule = Schedule.parse("ic:64 oc:64 mb.oh.ow:32 | mma | split_k=4 reduce=atomic warps=4")
    for target, word in (("sm_80", "RED"), ("gfx942", "global_atomic")):
        ((compute, chosen),) = compiler.plan_steps(
            problem, Prop.BWD_W, TARGETS[target], schedule, Epilogue()
        )
        found = expected(chosen, compute, TARGETS[target], "tf32")
        assert any(word in e.words for e in found)


def test_one_word_of_several_is_enough() -> None:
    rule = Expected(("RED", "ATOMG"), "parts of a sum meet in memory")
    assert rule.missing({"ATOMG": 3, "LDG": 1}) is None
    assert rule.missing({"RED": 0, "LDG": 1}) == (
        "no RED or ATOMG in the machine code: parts of a sum meet in memory"
    )
