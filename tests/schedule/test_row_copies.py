"""Copies whose rows are summed positions, and copies with zeros around images: right in every launch, and
refused where they are none."""

from __future__ import annotations

import pytest

from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.schedule import why_not
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.packing import framed, rows_of, why_not_rows
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


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("problem", "prop", "schedule"),
    [
        (
            "mb2ic3ih20oc24oh10kh7sh2ph3 tag=nhwc",
            BWD_W,
            "kw.ic:32 oc:32 oh:2 ow:16 | a=box swap=1 split_k=5",
        ),
        ("mb2ic3ih20oc24oh10kh7sh2ph3 tag=nchw", BWD_W, "kw.ic:32 oc:32 mb.oh.ow:32 | split_k=3"),
        ("mb1ic2ih19iw23oc16oh9ow11kh5kw5sh2sw2ph1pw1 tag=nhwc", BWD_W, "kh.kw.ic:64 oc:16 mb.oh.ow:16 |"),
        ("ic1ih12iw14oc16oh12ow14kh3kw3ph1pw1 tag=nchw", BWD_W, "kw.ic:32 oc:16 oh:2 ow:8 | a=box swap=1"),
        (
            "mb2ic3id6ih7iw9oc16od3oh7ow9kd3kh3kw3sd2sh1sw1pd1ph1pw1 tag=ndhwc",
            BWD_W,
            "kw.ic:32 oc:16 ow:16 |",
        ),
        ("mb2ic2iw33oc16ow17kw5sw2pw2dw1 tag=nwc", BWD_W, "kw.ic:16 oc:16 ow:16 |"),
        (
            "mb2ic3ih20oc24oh10kh7sh2ph3 tag=nhwc",
            Prop.FWD,
            "oh:2 ow:16 oc:32 kw.ic:32 | a=box c=box swap=1",
        ),
        (
            "mb2ic3ih11iw12oc24oh11ow12kh3kw3ph1pw1 tag=nchw",
            Prop.FWD,
            "mb.oh.ow:32 oc:32 kw.ic:32 | split_k=3",
        ),
    ],
)
def test_products_over_frames_are_right(problem: str, prop: Prop, schedule: str) -> None:
    """Padding on all sides, strides, dilation, odd sizes, one to three features and dimensions."""
    given = ConvProblem.parse(f"{problem} dt=bf16")
    case = ProblemCase(given, prop, where="cpu", target=SM90, numpy=True)
    tile, words = schedule.split("|")
    plan = case.plan(f"{tile}| mma | {words} pack=a.frame stages=2 warps=4")
    assert plan.steps[0].compute.name == "pack_frame_src"
    assert case.judge(plan, "exact", 3).reason == ""


def test_windows_begin_at_16_bytes_in_a_frame() -> None:
    """Windows two columns apart need four features, of three; those one column apart eight."""
    for stride, features, shape in ((2, 4, (2, 4, 26, 26)), (1, 8, (2, 8, 26, 26))):
        sizes = f"mb2ic3ih20oc16oh{(20 - 1) // stride + 1}kh7sh{stride}ph3 dt=bf16 tag=nhwc"
        compute = computes(ConvProblem.parse(sizes), BWD_W)[0]
        made = framed(compute.a, compute).tensor
        assert made.shape == shape
        assert made.layout.strides() == (26 * 26 * features, 1, 26 * features, features)


def test_frames_where_their_copy_pays() -> None:
    """Medians of an H200 (h200_window_trials.csv): 81 us over a frame and 150 without for 7x7 filters of
    stride 2, of 3x3 filters 195 and 101."""
    wide, narrow = (
        computes(ConvProblem.parse(f"mb32ic3ih224oc64{rest} dt=bf16 tag=nhwc"), BWD_W)[0]
        for rest in ("oh112kh7sh2ph3", "oh224kh3ph1")
    )
    assert heuristics.default(wide, SM90).pack == "a.frame"
    assert heuristics.default(narrow, SM90).pack == ""


@pytest.mark.parametrize(
    ("problem", "prop", "said"),
    [
        ("mb2ic8ih8oc16oh8kh3ph1", BWD_W, "8 features, which are a row of 16 bytes"),
        (
            "mb2ic3ih8oc16oh4kh3sh2ph1",
            Prop.BWD_D,
            "frames are for sizes that are numbers, all phases in one",
        ),
        ("g3mb2ic3ih8oc3oh8kh3ph1", BWD_W, "no dimension of features alone"),
    ],
)
def test_refused_frames_say_why(problem: str, prop: Prop, said: str) -> None:
    compute = computes(ConvProblem.parse(f"{problem} dt=bf16 tag=nhwc"), prop)[0]
    reason = why_not(Schedule.parse("mma | pack=a.frame warps=4"), compute, SM90)
    assert reason is not None and said in reason
