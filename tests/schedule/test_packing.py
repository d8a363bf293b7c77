"""Copies in another memory order: kernels over copies, and the kernels that copy, give the same
results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import integers, pack, unpack
from tests.stages import DRAWN, SM90, SM100, launches_of, small_schedules, wrong_stages
from tests.strategies import problems
from transconv.compute import parse
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.cost.work import count
from transconv.errors import ScheduleError
from transconv.ir import Layout, Tensor, convert, f16, f32, tf32
from transconv.ir.interp.evaluate import Memory
from transconv.ir.interp.kernel import run
from transconv.passes import PIPELINE
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.copy_kernels import copies, is_copy
from transconv.schedule.tiles.packing import (
    copy_of,
    innermost,
    over_copies,
    rows_of_features,
    why_not_copied,
    workspaces,
)
from transconv.schedule.words import with_letter
from transconv.selection.proposals import heuristics
from transconv.target.records import TARGETS, Target

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W

# -- every pass keeps the meaning -----------------------------------------------------------------

BOXED = "a=box b=box swap=1"
CASES = [
    ("mb4ic16ih7oc24oh7kh3ph1", FWD, f"mb:2 oh:4 ow:4 oc:16 ic:16 | {BOXED} pack=a.b"),
    ("mb4ic16ih7oc24oh7kh3ph1", FWD, f"mb:2 oh:4 ow:4 oc:16 ic:16 | {BOXED} c=box pack=a.b.c programs=3"),
    ("mb3ic19ih6oc21oh6kh3ph1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED} c=box pack=a.b.c"),  # odd
    ("mb4ic16ih6oc32oh6kh1", FWD, f"mb.oh.ow:16 oc:16 ic:16 | {BOXED} c=box pack=a.c"),
    ("mb2ic16ih8oc16oh8kh1", FWD, f"oh.ow:16 oc:16 ic:16 | {BOXED} c=box"),  # as it lies
    ("mb4ic16ih7oc16oh7kh3ph1", BWD_D, f"mb:2 ih:2 iw:4 oc:16 ic:16 | {BOXED} c=box pack=a.b.c"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", BWD_D, f"mb:2 qh:2 qw:4 oc:16 ic:16 | {BOXED} pack=a.b"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", BWD_D, f"mb:2 qh:2 qw:4 oc:16 ic:16 | {BOXED} pack=a.b.c"),
    ("mb4ic16ih8oc16oh8kh3ph1", BWD_W, "mb:1 oh:4 ow:4 oc:16 ic:16 | a=box pack=a.b.c swap=1"),
    ("mb4ic16ih6oc16oh6kh3ph1", BWD_W, "mb.oh.ow:16 oc:16 ic:16 | pack=a.b.c split_k=3"),
    ("mb16ic16ih3oc16oh3kh3ph1", BWD_W, f"mb:16 oc:16 ic:16 | {BOXED} c=box pack=a.b.c"),
    ("g2mb4ic32ih8oc32oh8kh3ph1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED} c=box pack=a.b.c"),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED} pack=a.b.c split_k=3"),
    ("mb4ic16iw18oc16ow16kw3", FWD, f"mb:1 ow:16 oc:16 ic:16 | {BOXED} c=box pack=a.b.c"),
    ("mb2ic16ih9oc16oh3kh3sh3ph0", FWD, f"mb:2 oh:4 ow:2 oc:16 ic:16 | {BOXED} c=box pack=a.b.c"),
    ("mb2ic16id4oc16od4kd3pd1", FWD, f"mb:1 od:2 oh:2 ow:4 oc:16 ic:16 | {BOXED} c=box pack=a.b.c"),
    ("mb2ic16ih9oc16oh9kh3ph2dh1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED} pack=a.b"),
    ("mb1ic16ih1oc16oh1kh1", FWD, "mb:16 oc:16 ic:16 | mma"),  # one pixel: nothing to copy
]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("text", "prop", "schedule"), CASES, ids=[f"{i}-{c[1]}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_boxes_over_copies(text: str, prop: Prop, schedule: str) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag=abx")
    steps = compiler.plan_steps(p, prop, SM100, Schedule.parse(schedule), Epilogue())
    assert wrong_stages(p, prop, launches_of(steps, target=SM100)) == []


# f32 for the matrix unit: what is summed lies innermost, output channels of weights and images too.
SUMMED = [
    ("mb4ic24ih7oc16oh7kh3ph1", BWD_D, f"mb:2 ih:2 iw:4 oc:16 ic:16 | {BOXED} pack=b", {"wei": 0}),
    ("g2mb4ic32ih8oc40oh4kh3sh2ph1", BWD_D, "mb:2 qh:2 qw:4 oc:16 ic:16 | pack=b", {"wei": 0}),
    (
        "mb2ic64ih8oc32oh8kh3ph1",
        BWD_D,
        f"ih:8 iw:8 ic:64 oc:32 | {BOXED} pack=b stages=2 via=gluon",
        {"wei": 0},
    ),
    ("mb32ic16ih3oc24oh3kh3ph1", BWD_W, f"mb:32 oc:16 ic:16 | {BOXED} pack=a.b", {"src": 0, "dst": 0}),
    (
        "mb32ic64ih3oc32oh2kh3sh2ph1",
        BWD_W,
        "mb:32 oc:32 ic:64 | a=box b=box pack=a.b via=gluon stages=2",
        {"src": 0, "dst": 0},
    ),
    ("mb32ic64ih2oc32oh2kh1", BWD_W, "mb:16 oc:32 ic:64 | pack=b split_k=3", {"dst": 0}),
]


@pytest.mark.every(7)
@pytest.mark.parametrize("tag", ["abx", "axb"])
@pytest.mark.parametrize(
    ("text", "prop", "schedule", "inner"), SUMMED, ids=[f"{i}-{c[1]}-{c[0]}" for i, c in enumerate(SUMMED)]
)
def test_what_is_summed_lies_innermost(
    text: str, prop: Prop, schedule: str, inner: dict[str, int], tag: str
) -> None:
    p = ConvProblem.parse(f"{text} dt=f32 tag={tag}")
    chosen = Schedule.parse(schedule)
    if tag == "abx" and prop is BWD_D and "box" in schedule:
        chosen = replace(chosen, pack="a.b")
    steps = compiler.plan_steps(p, prop, SM90, chosen, Epilogue())
    assert wrong_stages(p, prop, launches_of(steps)) == []
    made = {a.c.tensor.name: a.c.tensor.layout.strides() for a, _ in steps if a.name.startswith("pack_")}
    for name, dim in inner.items():
        assert made[f"{name}_packed"][dim] == 1


@pytest.mark.parametrize(
    ("text", "prop", "letter", "inner"),
    [
        ("mb32ic32ih8oc32oh8kh3ph1", BWD_W, "a", 0),
        ("mb31ic32ih8oc32oh8kh3ph1", BWD_W, "a", 1),  # a row is not full
        ("mb32ic32ih8oc32oh8kh3ph1 dt=bf16", BWD_W, "a", 1),  # read along either side
        ("mb32ic32ih8oc32oh8kh3ph1 math=ieee", BWD_W, "a", 1),  # not for the matrix unit
        ("mb32ic32ih8oc32oh8kh3ph1", BWD_W, "c", 1),
        ("mb2ic32ih8oc32oh8kh3ph1", BWD_D, "b", 0),
        ("mb2ic32ih8oc32oh8kh3ph1", BWD_D, "a", 1),  # its summed channels are its channels
        ("mb32ic32ih8oc32oh8kh3ph1", FWD, "a", 1),
        ("mb32ic32ih8oc32oh8kh3ph1", FWD, "b", 1),
    ],
)
def test_what_a_copy_has_innermost(text: str, prop: Prop, letter: str, inner: int) -> None:
    compute = computes(ConvProblem.parse(f"{text}"), prop)[0]
    (tensor,) = workspaces(compute, letter, 1)
    strides = tensor.layout.strides()
    assert strides is not None and strides[inner] == 1
    assert "already has" in str(why_not_copied(over_copies(compute, letter), letter))


@settings(DRAWN, max_examples=20)
@given(st.data(), problems(), st.sampled_from(list(Prop)), st.integers(0, 2**32 - 1))
def test_every_pass_keeps_the_meaning(data: st.DataObject, p: ConvProblem, prop: Prop, seed: int) -> None:
    """Any layout, blocked ones included, seen through copies of any of the tensors."""
    first = computes(p, prop)[0]
    if not all(x.size for x in first.axes):
        return
    schedule = small_schedules(first, data.draw)
    for letter in data.draw(st.sampled_from(["a.b.c", "a.b", "a", "b", "c", "a.c"])).split("."):
        more = replace(schedule, pack=with_letter(schedule.pack, letter))
        schedule = more if why_not(more, first, SM90) is None else schedule
    switches = {s.name: data.draw(st.booleans()) for s in PIPELINE if s.optional}
    steps = compiler.plan_steps(p, prop, SM90, schedule, Epilogue())
    assert wrong_stages(p, prop, launches_of(steps, switches), seed) == []


@settings(DRAWN, max_examples=20)
@given(st.data(), problems(), st.sampled_from("abc"))
def test_copies_move_every_element(data: st.DataObject, p: ConvProblem, letter: str) -> None:
    """Any schedule of a copy, there and back, after every pass."""
    tensor = {"a": FWD, "b": FWD, "c": FWD}
    compute = computes(p, tensor[letter])[0]
    (copy,) = copies(compute, letter)
    schedule = data.draw(st.sampled_from(heuristics.candidates(copy, SM90)[:12]))
    small = tuple(replace(b, extent=data.draw(st.sampled_from([1, 2, 4, 16]))) for b in schedule.blocks)
    schedule = replace(schedule, blocks=small)
    whole = {"a": compute.a, "b": compute.b, "c": compute.c}[letter]
    assert whole is not None
    here, there = whole.tensor, copy_of(whole.tensor, innermost(compute, letter))
    values = integers(np.random.default_rng(1), here.shape, 2)
    source, target = (there, here) if letter == "c" else (here, there)
    for stage, kernel in compiler.lower(copy, schedule, SM90, "copy"):
        buffers = {
            source.name: pack(values, source.layout),
            target.name: np.full(target.layout.span, np.nan, np.float32),
        }
        run(kernel, Memory(buffers))
        assert np.array_equal(unpack(buffers[target.name], target.layout, here.shape), values), stage


# -- what a copy looks like -----------------------------------------------------------------------


def tensor(shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
    names = ("mb", "ic", "ih", "iw")[: len(shape)]
    layout = Layout.dense(f16, shape) if strides is None else Layout.from_strides(f16, shape, strides)
    return Tensor("src", names, tuple(shape), layout)


def test_rows_of_a_copy_begin_at_16_bytes() -> None:
    assert copy_of(tensor((2, 16, 5, 7))).layout.strides() == (560, 1, 112, 16)
    odd = copy_of(tensor((2, 19, 5, 7)))
    assert odd.layout.strides() == (24 * 35, 1, 24 * 7, 24) and odd.shape == (2, 19, 5, 7)
    wide = Tensor("src", ("mb", "ic", "iw"), (2, 7, 4), Layout.dense(f32, (2, 7, 4)))
    assert copy_of(wide).layout.strides() == (32, 1, 8)
    short = Tensor("src", ("mb", "ic", "iw"), (2, 3, 4), Layout.dense(f32, (2, 3, 4)))
    assert copy_of(short).layout.strides() == (12, 1, 3)
    assert all(rows_of_features(t) for t in (copy_of(tensor((2, 16, 5, 7))), odd, copy_of(wide)))


@pytest.mark.parametrize(
    ("shape", "strides", "there"),
    [
        ((4, 16, 6, 6), None, False),
        ((4, 16, 1, 1), None, True),  # one pixel
        ((4, 16, 6, 6), (576, 1, 96, 16), True),
        ((4, 12, 6, 6), (432, 1, 72, 12), False),  # rows of 24 bytes
        ((4, 16, 6, 6), (700, 1, 112, 16), False),  # images 1400 bytes apart
        ((1, 16, 6, 6), (700, 1, 112, 16), True),  # one image
    ],
)
def test_what_lies_in_rows_of_features(
    shape: Sequence[int], strides: Sequence[int] | None, there: bool
) -> None:
    assert rows_of_features(tensor(shape, strides)) == there


def test_pixels_without_gaps_are_one_axis() -> None:
    """Of an image of 5x7 rows; not where rows are apart, nor over channels."""

    def axes(text: str, src: Layout | None = None) -> list[str]:
        p = ConvProblem.parse(f"{text} dt=f16 tag=abx")
        if src is not None:
            p = replace(p, src=replace(p.src, layout=src))
        (copy,) = copies(computes(p, FWD)[0], "a")
        assert is_copy(copy)
        return [f"{x.name}:{x.size}" for x in copy.axes]

    plain = "mb2ic16ih5iw7oc16oh5ow7kh3kw3ph1pw1"
    assert axes(plain) == ["mb:2", "ih_iw:35", "ic:16"]
    padded = Layout.from_strides(f16, (2, 16, 5, 7), (640, 40, 8, 1))
    assert axes(plain, padded) == ["mb:2", "ih:5", "iw:7", "ic:16"]
    assert axes("mb2ic16id3ih1iw4oc16od3oh1ow4kd1kh1kw1") == ["mb:2", "id_ih_iw:12", "ic:16"]


@pytest.mark.parametrize(
    ("tag", "axes"),
    [
        ("axb", ["mb_ih_iw_ic"]),  # the copy lies as the original does
        ("abx", ["mb", "ih_iw", "ic"]),
    ],
)
def test_a_copy_for_rounding_alone_is_one_run(tag: str, axes: list[str]) -> None:
    compute = computes(ConvProblem.parse(f"mb2ic3ih9oc16oh5kh3sh2ph1 tag={tag}"), FWD)[0]
    (copy, _) = copies(compute, "a.b")
    assert [x.name for x in copy.axes] == axes
    src = np.random.default_rng(0).standard_normal((2, 3, 9, 9)).astype(np.float32)
    a, c = compute.a.tensor, over_copies(compute, "a.b").a.tensor
    for schedule in heuristics.candidates(copy, SM90)[:3]:
        memory = Memory({"src": pack(src, a.layout), c.name: np.full(c.layout.span, np.nan, np.float32)})
        memory.new_launch()
        run(compiler.lower(copy, schedule, SM90, "copy", "tf32")[-1][1], memory)
        made = unpack(memory.buffers[c.name], c.layout, src.shape)
        assert np.array_equal(made, convert(src, tf32)) and not np.array_equal(made, src)


def test_gaps_and_other_orders_are_no_run() -> None:
    """Rows of 5 channels get gaps in a copy; weights of one channel a group have others innermost."""
    for text in ("mb2ic5ih4oc16oh4kh1 tag=axb", "g32mb2ic32ih8oc32oh8kh3ph1 tag=axb"):
        compute = computes(ConvProblem.parse(text), FWD)[0]
        letter = "a" if "g32" not in text else "b"
        (copy,) = copies(compute, letter)
        assert len(copy.axes) > 1, text


def test_what_goes_through_registers_is_known_to_the_estimate() -> None:
    compute = computes(ConvProblem.parse("mb32ic3ih224oc64oh112kh7sh2ph3 tag=axb"), FWD)[0]
    schedule = Schedule.parse("mb.oh.ow:128 oc:64 kw.ic:16 | mma")
    over = replace(schedule, pack="a.b")
    assert [f.through for f in count(schedule, compute, SM90).fetched] == [True, True]
    assert [f.through for f in count(over, compute, SM90).fetched] == [False, False]
    whole = replace(compute, math="ieee")
    assert not any(f.through for f in count(schedule, whole, SM90).fetched)


@pytest.mark.parametrize(
    ("schedule", "small"),
    [
        ("mb.oh.ow:128 oc:64 kw.ic:16 | mma", False),
        ("mb.oh.ow:128 oc:64 kw.ic:16 | mma | warps=2", True),
        ("mb.oh.ow:32 oc:64 kw.ic:16 | mma", True),
        ("mb.oh.ow:32 oc:64 kw.ic:16 | mma | swap=1", False),
    ],
)
def test_products_too_small_for_the_asynchronous_unit(schedule: str, small: bool) -> None:
    """Operands of the older unit are in registers in any case, so turning and rounding cost nothing."""
    compute = computes(ConvProblem.parse("mb32ic3ih224oc64oh112kh7sh2ph3 tag=axb"), FWD)[0]
    work = count(Schedule.parse(schedule), compute, SM90)
    assert work.small == small and [f.through for f in work.fetched] == [not small] * 2
    assert not count(Schedule.parse(schedule), replace(compute, math="ieee"), SM90).small


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "chip", "few"),
    [
        ("dt=f32", SM90, True),
        ("dt=f32 math=ieee", SM90, False),
        ("dt=bf16", SM90, False),
        ("dt=f32", TARGETS["sm_80"], False),
        ("dt=f32", SM100, False),
    ],
)
def test_two_warps_are_proposed_where_the_older_unit_may_win(text: str, chip: Target, few: bool) -> None:
    p = ConvProblem.parse(f"mb2ic64id48oc128od24kd3sd2pd1 tag=axb {text}")
    found = heuristics.candidates(computes(p, BWD_W)[0], chip)
    assert (2 in {c.warps for c in found}) == few
    assert (found[0].warps == 2) == few  # measured: 108 us, with 4 warps 292


# -- the schedule -----------------------------------------------------------------------------------


def test_schedule_text_round_trip() -> None:
    text = "mb.oh.ow:16 oc:16 ic:16 | mma | a=box b=box | pack=a.b.c swap=1 stages=3 warps=4"
    schedule = Schedule.parse(text)
    assert schedule.pack == "a.b.c" and schedule.unpacks
    assert str(schedule) == text and Schedule.parse(str(schedule)) == schedule
    assert not Schedule.parse(f"{text} split_k=2").unpacks
    for bad in ("b.a", "a.a", "d", "ab"):
        with pytest.raises(ScheduleError, match="expected some of a.b.c, in this order"):
            Schedule.parse(f"pack={bad}")


@pytest.mark.parametrize(
    ("text", "prop", "schedule", "reason"),
    [
        (
            "mb4ic16ih8oc16oh8kh3ph1 tag=axb",
            FWD,
            "pack=a",
            "pack=a: src already has ic innermost and rows that begin at multiples of 16 bytes",
        ),
        (
            "mb4ic16ih8oc16oh8kh3ph1",
            FWD,
            "pack=a.b.c split_k=2 reduce=atomic",
            "pack=c: atomic sums meet in the result itself",
        ),
        (
            "mb4ic16ih8oc16oh8kh3ph1",
            FWD,
            "a=box b=box pack=b swap=1 mb:1 oh:2 ow:8",
            "a=box: src: the box begins at ow + kw - 1 along iw, not at 16 bytes",
        ),
    ],
)
def test_refusals_say_why(text: str, prop: Prop, schedule: str, reason: str) -> None:
    compute = computes(ConvProblem.parse(f"{text} dt=f16"), prop)[0]
    blocks = "" if "mb:" in schedule else "mb.oh.ow:16"
    said = why_not(Schedule.parse(f"{blocks} oc:16 ic:16 | mma | {schedule}"), compute, SM90)
    assert said is not None and said.startswith(reason), said


def test_a_result_that_is_stored_in_part_has_no_copy() -> None:
    """The copy would be stored as a whole, with what it has in elements that no point stores."""
    text = (
        "compute c ;; tensor C f16 [4, {}] strides(1,4) ;; axes m=4 n=8 | k=8 ;; read x = X[m, k] ;; "
        "read w = W[k, n] ;; let s = sum(x*w; k) ;; store C[m, {}] = s"
    )
    schedule = Schedule.parse("m:4 n:8 k:8 | fma | pack=c")
    assert why_not(schedule, parse(text.format(8, "n")), SM90) is None
    said = why_not(schedule, parse(text.format(10, "n + 1")), SM90)
    assert said is not None and said.startswith("pack=c: the copy has all elements of C"), said


def test_residuals_lie_as_the_result() -> None:
    p = ConvProblem.parse("mb4ic16ih8oc16oh8kh3ph1 dt=f16")
    schedule = Schedule.parse("mb.oh.ow:16 oc:16 ic:16 | mma | pack=c")
    for epilogue, refused in (("bias+relu", False), ("bias+res", True)):
        compute = computes(p, FWD, Epilogue.parse(epilogue))[0]
        said = why_not(schedule, compute, SM90)
        assert (said == "pack=c: the epilogue reads a residual that lies as the result does") == refused
        assert why_not(replace(schedule, split_k=2), compute, SM90) is None


def test_a_copy_has_no_second_operand() -> None:
    compute = computes(ConvProblem.parse("mb4ic16ih8oc16oh8kh3ph1 dt=f16"), FWD)[0]
    (copy,) = copies(compute, "a")
    assert why_not(Schedule.parse("ic:16 | fma | pack=b"), copy, SM90) == (
        "pack=b, but pack_src has no second operand"
    )
