"""Steps of a sum that share boxes (``slide=``) on a GPU: whole numbers bit by bit, random ones within the
bound of the sum."""

from __future__ import annotations

import pytest

from transconv.conv import ConvProblem, Prop
from transconv.schedule import why_not
from transconv.schedule.schedule import Schedule
from transconv.verify.case import ProblemCase

ROLE = "mma | a=box b=box via=gluon"
H, D = "order=kw.ic.kh slide=kh", "order=kd.kw.ic.kh slide=kh"
KERNELS = [
    (
        "mb2ic96ih40oc96oh40kh3ph1",
        Prop.FWD,
        f"oh:8 ow:32 oc:128 ic:32 | {ROLE} c=box {H} swap=1 programs=5 stages=3 warps=8",
    ),
    (
        "mb2ic64ih56oc64oh56kh3ph1",
        Prop.FWD,
        f"oh:16 ow:16 oc:64 ic:64 | {ROLE} c=box {H} swap=1 programs=5 consumers=2 stages=2",
    ),
    ("mb2ic64ih37oc128oh37kh3ph1", Prop.FWD, f"oh:8 ow:16 oc:128 ic:64 | {ROLE} {H} swap=1 stages=3"),
    (
        "mb2ic64ih37oc64oh37kh3ph1",
        Prop.FWD,
        f"oh:8 ow:16 oc:64 ic:64 | {ROLE} c=box {H} programs=7 stages=3",
    ),
    ("mb2ic64ih40oc64oh36kh5", Prop.FWD, f"oh:4 ow:32 oc:64 ic:32 | {ROLE} {H} swap=1 stages=3"),
    (
        "mb2ic64ih40oc128oh40kh3ph2dh1",
        Prop.FWD,
        f"oh:8 ow:16 oc:128 ic:32 | {ROLE} {H} swap=1 stages=3 warps=8",
    ),
    (
        "mb2ic64ih40oc96oh40kh3ph1",
        Prop.BWD_D,
        f"ih:8 iw:16 ic:64 oc:32 | {ROLE} c=box order=kw.oc.kh slide=kh swap=1 programs=7 "
        "consumers=2 stages=4",
    ),
    (
        "mb1ic96id5ih40iw40oc96od5oh40ow40kd3kh3kw3pd2ph1pw1",
        Prop.FWD,
        f"oh:8 ow:32 oc:128 ic:32 | {ROLE} c=box {D} swap=1 programs=5 stages=3 warps=8",
    ),
    (
        "mb1ic96id4ih40iw40oc96od4oh40ow40kd3kh3kw3pd1ph1pw1",
        Prop.BWD_D,
        f"ih:8 iw:32 ic:128 oc:32 | {ROLE} c=box order=kd.kw.oc.kh slide=kh swap=1 programs=5 "
        "stages=3 warps=8",
    ),
    (
        "mb1ic64id16ih24iw24oc64od16oh24ow24kd3kh3kw3pd1ph1pw1",
        Prop.FWD,
        f"od:8 oh:4 ow:8 oc:64 ic:32 | {ROLE} c=box order=kh.kw.ic.kd slide=kd swap=1 programs=9 stages=3",
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "prop", "schedule"), KERNELS, ids=range(len(KERNELS)))
def test_steps_that_share_boxes(text: str, prop: Prop, schedule: str) -> None:
    case = ProblemCase(ConvProblem.parse(f"{text} dt=bf16 tag=axb"), prop)
    plan = case.plan(schedule)
    assert why_not(Schedule.parse(schedule), plan.steps[0].compute, plan.target) is None
    for data in ("exact", "float"):
        found = case.judge(plan, data)
        assert found.right, f"{data}: {found.reason}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtypes", "wide", "epilogue"),
    [
        ("i8", 128, "mul:f32:per_oc+add:s32:common"),
        ("i8", 64, ""),
        ("f8e4m3:f8e5m2:bf16", 128, "mul:f32:common"),
        ("f32", 32, ""),
    ],
)
def test_types_of_all_widths(dtypes: str, wide: int, epilogue: str) -> None:
    case = ProblemCase(
        ConvProblem.parse(f"mb2ic128ih37oc128oh37kh3ph1 dt={dtypes} tag=axb"), Prop.FWD, epilogue
    )
    plan = case.plan(f"oh:8 ow:16 oc:64 ic:{wide} | {ROLE} {H} swap=1 programs=7 consumers=2 stages=2")
    for data in ("exact", "float"):
        found = case.judge(plan, data)
        assert found.right, f"{data}: {found.reason}"
