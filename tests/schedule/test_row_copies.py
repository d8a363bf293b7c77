"""Copies whose rows are summed positions: right in every launch, and refused where they are none."""

from __future__ import annotations

import pytest

from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.schedule import why_not
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.packing import rows_of, why_not_rows
from transconv.selection.proposals import heuristics
from transconv.target.records import TARGETS
from transconv.verify.case import ProblemCase

SM90, BWD_W = TARGETS["sm_90"], Prop.BWD_W
GLUON = "a=box b=box | pack=a.b.rows swap=1 stages=3 warps=4 via=gluon"
WHOLE = "mb2ic16ih4iw40oc16oh4ow40kh3kw3ph1pw1"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("problem", "schedule"),
    [
        (f"{WHOLE} dt=f8e4m3:f32:f8e5m2 tag=nhwc", f"ic:64 oc:64 ow:32 | mma | {GLUON}"),
        (f"{WHOLE} dt=i8:i32:i8 tag=nhwc", f"ic:64 oc:64 ow:64 | mma | {GLUON} split_k=2"),
        (
            "mb1ic16ih9iw67oc16oh5ow33kh3kw5sh2sw2ph1pw2 dt=f8e4m3:bf16:f8e4m3 tag=nhwc",
            "ic:16 oc:32 ow:32 | mma | pack=a.b.rows stages=3 warps=4",
        ),
        (
            "mb1ic16iw65oc16ow65kw3pw2dw1 dt=f8e4m3:f32:f8e5m2 tag=nwc math=ieee",
            f"ic:64 oc:64 ow:64 | mma | {GLUON}",
        ),
        (
            "g2mb1ic32id3ih3iw32oc32od3oh3ow32kd3kh3kw3pd1ph1pw1 dt=f8e4m3:f32:f8e5m2 tag=ndhwc",
            "ic:16 oc:16 ow:32 | mma | a=box b=box | pack=a.b.rows swap=1 stages=3 warps=4",
        ),
    ],
)
def test_products_over_rows_are_right(problem: str, schedule: str) -> None:
    """Padding that a window sees on either side, strides, dilation, groups, rows of odd sizes."""
    case = ProblemCase(ConvProblem.parse(problem), BWD_W, where="cpu", target=SM90, numpy=True)
    plan = case.plan(schedule)
    assert [s.compute.name for s in plan.steps][:2] == ["pack_rows_src", "pack_rows_dst"]
    assert case.judge(plan, "exact", 3).reason == ""


def test_each_column_of_a_window_has_rows_of_its_own() -> None:
    compute = computes(ConvProblem.parse(f"{WHOLE} dt=f8e4m3:f32:f8e5m2 tag=nhwc"), BWD_W)[0]
    assert compute.b is not None
    src, dst = rows_of(compute.a, compute).tensor, rows_of(compute.b, compute).tensor
    assert (src.dims, src.shape) == (("mb", "ic", "ih", "kw", "ow"), (2, 16, 4, 3, 40))
    assert src.layout.strides() == (4 * 3 * 48, 2 * 4 * 3 * 48, 48, 4 * 48, 1)
    assert (dst.shape, dst.layout.strides()) == ((2, 16, 4, 40), (4 * 48, 2 * 4 * 48, 48, 1))


@pytest.mark.parametrize(
    ("problem", "prop", "said"),
    [
        (f"{WHOLE} dt=bf16 tag=nhwc", BWD_W, "types of 8 bits"),
        (f"{WHOLE} dt=i8 tag=nhwc", Prop.FWD, "no positions of src are summed"),
        ("mb2ic16ih8oc16oh8kh3ph1 dt=i8:i32:i8 tag=nhwc", BWD_W, "shorter than 32"),
        ("mb2ic16iw64oc16ow64kw33pw16 dt=i8:i32:i8 tag=nwc", BWD_W, "33 columns"),
    ],
)
def test_where_there_are_no_rows(problem: str, prop: Prop, said: str) -> None:
    compute = computes(ConvProblem.parse(problem), prop)[0]
    assert said in (why_not_rows(compute.a, compute) or "")
    schedule = Schedule.parse("mma | pack=a.b.rows warps=4")
    assert said in (why_not(schedule, compute, SM90) or "")


def test_rows_are_chosen_for_few_large_images() -> None:
    compute = computes(
        ConvProblem.parse("mb1ic320ih128oc320oh128kh3ph1 dt=f8e4m3:bf16:f8e5m2 tag=nhwc"), BWD_W
    )[0]
    assert heuristics.default(compute, SM90).pack == "a.b.rows"
