"""Numbers of estimates that no data sheet has: the rows of bench/results that they come from."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from inspect import unwrap
from math import log, prod, sqrt
from pathlib import Path
from statistics import mean

import pytest

from bench import estimates, layers
from bench.size_layers import Size, chosen, problem_at
from bench.trials import target_of
from tests.selection.test_ranks_for_several_sizes import MEASURED
from tests.stages import SM90
from transconv.compute import Compute
from transconv.conv import ConvProblem, Prop, any_size, compiler, computes, marked
from transconv.conv.relation import every
from transconv.cost import AtSizes, count, estimate, issue, model, of_phases
from transconv.ir import value_at
from transconv.schedule import Schedule, why_not
from transconv.target import Target
from transconv.torch_ops.quantized import block_scales

RESULTS = Path(__file__).parents[2] / "bench" / "results"
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    model._estimate.cache_clear()


def sized(
    names: str, files: tuple[str, ...] = ("h200_size_rows.csv", "h100_size_rows.csv")
) -> Iterator[tuple[Row, Schedule, tuple[Compute, ...], dict[str, int]]]:
    """The timed kernels of layers whose sizes are arguments, channels last, their computations and
    sizes."""
    of = {layer.name: layer for layer in chosen(False, names)}
    for row in (row for name in files for row in read(name)):
        if row["layer"] not in of or row["layout"] != "nhwc" or not row["us"]:
            continue
        layer, size = of[row["layer"]], Size.parse(row["size"])
        example = problem_at(layer, Size(8, (56, 56)), "bf16", row["layout"])
        found = any_size(example, layer.prop(row["direction"]), every(example))
        at = dict(zip(("MB", "IH", "IW"), (size.images, *size.sides), strict=True))
        yield row, Schedule.parse(row["schedule"]), found, at


def microseconds(
    schedule: Schedule, computes: tuple[Compute, ...], at: dict[str, int], chip: Target
) -> float:
    each = [AtSizes(schedule, c, chip) for c in computes]
    return sum(x.us(*(value_at(n, at) for n in x.counts)) for x in each)


def fits(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    others: tuple[float, ...],
    measured: list[tuple[float, Callable[[], float]]],
) -> float:
    """How far estimates are from what was measured, the root of the mean square of logarithms; further
    with other values of a number of the model."""

    def off() -> float:
        return sqrt(sum(log(us / estimated()) ** 2 for us, estimated in measured) / len(measured))

    found = off()
    for other in others:
        monkeypatch.setattr(model, name, other)
        assert off() > found, (name, other)
    return found


@pytest.mark.slow
def test_boxes_from_a_crowded_cache() -> None:
    """Of 36 kernels of a strided layer of any size on an H100: each of its multiprocessors gets fewer
    bytes from the L2 cache than an H200's, while all fetch."""
    timed = [r for r in read("h100_any_size_trials.csv") if "kh4" in r["problem"]]
    chip = target_of(timed)

    def off(gbs: float) -> float:
        far = []
        for row in timed:
            text, names = marked(row["problem"])
            p, schedule = ConvProblem.parse(text), Schedule.parse(row["schedule"])
            us = 0.0
            for part, c in enumerate(any_size(p, Prop(row["direction"]), names)):
                at = AtSizes(schedule, c, replace(chip, l2_gbs=gbs), part > 0)
                sizes = dict(zip(("MB", "IH", "IW"), (p.mb, *p.i), strict=True))
                us += at.us(*(value_at(n, sizes) for n in at.counts))
            far.append(log(float(row["us"]) / us) ** 2)
        return sqrt(sum(far) / len(far))

    assert len(timed) == 36 and chip.l2_gbs < SM90.l2_gbs
    found = [off(gbs) for gbs in (66.0, chip.l2_gbs, 88.0, SM90.l2_gbs)]
    assert found[1] < 0.06 < min(found[0], found[2]) and found[3] > 0.13, found


@pytest.mark.slow
def test_boxes_of_every_second_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 46 kernels: they take hardly longer than other boxes, if at all, and not half as long again."""
    measured = [
        (float(row["us"]), partial(microseconds, s, c, at, target_of([row])))
        for row, s, c, at in sized("rn50_l2_3x3_128_s2,dcgan_up_512_256")
        if len(c) == 1
        and why_not(s, c[0], SM90) is None
        and any(f.stepped for f in count(s, c[0], SM90).fetched)
    ]
    assert len(measured) == 46
    assert fits(monkeypatch, "STEPPED", (1.5,), measured) < 0.11


def test_loads_that_the_nearest_cache_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 23 kernels, the gradients of a stem whose phases are launches of their own."""
    timed = [*sized("rn50_stem7x7s2", ("h100_stem_phases.csv",))]
    measured = [
        (float(row["us"]), partial(microseconds, s, c, at, target_of([row]))) for row, s, c, at in timed
    ]
    for sizes, *us in MEASURED:
        at = dict(zip(("MB", "IH", "IW"), sizes, strict=True))
        for t, tile, device in zip(
            us,
            (
                "256 ic:16 oc:64 | mma | a=gather b=gather | stages=3",
                "128 ic:16 oc:64 | mma | a=gather b=gather | stages=4",
            ),
            ("H200", "H100"),
            strict=True,
        ):
            words = Schedule.parse(f"mb.qh.qw:{tile} warps=4")
            chip = target_of([{"device": device}])
            measured.append((t, partial(microseconds, words, timed[0][2], at, chip)))
    assert len(measured) == 23
    assert fits(monkeypatch, "NEAR_NS", (0.0, 300.0), measured) < 0.09


def test_weight_gradients_in_registers_wait_for_their_loads() -> None:
    """Of 19 tiles of four layers on an H200, some of whose loads are ahead: the estimate puts a layer's
    fastest one first. Without the waits, tiles of whole rows were first, which take up to 2.7 times as
    long."""
    timed = read("h200_depthwise_weight_trials.csv")
    chip = target_of(timed)
    found = [*estimates.problems(timed, chip)]
    assert [len(p.timed) for p in found] == [8, 4, 4, 3]
    assert [round(p.regret, 2) for p in found] == [1.0] * 4, [*map(str, found)]
    assert mean(p.agreement for p in found) > 0.6


def test_loads_that_are_ahead_pass_through_shared_memory() -> None:
    """Of 4 bytes they take 1.6 times as long; of 16 bytes whose waits they save, 0.56 times."""
    timed = [
        r
        for r in read("h200_ablation.csv")
        if r["variant"] == "stages+1" and r["prop"] == "bwd_w" and "stages=1" in r["base"] and r["us"]
    ]
    found = {}
    for row in timed:
        (compute,) = computes(ConvProblem.parse(row["problem"]), Prop.BWD_W)
        ahead, base = (Schedule.parse(row[c]) for c in ("config", "base"))
        if base.regs:
            factor = estimate(ahead, compute, SM90) / estimate(base, compute, SM90)
            found[row["layer"]] = (float(row["earns"]), factor)
    assert {*found} == {"x3d_m:dw3_54", "mobilenet_v2:dw3_384"}
    for measured, factor in found.values():
        assert (factor > 1) == (measured > 1) and 0.7 < factor / measured < 1.4, found


def test_stride_phases_that_are_one_launch() -> None:
    """Its start is counted once: of the gradient of a strided layer at 16 images on an H200, four launches
    of a tile with as many tiles as programs take 20.3 us, one launch of another 12.9."""
    problem = ConvProblem.parse("mb16ic128ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc")
    phases = computes(problem, Prop.BWD_D)
    apart, one = (
        Schedule.parse(f"{tile} | mma | a=box b=box | c=box swap=1 {words} stages=6 warps=4 via=gluon")
        for tile, words in (
            ("qh:16 qw:8 ic:128 oc:64", "programs=128"),
            ("mb:8 qh:4 qw:4 ic:64 oc:64", "programs=98 consumers=2"),
        )
    )
    of = {s: of_phases([s] * 4, phases, SM90) for s in (apart, one)}
    assert of[apart] == sum(estimate(apart, c, SM90) for c in phases) > of[one]
    assert of[one] < sum(estimate(one, c, SM90) for c in phases) - 3 * SM90.rates.gluon.fill_ns / 1e3
    assert len(compiler.build(problem, Prop.BWD_D, SM90).steps) == 1


def test_results_leave_from_where_the_stages_were() -> None:
    """With a stage less, three programs of a grouped layer fit a multiprocessor: 11.1 for 13.6 us on an
    H200, and the kernel that is chosen."""
    problem = ConvProblem.parse("g32mb16ic256ih28oc256oh28kh3ph1 dt=bf16 tag=nhwc")
    (compute,) = computes(problem, Prop.FWD)
    schedule = compiler.build(problem, Prop.FWD, SM90).schedule
    assert schedule.stages == 3 and count(schedule, compute, SM90).resident == 3
    assert count(schedule.with_words(stages=4), compute, SM90).resident == 2


GRADIENT = "g384mb128ic384ih14oc384oh14kh7ph3 dt=f8e4m3:bf16:f8e5m2 tag=nhwc"


@pytest.mark.slow
def test_loads_of_bytes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three kernels of a weight's gradient, which take 54, 61 and 146 us, estimates without the waits
    would prefer the slowest."""
    taken = {
        r["schedule"]: float(r["us"])
        for r in read("h200_byte_trials.csv")
        if r["problem"] == GRADIENT and r["us"]
    }
    taken |= {
        r["config"]: float(r["ours_us"])
        for r in read("h100_small_types.csv")
        if r["problem"] == GRADIENT and r["prop"] == "bwd_w"
    }
    assert sorted(map(round, taken.values())) == [54, 61, 146]

    plans = {
        words: compiler.build(ConvProblem.parse(GRADIENT), Prop.BWD_W, SM90, Schedule.parse(words))
        for words in taken
    }

    monkeypatch.setattr(issue, "_issued", unwrap(issue._issued))  # which keeps what it has found of a tile

    def best() -> float:
        model._estimate.cache_clear()
        found = {
            words: sum(estimate(s.schedule, s.compute, SM90) for s in plan.steps)
            for words, plan in plans.items()
        }
        return taken[min(found, key=found.__getitem__)]

    assert round(best()) == 54
    monkeypatch.setattr(issue, "TURN_NS", 0.0)
    assert round(best()) == 146


def test_weights_that_pass_through_registers() -> None:
    """Of SDXL's convolutions, whose weights of 8 bits were all made floats in registers; whose weights of
    4 bits are written as floats before. The rows are of two commits."""
    (late,) = (float(r["ms"]) for r in read("h200_converted_weights.csv"))
    (early,) = (
        float(r["ms"])
        for r in read("h200_quantized.csv")
        if (r["model"], r["kind"]) == ("sdxl", "int4 weights")
    )
    found = [x.shape for x in layers.read("sdxl") if ":unet." in x.name]
    assert len(found) == 27
    weights = [p.oc * p.icg * prod(p.k) for p in found]
    multiplied = sum(
        block_scales.multiplied_us(n * p.mb * prod(p.o), SM90) for n, p in zip(weights, found, strict=True)
    )
    written = sum(block_scales.written_us(int(2.5 * n), SM90) for n in weights)
    more = (late - early) * 1e3 + written
    assert more / multiplied == pytest.approx(SM90.rates.issue.converted_late, rel=0.05)
