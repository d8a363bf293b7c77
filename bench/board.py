"""``python -m bench board``: the tables of docs/board.md, what is known of each chip; predictions and
measurements.

Files of ``transconv doctor --measure --share`` are given as arguments: each is checked and kept in
``bench/shared`` under the name of its card, and ``--tuned FILE`` writes the tuned rows of all of them as
one table of schedules. Files of the same card are merged: a row's time is the median of those that are
right. Ours are in ``bench/results``: the timings of layers, and ``CARD_doctor.json``."""

from __future__ import annotations

import argparse
import hashlib
import re
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from bench.environment import ROOT
from bench.estimates import alone
from bench.predictions import (
    CARDS,
    KINDS,
    LAYERS,
    MEASURED,
    VALIDATION,
    file_of,
    misses,
    regrets,
    validated,
)
from bench.tables import geometric_mean, markdown, two_digits
from transconv.cli.matrix import RECORD
from transconv.cli.measurement import SharedMeasurement, read_shared
from transconv.conv import DIRECTIONS
from transconv.selection import tuning_db
from transconv.tuning.table import Row, number, read

SHARED = ROOT / "bench" / "shared"
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "board.md"
TRITON = "3.6.0"  # the release of the record that is shown
Times = dict[tuple[str, str], float]  # microseconds by name and direction, of graphs by name and ""


def card_of(device: str) -> str:
    """The card of a device's name, the longest that it contains; empty for another."""
    said = re.sub(r"[\W_]", "", device).lower()
    found = [c for c in CARDS if re.sub(r"\W", "", c).lower().removeprefix("arc") in said]
    return max(found, key=len, default="")


def times_of(found: Iterable[SharedMeasurement]) -> Times:
    """The medians of what is right in files of one card."""
    each: dict[tuple[str, str], list[float]] = {}
    for one in found:
        named = [((r["layer"], r["layer_direction"]), r) for r in one.layers]
        for key, row in named + [((r["block"], ""), r) for r in one.graphs]:
            us = row.get("kernels_us") or row.get("us")
            if row["verdict"] == "right" and us:
                each.setdefault(key, []).append(alone(float(us)))
    return {key: median(us) for key, us in each.items()}


def by_card(paths: Iterable[Path]) -> dict[str, list[SharedMeasurement]]:
    """Files by card. Raises ValueError for other files, and for devices without predictions."""
    made: dict[str, list[SharedMeasurement]] = {}
    for path in sorted(paths):
        found = read_shared(path)
        card = card_of(str(found.about.get("device", "")))
        if not card:
            device, known = found.about.get("device"), ", ".join(CARDS)
            raise ValueError(
                f"{path}: no predictions for {device}; expected one of {known} "
                "(CARDS of bench/predictions.py has their counts)"
            )
        made.setdefault(card, []).append(found)
    return made


def ours(card: str) -> Times:
    """What we measured: the table of layers, and a file of ``doctor``."""
    table, doctors = RESULTS / LAYERS.format(card.lower()), RESULTS / f"{card.lower()}_doctor.json"
    made: Times = {}
    for row in read(table) if table.exists() else ():
        if row["verdict"] == "right" and (us := number(row, "ours_us")):
            made[row["layer"], row["direction"]] = alone(us)
    return made | (times_of([read_shared(doctors)]) if doctors.exists() else {})


# -- tables ----------------------------------------------------------------------------------------


def predictions_of(card: str) -> dict[tuple[str, str], Row]:
    """The rows of a card that have a time, by name and direction."""
    rows = read(file_of(card)) if file_of(card).exists() else []
    return {(r["name"], r["direction"]): r for r in rows if number(r, "us")}


def chips_board(shared: dict[str, list[SharedMeasurement]]) -> str:
    """A line for each card, with the five marks."""
    record = read(RECORD)
    lines = []
    for card, target in CARDS.items():
        rows = [r for r in record if r["target"] == target.name]
        # By the pinned Triton, or the one that compiles for the chip.
        kernels = [r for r in rows if r["triton"] == TRITON] or rows
        spilt = sum(r["spill_bytes"] != "0" for r in kernels)
        file = file_of(card)
        lines.append(
            [
                card,
                target.name,
                f"{len(kernels)} kernels, {spilt} spill",
                "exact",
                f"[{len(predictions_of(card))} rows](../{file.relative_to(ROOT)})",
                f"{len(found)} rows" if (found := ours(card)) else "-",
                f"{len(shared[card])} files" if card in shared else "-",
            ]
        )
    marks = ["compiled", "interpreted", "predicted", "measured by us", "measured by others"]
    return markdown(["card", "target", *marks], lines)


def times_board(shared: dict[str, list[SharedMeasurement]]) -> str:
    """A line for each card: the geometric means of what is predicted, with the interval, and of measured
    over predicted times where there are some, by others if they are there."""
    lines = []
    for card in CARDS:
        told, found = predictions_of(card), ours(card) | times_of(shared.get(card, ()))
        cells = []
        for direction in (*DIRECTIONS, ""):
            own = {key: row for key, row in told.items() if key[1] == direction}
            us, low, high = (
                geometric_mean(float(r[c]) for r in own.values()) for c in ("us", "low", "high")
            )
            shares = [found[key] / float(row["us"]) for key, row in own.items() if key in found]
            cells += [
                f"{us:.0f} ({low:.0f} to {high:.0f})" if us and low and high else "-",
                f"{two_digits(geometric_mean(shares))} of {len(shares)}" if shares else "-",
            ]
        lines.append([card, *cells])
    head = [x for d in (*DIRECTIONS, "graphs") for x in (f"{d}, us", "measured")]
    return markdown(["card", *head], lines)


def validation_board(rows: list[Row]) -> str:
    """A line for each measured card and kind: how far off its predictions from the others are."""
    lines = []
    for card in MEASURED:
        for kind in KINDS:
            m = misses(validated(rows, card, kind))
            regret = regrets(rows, card) if kind == KINDS[0] else []
            lines.append(
                [
                    card,
                    f"{m.count} {kind}s",
                    f"{m.typical:.3f}",
                    f"{m.bias:.3f}",
                    f"{m.near:.0%}",
                    f"{m.inside:.0%}",
                    f"{m.agreement:.2f}",
                    f"{geometric_mean(regret):.3f} of {len(regret)}" if regret else "-",
                ]
            )
    return markdown(
        [
            "predicted",
            "what",
            "off by, median",
            "time / prediction, median",
            "within 1.25",
            "in the interval",
            "rank correlation",
            "regret",
        ],
        lines,
    )


def shared_board(shared: dict[str, list[SharedMeasurement]]) -> str:
    """A line for each file: the rates of the machine, what is right, and tuned rows."""
    lines = []
    doctors = [p for c in CARDS if (p := RESULTS / f"{c.lower()}_doctor.json").exists()]
    owns = [(f"us, `bench/results/{p.name}`", read_shared(p)) for p in doctors]
    for by, one in owns + [("others", f) for files in shared.values() for f in files]:
        rates = (one.ceilings.get(c) for c in ("gemm_tflops", "copy_tbs", "launch_us"))
        right = [sum(r["verdict"] == "right" for r in rows) for rows in (one.layers, one.graphs)]
        lines.append(
            [
                str(one.about["device"]).replace("_", " "),
                by,
                f"torch {one.about['torch']}, Triton {one.about['triton']}",
                *("-" if x is None else f"{x:.3g}" for x in rates),
                " and ".join(map(str, right)),
                str(len(one.tuned)),
            ]
        )
    head = ["device", "by", "with", "product TFLOP/s", "copy TB/s", "launch us"]
    return markdown([*head, "layers and graphs right", "tuned rows"], lines) if lines else "No file yet."


def tables() -> dict[str, str]:
    """The tables of the page, by the names of their markers."""
    shared = by_card(SHARED.glob("*.json"))
    return {
        "board_chips": chips_board(shared),
        "board_times": times_board(shared),
        "board_validation": validation_board(read(VALIDATION)),
        "board_files": shared_board(shared),
    }


def keep(path: Path) -> Path:
    """Copy a file to ``bench/shared``, under a name that its content gives. Raises ValueError for another
    file."""
    (card,) = by_card([path])
    text = path.read_bytes()
    place = SHARED / f"{file_of(card).stem}_{hashlib.sha256(text).hexdigest()[:8]}.json"
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(text)
    return place


def arguments(made: argparse.ArgumentParser) -> None:
    """Its options."""
    made.add_argument("files", nargs="*", type=Path, help="files of transconv doctor --measure --share")
    made.add_argument("--tuned", type=Path, help="also write the tuned rows of all files here")


def main(options: Namespace) -> int:
    """Keep files and write the tables of docs/board.md."""
    from bench.pages import fill_markers

    for path in options.files:
        print(keep(path).relative_to(ROOT))
    PAGE.write_text(fill_markers(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    if options.tuned:
        found = [r for files in by_card(SHARED.glob("*.json")).values() for f in files for r in f.tuned]
        rows = [tuning_db.of_mapping({k: v for k, v in r.items() if k != "first_us"}) for r in found]
        tuning_db.save(options.tuned, tuning_db.merged([], [r for r in rows if r]))
    return 0
