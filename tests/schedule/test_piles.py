"""Tiles of tensors with pixels innermost: a box per tap, its channels below those of the one before."""

from __future__ import annotations

import pytest

from tests.stages import SM90, launches_of, wrong_stages
from transconv.backend_triton.offline_compilation import CompileFailure, compile_offline
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.ir import SmemRing, find
from transconv.runtime import job_of
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.selection.proposals import heuristics

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
EXPLICIT = "mma | a=box b=box via=gluon warps=4 stages=2"
IMAGE = "mb1ic64ih4iw64oc64oh4ow64kh3kw1ph1pw0"
SQUARE = "mb1ic64ih4iw64oc64oh4ow64kh3kw3ph1pw1"
NARROW = "mb1ic32ih4iw64oc64oh4ow64kh3kw1ph1pw0"
CASES = [
    (IMAGE, FWD, "ow:64 oc:64 ic:64", "c=box pack=b swap=1 programs=2"),
    (IMAGE, FWD, "ow:64 oc:64 ic:64", "pack=b swap=1 split_k=3"),
    (IMAGE, BWD_D, "iw:64 ic:64 oc:64", "c=box pack=b swap=1"),
    (IMAGE, BWD_W, "ic:64 oc:64 ow:64", "pack=c"),
    (IMAGE, BWD_W, "ic:64 oc:64 ow:64", "swap=1 reduce=stream programs=5 group_m=1"),
    (NARROW, BWD_W, "kh.ic:64 oc:64 ow:64", "swap=1"),
    (NARROW, BWD_W, "kh.ic:128 oc:64 ow:32", "pack=c swap=1 split_k=2"),
    ("mb2ic16ih4iw32oc64oh4ow32kh3kw1ph1pw0", BWD_W, "kh.ic:64 oc:64 ow:16", ""),
    ("mb1ic32id2ih4iw32oc64od2oh4ow32kd3kh3kw1pd1ph1pw0", BWD_W, "kd.kh.ic:128 oc:64 ow:32", "swap=1"),
    ("mb1ic32ih4iw64oc64oh4ow64kh3kw3dw7ph1pw8", BWD_W, "kh.kw.ic:128 oc:64 ow:64", "swap=1"),
    ("mb1ic128iw64oc64ow64kw3pw1 tag=nwc:owi:ncw", BWD_W, "kw.ic:256 oc:64 ow:32", "swap=1"),
    ("mb1ic32iw16oc64ow16kw1", BWD_W, "kw.ic:64 oc:64 ow:16", "swap=1"),  # one tap, half a block
    ("mb1ic32iw64oc64ow64kw1 tag=nwc", BWD_W, "kw.ic:64 oc:64 ow:16", "swap=1"),
]
WIDE = [  # f32: transposed on the way, K innermost
    (IMAGE, FWD, "ow:64 oc:64 ic:32", "c=box pack=b swap=1 programs=2"),
    (NARROW, BWD_W, "kh.ic:64 oc:64 ow:32", "pack=c swap=1"),
    ("mb1ic64iw64oc32ow64kw3dw7pw8", BWD_W, "kw.ic:64 oc:32 ow:32", "pack=a"),  # its pixels lie inside
]
ALL = [(*c, "f16") for c in CASES] + [(*c, "f32") for c in WIDE]
IDS = [f"{i}-{c[1]}-{c[4]}" for i, c in enumerate(ALL)]


def planned(text: str, prop: Prop, blocks: str, words: str, dtype: str):  # type: ignore[no-untyped-def]
    p = ConvProblem.parse(f"{text} dt={dtype}")
    schedule = Schedule.parse(f"{blocks} | {EXPLICIT} {words}")
    return p, schedule, compiler.plan_steps(p, prop, SM90, schedule, Epilogue())


@pytest.mark.every(10)
@pytest.mark.parametrize(("text", "prop", "blocks", "words", "dtype"), ALL, ids=IDS)
def test_piles_mean_the_same(text: str, prop: Prop, blocks: str, words: str, dtype: str) -> None:
    p, schedule, steps = planned(text, prop, blocks, words, dtype)
    assert why_not(schedule, computes(p, prop)[0], SM90) is None
    assert wrong_stages(p, prop, launches_of(steps)) == []


@pytest.mark.every(3)
@pytest.mark.parametrize(("text", "prop", "blocks", "words", "dtype"), ALL[::4], ids=IDS[::4])
def test_the_matrix_unit_reads_them_in_shared_memory(
    text: str, prop: Prop, blocks: str, words: str, dtype: str
) -> None:
    p, schedule, _ = planned(text, prop, blocks, words, dtype)
    plan = compiler.build(p, prop, SM90, schedule)
    job = next(job_of(s, SM90) for s in plan.steps if s.compute.name.startswith(prop.value))
    (made,) = compile_offline([job])
    assert not isinstance(made, CompileFailure), made
    assert "HGMMA" in str(made) and "UTMALDG" in str(made) and "no spills" in str(made)


def test_a_lane_is_found_behind_its_names() -> None:
    """Without `simplify` and `lets` where a lane is inside a box is a name, not an expression."""
    p, _, steps = planned(
        "mb2ic16ih4iw16oc20oh4ow16kh3kw1ph1pw0", BWD_W, "kh.ic:64 oc:64 ow:16", "swap=1", "f32"
    )
    launches = launches_of(steps, {"simplify": False, "lets": False})
    assert wrong_stages(p, BWD_W, launches) == []
    kernel = launches[0][-1][1]
    assert {(b.name, b.members, b.below) for b in find(kernel, SmemRing) if b.name.endswith("ring")} == {
        ("src_ring", 4, True),
        ("dst_ring", 1, False),
    }


@pytest.mark.parametrize(
    ("text", "blocks", "below"),
    [
        (NARROW, "kh.ic:128 oc:64 ow:32", True),
        ("mb2ic32ih8oc64oh8kh3ph1 tag=axb", "kh.kw.ic:128 oc:64 oh:8 ow:8", False),
    ],
)
def test_taps_lie_below_one_another_or_side_by_side(text: str, blocks: str, below: bool) -> None:
    _, _, steps = planned(text, BWD_W, blocks, "swap=1", "f16")
    kernel = launches_of(steps)[0][-1][1]
    src = next(b for b in find(kernel, SmemRing) if b.name == "src_ring")
    assert (src.members, src.below, src.extents[-1]) == (4, below, 32)


@pytest.mark.parametrize(
    ("text", "prop", "blocks", "words", "reason"),
    [
        (
            SQUARE,
            FWD,
            "ow:64 oc:64 ic:64",
            "pack=b swap=1",
            "a=box: src: the box begins at ow + kw - 1 along iw, not at 16 bytes",
        ),
        (
            SQUARE,
            FWD,
            "ow:64 oc:64 ic:64",
            "via=tl pack=b swap=1",
            "a=box: src: the box begins at ow + kw - 1 along iw, not at 16 bytes",
        ),
        (
            SQUARE,
            BWD_W,
            "kh.kw.ic:64 oc:64 ow:64",
            "swap=1",
            "a=box: src: the box begins at ow + kw - 1 along iw, not at 16 bytes",
        ),
        (
            "mb4ic64ih2iw16oc64oh2ow16kh1kw1",
            FWD,
            "mb:4 ow:16 oc:64 ic:64",
            "swap=1",
            "src: the dimensions of one side of the tile are apart in memory",
        ),
        (
            IMAGE,
            FWD,
            "oh:2 ow:64 oc:64 ic:64",
            "pack=b swap=1",
            "a=box: the innermost side of the tile is spread over several dimensions of the box",
        ),
        (
            "mb2ic64ih5iw64oc64oh5ow32kh3kw3sw2ph1pw1",
            FWD,
            "ow:32 oc:64 ic:64",
            "pack=b swap=1",
            "iw has stride 2",
        ),
        (
            "mb1ic32ih4iw128oc64oh4ow128kh3kw1ph1pw0",
            BWD_W,
            "kh.ic:64 oc:64 ow:128",
            "",
            "window elements of 256 bytes are boxes of their own, "
            "which can be read across from 32 to 128 bytes",
        ),
        (SQUARE, BWD_W, "kh.kw.ic:64 oc:64 ow:64", "via=tl", "src: lanes kw and ow both move along iw"),
    ],
)
def test_refusals_say_why(text: str, prop: Prop, blocks: str, words: str, reason: str) -> None:
    compute = computes(ConvProblem.parse(f"{text} dt=f16"), prop)[0]
    spelled = EXPLICIT.replace("via=gluon ", "") if "via=" in words else EXPLICIT
    said = why_not(Schedule.parse(f"{blocks} | {spelled} {words}"), compute, SM90)
    assert said is not None and reason in said, said


@pytest.mark.every(2)
@pytest.mark.parametrize(("prop", "copied"), [(FWD, "b"), (BWD_D, "b"), (BWD_W, "c")])
def test_only_weights_are_copied_where_rows_do_as_they_lie(prop: Prop, copied: str) -> None:
    p = ConvProblem.parse("mb1ic512ih128iw128oc512oh128ow128kh3kw1ph1pw0 dt=bf16")
    assert heuristics.default(computes(p, prop)[0], SM90).pack == copied
