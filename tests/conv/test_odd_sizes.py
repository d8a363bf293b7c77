"""Weight gradients at given sizes that no tile divides: boxes of positions that reach beyond them."""

from __future__ import annotations

import pytest

from transconv.compute import Compute
from transconv.conv import ConvProblem, Prop, computes
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.verify.computation import ComputationCase

SM90 = Target.parse("sm_90")
SQUARE = "ic64ih13oc64oh13kh3ph1"
WORDS = "mma | a=box b=box | swap=1"
EXACT = (  # piles and parts of a sum, a stride, a dilation in 1D, 3D, merged groups
    (
        "mb3ic96ih7iw5oc40oh7ow5kh3kw3ph1pw1 dt=bf16",
        f"kh.kw.ic:64 oc:64 mb:2 oh:8 ow:4 | {WORDS} split_k=2",
    ),
    ("mb3ic64ih10iw6oc64oh5ow3kh3kw3sh2sw2ph1pw1 dt=f16", f"ic:64 oc:64 mb:2 oh:2 ow:8 | {WORDS}"),
    ("mb1ic64iw37oc24ow39kw3dw1pw3 dt=f32", f"ic:64 oc:64 ow:32 | {WORDS}"),
    ("mb1ic16id3ih5iw3oc64od3oh5ow3kd3kh1kw2pd1ph0pw0 dt=bf16", f"ic:64 oc:64 od:4 oh:4 ow:4 | {WORDS}"),
    ("g8mb1ic64ih7oc64oh7kh3ph1 dt=bf16", f"kh.kw.ic:64 oc:64 oh:8 ow:8 | {WORDS} merge=8"),
)
LEGAL = (
    (f"mb8{SQUARE} dt=bf16", "oh:4 ow:16", ""),
    (f"mb32{SQUARE} dt=f16", "mb:32 ow:2", ""),  # 32 positions, and a tile has 64
    ("mb8ic64ih28oc64oh28kh3ph1 dt=bf16", "mb:4 oh:4 ow:4", ""),
    ("mb8ic64ih28oc64oh28kh3ph1 dt=bf16", "oh:8 ow:8", "block oh:8 does not divide 28"),
    (f"mb64{SQUARE} dt=bf16", "oh:4 ow:16", "block oh:4 does not divide 13"),
    (f"mb32{SQUARE} dt=f32", "mb:8 oh:4", "block oh:4 does not divide 13"),  # tiles of 32 divide these
    (f"mb32{SQUARE} dt=s8", "mb:32 oh:4", "block oh:4 does not divide 13"),
    ("mb8ic64ih25oc64oh13kh3sh2ph1 dt=bf16", "oh:4 ow:16", "25 is no multiple of 2"),
)


def summed(text: str) -> Compute:
    (compute,) = computes(ConvProblem.parse(f"{text} tag=axb"), Prop.BWD_W)
    return compute


@pytest.mark.parametrize(("text", "tile", "reason"), LEGAL)
def test_tiles_reach_beyond_sizes_that_none_divides(text: str, tile: str, reason: str) -> None:
    schedule = Schedule.parse(f"ic:64 oc:64 {tile} | {WORDS} stages=3 warps=4 via=gluon")
    said = why_not(schedule, summed(text), SM90)
    assert reason in (said or "") and (said is None) == (not reason)


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "words"), EXACT)
def test_what_lies_beyond_adds_nothing(text: str, words: str) -> None:
    compute = summed(text)
    schedule = Schedule.parse(f"{words} stages=2 warps=4 via=gluon")
    assert why_not(schedule, compute, SM90) is None
    plan = build_compute(compute, SM90, schedule)
    assert not ComputationCase(compute).interpreted(*[s.kernel for s in plan.steps]).problem


def test_sizes_that_tiles_divide_get_those_alone() -> None:
    for text in (
        "mb16ic64ih28oc64oh28kh3ph1 dt=bf16",
        f"mb64{SQUARE} dt=bf16",
        "mb8ic64ih14oc64oh14kh3ph1 dt=f32",
    ):
        compute = summed(text)
        boxed = [s for s in heuristics.candidates(compute, SM90) if "box" in (s.a, s.b)]
        summing = [b for s in boxed for b in s.blocks if compute.kind(b.first) == "K"]
        assert summing and all(compute.size(b.first) % b.extent == 0 for b in summing)


def test_sizes_that_none_divides_get_boxes() -> None:
    compute = summed("mb12ic64ih143iw111oc64oh143ow111kh3kw3ph1pw1 dt=bf16")
    best = heuristics.default(compute, SM90)
    gathered = next(s for s in heuristics.candidates(compute, SM90) if "box" not in (s.a, s.b))
    assert best.via == "gluon"
    assert heuristics.estimate(gathered, compute, SM90) > 1.5 * heuristics.estimate(best, compute, SM90)
