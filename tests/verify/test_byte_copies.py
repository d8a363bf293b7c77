"""Gradients of 8-bit types: what is summed is made innermost, by copies or in shared memory."""

from __future__ import annotations

import ast
import itertools
import re

import pytest

from transconv import ir
from transconv.backend_triton import Resources
from transconv.backend_triton.emitters.gluon import bytes_layout
from transconv.backend_triton.offline_compilation import compile_offline
from transconv.conv import ConvProblem, Prop, compiler
from transconv.errors import ScheduleError
from transconv.runtime import job_of
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.verify.case import ProblemCase

COPIES = [
    (
        "mb1ic64ih8oc64oh8kh3ph1 dt=bf16:f8e4m3:f8e5m2",
        "bwd_d",
        "ih:8 iw:8 ic:64 oc:64 | mma | a=box b=box | pack=b swap=1 via=gluon stages=4 warps=4",
    ),
    (
        "mb32ic64ih4oc64oh4kh3ph1 dt=f8e4m3:bf16:f8e5m2",
        "bwd_w",
        "ic:64 oc:64 mb:32 | mma | a=box b=box | pack=a.b swap=1 via=gluon stages=4 warps=4",
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "prop", "schedule"), COPIES, ids=["bwd_d", "bwd_w"])
def test_gradients_are_summed_along_copies(problem: str, prop: str, schedule: str) -> None:
    """What is summed is innermost in copies, where the asynchronous unit reads 8 bits; without copies
    tiles are transposed on their way."""
    case = over_bytes(problem, prop)
    plan = case.plan(schedule)
    assert case.judge(plan, "exact", 1).reason == "" and "warpgroup_mma" in plan.source
    assert "transposer" not in plan.source
    bare = case.plan(schedule.replace(" pack=b", "").replace(" pack=a.b", ""))
    assert case.judge(bare, "exact", 1).reason == "" and "def transposer" in bare.source


TURNED = [
    (
        "mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2",
        "bwd_w",
        "ic:64 oc:64 mb:2 oh:4 ow:8 | mma | a=box b=box | swap=1 stages=3 warps=4 via=gluon",
    ),
    (
        "mb2ic64ih8oc64oh8kh3ph1 dt=f8e5m2:f32:f8e4m3",
        "bwd_w",
        "kh.kw.ic:128 oc:64 mb:1 oh:4 ow:8 | mma | a=box b=box | swap=1 split_k=2 stages=3 via=gluon",
    ),
    (
        "g4mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2",
        "bwd_w",
        "ic:64 oc:64 mb:1 oh:8 ow:8 | mma | a=box b=box | merge=4 swap=1 stages=3 warps=4 via=gluon",
    ),
    (
        "mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2",
        "bwd_w",
        "kh.kw.ic:128 oc:64 oh:8 ow:8 | mma | a=box b=box | "
        "transposers=2 swap=1 stages=3 warps=4 via=gluon",
    ),
    (
        "mb1ic64ih8oc64oh8kh3ph1 dt=s32:s8:s8",
        "bwd_d",
        "ih:8 iw:8 ic:64 oc:64 | mma | a=box b=box | swap=1 via=gluon stages=4 warps=4",
    ),
    (
        "mb1ic64ih8oc64oh8kh3ph1 dt=s8:s8:s32",
        "fwd",
        "oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box swap=1 via=gluon stages=4 warps=4",
    ),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("problem", "prop", "schedule"), TURNED, ids=[f"{t[1]}-{i}" for i, t in enumerate(TURNED)]
)
def test_bytes_are_transposed_in_shared_memory(problem: str, prop: str, schedule: str) -> None:
    tag = "nhwc:hwio:nhwc" if prop == "fwd" else "nhwc"
    case = ProblemCase(
        ConvProblem.parse(f"{problem} tag={tag}"),
        Prop(prop),
        "",
        "cpu",
        target=TARGETS["sm_90"],
        numpy=True,
    )
    plan = case.plan(schedule)
    two = "transposers=2" in schedule
    assert case.judge(plan, "exact", 1).reason == ""
    assert f"def {'odd_' * two}transposer" in plan.source
    # Steps are in another order only if that is so in both operands.
    assert plan.source.count(".reshape([4, 16, ") + plan.source.count(", 4, 16]") == (2 + 2 * two) * (
        (prop == "bwd_w" and " oh:8" in schedule) or " mb:2" in schedule
    )


def test_every_byte_of_a_tile_is_turned_once() -> None:
    for depth, width, warps, along, apart in itertools.product(
        (32, 64, 128), (16, 64, 256), (4, 8), (0, 1), (False, True)
    ):
        shape = (depth, width) if along == 0 else (width, depth)
        lanes = tuple(ir.Lane(f"x{i}", n, "K" if i == along else "M") for i, n in enumerate(shape))
        own, ways, of_warps, _, told = ast.literal_eval(
            bytes_layout(lanes, along, warps, apart).removeprefix("gl.DistributedLinearLayout")
        )
        assert tuple(told) == shape and len(ways) == 5 and 1 << len(of_warps) == warps
        bases = [b for b in (*own, *ways, *of_warps) if any(b)]
        places = {(0, 0)}
        for y, x in bases:
            places |= {(i ^ y, j ^ x) for i, j in places}
        assert len(places) == 2 ** len(bases) == depth * width


def over_bytes(problem: str, prop: str) -> ProblemCase:
    p = ConvProblem.parse(f"{problem} tag=nhwc")
    return ProblemCase(p, Prop(prop), "", "cpu", target=TARGETS["sm_90"], numpy=True)


WIDENED = [
    (
        "mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2 math=ieee",
        "bwd_w",
        "ic:64 oc:64 mb:1 oh:8 ow:8 | mma | a=box b=box | pack=a.b.f16 swap=1 stages=3 warps=4 via=gluon",
    ),
    (
        "g4mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2",
        "bwd_w",
        "ic:64 oc:64 mb.oh.ow:64 | mma | merge=4 pack=a.b.f16 stages=3 warps=4",
    ),
    (
        "mb2ic64ih8oc64oh8kh3ph1 dt=bf16:f8e4m3:f8e5m2",
        "bwd_d",
        "ih:8 iw:8 ic:64 oc:64 | mma | a=box b=box | pack=a.b.f16 swap=1 via=gluon stages=4 warps=4",
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "prop", "schedule"), WIDENED, ids=[w[1] for w in WIDENED])
def test_copies_hold_floats_of_8_bits_as_f16(problem: str, prop: str, schedule: str) -> None:
    case = over_bytes(problem, prop)
    plan = case.plan(schedule)
    assert {str(t.dtype) for t in plan.workspaces.values() if "packed" in t.name} == {"f16"}
    assert case.judge(plan, "exact", 1).reason == ""
    integers = over_bytes("mb2ic64ih8oc64oh8kh3ph1 dt=s32:s8:s8", "bwd_d")
    with pytest.raises(ScheduleError, match="holds i8, no floats of 8 bits"):
        integers.plan("ih:8 iw:8 ic:64 oc:64 | mma | pack=a.b.f16 stages=4 warps=4")


REGISTERS = [
    (
        "mb2ic4ih8oc40oh8kh3ph1 dt=f8e4m3:bf16:f8e5m2 math=ieee",
        "bwd_w",
        "kh.kw.ic:64 oc:64 mb.oh.ow:32 | mma | pack=f16 split_k=2 stages=3 warps=4",
    ),
    (
        "mb2ic64ih8oc64oh8kh3ph1 dt=bf16:f8e4m3:f8e5m2",
        "bwd_d",
        "mb.ih.iw:64 ic:64 oc:32 | mma | pack=f16 swap=1 stages=3 warps=4",
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "prop", "schedule"), REGISTERS, ids=[r[1] for r in REGISTERS])
def test_floats_of_8_bits_become_f16_in_registers(problem: str, prop: str, schedule: str) -> None:
    """Without copies, and without a part of the sum that moves to f32."""
    case = over_bytes(problem, prop)
    plan = case.plan(schedule)
    assert not any("packed" in t.name for t in plan.workspaces.values())
    assert "tl.dot(wide_" in plan.source and "imprecise" not in plan.source
    assert case.judge(plan, "exact", 1).reason == ""
    for line, words, reason in (
        ("mb2ic64ih8oc64oh8kh3ph1 dt=s32:s8:s8", schedule, "dst holds i8, no floats of 8 bits"),
        (problem, schedule.replace(" mma ", " fma "), "pack=f16: it is for the matrix unit"),
        (
            problem.replace("ih8", "ih7").replace("oh8", "oh7"),
            schedule.replace("oc:32", "oc:128"),
            "does not divide",
        ),
    ):
        direction = prop if "s8" not in line else "bwd_d"
        given = words if direction == prop else REGISTERS[1][2]
        with pytest.raises(ScheduleError, match=reason):
            over_bytes(line, direction).plan(given)


def test_rows_of_a_patch_are_runs_of_bytes() -> None:
    """A window whose elements are read once is a row in memory, also where a block's end cuts it."""
    problem = ConvProblem.parse("mb256ic3ih14oc64oh1kh14sh14 dt=f8e4m3:f8e4m3:bf16 tag=nhwc")
    text = "mb:64 oc:64 kh.kw.ic:64 | mma | stages=3 warps=4"
    source = compiler.build(problem, Prop.FWD, TARGETS["sm_90"], Schedule.parse(text)).source
    (loaded,) = re.findall(r"a = tl\.load\((.*\n?.*)other", source)
    assert "k[None, :]" in loaded and "//" not in loaded and "kh" not in loaded.replace("kh_kw_ic", "")


GRADIENTS = [
    ("mb128ic256ih14oc256oh14kh3ph1", "bwd_d", "pack=b"),
    ("mb1ic128ih64oc128oh64kh3ph1", "bwd_w", "a=box b=box | swap=1"),
    ("mb8ic256ih65oc256oh33kh3sh2ph1", "bwd_w", "pack=a.b.f16"),
    ("mb8ic32ih128oc32oh128kh5ph2", "bwd_d", "a=gather b=gather | pack=b"),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("text", "prop", "words"), GRADIENTS, ids=["bwd_d", "bwd_w", "odd", "narrow"])
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
    for groups in (1, 2):
        made = Schedule.parse(f"{schedule} transposers={groups}")
        plan = compiler.build(problem, Prop.BWD_W, TARGETS["sm_90"], made)
        found, *_ = compile_offline([job_of(s, TARGETS["sm_90"], "ptx") for s in plan.steps])
        assert isinstance(found, Resources) and found.spill_bytes == 0 and not found.flaw
        assert found.words["QGMMA"] and found.texts["ptx"].count("ld.shared.b32") == 64 * groups
