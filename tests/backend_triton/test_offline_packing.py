"""Copies and the kernels over them, compiled for a chip with boxes: wide accesses, no spills."""

from __future__ import annotations

import re

import pytest

from transconv.backend_triton.offline_compilation import CompileFailure, Resources, compile_offline
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS
from transconv.verify.matrix import jobs_of

SM90 = TARGETS["sm_90"]
PACK = Schedule.parse("mb.oh.ow:128 oc:64 ic:64 | mma | pack=a.b.c stages=3 warps=4")
Found = dict[tuple[str, str], Resources | CompileFailure]


@pytest.fixture(scope="module")
def copies() -> Found:
    """The copies of an input and a result, by shape and name."""
    jobs, keys = [], []
    for shape in ("mb32ic96ih28oc96oh28kh3ph1", "mb128ic512ih7oc512oh7kh3ph1"):
        problem = ConvProblem.parse(f"{shape} dt=bf16 tag=nchw")
        for job in jobs_of(problem, Prop.FWD, SM90, PACK, None, "ptx"):
            name = re.split("_(?=mb|oc)", job.function)[0]
            if name in ("pack_src", "unpack_dst"):
                jobs.append(job)
                keys.append((shape, name))
    return dict(zip(keys, compile_offline(jobs), strict=True))


def accesses(found: Resources | CompileFailure, verb: str) -> set[str]:
    assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
    return set(re.findall(rf"\b{verb}\.global\.((?:v\d\.)?b\d+)", found.texts["ptx"]))


@pytest.mark.slow
def test_wide_accesses_on_both_sides(copies: Found) -> None:
    """16 bytes at a time where rows allow; images of 7x7 pixels begin at any multiple of 2 bytes."""
    for (shape, name), found in copies.items():
        odd = "ih7" in shape
        pixels, channels = ("ld", "st") if name == "pack_src" else ("st", "ld")
        assert accesses(found, channels) == {"v4.b32"}, (shape, name)
        assert accesses(found, pixels) == ({"b16"} if odd else {"v4.b32"}), (shape, name)


@pytest.mark.slow
def test_copies_leave_room_for_many_programs(copies: Found) -> None:
    for found in copies.values():
        assert isinstance(found, Resources) and found.spill_bytes == 0
        assert found.registers <= 64 and found.shared_bytes <= 16 << 10, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prop", "schedule", "words"),
    [
        (
            Prop.FWD,
            "mb:4 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=gather c=box merge=16 swap=1 programs=132 "
            "stages=4 warps=4",
            ("HGMMA", "UTMALDG", "LDGSTS", "UTMASTG"),
        ),
        (
            Prop.FWD,
            "mb:4 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box merge=16 pack=b swap=1 "
            "programs=132 stages=4 warps=4 via=gluon",
            ("HGMMA", "UTMALDG", "UTMASTG"),
        ),
        (
            Prop.BWD_D,
            "mb:4 ih:8 iw:8 ic:64 oc:64 | mma | a=box b=box c=box merge=16 pack=b swap=1 "
            "programs=132 stages=4 warps=4 via=gluon",
            ("HGMMA", "UTMALDG", "UTMASTG"),
        ),
        (
            Prop.BWD_W,
            "kh.kw.ic:128 oc:64 oh:8 ow:8 | mma | a=box b=box merge=16 swap=1 split_k=13 "
            "stages=6 warps=4 via=gluon",
            ("HGMMA", "UTMALDG"),
        ),
    ],
    ids=["fwd-gathered-weights", "fwd", "bwd_d", "bwd_w"],
)
def test_merged_groups_keep_the_matrix_unit_busy(
    prop: Prop, schedule: str, words: tuple[str, ...]
) -> None:
    """Asynchronous products of boxes, one wait a step, whatever is masked."""
    problem = ConvProblem.parse("g32mb64ic128ih56oc128oh56kh3ph1 dt=bf16 tag=nhwc")
    answers = compile_offline(jobs_of(problem, prop, SM90, Schedule.parse(schedule)))
    for found in answers:
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
        assert found.spill_bytes == 0 and not found.serialised, str(found)
    assert any(all(f.words.get(w) for w in words) for f in answers if isinstance(f, Resources))


@pytest.mark.every(3)
@pytest.mark.parametrize("prop", list(Prop))
def test_every_kernel_of_a_plan_compiles(prop: Prop) -> None:
    problem = ConvProblem.parse("mb128ic512ih7oc512oh7kh3ph1 dt=bf16 tag=nchw")
    answers = compile_offline(jobs_of(problem, prop, SM90))
    assert len(answers) >= 3
    for found in answers:
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
        assert found.spill_bytes == 0 and not found.serialised, str(found)
    assert any(
        f.words.get("HGMMA") and f.words.get("UTMALDG") for f in answers if isinstance(f, Resources)
    )
