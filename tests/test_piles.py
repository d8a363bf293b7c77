"""Tiles of tensors with pixels innermost: a box per row, laid side by side and below one another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.stages import SM90, launches_of, wrong_stages
from transconv import compiler, heuristics
from transconv.algorithm import algorithms
from transconv.backend_triton.offline import CompileFailure, compile_offline
from transconv.boxes import Box, box_of
from transconv.config import Config
from transconv.counts import main_of
from transconv.epilogue import Epilogue
from transconv.ir import Buffer, find
from transconv.legality import why_not
from transconv.matrix.jobs import job_of
from transconv.problem import ConvProblem, Prop

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
SHIFTING = replace(SM90, features=SM90.features | {"box_rows"})
EXPLICIT = "mma | a=box b=box via=gluon warps=4 stages=2"
IMAGE = "mb1ic64ih4iw64oc64oh4ow64kh3kw3ph1pw1"
CASES = [
    (IMAGE, FWD, "oh:2 ow:64 oc:64 ic:64", "c=box pack=b swap=1 programs=2"),
    (IMAGE, FWD, "oh:4 ow:16 oc:64 ic:64", "c=box pack=b swap=1"),
    (IMAGE, FWD, "ow:64 oc:64 ic:64", "pack=b swap=1 split_k=3"),
    ("mb2ic64ih4iw16oc64oh4ow16kh3kw3ph1pw1", FWD, "mb:2 oh:4 ow:16 oc:64 ic:64", "pack=b"),
    ("mb4ic64ih2iw16oc64oh2ow16kh1kw1", FWD, "mb:4 ow:16 oc:64 ic:64", "swap=1"),
    ("mb1ic64id2ih4iw32oc64od2oh4ow32kd3kh3kw3pd1ph1pw1", FWD, "od:2 oh:2 ow:32 oc:64 ic:64",
     "c=box pack=b swap=1"),
    ("mb1ic64ih2iw56oc64oh2ow56kh3kw3ph1pw1", BWD_D, "ih:2 iw:64 ic:64 oc:64", "c=box pack=b swap=1"),
    ("mb1ic64ih4iw64oc64oh2ow32kh3kw3sh2sw2ph1pw1", BWD_D, "qh:2 qw:32 ic:64 oc:64", "pack=b swap=1"),
    (IMAGE, BWD_W, "ic:64 oc:64 oh:4 ow:16", "swap=1 split_k=2"),
    (IMAGE, BWD_W, "ic:64 oc:64 ow:64", "pack=c"),
    (IMAGE, BWD_W, "ic:64 oc:64 ow:64", "swap=1 reduce=stream programs=5 group_m=1"),
    ("mb1ic64id2ih4iw32oc64od2oh4ow32kd3kh3kw3pd1ph1pw1", BWD_W, "ic:64 oc:64 od:2 oh:2 ow:16",
     "swap=1"),
    ("mb1ic32ih4iw64oc64oh4ow64kh3kw3ph1pw1", BWD_W, "kh.kw.ic:128 oc:64 ow:64", "swap=1"),
    ("mb1ic32ih4iw64oc64oh4ow64kh3kw3ph1pw1", BWD_W, "kh.kw.ic:64 oc:64 oh:4 ow:16", ""),
    ("mb1ic32ih4iw64oc64oh4ow64kh3kw3ph1pw1", BWD_W, "kh.kw.ic:128 oc:64 oh:2 ow:32",
     "pack=c swap=1 split_k=2"),
    ("mb2ic16ih4iw32oc64oh4ow32kh3kw3ph1pw1", BWD_W, "kh.kw.ic:64 oc:64 mb:2 oh:2 ow:16",
     "pack=c swap=1"),
    ("mb1ic128iw64oc64ow64kw3pw1 tag=nwc:owi:ncw", BWD_W, "kw.ic:256 oc:64 ow:32", "swap=1"),
    ("mb1ic32iw16oc64ow16kw1", BWD_W, "kw.ic:64 oc:64 ow:16", "swap=1"),  # one tap, half a block
    ("mb1ic32iw64oc64ow64kw1 tag=nwc", BWD_W, "kw.ic:64 oc:64 ow:16", "swap=1"),
]
WIDE = [  # f32: turned on the way, K innermost
    (IMAGE, FWD, "oh:2 ow:32 oc:64 ic:32", "c=box pack=b swap=1 programs=2"),
    (IMAGE, BWD_W, "kh.kw.ic:64 oc:64 oh:2 ow:16", "pack=c swap=1"),
    ("mb1ic64iw64oc32ow64kw3pw1", BWD_W, "kw.ic:64 oc:32 ow:32", "pack=a"),  # its pixels lie inside
]
ALL = [(*c, "f16") for c in CASES] + [(*c, "f32") for c in WIDE]
IDS = [f"{i}-{c[1]}-{c[4]}" for i, c in enumerate(ALL)]


def planned(text: str, prop: Prop, blocks: str, words: str, dtype: str):  # type: ignore[no-untyped-def]
    p = ConvProblem.parse(f"{text} dt={dtype}")
    config = Config.parse(f"{blocks} | {EXPLICIT} {words}")
    return p, config, compiler.plan_steps(p, prop, SHIFTING, config, Epilogue())


@pytest.mark.parametrize(("text", "prop", "blocks", "words", "dtype"), ALL, ids=IDS)
def test_piles_mean_the_same(text: str, prop: Prop, blocks: str, words: str, dtype: str) -> None:
    p, config, steps = planned(text, prop, blocks, words, dtype)
    assert why_not(config, algorithms(p, prop)[0], SHIFTING) is None
    assert wrong_stages(p, prop, launches_of(steps, target=SHIFTING)) == []


@pytest.mark.parametrize(("text", "prop", "blocks", "words", "dtype"), ALL[::4], ids=IDS[::4])
def test_the_matrix_unit_reads_them_in_shared_memory(text: str, prop: Prop, blocks: str, words: str,
                                                     dtype: str) -> None:
    p, config, _ = planned(text, prop, blocks, words, dtype)
    plan = compiler.build(p, prop, SHIFTING, config)
    job = next(job_of(s, SHIFTING) for s in plan.steps if s.algorithm.name.startswith(prop.value))
    made, = compile_offline([job])
    assert not isinstance(made, CompileFailure), made
    assert "HGMMA" in str(made) and "UTMALDG" in str(made) and "no spills" in str(made)


def test_a_lane_is_found_behind_its_names() -> None:
    """Without `simplify` and `tidy` where a lane is inside a box is a name, not an expression."""
    p, _, steps = planned("mb2ic5ih4oc20oh4kh3ph1iw8ow8kw3pw1", BWD_W, "ic:64 oc:64 mb:2 oh:4 ow:8",
                          "swap=1", "f32")
    launches = launches_of(steps, {"simplify": False, "tidy": False, "lets": False}, SHIFTING)
    assert wrong_stages(p, BWD_W, launches) == []
    kernel = launches[0][-1][1]
    assert {(b.members, b.below) for b in find(kernel, Buffer) if b.name.endswith("ring")} == {(8, 1)}


def buffers(blocks: str, words: str, text: str = IMAGE, prop: Prop = BWD_W) -> dict[str, Buffer]:
    p, _, steps = planned(text, prop, blocks, words, "f16")
    main = next(s for s in steps if s[0].name == prop.value)
    kernel = launches_of([main], target=SHIFTING)[0][-1][1]
    return {b.name: b for b in find(kernel, Buffer)}


def test_taps_below_one_another_rows_side_by_side() -> None:
    made = buffers("kh.kw.ic:128 oc:64 oh:2 ow:32", "swap=1", "mb1ic32ih4iw64oc64oh4ow64kh3kw3ph1pw1")
    src, dst = made["src_ring"], made["dst_ring"]
    assert (src.members, src.below, src.extents[-1]) == (8, 4, 32)
    assert (dst.members, dst.below, dst.extents[-1]) == (2, 1, 32)


def test_channels_innermost_still_lie_side_by_side() -> None:
    p = ConvProblem.parse("mb2ic32ih8oc64oh8kh3ph1 dt=f16 tag=axb")
    config = Config.parse(f"kh.kw.ic:128 oc:64 oh:8 ow:8 | {EXPLICIT} swap=1")
    kernel = launches_of(compiler.plan_steps(p, BWD_W, SM90, config, Epilogue()))[0][-1][1]
    src = next(b for b in find(kernel, Buffer) if b.name == "src_ring")
    assert (src.members, src.below, src.extents[-1]) == (4, 1, 32)


@pytest.mark.parametrize(("text", "prop", "blocks", "words", "reason"), [
    (IMAGE, FWD, "oh:8 ow:8 oc:64 ic:64", "pack=b swap=1",
     "rows of 16 bytes are boxes of their own, which can be read across from 32 to 128 bytes"),
    (IMAGE, FWD, "ow:64 oh:2 oc:64 ic:64", "via=tl pack=b swap=1", "src: the box begins at"),
    ("mb2ic64ih8iw58oc64oh6ow56kh3kw3", BWD_W, "ic:64 oc:64 oh:2 ow:16", "",
     "src: ih has stride 58, which is not a multiple of 16 bytes"),
    ("mb1ic64ih6iw64oc64oh6ow64kh3kw3ph1pw1", BWD_W, "ic:64 oc:64 oh:4 ow:16", "",
     "block oh:4 does not divide 6, and ih goes on beyond it"),
    ("mb2ic64ih5iw64oc64oh5ow32kh3kw3sw2ph1pw1", FWD, "ow:32 oc:64 ic:64", "pack=b swap=1",
     "iw has stride 2"),
    ("mb1ic32ih4iw128oc64oh4ow128kh3kw1ph1pw0", BWD_W, "kh.ic:64 oc:64 ow:128", "",
     "taps of 256 bytes are boxes of their own, which can be read across from 32 to 128 bytes"),
    (IMAGE, BWD_W, "kh.kw.ic:64 oc:64 ow:64", "via=tl", "src: lanes kw and ow both move along iw"),
])
def test_refusals_say_why(text: str, prop: Prop, blocks: str, words: str, reason: str) -> None:
    algorithm = algorithms(ConvProblem.parse(f"{text} dt=f16"), prop)[0]
    spelled = EXPLICIT.replace("via=gluon ", "") if "via=" in words else EXPLICIT
    said = why_not(Config.parse(f"{blocks} | {spelled} {words}"), algorithm, SHIFTING)
    assert said is not None and reason in said, said


def test_a_shift_is_a_feature_of_the_chip() -> None:
    """Taken from the target, or switched on for a trial."""
    algorithm = algorithms(ConvProblem.parse(f"{IMAGE} dt=f16"), FWD)[0]
    config = Config.parse(f"oh:2 ow:64 oc:64 ic:64 | {EXPLICIT} pack=b swap=1")
    assert why_not(config, algorithm, SHIFTING) is None
    never = replace(SM90, features=SM90.features - {"box_rows"})
    assert why_not(config, algorithm, never) == (
        "a=box: src: the box begins at ow + kw - 1 along iw, not at 16 bytes")
    aligned = algorithms(ConvProblem.parse("mb4ic64ih2iw16oc64oh2ow16kh1kw1 dt=f16"), FWD)[0]
    rows = Config.parse(f"mb:4 ow:16 oc:64 ic:64 | {EXPLICIT} swap=1")
    assert why_not(rows, aligned, SHIFTING) is None
    assert "is a box of its own, beside the others" in str(why_not(rows, aligned, never))
    box = box_of(main_of(algorithm, config).a, config, main_of(algorithm, config))
    assert isinstance(box, Box) and box.extents == (64, 1, 64) and "not at 16 bytes" in box.shifted


@pytest.mark.parametrize(("prop", "copied"), [(FWD, "b"), (BWD_D, "b"), (BWD_W, "c")])
def test_only_weights_are_copied_where_rows_do_as_they_lie(prop: Prop, copied: str) -> None:
    p = ConvProblem.parse("mb1ic512ih128oc512oh128kh3ph1 dt=bf16")
    assert heuristics.default(algorithms(p, prop)[0], SHIFTING).pack == copied
