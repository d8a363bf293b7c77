"""Depthwise: pixels and taps written out, lanes of sums added late, filters in rows of channels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from tests.reference import convolve, integers, pack, unpack
from transconv.compute.compute import Compute
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.cost import copies as cost_of_copies
from transconv.cost import issue
from transconv.cost import model as cost
from transconv.errors import ScheduleError
from transconv.ir import Alloc, For, Kernel, Let, Load, Reduce, Spread, Update, find
from transconv.ir.interp.evaluate import Memory
from transconv.ir.interp.kernel import run
from transconv.ir.rules.verifier import verify
from transconv.passes import PIPELINE, levels
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.copy_kernels import copies
from transconv.schedule.tiles.packing import copy_of, over_copies, rows_of_features
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.products import sliding, sliding_down
from transconv.target.records import TARGETS

SM90 = TARGETS["sm_90"]
FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
P = "g8mb2ic8ih5oc8oh5kh3ph1"
LARGE = "g96mb128ic96ih56oc96oh56kh7ph3 dt=bf16 tag=nhwc"
FIRST = "mb.oh:4 ow:4 g:8 kw:3 | fma | regs=ow.kw stages=1"
SECOND = "kw:3 mb.oh:4 ow:4 g:8 | fma | regs=ow.kw late=1 stages=1"


def made_of(text: str, prop: Prop) -> Compute:
    return computes(ConvProblem.parse(text), prop)[0]


def lowered(text: str, prop: Prop, schedule: str) -> Kernel:
    compute = made_of(text, prop)
    return compiler.lower(compute, Schedule.parse(schedule), SM90, "conv", "ieee")[-1][1]


CASES = [
    (P, FWD, FIRST),
    (P, FWD, "mb.oh:4 ow:5 g:8 kh:3 kw:2 | fma | pack=b regs=kh.ow.kw stages=1"),
    (P, FWD, "mb.oh:4 ow:2 g:4 kw:2 | fma | regs=g.ow unroll=1 stages=1"),
    (P, BWD_D, "mb.ih:4 iw:5 g:8 kw:3 | fma | pack=b regs=iw.kw stages=1"),
    (P, BWD_W, SECOND),
    (f"{P} tag=abx", BWD_W, f"{SECOND} pack=a.b split_k=2"),
    (P, BWD_W, f"kh:4 {SECOND} split_k=3"),
    (P, BWD_W, "kh:3 kw:3 mb.oh:8 ow:3 g:8 | fma | pack=c regs=kh.ow.kw late=1 split_k=2 stages=1"),
    (P, BWD_W, "kh.kw:4 mb.oh.ow:16 g:2 | fma | late=1 split_k=2 reduce=atomic stages=1"),
    ("g6mb3ic6iw11oc12ow5kw4sw2pw1dw1", FWD, "mb:2 ow:3 oc:2 kw:4 | fma | regs=kw.oc.ow stages=1"),
    ("g4mb2ic4ih10oc4oh5kh3sh2ph1", BWD_D, "mb.qh:4 qw:5 g:4 | fma | regs=qw stages=1"),
    ("mb2ic4ih6oc3oh6kh3ph1", BWD_W, "ic:4 kw:3 oc:2 mb.oh:4 | fma | regs=kw late=1 swap=1 stages=1"),
    pytest.param(
        "g3mb1ic3id5ih4iw6oc3od5oh4ow6kd3kh3kw3pd1ph1pw1",
        BWD_W,
        "kh:3 kw:2 mb.od.oh:8 ow:5 | fma | regs=kw.kh.ow late=1 stages=1",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.every(6)
@pytest.mark.parametrize(("text", "prop", "schedule"), CASES)
def test_every_pass_keeps_the_meaning(text: str, prop: Prop, schedule: str) -> None:
    check(text, prop, schedule, {}, range(2, len(PIPELINE) + 1))


@pytest.mark.every(6)
@pytest.mark.parametrize("off", ["unroll", "reuse", "widen", "hoist"])
@pytest.mark.parametrize(("text", "prop", "schedule"), [CASES[1], CASES[5]])
def test_passes_can_be_left_out(text: str, prop: Prop, schedule: str, off: str) -> None:
    check(text, prop, schedule, {off: False}, [len(PIPELINE)])


def check(text: str, prop: Prop, schedule: str, switches: dict[str, bool], stages: Iterable[int]) -> None:
    """The interpreter gives the reference's answer after some stages; what a pass has left as it was is
    not run again."""
    p = ConvProblem.parse(f"{text} dt=f32" + (" tag=axb" if "tag" not in text else ""))
    rng = np.random.default_rng(3)
    a, b, c = prop.roles
    shapes = {"src": (p.mb, p.ic, *p.i), "wei": (p.oc, p.icg, *p.k), "dst": (p.mb, p.oc, *p.o)}
    values = {name: integers(rng, shapes[name]) for name in (a, b)}
    expected = convolve(p, prop, values[a], values[b])
    steps = compiler.plan_steps(p, prop, SM90, Schedule.parse(schedule), Epilogue())
    launches = [compiler.lower(x, y, SM90, "conv", "ieee", switches) for x, y in steps]
    layouts = {n: getattr(p, n).layout for n in shapes}
    before: list[Kernel] = []
    for stage in stages:
        kernels = [launch[stage][1] for launch in launches]
        for kernel in kernels:
            verify(kernel, levels()[launches[0][stage][0]], launches[0][stage][0])
        if kernels == before:
            continue
        before = kernels
        buffers = {n: pack(v, layouts[n]) for n, v in values.items()}
        buffers[c] = np.zeros(layouts[c].span, layouts[c].dtype.numpy)
        for kernel in kernels:
            for t in kernel.params:
                buffers.setdefault(t.name, np.zeros(t.layout.span, t.dtype.numpy))
        memory = Memory(buffers)
        for kernel in kernels:
            memory.new_launch()
            run(kernel, memory)
        got = unpack(buffers[c], layouts[c], shapes[c])
        assert np.array_equal(got, expected), f"wrong after {launches[0][stage][0]}"


def test_taps_share_what_they_load() -> None:
    """4 pixels and 3 taps are 12 products of 6 pixels and 3 weights; without sharing, of 12 and 3."""
    body = lowered(f"{P} tag=axb", FWD, FIRST)
    loads = [s.value.tensor.name for s in find(body, Let) if isinstance(s.value, Load)]
    assert (loads.count("src"), loads.count("wei")) == (6, 3)
    assert len(find(body, Update)) == 12 and len(find(body, Alloc)) == 4
    compute = made_of(f"{P} tag=axb", FWD)
    alone = compiler.lower(compute, Schedule.parse(FIRST), SM90, "conv", "ieee", {"reuse": False})[-1][1]
    names = [s.value.tensor.name for s in find(alone, Let) if isinstance(s.value, Load)]
    assert names.count("src") == 12


def test_a_row_from_end_to_end_shares_its_pixels() -> None:
    """Columns that come out as numbers are the same pixels too: 14 of a row, and not 14 a tap."""
    text = "g32mb2ic32ih14oc32oh14kh3ph1 tag=axb"
    body = lowered(text, FWD, "mb.oh:2 ow:14 kw:3 g:32 | fma | unroll=1 regs=ow.kw stages=1")
    loads = [s.value.tensor.name for s in find(body, Let) if isinstance(s.value, Load)]
    assert (loads.count("src"), loads.count("wei")) == (3 * 14, 3 * 3)


def test_lanes_are_added_behind_the_loop() -> None:
    body = lowered(f"{P} tag=axb", BWD_W, SECOND)
    (loop,) = (x for x in find(body, For) if x.kind == "serial")
    assert not find(loop, Reduce) and len(find(body, Reduce)) == 3
    soon = lowered(f"{P} tag=axb", BWD_W, SECOND.replace("late=1", "late=0"))
    (loop,) = (x for x in find(soon, For) if x.kind == "serial")
    assert len(find(loop, Reduce)) == 12


@pytest.mark.slow
def test_narrow_operands_are_loaded_along_all_lanes() -> None:
    """Pixels of dst lack the lanes of kh; a filter whose channels are apart stays narrow."""
    spread = find(lowered(f"{P} tag=axb", BWD_W, f"kh:4 {SECOND}"), Spread)
    assert {len(s.lanes) for s in spread} == {3}
    assert not find(lowered(f"{P} tag=axb", FWD, FIRST), Spread)
    over = Schedule.parse(f"{FIRST} pack=b")
    assert (
        compiler.plan_steps(ConvProblem.parse(f"{P} tag=axb"), FWD, SM90, over, Epilogue())[0][0].does
        == "pack"
    )


def test_a_filter_of_one_channel_is_packed_in_rows_of_output_channels() -> None:
    wei = ConvProblem.parse("g19mb1ic19ih5oc19oh5kh3ph1 dt=f16 tag=axb")
    tensor = made_of(str(wei), FWD).b.tensor  # type: ignore[union-attr]
    assert tensor.shape == (19, 1, 3, 3) and not rows_of_features(tensor, 0)
    assert copy_of(tensor, 0).layout.strides() == (1, 216, 72, 24)
    assert rows_of_features(copy_of(tensor, 0), 0)


@pytest.mark.parametrize(
    ("prop", "schedule", "reason"),
    [
        (FWD, "ow:4 g:8 | fma | regs=oh", "there is no block of oh alone"),
        (FWD, "oh.ow:4 g:8 | fma | regs=ow", "there is no block of ow alone"),
        (FWD, "ow:4 g:8 | fma | regs=ow.ow", "names an axis twice"),
        (FWD, "ow:16 g:8 | fma | regs=ow", "more positions than there are, 5"),
        (FWD, "oh:5 ow:5 g:8 kh:3 kw:2 | fma | regs=oh.ow.kh.kw.g", "1200 positions to unroll"),
        (FWD, "ow:5 | fma", "an extent is a power of two"),
        (FWD, "g:8 | fma | late=1", "only sums over lanes of a tile"),
        (BWD_W, "g:8 ow:4 | fma | regs=ow late=1", "only sums over lanes of a tile"),
        (BWD_W, "g:8 oh.ow:4 | fma | late=2", "late=2"),
    ],
)
def test_refusals(prop: Prop, schedule: str, reason: str) -> None:
    assert reason in str(why_not(Schedule.parse(schedule), made_of(f"{P} tag=axb", prop), SM90))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "schedule", "loads"),
    [
        # Schedules that the fuzzer found to take LLVM minutes.
        ("mb4ic16ih11oc16oh5kh4sh2 tag=axb", "mb.oh.ow:32 oc:16 ic:16 | fma | unroll=1 regs=ic", 512),
        ("mb1ic32ih11oc16oh6kh3sh2ph1", "oh.ow:16 oc:16 kh.kw:16 ic:2 | fma | unroll=1 regs=oc.ic", 544),
        # Fewer at a time, steps that are no part of it, and pixels that taps share.
        ("mb4ic8ih11oc16oh5kh4sh2 tag=axb", "mb.oh.ow:32 oc:16 ic:8 | fma | unroll=1 regs=ic", 0),
        ("mb4ic16ih11oc16oh5kh4sh2 tag=axb", "mb.oh.ow:32 oc:16 ic:16 | fma | regs=ic", 0),
        ("mb4ic16ih12oc16oh5kh9 tag=axb", "mb.oh.ow:32 oc:16 ic:16 | fma | unroll=1 regs=ic", 0),
        (
            "mb4ic16ih11oc16oh5kh4sh2 tag=axb",
            "mb.oh.ow:32 oc:16 ic:16 | fma | unroll=1 split_k=4 regs=ic",
            0,
        ),
        (
            "g256mb8ic256ih14oc256oh14kh5ph2 tag=axb",
            "mb.oh:2 ow:14 kw:5 g:256 | fma | pack=b unroll=1 regs=ow.kw",
            0,
        ),
    ],
)
def test_how_many_loads_are_written_out(text: str, schedule: str, loads: int) -> None:
    reason = why_not(Schedule.parse(schedule), made_of(text, FWD), SM90)
    regs = Schedule.parse(schedule).regs
    assert reason == (f"regs={regs} unroll=1: {loads} loads to write out, at most 256" if loads else None)


def test_the_matrix_unit_has_no_registers_to_give() -> None:
    compute = made_of("mb2ic32ih8oc32oh8kh3ph1 dt=f16 tag=nhwc", FWD)
    for word, reason in (("regs=kw", "unrolled into registers"), ("late=1", "element by element")):
        schedule = Schedule.parse(f"mb.oh.ow:32 oc:32 kw:2 ic:16 | mma | {word}")
        assert reason in str(why_not(schedule, compute, SM90))


def test_text_form() -> None:
    for text in (FIRST, SECOND):
        assert Schedule.parse(str(Schedule.parse(text))) == Schedule.parse(text)
    assert "regs=ow.kw late=1" in str(Schedule.parse(SECOND))
    with pytest.raises(ScheduleError, match="late=x, expected a whole number"):
        Schedule.parse("g:8 | fma | late=x")


# -- the choice -----------------------------------------------------------------------------------


def test_counted_instructions_are_those_of_the_machine_code() -> None:
    """FFMA per product, 1.5 conversions per element: 784 instructions were counted for a step of 448
    products a thread, 844 where pixels are summed. The time is theirs within a third."""
    ways = {
        (FWD, "mb.oh:32 ow:8 kw:7 g:32 | fma | pack=b regs=ow.kw stages=1"): 773,
        (BWD_W, "kh:8 kw:7 mb.oh:4 ow:8 g:32 | fma | regs=ow.kw late=1 split_k=132 stages=1"): 844,
    }
    for (prop, text), instructions in ways.items():
        schedule = Schedule.parse(text)
        compute = over_copies(made_of(LARGE, prop), schedule.pack)
        w = cost.count(schedule, compute, SM90)
        counted = issue.microseconds(schedule, compute, SM90, w.tiles, w.steps)
        issued = w.tiles / SM90.sms * w.steps * schedule.warps * instructions / SM90.rates.issue.schedulers
        assert 0.8 < counted / (issued / SM90.rates.issue.clock / SM90.rates.issue.share / 1e3) < 1.35


@pytest.mark.every(5)
@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize(
    "shape",
    [
        "g96mb128ic96ih56oc96oh56kh7ph3",
        "g384mb128ic384ih14oc384oh14kh3ph1",
        "g480mb128ic480ih14oc480oh14kh5ph2",
        "g128mb32ic128ih56oc128oh56kh31ph15",
    ],
)
def test_depthwise_slides_in_registers(shape: str, prop: Prop) -> None:
    schedule = heuristics.default(made_of(f"{shape} dt=bf16 tag=nhwc", prop), SM90)
    assert schedule.regs and schedule.unit == "fma", str(schedule)
    assert schedule.late or prop is not BWD_W, str(schedule)


@pytest.mark.parametrize(
    ("tag", "prop", "asked", "chosen"),
    [
        ("nchw", FWD, {"a.b", "a.b.c"}, "a.b.c"),
        ("nchw", BWD_W, {"a.b"}, "a.b"),
        ("nhwc:ohwi:nchw", FWD, {"", "b", "b.c"}, "b.c"),  # a gradient that comes with channels apart, say
        ("nhwc:ohwi:nchw", Prop.BWD_D, {"a.b"}, "a.b"),
        ("nhwc:ohwi:nchw", BWD_W, {"", "b"}, "b"),
    ],
)
def test_channels_first(tag: str, prop: Prop, asked: set[str], chosen: str) -> None:
    """Neighbours in memory are pixels, over which lanes cannot slide: they are copied first. So is a
    result, where lanes that run along channels would store each of its elements alone."""
    compute = made_of(f"g96mb64ic96ih56oc96oh56kh7ph3 dt=bf16 tag={tag}", prop)
    assert {c.pack for c in sliding(compute, SM90)} == asked
    schedule = heuristics.default(compute, SM90)
    assert schedule.regs and schedule.pack == chosen, str(schedule)


def test_what_does_not_slide() -> None:
    assert not list(sliding(made_of("mb8ic96ih56oc96oh56kh7ph3 dt=bf16 tag=nhwc", FWD), SM90))
    assert all(
        why_not(c, made_of(LARGE, FWD), SM90) is None
        or "registers" in str(why_not(c, made_of(LARGE, FWD), SM90))
        for c in sliding(made_of(LARGE, FWD), SM90)
    )


def test_barriers_at_every_step_cost() -> None:
    compute = made_of(LARGE, BWD_W)
    late = Schedule.parse("kh:8 kw:7 mb.oh:4 ow:8 g:32 | fma | regs=ow.kw late=1 split_k=60 stages=1")
    soon = Schedule.parse(str(late).replace("late=1 ", ""))
    assert cost.estimate(soon, compute, SM90) > 3 * cost.estimate(late, compute, SM90)


def test_one_channel_and_a_large_window_are_multiplied_in_registers() -> None:
    """On the matrix unit 15 of 16 columns would be empty; the positions slide down the window instead."""
    compute = made_of("mb75ic1ih572oc1oh522kh51", FWD)
    matrix = Schedule.parse("mb.oh.ow:256 oc:16 kw:32 | mma | pack=a.b stages=3 warps=4")
    chosen = heuristics.default(compute, SM90)
    assert chosen.unit == "fma" and chosen.regs == "oh.kh"
    assert cost.estimate(chosen, compute, SM90) < cost.estimate(matrix, compute, SM90) / 3


@pytest.mark.parametrize("text", ["mb32ic64ih56oc64oh56kh3ph1", "mb2ic1ih28oc32oh28kh5ph2"])
def test_more_channels_stay_on_the_matrix_unit(text: str) -> None:
    assert not list(sliding_down(made_of(text, FWD), SM90))


# -- types of 8 bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("types", ["f8e4m3:f8e4m3:bf16", "i8"])
def test_tiles_of_8_bits_are_those_of_16_bits(types: str) -> None:
    """Sums need as many registers: no thread has more than 8 elements along g, nor more than 72 sums."""
    wide, small = (
        {str(s) for s in sliding(made_of(LARGE.replace("bf16", t), FWD), SM90)} for t in ("bf16", types)
    )
    held = {s for s in small if s in wide}
    assert held and all("ow:14" in s for s in small - wide)
    assert not any("ow:14" in s and "mb.oh:32 ow:14 kw:7 g:32" in s for s in small)


def test_rows_of_bytes_that_begin_anywhere_are_not_copied() -> None:
    """The copy of 54 channels stores one or two bytes at a time, which takes longer than the rest."""
    compute = made_of("g54mb8ic54id16ih56iw56oc54od16oh56ow56kd3kh3kw3pd1ph1pw1 dt=i8 tag=ndhwc", FWD)
    assert heuristics.default(compute, SM90).pack == "b"
    rows = {c.a.tensor.name: cost_of_copies.copying(c, SM90) for c in copies(compute, "a.b", unit="fma")}
    aligned = made_of("g64mb8ic64id16ih56iw56oc64od16oh56ow56kd3kh3kw3pd1ph1pw1 dt=i8 tag=ncdhw", FWD)
    [other] = [cost_of_copies.copying(c, SM90) for c in copies(aligned, "a", unit="fma")]
    assert rows["src"] > 2 * other
