"""``python -m bench predictions``: times of layers and graphs on chips, written before they are measured.

A prediction is the estimate of the cost model (``transconv.cost``) for the schedule that is chosen on that
chip, times a correction for how the kernel is written (``bench.estimates.family``): the median of measured
time over estimate. Its interval is what was missed where both are known:

    correction(family) = exp(median of log(time / estimate))     of the kernels measured on one chip
    error              = log(time / (estimate * correction))     of those measured on the other one
    interval           = prediction * exp(the quantiles 0.1 and 0.9 of the errors of both)

The cost model was fitted on chips of one architecture. On others the interval's logarithms are doubled: a
guess, which the first measured chip replaces. Files: ``bench/predictions/CARD.csv``, a row for each layer,
direction and graph, and ``validation.csv``, what is known of measured chips. They are made on a CPU:

    TRITON_INTERPRET=1 python -m bench predictions --only validation
    TRITON_INTERPRET=1 python -m bench predictions
"""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import layers
from bench.environment import ROOT
from bench.estimates import family, problems, rank_correlation
from bench.fit import H200
from bench.tables import geometric_mean
from transconv.compute import Alone, Workload, parse
from transconv.conv import DIRECTIONS, ConvWorkload
from transconv.cost import estimate
from transconv.errors import TransconvError
from transconv.runtime import main_computations
from transconv.selection import choice
from transconv.target import TARGETS, Target, of_card
from transconv.tuning.session import read_log
from transconv.tuning.table import CsvTable, Row, number, read
from transconv.verify.network_blocks import BLOCKS, NetworkBlock

FOLDER = ROOT / "bench" / "predictions"
VALIDATION = FOLDER / "validation.csv"
L40S = TARGETS["sm_89"]
# The cards of the files, by the words that name them on a page; those with other counts than the record.
CARDS = {
    "A100": TARGETS["sm_80"],
    "A40": TARGETS["sm_86"],
    "L40S": L40S,
    "RTX 4090": replace(L40S, sms=128, l2_bytes=72 << 20, bandwidth_gbs=1008, tflops=165.2),
    "H100": of_card(TARGETS["sm_90"], "H100"),
    "H200": H200,
    "B200": TARGETS["sm_100"],
    "B300": TARGETS["sm_103"],
    "RTX 5090": TARGETS["sm_120"],
    "GB10": TARGETS["sm_121"],
    "MI250X": TARGETS["gfx90a"],
    "MI300X": TARGETS["gfx942"],
    "MI355X": TARGETS["gfx950"],
    "MI455X": TARGETS["gfx1250"],
    "RX 7900 XTX": TARGETS["gfx1100"],
    "Radeon 8060S": TARGETS["gfx1151"],
    "RX 9070 XT": TARGETS["gfx1201"],
    "Max 1550": TARGETS["pvc"],
    "Arc A770": TARGETS["dg2"],
    "Arc B580": TARGETS["bmg"],
    "Arc 140V": TARGETS["lnl"],
}
FITTED = "sm_90"  # the architecture of the chips that the model was fitted on
MEASURED = ("H200", "H100")  # the cards whose files of bench/results the method is held against
LAYERS = "{}_layers_bf16_nhwc.csv"
LOGS = {"H200": ("h200_trials.csv",), "H100": ("h100_residual_trials.csv", "h100_small_types_trials.csv")}
MODELS = ("{}_graphs.csv", "{}_zoo.csv")
GRAPH = "graph"  # also the family of rows of whole models
KINDS = ("layer", GRAPH)
FEW = 8  # of a family, for a correction of its own
TAILS = 10  # of this many parts, one lies below and one above an interval
ELSEWHERE = 2.0  # times the logarithms of an interval on another architecture
COLUMNS = ("kind", "name", "direction", "us", "low", "high", "estimate_us", "family", "schedule", "reason")
KNOWN = ("card", "source", "name", "family", "us", "estimate_us")


def file_of(card: str) -> Path:
    """The predictions of a card."""
    return FOLDER / (card.lower().replace(" ", "_") + ".csv")


# -- formulas --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on estimates, by how a kernel is written, and the interval's ends as factors on a
    prediction, of layers and of graphs."""

    factors: dict[str, float]
    interval: dict[str, tuple[float, float]]

    def of(self, family: str) -> float:
        return self.factors.get(family, self.factors[""])

    def ends(self, kind: str, elsewhere: bool) -> tuple[float, float]:
        """``elsewhere``: on an architecture that the model was not fitted on."""
        low, high = (x ** (ELSEWHERE if elsewhere else 1.0) for x in self.interval[kind])
        return low, high


def off(row: Row) -> float:
    """The logarithm of a time by its estimate."""
    return log(float(row["us"]) / float(row["estimate_us"]))


def factors(rows: Iterable[Row]) -> dict[str, float]:
    """The factor of each family with enough rows, and that of all others, ``""``. Of one problem each
    family counts once, so that logs of many schedules weigh as much as tables of one."""
    found: dict[str, dict[tuple[str, ...], list[float]]] = {}
    for row in rows:
        problem = row["source"], row["name"]
        found.setdefault(row["family"], {}).setdefault(problem, []).append(off(row))
    each = {name: [median(own) for own in by.values()] for name, by in found.items()}
    kernels = [x for name, own in each.items() if name != GRAPH for x in own]
    made = {name: exp(median(own)) for name, own in each.items() if len(own) >= FEW}
    return made | {"": exp(median(kernels))}


def errors(rows: Iterable[Row], by: dict[str, float]) -> list[float]:
    """The logarithms of measured times over predictions that these factors give."""
    return [off(row) - log(by.get(row["family"], by[""])) for row in rows]


def of_kind(rows: Iterable[Row], kind: str, card: str) -> list[Row]:
    """Rows of layers, each with the schedule that was run, or of graphs of a card."""
    word = {"layer": "layers"}.get(kind)
    return [r for r in rows if r["card"] == card and (r["source"] == word or r["family"] == kind)]


def correction(rows: Sequence[Row], card: str = "") -> Correction:
    """What rows of measured cards say: the factors of all but ``card``, and the interval of what each
    card's predictions from the others miss."""
    ends = {}
    for kind in KINDS:
        found: list[float] = []
        for one in MEASURED:
            by = factors(r for r in rows if r["card"] != one)
            found += errors(of_kind(rows, kind, one), by)
        cuts = quantiles(found, n=TAILS)
        ends[kind] = exp(cuts[0]), exp(cuts[-1])
    return Correction(factors(r for r in rows if r["card"] != card), ends)


@dataclass(frozen=True, slots=True)
class Misses:
    """How far off predictions of one card were: the median of their factors, up or down; the bias; the
    share within a factor of 1.25 and within the interval; the rank correlation."""

    count: int
    typical: float
    bias: float
    near: float
    inside: float
    agreement: float


def misses(found: Sequence[tuple[float, float, float, float]]) -> Misses:
    """Of measured times, predictions, and the ends of their intervals."""
    logs = [log(us / predicted) for us, predicted, _, _ in found]
    return Misses(
        len(logs),
        exp(median(map(abs, logs))),
        exp(median(logs)),
        sum(abs(x) <= log(1.25) for x in logs) / len(logs),
        sum(low <= us <= high for us, _, low, high in found) / len(logs),
        rank_correlation([f[1] for f in found], [f[0] for f in found]) if len(found) > 1 else 1.0,
    )


def validated(rows: Sequence[Row], card: str, kind: str) -> list[tuple[float, float, float, float]]:
    """Measured times of a card, and what the other card's factors predict, with the interval."""
    by = correction(rows, card)
    low, high = by.ends(kind, False)
    made = []
    for row in of_kind(rows, kind, card):
        us = float(row["estimate_us"]) * by.of(row["family"])
        made.append((float(row["us"]), us, low * us, high * us))
    return made


def regrets(rows: Sequence[Row], card: str) -> list[float]:
    """Of each problem of a card's logs: the time of the schedule that the other card's factors put first,
    by that of the best."""
    by = factors(r for r in rows if r["card"] != card)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["card"] == card and row["source"].endswith("trials"):
            groups.setdefault((row["source"], row["name"]), []).append(row)
    found = []
    for own in groups.values():
        if len(own) > 1:
            first = min(own, key=lambda r: float(r["estimate_us"]) * by.get(r["family"], by[""]))
            found.append(float(first["us"]) / min(float(r["us"]) for r in own))
    return found


# -- what is known of measured cards ---------------------------------------------------------------


def known(card: str) -> Iterator[Row]:
    """Rows of bench/results of one card with their estimates: layers and logs by today's model, whole
    models by the one that was there when they were measured."""
    results, target, name = ROOT / "bench" / "results", CARDS[card], card.lower()
    timed = [r | {"us": r["ours_us"], "behind": ""} for r in read_log(results / LAYERS.format(name))]
    sources = {"layers": timed} | {log[5:-4]: read_log(results / log) for log in LOGS[card]}
    for source, rows in sources.items():
        for found in problems(rows, target):
            for t in found.timed:
                yield {
                    "card": card,
                    "source": source,
                    "name": found.name,
                    "family": t.family,
                    "us": t.us,
                    "estimate_us": t.estimated,
                }
    for table in MODELS:
        for row in read(results / table.format(name)):
            us = number(row, "transconv_gpu_ms" if "library" in row else "gpu_ms")
            estimated = number(row, "estimated_ms")
            if us and estimated and row.get("side", "transconv") == "transconv":
                about = {"card": card, "source": table[3:-4], "name": row["model"]}
                yield about | {"family": GRAPH, "us": us * 1e3, "estimate_us": estimated * 1e3}


# -- predictions -----------------------------------------------------------------------------------


def kernels(workload: Workload, target: Target) -> Iterator[tuple[str, str, float]]:
    """The main kernels of a workload: how each is written, its schedule, and its estimate with those of
    the copies around it and of the sum of its parts."""
    for compute in main_computations(workload, target, None)[0]:
        schedule = choice.default(compute, target, workload)
        yield family(schedule, compute), str(schedule), estimate(schedule, compute, target)


class GraphPlanned(Exception):
    """A graph is planned; nothing is to be run."""


def texts(block: NetworkBlock) -> list[str]:
    """The computations that a block becomes, as they are planned without a GPU: grouped by the rates of
    sm_90. Raises ValueError where torch computes a part."""
    import torch

    import transconv
    from transconv.graph import KernelRow, backend

    made: list[Any] = []

    def plan(gm: Any, inputs: Any) -> Any:
        made.append(backend(gm, inputs, options={"rest": "eager"}))
        raise GraphPlanned

    module, x = block.built("cpu", torch.bfloat16)
    before, transconv.config.cpu = transconv.config.cpu, "interpret"
    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(module, backend=plan)(x)
    except Exception:  # torch's, which holds ours
        if not made:
            raise
    finally:
        transconv.config.cpu = before
    (graph,) = made[0].transconv.graphs
    if left := [r for r in graph.rows if not isinstance(r, KernelRow)]:
        raise ValueError(f"torch computes {left[0].operations}")
    return [f"compute{part}" for r in graph.rows for part in re.split(r"^compute", r.text, flags=re.M)[1:]]


def asked() -> Iterator[tuple[Row, list[Workload]]]:
    """What is predicted: the columns that name it, and its workloads."""
    for layer in layers.read("layers"):
        problem = layer.problem("bf16", "nhwc")
        for direction in DIRECTIONS:
            about = {"kind": "layer", "name": layer.name, "direction": direction}
            yield about, [ConvWorkload(problem, layer.prop(direction))]
    for name, block in BLOCKS.items():
        yield {"kind": "graph", "name": name, "direction": ""}, [Alone(parse(t)) for t in texts(block)]


def predicted(about: Row, workloads: Sequence[Workload], target: Target, by: Correction) -> Row:
    """A row of a card's file; where a chip has no kernel, the reason."""
    try:
        found = [k for w in workloads for k in kernels(w, target)]
    except TransconvError as error:
        return about | {"reason": " ".join(str(error).split())[:160]}
    low, high = by.ends(about["kind"], target.name != FITTED)
    is_graph = about["kind"] == GRAPH
    us = sum(estimated * by.of(GRAPH if is_graph else name) for name, _, estimated in found)
    return about | {
        "us": us,
        "low": us * low,
        "high": us * high,
        "estimate_us": sum(estimated for _, _, estimated in found),
        "family": found[0][0],
        "schedule": str(found[0][1]) if len({s for _, s, _ in found}) == 1 else f"{len(found)} kernels",
    }


def arguments(made: argparse.ArgumentParser) -> None:
    """Its options."""
    made.add_argument(
        "--cards", default=",".join(CARDS), help="the cards to predict, as the page names them"
    )
    made.add_argument(
        "--only", choices=("validation", "predictions"), default="", help="write these files alone"
    )


def main(options: Namespace) -> int:
    """Write the rows that are not there: what was predicted stays as it is. Raises ValueError for an
    unknown card."""
    cards = options.cards.split(",")
    if strange := [c for c in cards if c not in CARDS]:
        raise ValueError(f"card '{strange[0]}' is unknown; expected some of {', '.join(CARDS)}")
    if options.only != "predictions":
        VALIDATION.unlink(missing_ok=True)
        table = CsvTable(VALIDATION, KNOWN, KNOWN)
        for row in (r for card in MEASURED for r in known(card)):
            table.add(row)
    rows = read(VALIDATION)
    for card in MEASURED:
        for kind in KINDS:
            print(card, kind, misses(validated(rows, card, kind)))
        if given := regrets(rows, card):
            print(
                card, f"{len(given)} problems with several schedules: regret {geometric_mean(given):.3f}"
            )
    if options.only == "validation":
        return 0
    tables = {c: CsvTable(file_of(c), COLUMNS, COLUMNS[:3]) for c in cards}
    by = {c: correction(rows, c) for c in cards}
    for about, workloads in asked():
        for card, own in tables.items():
            if not own.has(about):
                own.add(predicted(about, workloads, CARDS[card], by[card]))
    return 0
