"""Sums of 8-bit floats in explicit kernels on a GPU, moved to f32 in parts. Whole numbers bit by bit,
random ones within the bound of sums in f32, which sums that stay in the matrix unit exceed."""

from __future__ import annotations

import pytest

from transconv.conv import ConvProblem, Prop
from transconv.schedule import why_not
from transconv.schedule.schedule import Schedule
from transconv.verify.case import ProblemCase

ROLE = "mma | a=box b=box via=gluon"
SUMS = "mb2ic{ic}ih40oc{oc}oh40kh3ph1 dt=f8e4m3:f8e4m3:f32 tag=nhwc math=ieee"
KERNELS = [
    (SUMS.format(ic=512, oc=128), Prop.FWD, f"oh:8 ow:16 oc:128 ic:128 | {ROLE} swap=1 stages=6 warps=8"),
    (
        SUMS.format(ic=384, oc=256),
        Prop.FWD,
        f"oh:8 ow:16 oc:128 ic:128 | {ROLE} programs=9 stages=5 warps=8",
    ),
    (
        SUMS.format(ic=320, oc=128),
        Prop.FWD,
        f"oh:8 ow:16 oc:128 ic:64 | {ROLE} swap=1 programs=7 stages=6 warps=8",
    ),
    (
        SUMS.format(ic=64, oc=64),
        Prop.FWD,
        f"oh:8 ow:8 oc:64 ic:64 | {ROLE} swap=1 programs=5 consumers=2 keep=b stages=6 warps=4",
    ),
    (
        SUMS.format(ic=256, oc=128),
        Prop.FWD,
        f"oh:8 ow:8 oc:128 ic:128 | {ROLE} programs=6 consumers=2 stages=4 warps=4",
    ),
    (
        SUMS.format(ic=256, oc=128),
        Prop.FWD,
        f"oh:8 ow:16 oc:128 ic:128 | {ROLE} swap=1 split_k=3 stages=6 warps=8",
    ),
    (SUMS.format(ic=96, oc=128), Prop.FWD, f"oh:8 ow:16 oc:128 ic:32 | {ROLE} swap=1 stages=6 warps=8"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "prop", "schedule"), KERNELS, ids=range(len(KERNELS)))
def test_sums_of_8_bit_floats(text: str, prop: Prop, schedule: str) -> None:
    case = ProblemCase(ConvProblem.parse(text), prop)
    plan = case.plan(schedule)
    main = next(s for s in plan.steps if s.compute.factors is not None)
    assert why_not(Schedule.parse(schedule), main.compute, plan.target) is None
    for data in ("exact", "float"):
        found = case.judge(plan, data)
        assert found.right, f"{data}: {found.reason}"
