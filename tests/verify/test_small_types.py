"""Convolutions of 8-bit integers and floats: right results, and wrong ones that the check finds."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from transconv import ir, knobs
from transconv.backend_triton import Resources
from transconv.backend_triton.gluon_memory import bytes_layout
from transconv.backend_triton.offline import compile_offline
from transconv.conv import ConvProblem, Epilogue, Prop, compiler, epilogue, zero_points
from transconv.errors import ProblemError, ScheduleError, Unsupported
from transconv.ir import Call, Cast, Const, Evaluator, Expr, Memory, saturated
from transconv.schedule import Schedule
from transconv.selection import heuristics
from transconv.target import TARGETS
from transconv.torch_ops import execute
from transconv.verify.bisect import blame
from transconv.verify.case import Case
from transconv.verify.matrix.jobs import job_of
from transconv.verify.oracle import Judgement

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")

CASES = [
    ("mb2ic16ih7oc24oh7kh3ph1 dt=s8:s8:s32 tag=nhwc", "fwd", ""),
    ("g4mb1ic16iw9oc8ow5kw3sw2pw1 dt=u8:s8:s8", "fwd", "bias+relu"),
    ("g8mb2ic8ih6oc8oh6kh3ph1 dt=u8:u8:u8 tag=nhwc", "fwd", ""),
    ("mb1ic16ih9oc16oh5kh4sh2ph1dh1 dt=s8:u8:f16", "fwd", "bias"),
    ("mb2ic16ih7oc24oh7kh3ph1 dt=s8:s8:u8", "bwd_d", ""),
    ("mb1ic16ih5oc16oh10kh2sh2 dt=f32:f32:s8", "fwd", "bias"),
    ("mb2ic16ih7oc24oh7kh3ph1 dt=f8e4m3:f8e5m2:f8e4m3 tag=nhwc", "fwd", ""),
    ("mb1ic16ih9oc16oh5kh4sh2ph1 dt=bf16:f8e4m3:f8e5m2 tag=nhwc", "bwd_d", ""),
    ("mb2ic16ih7oc24oh7kh3ph1 dt=f8e4m3:f32:f8e5m2", "bwd_w", ""),
    ("mb1ic4id3ih3iw3oc4od3oh3ow3kd3kh3kw3pd1ph1pw1 dt=f16:f16:f8e5m2", "fwd", ""),
    ("mb2ic20ih7oc24oh7kh3ph1 dt=bf16:s8:bf16 tag=nhwc", "fwd", "bias"),
    ("g2mb1ic16iw9oc16ow5kw4sw2pw1 dt=f16:u8:f16", "bwd_d", ""),
    ("g8mb2ic8ih6oc8oh6kh3ph1 dt=f16:s8:f32", "fwd", ""),
]


def judged(problem: str, prop: str, words: str, numpy: bool, mode: str = "exact") -> Judgement:
    case = Case(ConvProblem.parse(problem), Prop(prop), words, "cpu", bia="f32" if "bias" in words else "",
                numpy=numpy)
    return case.judge(case.plan(), mode, 3)


@pytest.mark.parametrize(("problem", "prop", "words"), CASES)
def test_results(problem: str, prop: str, words: str) -> None:
    found = judged(problem, prop, words, numpy=True)
    assert found.reason == "" and found.nonzero > 0.02


@interpreted
@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "prop", "words"), CASES)
def test_results_in_tritons_interpreter(problem: str, prop: str, words: str) -> None:
    assert judged(problem, prop, words, numpy=False, mode="float").reason == ""


# -- zero points -----------------------------------------------------------------------------------

ZEROS = [
    ("mb2ic16ih7oc24oh7kh3ph1 dt=s8:s8:s32 tag=nhwc", "zero:src"),
    ("mb2ic16ih8oc24oh4kh3sh2ph1 dt=u8:s8:s8 tag=nhwc", "zero:src:per_ic+zero:wei+bias"),
    ("g4mb1ic16iw9oc8ow5kw3sw2pw1 dt=u8:s8:s32", "zero:src:per_ic"),
    ("g8mb2ic8ih6oc8oh6kh3ph1 dt=u8:u8:u8", "zero:src"),
    ("mb1ic3id4ih4iw4oc5od4oh4ow4kd3kh3kw3pd1ph1pw1 dt=s8:s8:f32", "zero:src+zero:wei"),
    ("mb1ic4ih12oc8oh20kh3ph6 dt=s8:u8:s32", "zero:wei:per_oc"),
    ("mb1ic4ih12oc8oh12kh5ph4dh1 dt=s8:s8:s32", "zero:src:per_ic"),
    ("mb2ic20iw8oc17ow4kw3sw2pw1 dt=u8:s8:s32", ""),
    ("g2mb1ic32iw5oc32ow5kw3pw1 dt=u8:s8:s32", "zero:src:per_ic"),
    ("mb1ic16iw6oc16ow6kw3pw1 dt=s8:u8:s32", "zero:src"),
    ("mb1ic16iw6oc20ow6kw3pw1 dt=u8:u8:s32", "zero:src+zero:wei:per_oc")]

# Of transposed convolutions: all phases in one product, a product for each, several at once, one position.
TRANSPOSED = [
    ("mb2ic24ih7oc16oh7kh3ph1 dt=s32:s8:s8 tag=nhwc", "zero:dst"),
    ("mb2ic24ih8oc16oh4kh3sh2ph1 dt=s8:s8:u8 tag=nhwc", "zero:dst:per_oc+zero:wei+bias"),
    ("g4mb1ic16iw19oc8ow10kw4sw2pw1 dt=s32:u8:s8", "zero:dst:per_oc"),
    ("mb1ic4iw17oc8ow5kw4sw4pw1 dt=s32:s8:s8", "zero:dst+zero:wei:per_ic"),
    ("mb1ic4iw24oc8ow7kw3sw3pw1dw1 dt=s32:s8:s8", "zero:dst"),
    ("mb1ic3id4ih4iw4oc5od1oh1ow1kd4kh4kw4 dt=f32:s8:s8", "zero:dst+zero:wei"),
    ("mb1ic4iw30oc8ow11kw5sw3pw2 dt=s32:s8:u8", "zero:dst:per_oc"),
    ("mb1ic16iw14oc16ow5kw5sw3pw1 dt=s32:u8:u8", "zero:dst"),
    ("mb1ic16iw10oc20ow5kw4sw2pw1 dt=s32:s8:u8", "")]


@pytest.mark.parametrize(("problem", "prop", "words"), [
    *((p, "fwd", w) for p, w in ZEROS), *((p, "bwd_d", w) for p, w in TRANSPOSED)])
def test_zero_points(problem: str, prop: str, words: str) -> None:
    assert judged(problem, prop, words, numpy=True).reason == ""


@interpreted
@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "words"), ZEROS[1::3])
def test_zero_points_in_tritons_interpreter(problem: str, words: str) -> None:
    assert judged(problem, "fwd", words, numpy=False).reason == ""


def test_a_given_schedule_is_that_of_the_product() -> None:
    given = "mb.oh.ow:32 oc:32 ic:16 | mma | stages=2"
    case = Case(ConvProblem.parse(ZEROS[0][0]), Prop.FWD, "zero:src", "cpu", numpy=True)
    plan = case.plan(given)
    assert [s.compute.name for s in plan.steps] == ["zero_src", "fwd"] and plan.schedule.unit == "mma"
    assert plan.steps[0].compute.sizes == {"oh": 3, "ow": 3, "oc": 24, "kh": 3, "kw": 3, "ic": 16}
    assert case.judge(plan, "exact", 1).reason == ""


def test_padding_that_counts_as_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_points, "_inside", lambda *_: ir.TRUE)
    assert "wrong" in judged("mb1ic3ih6oc5oh6kh3ph1 dt=s8:s8:s32", "fwd", "zero:src", numpy=True).reason
    assert "wrong" in judged("mb1ic3ih6oc5oh6kh3ph1 dt=s32:s8:s8", "bwd_d", "zero:dst", numpy=True).reason


@pytest.mark.parametrize(("problem", "prop", "words", "reason"), [
    ("mb1ic8ih5oc8oh5kh3ph1 dt=f16", "fwd", "zero:src", "zero points are for integers; src is f16"),
    ("mb1ic8ih5oc8oh5kh3ph1 dt=s8", "bwd_d", "zero:src", "bwd_d multiplies dst by weights; expected its"),
    ("mb1ic8ih5oc8oh5kh3ph1 dt=s8:s32:s8", "bwd_w", "zero:dst", "products with weights; bwd_w has none"),
    ("mb1ic8ih5oc8oh5kh3ph1 dt=s8", "fwd", "zero:wei:per_ic", "fwd sums over the channels of src"),
    ("g2mb1ic8ih5oc8oh5kh3ph1 dt=s8", "fwd", "zero:wei", "for one group; there are 2")])
def test_refused_zero_points(problem: str, prop: str, words: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        judged(problem, prop, words, numpy=True)


def test_words_of_zero_points() -> None:
    assert str(Epilogue.parse("zero:wei+zero:src:common+relu")) == "zero:src+zero:wei+relu"
    assert str(Epilogue.parse("zero:dst:per_oc")) == "zero:dst:per_oc"
    with pytest.raises(ScheduleError, match="'zero:dst:per_ic' is no zero point"):
        Epilogue.parse("zero:dst:per_ic")


# -- explicit kernels ------------------------------------------------------------------------------

BOXES = "oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box swap=1 via=gluon stages=4 warps=4"


@pytest.mark.parametrize(("types", "words"), [
    ("s8:s8:s8", "zero:src+bias+relu"), ("f8e4m3:f8e5m2:bf16", "")])
def test_explicit_kernels(types: str, words: str) -> None:
    problem = ConvProblem.parse(f"mb1ic64ih16oc64oh16kh3ph1 dt={types} tag=nhwc")
    case = Case(problem, Prop.FWD, words, "cpu", target=TARGETS["sm_90"], numpy=True,
                bia="f32" if words else "")
    assert case.judge(case.plan(BOXES), "exact", 1).reason == ""


COPIES = [
    ("mb1ic64ih8oc64oh8kh3ph1 dt=bf16:f8e4m3:f8e5m2", "bwd_d",
     "ih:8 iw:8 ic:64 oc:64 | mma | a=box b=box | pack=b swap=1 via=gluon stages=4 warps=4"),
    ("mb32ic64ih4oc64oh4kh3ph1 dt=f8e4m3:bf16:f8e5m2", "bwd_w",
     "ic:64 oc:64 mb:32 | mma | a=box b=box | pack=a.b swap=1 via=gluon stages=4 warps=4")]


@pytest.mark.parametrize(("problem", "prop", "schedule"), COPIES, ids=["bwd_d", "bwd_w"])
def test_gradients_are_summed_along_copies(problem: str, prop: str, schedule: str) -> None:
    """What is summed is innermost in copies, where the asynchronous unit reads 8 bits; without copies
    tiles are transposed on their way."""
    case = Case(ConvProblem.parse(f"{problem} tag=nhwc"), Prop(prop), "", "cpu", target=TARGETS["sm_90"],
                numpy=True)
    plan = case.plan(schedule)
    assert case.judge(plan, "exact", 1).reason == "" and "warpgroup_mma" in plan.source
    assert "transposer" not in plan.source
    bare = case.plan(schedule.replace(" pack=b", "").replace(" pack=a.b", ""))
    assert case.judge(bare, "exact", 1).reason == "" and "def transposer" in bare.source


TURNED = [
    ("mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2", "bwd_w",
     "ic:64 oc:64 mb:2 oh:4 ow:8 | mma | a=box b=box | swap=1 stages=3 warps=4 via=gluon"),
    ("mb2ic64ih8oc64oh8kh3ph1 dt=f8e5m2:f32:f8e4m3", "bwd_w",
     "kh.kw.ic:128 oc:64 mb:1 oh:4 ow:8 | mma | a=box b=box | swap=1 split_k=2 stages=3 via=gluon"),
    ("g4mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2", "bwd_w",
     "ic:64 oc:64 mb:1 oh:8 ow:8 | mma | a=box b=box | merge=4 swap=1 stages=3 warps=4 via=gluon"),
    ("mb1ic64ih8oc64oh8kh3ph1 dt=s32:s8:s8", "bwd_d",
     "ih:8 iw:8 ic:64 oc:64 | mma | a=box b=box | swap=1 via=gluon stages=4 warps=4"),
    ("mb1ic64ih8oc64oh8kh3ph1 dt=s8:s8:s32", "fwd",
     "oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box swap=1 via=gluon stages=4 warps=4")]


@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "prop", "schedule"), TURNED, ids=[f"{t[1]}-{i}" for i, t in
                                                                      enumerate(TURNED)])
def test_bytes_are_transposed_in_shared_memory(problem: str, prop: str, schedule: str) -> None:
    tag = "nhwc:hwio:nhwc" if prop == "fwd" else "nhwc"
    case = Case(ConvProblem.parse(f"{problem} tag={tag}"), Prop(prop), "", "cpu", target=TARGETS["sm_90"],
                numpy=True)
    plan = case.plan(schedule)
    assert case.judge(plan, "exact", 1).reason == "" and "def transposer" in plan.source
    # Steps are in another order only if that is so in both operands.
    assert plan.source.count(".reshape([4, 16, ") + plan.source.count(", 4, 16]") == 2 * (
        prop == "bwd_w" and " oh:8" in schedule or " mb:2" in schedule)


def test_every_byte_of_a_tile_is_turned_once() -> None:
    for depth, width, warps, along, apart in itertools.product((32, 64, 128), (16, 64, 256), (4, 8),
                                                               (0, 1), (False, True)):
        shape = (depth, width) if along == 0 else (width, depth)
        lanes = tuple(ir.Lane(f"x{i}", n, "K" if i == along else "M") for i, n in enumerate(shape))
        own, ways, of_warps, _, told = ast.literal_eval(
            bytes_layout(lanes, along, warps, apart).removeprefix("gl.DistributedLinearLayout"))
        assert tuple(told) == shape and len(ways) == 5 and 1 << len(of_warps) == warps
        bases = [b for b in (*own, *ways, *of_warps) if any(b)]
        places = {(0, 0)}
        for y, x in bases:
            places |= {(i ^ y, j ^ x) for i, j in places}
        assert len(places) == 2**len(bases) == depth * width


WIDENED = [
    ("mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2 math=ieee", "bwd_w",
     "ic:64 oc:64 mb:1 oh:8 ow:8 | mma | a=box b=box | pack=a.b.f16 swap=1 stages=3 warps=4 via=gluon"),
    ("g4mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2", "bwd_w",
     "ic:64 oc:64 mb.oh.ow:64 | mma | merge=4 pack=a.b.f16 stages=3 warps=4"),
    ("mb2ic64ih8oc64oh8kh3ph1 dt=bf16:f8e4m3:f8e5m2", "bwd_d",
     "ih:8 iw:8 ic:64 oc:64 | mma | a=box b=box | pack=a.b.f16 swap=1 via=gluon stages=4 warps=4")]


@pytest.mark.parametrize(("problem", "prop", "schedule"), WIDENED, ids=[w[1] for w in WIDENED])
def test_copies_hold_floats_of_8_bits_as_f16(problem: str, prop: str, schedule: str) -> None:
    case = Case(ConvProblem.parse(f"{problem} tag=nhwc"), Prop(prop), "", "cpu", target=TARGETS["sm_90"],
                numpy=True)
    plan = case.plan(schedule)
    assert {str(t.dtype) for t in plan.workspaces.values() if "packed" in t.name} == {"f16"}
    assert case.judge(plan, "exact", 1).reason == ""
    bytes_ = ConvProblem.parse("mb2ic64ih8oc64oh8kh3ph1 dt=s32:s8:s8 tag=nhwc")
    integers = Case(bytes_, Prop.BWD_D, "", "cpu", target=TARGETS["sm_90"])
    with pytest.raises(ScheduleError, match="holds i8, no floats of 8 bits"):
        integers.plan("ih:8 iw:8 ic:64 oc:64 | mma | pack=a.b.f16 stages=4 warps=4")


def test_rows_of_a_patch_are_runs_of_bytes() -> None:
    """A window whose elements are read once is a row in memory, also where a block's end cuts it."""
    problem = ConvProblem.parse("mb256ic3ih14oc64oh1kh14sh14 dt=f8e4m3:f8e4m3:bf16 tag=nhwc")
    text = "mb:64 oc:64 kh.kw.ic:64 | mma | stages=3 warps=4"
    source = compiler.build(problem, Prop.FWD, TARGETS["sm_90"], Schedule.parse(text)).source
    (loaded,) = re.findall(r"a = tl\.load\((.*\n?.*)other", source)
    assert "k[None, :]" in loaded and "//" not in loaded and "kh" not in loaded.replace("kh_kw_ic", "")


GRADIENTS = [("mb128ic256ih14oc256oh14kh3ph1", "bwd_d", "pack=b"),
             ("mb1ic128ih64oc128oh64kh3ph1", "bwd_w", "a=box b=box | swap=1"),
             ("mb8ic256ih65oc256oh65kh3ph24dh23", "bwd_w", "pack=a.b.f16")]


@pytest.mark.parametrize(("text", "prop", "words"), GRADIENTS, ids=["bwd_d", "bwd_w", "bwd_w-odd"])
def test_what_gradients_choose(text: str, prop: str, words: str) -> None:
    """Bytes are not transposed one by one in registers, which takes longer than the products."""
    types = "bf16:f8e4m3:f8e5m2" if prop == "bwd_d" else "f8e4m3:bf16:f8e5m2"
    p = ConvProblem.parse(f"{text} dt={types} tag=nhwc")
    main = next(s for s in compiler.plan(p, Prop(prop), TARGETS["sm_90"]).steps if s.compute.factors)
    assert words in str(main.schedule)


@pytest.mark.slow
def test_words_of_4_bytes_are_transposed() -> None:
    problem = ConvProblem.parse("mb32ic256ih56oc256oh56kh3ph1 dt=f8e4m3:bf16:f8e5m2 tag=nhwc")
    schedule = "ic:128 oc:128 mb:2 oh:8 ow:8 | mma | a=box b=box | swap=1 split_k=7 stages=3 via=gluon"
    plan = compiler.build(problem, Prop.BWD_W, TARGETS["sm_90"], Schedule.parse(schedule))
    found, *_ = compile_offline([job_of(s, TARGETS["sm_90"], "ptx") for s in plan.steps])
    assert isinstance(found, Resources) and found.spill_bytes == 0 and not found.flaw
    assert found.words["QGMMA"] and found.texts["ptx"].count("ld.shared.b32") == 64


def test_merged_groups_share_a_scale() -> None:
    problem = ConvProblem.parse("g8mb2ic64ih4oc64oh4kh3ph1 dt=s8:s8:s8 tag=nhwc")
    case = Case(problem, Prop.FWD, "mul:f32:per_oc+add:s32:common", "cpu", target=TARGETS["sm_90"],
                numpy=True)
    plan = case.plan("mb:2 oh:4 ow:4 oc:32 ic:32 | mma | merge=4 stages=4 warps=4")
    assert case.judge(plan, "exact", 1).reason == ""


def test_zero_points_without_a_border() -> None:
    """What they add is the same in all places: its address varies along channels alone."""
    schedule = "mb.oh.ow:128 oc:64 ic:64 | mma | a=box b=box | c=box swap=1 stages=4 warps=4 via=gluon"
    *_, main = compiler.build(ConvProblem.parse("mb32ic64ih7oc64oh7kh1 dt=s8:s8:bf16 tag=nhwc"), Prop.FWD,
                              TARGETS["sm_90"], Schedule.parse(schedule), Epilogue.parse("zero:src")).steps
    assert re.search(r"gl\.load\(src_zero_sums \+ [^,]*\)$", main.source, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("types", "word", "via"), [
    ("s8:s8:s32", "IGMMA", "gluon"), ("f8e4m3:f8e5m2:bf16", "QGMMA", "gluon"), ("u8:s8:s8", "IGMMA", "tl"),
    ("u8:u8:s32", "IGMMA", "tl"), ("bf16:s8:bf16", "HGMMA", "tl")])
def test_what_sm_90_chooses_is_asynchronous(types: str, word: str, via: str) -> None:
    plan = compiler.build(ConvProblem.parse(f"mb32ic64ih56oc64oh56kh3ph1 dt={types} tag=nhwc"), Prop.FWD,
                          TARGETS["sm_90"], choose=heuristics.default)
    assert plan.schedule.via == via
    *_, found = compile_offline([job_of(s, TARGETS["sm_90"]) for s in plan.steps])
    assert isinstance(found, Resources) and any(w.startswith(word) for w in found.words)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "types", "word"), [
    ("sm_80", "s8:s8:s32", "IMMA.16832.S8.S8"),
    ("sm_89", "f8e4m3:f8e5m2:bf16", "QMMA.16832.F32.E4M3.E5M2"),
    ("gfx942", "s8:s8:s32", "v_mfma_i32_32x32x16_i8"), ("gfx950", "f8e4m3:f8e4m3:bf16", "_f8f6f4")])
def test_what_other_chips_multiply_with(target: str, types: str, word: str) -> None:
    chip = TARGETS[target]
    problem = ConvProblem.parse(f"mb32ic64ih56oc64oh56kh3ph1 dt={types} tag=nhwc")
    schedule = Schedule.parse("mb.oh.ow:128 oc:64 ic:64 | mma | stages=2 warps=4")
    plan = compiler.build(problem, Prop.FWD, chip, schedule)
    text = "sass" if target.startswith("sm") else "amdgcn"
    *_, found = compile_offline([job_of(s, chip, text) for s in plan.steps])
    assert isinstance(found, Resources) and word in found.texts[text]


@pytest.mark.parametrize(("problem", "prop", "reason"), [
    ("mb1ic64ih16oc64oh16kh3ph1 dt=u8:s8:s32 tag=nhwc", "fwd", "near_a is computed from it before"),
    ("mb1ic64ih16oc8oh16kh3ph1 dt=u8:s8:s32 tag=nhwc", "fwd", "element by element"),
])
def test_refused_explicit_kernels(problem: str, prop: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Case(ConvProblem.parse(problem), Prop(prop), "", "cpu", target=TARGETS["sm_90"]).plan(BOXES)


# -- wrong answers ---------------------------------------------------------------------------------


def test_results_that_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogue, "saturated", Cast)
    assert "wrong" in judged("mb1ic8ih5oc8oh5kh3ph1 dt=s8:s8:s8", "fwd", "", numpy=True).reason


def test_halves_that_go_up(monkeypatch: pytest.MonkeyPatch) -> None:
    away = replace(ir.CALLS["nearest_within"],
                   numpy=lambda x, low, high: np.clip(np.floor(x + 0.5), low, high))
    monkeypatch.setitem(ir.CALLS, "nearest_within", away)
    assert "wrong" in judged("mb1ic8ih5oc8oh5kh3ph1 dt=s8:s8:s8", "fwd", "bias", numpy=True).reason


def test_bytes_without_a_sign_taken_for_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Evaluator._Load

    def signed(self: Evaluator, e: ir.Load) -> ir.Array:
        made = honest(self, e)
        return made.astype(np.int8) if made.dtype == np.uint8 else made

    monkeypatch.setattr(Evaluator, "_Load", signed)
    assert "wrong" in judged("mb1ic8ih5oc8oh5kh3ph1 dt=u8:s8:s32", "fwd", "", numpy=True).reason


def test_bisection_blames_nothing_right_and_finds_the_wrong() -> None:
    problem, words = "mb1ic8ih6oc8oh6kh3ph1 dt=u8:s8:s8", "zero:src+zero:wei"
    assert blame(problem, "fwd", "sm_90", epilogue=words, parts=("ir",)).stage == ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(epilogue, "saturated", Cast)
        found = blame(problem.replace("ih6", "ih7").replace("oh6", "oh7"), "fwd", "sm_90", parts=("ir",))
    assert found.stage == "naive"


# -- the conversion --------------------------------------------------------------------------------


def value(e: Expr) -> float:
    return float(Evaluator(Memory({}), {}, 1).compute(e).item())


@pytest.mark.parametrize(("x", "to", "want"), [
    (2.5, "i8", 2), (3.5, "i8", 4), (-2.5, "i8", -2), (-129.0, "i8", -128), (1e30, "u8", 255),
    (-0.5, "u8", 0), (254.5, "u8", 254), (2.0**31, "i32", 2**31 - 1), (-3e9, "i32", -2**31),
    (float("nan"), "i8", 0), (float("nan"), "i32", 0),
    (8388609.0, "i32", 8388609), (4194304.5, "i32", 4194304), (460.0, "f8e4m3", 448.0),
    (1e9, "f8e5m2", 57344.0), (1.0625, "f8e4m3", 1.0), (1.1875, "f8e4m3", 1.25)])
def test_floats_to_short_types(x: float, to: str, want: float) -> None:
    assert value(saturated(Const(x, ir.f32), ir.type_named(to))) == want


def test_quotients_that_become_integers_are_rounded_to_nearest() -> None:
    """The language's own division may be off in the last place, which decides where halves go."""
    p = "mb1ic8ih6oc8oh6kh3ph1 dt=s8:s8:"
    made, other = (compiler.build(ConvProblem.parse(p + dst), Prop.FWD, TARGETS["sm_90"], None,
                                  Epilogue.parse("div:f32:per_oc")).source for dst in ("s8", "f32"))
    assert "tl.div_rn(" in made and "div_rn" not in other


def test_sums_of_8_bit_floats_move_to_f32_where_that_is_asked_for() -> None:
    """wgmma's own accumulators keep some 13 bits: on an H200 2048 positive terms sum up to 3 % too little.
    Torch's calls ask for f32; a text does with math=ieee."""
    text = "mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:f8e4m3:bf16 tag=nhwc"
    for math, said in (("tf32", False), ("ieee", True)):
        p = ConvProblem.parse(f"{text} math={math}")
        assert ConvProblem.parse(str(p)) == p and (" math=ieee" in str(p)) is said
        plan = compiler.build(p, Prop.FWD, TARGETS["sm_90"], None, Epilogue(), heuristics.default)
        assert ("max_num_imprecise_acc=" in plan.source or "acc = acc + held" in plan.source) is said
    assert execute.flags(torch.float8_e4m3fn).math == "ieee"


def test_nearest_in_triton_is_nearest() -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(ir.CALLS["nearest"].helper.replace("@{jit}", "").replace("{tl}", "torch").replace(
        "x.dtype.primitive_bitwidth", "8 * x.dtype.itemsize"), scope)
    x = torch.cat([torch.arange(-20, 20) / 4, torch.tensor([8388607.5, 4194304.5, -4194305.5, 3e9, 1e30])])
    assert torch.equal(scope["nearest"](x), x.round())
    assert value(Call("nearest", (Const(-1.5, ir.f32),))) == -2
    exec(ir.CALLS["nearest_small"].helper.replace("@{jit}", "").replace("{tl}", "torch").replace(
        ".to(torch.int32, bitcast=True)", ".view(torch.int32)"), scope)
    small = torch.cat([torch.arange(-(1 << 10), 1 << 10) / 4, torch.tensor([2.0**21, -2.0**21, -0.0])])
    assert torch.equal(scope["nearest_small"](small), small.round().int())
    assert scope["nearest_small"](torch.tensor([torch.nan])).item() == 0 == value(
        Cast(Call("nearest_small", (Const(torch.nan, ir.f32),)), ir.i8))


def test_nearest_within_in_triton_is_nearest_within_limits() -> None:
    scope: dict[str, Any] = {"torch": torch}
    text = ir.CALLS["nearest_within"].helper.replace("@{jit}", "").replace("{tl}.maximum", "torch.fmax")
    text = text.replace(".to({tl}.int32, bitcast=True)", ".view(torch.int32)").replace("{tl}", "torch")
    exec(text, scope)
    many = torch.cat([torch.arange(-(1 << 10), 1 << 10) / 4, torch.tensor([2.0**21, -2.0**21, -0.0])])
    beyond = torch.tensor([127.5, -128.5, 4e6, -4e6, 2e7, -2e7, 3e38, -3e38, torch.inf, -torch.inf])
    for x, low, high in ((many, -(1 << 21), 1 << 21), (beyond, -128, 127), (beyond, 0, 255)):
        found = scope["nearest_within"](x, torch.tensor(float(low)), torch.tensor(high))
        assert torch.equal(found, x.round().clamp(low, high).int())
        limits = Const(low, ir.i32), Const(high, ir.i32)
        same = [value(Call("nearest_within", (Const(float(v), ir.f32), *limits))) for v in x]
        assert found.tolist() == same


def test_sums_of_integers_are_numbers_and_those_of_floats_may_not_be() -> None:
    acc, scale = ir.Var("acc", ir.i32), ir.Var("scale", ir.f32)
    scaled = Cast(acc, ir.f32) * scale
    sure, unsure = (str(ir.saturated(x, ir.i8, {scale})) for x in (scaled, ir.Var("acc", ir.f32) * scale))
    assert "nearest_within" in sure and "nearest_small" in unsure
    assert "nearest_small" in str(ir.saturated(Call("log", (scaled,)), ir.i8, {scale}))
    sign = ir.select(scaled > 0.0, Const(1.0, ir.f32), Const(-0.5, ir.f32))
    assert str(ir.saturated(sign, ir.u8, {scale})).endswith("1:u8, 0:u8)")


# -- types that do not go together -----------------------------------------------------------------


def test_refused_types() -> None:
    with pytest.raises(Unsupported, match="i8 is multiplied by f8e4m3, but f8e4m3 has not all"):
        Case(ConvProblem.parse("mb1ic8ih5oc8oh5kh3ph1 dt=s8:f8e4m3:f16"), Prop.FWD, where="cpu").plan()
    with pytest.raises(Unsupported, match="dst: sums of floats by integers are floats, not i8"):
        Case(ConvProblem.parse("mb1ic8ih5oc8oh5kh3ph1 dt=s8:f16:s8"), Prop.FWD, where="cpu").plan()
    with pytest.raises(Unsupported, match="i32 is the type of results; operands are"):
        Case(ConvProblem.parse("mb1ic8ih5oc8oh5kh3ph1 dt=s8:s8:s32"), Prop.BWD_D, where="cpu").plan()
    with pytest.raises(Unsupported, match="src: Triton has no f8e4m3 for sm_80; expected f8e5m2, or"):
        compiler.build(ConvProblem.parse("mb1ic8ih5oc8oh5kh3ph1 dt=f8e4m3"), Prop.FWD, TARGETS["sm_80"])
    with pytest.raises(ProblemError, match="dt=s7 is unknown; expected one of"):
        ConvProblem.parse("mb1ic8ih5oc8oh5kh3ph1 dt=s7")
