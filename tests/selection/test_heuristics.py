"""The heuristics: candidates are legal, few and quickly made, and the first one is what sweeps found
to be fast."""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench import fit
from tests.strategies import problems
from transconv.compute import parse
from transconv.compute.analysis import axis_roles as lying
from transconv.compute.compute import Compute
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.cost import model as cost
from transconv.cost.work import count
from transconv.schedule import legality, word_rules
from transconv.schedule.counts import k_steps, tile
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Block, Schedule
from transconv.schedule.tiles import shared_memory
from transconv.schedule.tiles.packing import over_copies
from transconv.schedule.tiles.shared_memory import transposed_bytes
from transconv.selection import choice
from transconv.selection.proposals import heuristics, tile_shapes
from transconv.target import TARGETS, Constants

GPUS = ("sm_90", "sm_80", "gfx942")
SM90 = TARGETS["sm_90"]
DENSE = "mb32ic256ih56oc256oh56kh3ph1"
DEPTHWISE = "g128mb32ic128ih28oc128oh28kh3ph1"


def made_of(text: str, prop: Prop = Prop.FWD) -> Compute:
    return computes(ConvProblem.parse(text), prop)[0]


def first(text: str, prop: Prop = Prop.FWD, target: str = "sm_90") -> Schedule:
    return heuristics.default(made_of(text, prop), TARGETS[target])


def extent(schedule: Schedule, axis: str) -> int:
    block = schedule.block_of(axis)
    return block.extent if block is not None else 1


# A fast schedule of this problem is long to compile, and comes last.
LONG = "g2mb1ic2id3ih3iw3oc2od1oh1ow1kd3kh3kw3 dt=f32"


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@example(ConvProblem.parse(LONG), Prop.FWD, "gfx942")
@given(
    st.sampled_from(["f32", "bf16", "f64"]).flatmap(lambda dtype: problems(dtype=dtype)),
    st.sampled_from(list(Prop)),
    st.sampled_from([*GPUS, "interpreter"]),
)
def test_candidates_are_legal(p: ConvProblem, prop: Prop, name: str) -> None:
    target = TARGETS[name]
    for compute in computes(p, prop):
        found = heuristics.candidates(compute, target)
        assert found and len(set(found)) == len(found)
        assert name == "interpreter" or len(found) <= heuristics.MOST
        assert heuristics.default(compute, target) == found[0]
        for schedule in found:
            assert why_not(schedule, compute, target) is None, str(schedule)
            assert cost.estimate(schedule, compute, target) > 0
        ranks = [
            (
                heuristics.too_long(c, compute, target),
                heuristics.spills(c, compute, target),
                cost.estimate(c, compute, target),
            )
            for c in found
        ]
        assert ranks == sorted(ranks) or any(x.size == 0 for x in compute.axes_of("K"))


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(dtype="f32"), st.sampled_from(list(Prop)), st.sampled_from(GPUS))
def test_plans_have_a_legal_schedule_per_kernel(p: ConvProblem, prop: Prop, name: str) -> None:
    for compute, schedule in compiler.plan_steps(p, prop, TARGETS[name], None, Epilogue()):
        assert why_not(schedule, compute, TARGETS[name]) is None


def test_interpreter_ranks_by_steps_alone() -> None:
    compute = made_of("mb2ic64ih16oc64oh16kh3ph1 dt=f32 tag=nhwc")
    best = heuristics.default(compute, TARGETS["interpreter"])
    assert heuristics.programs(best, compute) * k_steps(best, compute) <= 9
    assert best.split_k == 1


@pytest.mark.every(4)
@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize("target", GPUS)
def test_choosing_is_quick(prop: Prop, target: str) -> None:
    compute = made_of("mb64ic192ih35oc320oh35kh3ph1 dt=bf16 tag=nhwc", prop)
    started = time.process_time()
    found = heuristics.candidates(compute, TARGETS[target])
    assert time.process_time() - started < 1.0  # some 0.1 s alone on a machine
    assert len(found) <= heuristics.MOST


# -- what the first one looks like ----------------------------------------------------------------


@pytest.mark.parametrize("prop", [Prop.FWD, Prop.BWD_D])
def test_dense_channels_last_takes_boxes_where_there_are_any(prop: Prop) -> None:
    schedule = first(f"{DENSE} dt=bf16 tag=nhwc", prop)
    assert (schedule.a, schedule.b, schedule.c, schedule.unit) == ("box", "box", "box", "mma")
    tiles = heuristics.programs(schedule, made_of(f"{DENSE} dt=bf16 tag=nhwc", prop))
    rounds = -(-tiles // SM90.sms)
    assert rounds > 1 and schedule.programs <= SM90.sms and -(-tiles // schedule.programs) == rounds


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_chips_without_boxes_gather(target: str) -> None:
    schedule = first(f"{DENSE} dt=bf16 tag=nhwc", target=target)
    assert (schedule.a, schedule.b, schedule.unit) == ("gather", "gather", "mma")


@pytest.mark.slow
def test_channels_first_gathers_where_there_are_no_boxes() -> None:
    schedule = first(f"{DENSE} dt=bf16 tag=nchw", target="sm_80")
    assert (schedule.a, schedule.unit, schedule.pack) == ("gather", "mma", "")
    assert first(f"{DENSE} dt=bf16 tag=nchw").pack == "a.b"  # see test_packing.py


@pytest.mark.parametrize("text", [f"{DEPTHWISE} dt=bf16 tag=nhwc", f"{DENSE} dt=f64 tag=nhwc"])
def test_what_the_matrix_unit_cannot_do_well(text: str) -> None:
    assert first(text).unit == "fma"


@pytest.mark.every(4)
@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize("target", GPUS)
def test_products_of_elements_have_lanes_along_rows_and_columns(prop: Prop, target: str) -> None:
    """Each operand is then read once for several elements of the result, and neighbours lie together."""
    compute = made_of(f"{DENSE} dt=f64 tag=nhwc", prop)
    best = heuristics.default(compute, TARGETS[target])
    sides = [tile(best, compute, kind) for kind in "MN"]
    assert best.unit == "fma" and min(sides) > 1 and prod(sides) >= 64, str(best)


@pytest.mark.parametrize("prop", list(Prop))
def test_large_tiles_of_the_matrix_unit_have_the_registers_of_eight_warps(prop: Prop) -> None:
    compute = made_of(f"{DENSE} dt=bf16 tag=nhwc", prop)
    large = [
        s
        for s in heuristics.candidates(compute, SM90)
        if s.unit == "mma" and tile(s, compute, "M") * tile(s, compute, "N") > 128 * 128
    ]
    assert large and {s.warps * s.consumers for s in large} == {8}


def test_of_a_schedule_that_was_given_its_estimate_and_the_first_choice_are_told() -> None:
    compute = made_of(f"{DENSE} dt=bf16 tag=nhwc")
    ranked = choice.ranked(compute, SM90)
    other = ranked[2].schedule
    chosen, said = " ".join(choice.given(other, ranked, compute, SM90)).split("without")
    assert "chosen     by the caller" in chosen
    assert f"{cost.estimate(other, compute, SM90):.4g} us" in chosen
    assert str(ranked[0].schedule) in " ".join(said.split())


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "shape", [DEPTHWISE, "g64mb32ic64ih112oc64oh56kh3sh2ph1", "g384mb64ic384ih14oc384oh14kh31ph15"]
)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_depthwise_lanes_run_along_memory(shape: str, target: str) -> None:
    ranked = heuristics.candidates(made_of(f"{shape} dt=bf16 tag=nchw"), TARGETS[target])
    as_they_lie = [c for c in ranked if not c.pack][:1]
    assert as_they_lie or "a" in ranked[0].pack.split(".")  # a large filter is worth copies
    for schedule in as_they_lie:
        assert extent(schedule, "ow") >= 64 > extent(schedule, "g"), str(schedule)
    channels_last = first(f"{shape} dt=bf16 tag=nhwc", target=target)
    assert extent(channels_last, "g") >= 16, str(channels_last)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("shape", "prop", "pack", "transposed"),
    [
        ("mb32ic256ih14oc256oh14kh3ph1", Prop.FWD, "", False),
        ("mb32ic256ih14oc256oh14kh3ph1", Prop.BWD_D, "b", False),  # weights are copied quickly
        ("mb32ic256ih14oc256oh14kh3ph1", Prop.BWD_W, "a.b", False),  # short rows of images
        ("mb32ic64ih56oc64oh56kh3ph1", Prop.BWD_W, "", True),  # copies would take as long as products
        ("mb32ic64ih56oc256oh56kh1", Prop.BWD_W, "", True),
        ("mb2ic128id32oc128od32kd3pd1", Prop.BWD_W, "", True),  # elements of two images are not adjacent
    ],
)
def test_f32_for_the_matrix_unit_lies_along_the_sum(
    shape: str, prop: Prop, pack: str, transposed: bool
) -> None:
    text = f"{shape} dt=f32 tag=axb"
    best = first(text, prop)
    assert (best.a, best.b, best.pack) == ("box", "box", pack)
    compute = over_copies(made_of(text, prop), pack)
    assert bool(transposed_bytes(best, compute)) == transposed
    assert first(f"{text} math=ieee", prop).a == "gather"
    assert first(text, prop, "sm_80").a == "gather"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "sum_of_forward"),
    [
        ("mb32ic3ih224oc768oh14kh16sh16 dt=bf16", "ic.kh.kw"),
        ("mb8ic3ih32oc64oh8kh4sh4 dt=f16", "ic.kh.kw"),
        ("mb2ic4id32ih32iw32oc96od4oh4ow4kd8kh8kw8sd8sh8sw8 dt=bf16", "ic.kd.kh.kw"),
        ("mb32ic3ih224oc768oh14kh16sh16 dt=bf16 tag=nhwc", ""),  # features are innermost
        ("mb32ic3ih224oc64oh112kh7sh2ph3 dt=bf16", ""),  # windows share elements
        ("mb8ic96ih56oc192oh28kh2sh2 dt=bf16", ""),  # rows of four bytes
    ],
)
def test_patches_are_summed_as_they_lie(text: str, sum_of_forward: str) -> None:
    """Of an image with its columns innermost, in all directions; no other convolution is concerned."""
    for prop in Prop:
        compute = made_of(text, prop)
        kind = {Prop.FWD: "K", Prop.BWD_D: "N", Prop.BWD_W: "M"}[prop]
        found = tile_shapes.fusable(compute.axes_of(kind), compute)
        wanted = sum_of_forward if prop is not Prop.BWD_D else sum_of_forward.replace("k", "r")
        assert (wanted in map(".".join, found)) is bool(wanted)
        if wanted:
            first = heuristics.candidates(compute, SM90)[0]
            assert any(".".join(b.axes) == wanted for b in first.blocks), first
        else:
            assert len(found) == 1


def test_gathering_across_the_sum_costs_more() -> None:
    """f32 weights of the data gradient go to shared memory element by element, their copies and 16-bit
    ones do not. In full precision no matrix unit multiplies f32, here with a third of its rate."""
    schedule = Schedule.parse("mb.ih.iw:128 ic:128 oc:32 | mma | a=gather b=gather | stages=3 warps=8")

    def cost_of(words: str, target: str = "sm_90", pack: str = "") -> float:
        compute = made_of(f"mb32ic256ih14oc256oh14kh3ph1 tag=axb {words}", Prop.BWD_D)
        return cost.estimate(schedule.with_words(pack=pack), compute, TARGETS[target])

    assert cost_of("dt=f32") > 1.3 * cost_of("dt=f32", pack="b")
    assert cost_of("dt=f32 math=ieee") > 3 * cost_of("dt=f32")
    assert cost_of("dt=f32", "gfx942") == cost_of("dt=f32 math=ieee", "gfx942")
    assert cost_of("dt=bf16") == cost_of("dt=bf16 math=ieee")


def test_long_sums_are_split_to_fill_the_chip() -> None:
    """64x64 results of 9 taps are 9 tiles of a sum over 401408 pixels."""
    compute = made_of("mb128ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc", Prop.BWD_W)
    schedule = heuristics.default(compute, SM90)
    waves = heuristics.programs(schedule, compute) / SM90.sms
    assert (waves > 0.8 and waves % 1 > 0.8) or waves % 1 == 0


def test_consumers_take_turns_where_storing_takes_long_beside_the_sum() -> None:
    """9 steps and a store for each of 95 tiles of a program (the fastest of ten that were measured:
    h200_slide_trials.csv); and 36 steps of 256x128 to a tile."""
    short = first("mb32ic64ih224oc64oh224kh3ph1 dt=bf16 tag=nhwc")
    assert short.consumers == 2 and short.warps == 4 and tile_of(short) == 128 * 64
    alone = replace(short, consumers=1)
    compute = made_of("mb32ic64ih224oc64oh224kh3ph1 dt=bf16 tag=nhwc")
    assert heuristics.estimate(short, compute, SM90) < 0.97 * heuristics.estimate(alone, compute, SM90)
    assert first("mb32ic256ih56oc256oh56kh3ph1 dt=bf16 tag=nhwc").consumers == 1


def tile_of(schedule: Schedule) -> int:
    return prod(extent(schedule, axis) for axis in ("mb", "oh", "ow", "oc"))


def test_summed_pixels_are_also_tiled_without_divisions() -> None:
    compute = made_of("mb128ic256ih14oc256oh14kh3ph1 dt=f32 tag=nhwc math=ieee", Prop.BWD_W)
    found = heuristics.candidates(compute, SM90)
    gathered = [c for c in found if c.a == c.b == "gather"]
    assert any(all(len(b.axes) == 1 for b in c.blocks) for c in gathered)
    assert any(Block(("mb", "oh", "ow"), 64) in c.blocks for c in gathered)


def test_variety_for_the_tuner() -> None:
    found = heuristics.candidates(made_of(f"{DENSE} dt=bf16 tag=nhwc"), SM90)
    assert {c.stages for c in found} >= {3, 4} and {c.warps for c in found} == {4, 8}
    assert {c.programs for c in found} == {0, 131, SM90.sms}
    square = {(c.warps, c.a) for c in found if extent(c, "oc") == 128 and k_steps(c, made_of(DENSE)) == 36}
    assert {(4, "box"), (8, "box")} <= square


def test_tilings_lose_the_least_first() -> None:
    axes = made_of("mb128ic64ih14oc64oh14kh3ph1", Prop.FWD).axes_of("M")
    best = heuristics.tilings(axes, 128)[0]
    assert all(axes[[x.name for x in axes].index(b.axes[0])].size % b.extent == 0 for b in best)


# -- the estimate ---------------------------------------------------------------------------------


def test_strides_of_axes() -> None:
    compute = made_of("mb2ic8ih7oc16oh7kh3ph1 dt=bf16 tag=nhwc")
    strides = lying.axis_strides(compute.a, compute)
    assert strides["ic"] == 1 and strides["ow"] == strides["kw"] == 8
    assert strides["oh"] == 56 and strides["oc"] == 0 and strides[""] == -(7 + 1) * 8


def test_strides_see_through_a_stride_phase() -> None:
    compute = made_of("mb2ic8ih8oc16oh4kh3sh2ph1 dt=bf16 tag=nhwc", Prop.BWD_D)
    strides = lying.axis_strides(compute.a, compute)
    assert strides["qw"] == 16 and strides["oc"] == 1  # one output further, not half of one


@pytest.mark.parametrize(("tag", "pixels", "channels"), [("nchw", 1, 16), ("nhwc", 16, 1)])
def test_scattered_lanes_move_whole_sectors(tag: str, pixels: int, channels: int) -> None:
    compute = made_of(f"g64mb2ic64ih32oc64oh32kh3ph1 dt=bf16 tag={tag}")
    along = {"pixels": Schedule.parse("mb.oh.ow:64 | fma"), "channels": Schedule.parse("g:64 | fma")}
    stored = {n: cost.count(c, compute, SM90).stored.bytes for n, c in along.items()}
    assert stored == {"pixels": 64 * 2 * pixels, "channels": 64 * 2 * channels}


@pytest.mark.parametrize(
    ("size", "sectors"),
    [
        (64, 1.0),  # rows of 16 bytes that begin at multiples of 16: each in one sector
        (65, 1 + 7 / 16),  # that begin anywhere: 7 of 16 end in the next
        (66, 1 + 3 / 8),
    ],
)
def test_rows_that_begin_anywhere_straddle_sectors(size: int, sectors: float) -> None:
    compute = made_of(f"mb2ic64ih{size}oc64oh{size}kh3ph1 dt=bf16")
    schedule = Schedule.parse("mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=gather b=gather")
    assert cost.count(schedule, compute, SM90).stored.bytes == 128 * 64 * 4 * sectors


@pytest.mark.slow
def test_channels_are_not_scattered_pixel_by_pixel() -> None:
    """Of a stride phase in channels first no two results are neighbours; stored from a swapped tile,
    each would be a sector of its own (44 ms instead of 9 on an H200)."""
    p = ConvProblem.parse("mb64ic128ih513oc128oh256kh3sh2 dt=bf16")
    for compute in computes(p, Prop.BWD_D):
        best = heuristics.candidates(compute, TARGETS["sm_90"])[0]
        assert "c" in best.pack.split(".") or not best.swap, (compute.name, best)


def test_a_last_wave_costs_a_whole_one() -> None:
    """133 tiles on 132 multiprocessors take two rounds, 132 take one."""
    base = made_of("mb132ic64ih8oc128oh8kh3ph1 dt=bf16 tag=nhwc")
    more = made_of("mb134ic64ih8oc128oh8kh3ph1 dt=bf16 tag=nhwc")
    schedule = Schedule.parse(
        "mb:1 oh:8 ow:8 oc:128 ic:64 | mma | a=box b=box | c=box swap=1 programs=132 stages=4 warps=4"
    )
    one, two = (cost.estimate(schedule, compute, SM90) for compute in (base, more))
    launch = SM90.rates.triton.launch_us
    assert (two - launch) / (one - launch) > 1.5


def test_splitting_pays_for_its_second_kernel() -> None:
    compute = made_of(f"{DENSE} dt=bf16 tag=nhwc")
    schedule = Schedule.parse("mb.oh.ow:128 oc:128 ic:64 | mma | stages=3 warps=8")
    whole, split = (
        cost.estimate(replace(schedule, split_k=parts), compute, SM90) for parts in (schedule.split_k, 2)
    )
    assert split > whole


# -- the fit --------------------------------------------------------------------------------------


def sweep(path: Path, times: dict[str, str]) -> Path:
    lines = ["problem,prop,config,us,err,tflops"]
    lines += [f"{DENSE} dt=bf16 tag=nhwc,fwd,{schedule},{us},0," for schedule, us in times.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_fit_reads_sweeps(tmp_path: Path) -> None:
    wide = "mb.oh.ow:128 oc:128 ic:64 | mma | a=gather b=gather | stages=3 warps=8"
    thin = "mb.oh.ow:16 oc:16 ic:16 | mma | a=gather b=gather | stages=4 warps=4"
    split = thin.replace("stages", "split_k=2 stages")
    old = sweep(tmp_path / "old.csv", {"cudnn": "150", wide: "200", split: "1", thin: "900"})
    new = sweep(tmp_path / "new.csv", {"cudnn": "154", wide: "185.5", "oc:3 | mma": ""})
    (group,) = fit.read([new], fit.H200, [old])
    assert group.reference == 154 and group.best.us == 185.5
    assert {str(s.schedule): s.us for s in group.samples} == {wide: 185.5, thin: 900.0}
    assert fit.ratio(group, fit.H200, SM90.rates.triton) == 1.0
    (swapped,) = fit.read([sweep(tmp_path / "odd.csv", {wide: "900", thin: "90"})], fit.H200)
    assert fit.ratio(swapped, fit.H200, SM90.rates.triton) == pytest.approx(0.1)


def test_search_walks_to_the_minimum() -> None:
    def score(c: Constants) -> float:
        return abs(c.narrow - 40) + abs(c.persistent - 0.3) * 100

    found = fit.search(score, SM90.rates.triton)
    assert found.narrow == pytest.approx(40, rel=0.05)
    assert found.persistent == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize(
    ("text", "prop"),
    [
        ("ic4ih128oc320oh128kh3ph1 dt=i8 tag=nhwc", "bwd_d"),
        ("mb128ic3ih224oc64oh112kh7sh2ph3 dt=f8e4m3:bf16:f8e5m2 tag=nhwc", "bwd_w"),
    ],
)
def test_boxes_of_bytes_are_not_mostly_padding(text: str, prop: str) -> None:
    """Copies with the sum innermost have rows of 3 or 4 features: no box of 32 or more of them. Copies of
    ``rows`` have positions innermost."""
    compute = computes(ConvProblem.parse(text), Prop(prop))[0]
    assert not any(
        c.pack and "box" in (c.a, c.b) and not {"f16", "rows"} & {*c.pack.split(".")}
        for c in heuristics.proposals(compute, TARGETS["sm_90"])
    )


def test_boxes_are_shared_where_fetching_takes_long() -> None:
    """Tiles of 256x64 fetch 5 bytes for 4 of a tile of 256x128; with shared rows 2.6. The estimate has the
    bytes of a step."""
    compute = made_of("ic192ih256oc192oh256kh3ph1 dt=bf16 tag=nhwc")
    best = heuristics.candidates(compute, SM90)[0]
    assert best.slide == "kh" and best.order == "kw.ic.kh"
    plain = best.with_words(slide="", order="")
    shared, each = (sum(f.bytes for f in count(s, compute, SM90).fetched) for s in (best, plain))
    high, deep = best.blocks[0].extent, best.blocks[-1].extent
    assert shared == each - 256 * deep * 2 * (1 - (high + 2) / (3 * high))
    assert heuristics.estimate(best, compute, SM90) < heuristics.estimate(plain, compute, SM90)


OTHERS = {
    "unit": "mma",
    "a": "box",
    "b": "box",
    "c": "box",
    "swap": 1,
    "split_k": 2,
    "reduce": "atomic",
    "programs": 132,
    "consumers": 2,
    "stages": 4,
    "warps": 8,
    "order": "kw.ic.kh",
    "via": "gluon",
}


@pytest.mark.parametrize(
    ("text", "prop"),
    [
        ("mb2ic32ih9iw12oc64oh9ow12kh3kw3ph1pw1 dt=bf16 tag=nhwc", Prop.FWD),
        ("mb3ic48ih14oc40oh7kh3sh2ph1 dt=f16 tag=nhwc", Prop.BWD_D),
        ("g4mb2ic32ih6oc32oh6kh3ph1 dt=f32 tag=nchw", Prop.BWD_W),
    ],
)
def test_rules_of_a_tile_depend_on_no_other_word(
    text: str, prop: Prop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are asked once for all schedules that share the words that they take: whatever the others are,
    the answer is the same."""
    target = TARGETS["sm_90"]
    compute = next(iter(computes(ConvProblem.parse(text), prop)))
    asked: dict[Any, None] = {}
    for s in heuristics.proposals(compute, target):
        if s.merge == Schedule().merge:
            asked[s.blocks, s.via, s.order, s.swap] = None

    def answers() -> list[Any]:
        found: list[Any] = []
        for blocks, via, order, swap in asked:
            found.append(word_rules._why_not_tile.__wrapped__(blocks, compute, target, 0))
            found.append(shared_memory._transposed_bytes.__wrapped__(blocks, compute, order))
            found.append(shared_memory._result_boxes.__wrapped__(blocks, compute, via, order))
            for name, view in (("a", compute.a), ("b", compute.b), ("c", compute.c)):
                given = blocks, compute, name, via, order, swap, view, target, True
                found.append(legality._why_not_tile.__wrapped__(*given))
        return found

    first = answers()
    for module in (legality, word_rules, shared_memory):
        monkeypatch.setattr(
            module, "Schedule", lambda blocks, **words: Schedule(blocks, **(OTHERS | words))
        )
    assert answers() == first and len({*map(str, first)}) > 4


@pytest.mark.parametrize("frames", [1, 2])
def test_a_small_transposed_part_has_lanes_along_its_memory(frames: int) -> None:
    """A sixth or a third of what is concatenated is in torch's order, the result has features last. Lanes
    along features alone would read two bytes of each sector of that part."""
    text = f"""compute cat
        tensor X bf16 [c=96, t={frames}, p=4096]
        tensor Z bf16 [c=96, t=6, p=4096] bca
        tensor Y bf16 [c=96, t=6, p=4096] bca
        axes   c=96 t=6 p=4096
        read   x = X[c, t, p]
        read   z = Z[c, t, p]
        store  Y[c, t, p] = where(t < {frames}, x, z)"""
    compute = parse(text)
    chosen = heuristics.default(compute, TARGETS["sm_90"])
    blocks = {b.axes[-1]: b.extent for b in chosen.blocks}
    assert min(blocks.get("c", 1), blocks.get("p", 1)) >= 16, chosen
