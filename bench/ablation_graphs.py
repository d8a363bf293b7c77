"""Whole graphs without one pass: the time of a model's kernels with all passes, and with each optional one
switched. A row for each model and pass, ``ablation_graphs.csv``; a process compiles and times one row."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from bench import environment, waves
from bench.graph_measures import STEPS
from bench.graph_models import MODELS
from bench.tables import geometric_mean, markdown
from transconv.passes import passes
from transconv.support import knobs
from transconv.tuning.table import CsvTable, Row, number
from transconv.verify.machine import Pool

COLUMNS = (
    "model",
    "what",
    "variant",
    "gpu_ms",
    "ms",
    "kernels",
    "rmse",
    "compile_s",
    "error",
    *environment.VERSIONS,
)
KEY = ("model", "variant")
BASE = "as chosen"
WORK = "bench.graph_measures:work"


def variants(names: Collection[str]) -> list[str]:
    """The base, then each of some optional passes against its default."""
    return [BASE, *(f"{'-' if p.default else '+'}{p.name}" for p in passes() if p.name in names)]


def run(options: argparse.Namespace) -> CsvTable:
    """The table, with the rows that it lacked: ``graphs`` of the options names the models."""
    table = CsvTable(Path(options.out) / "ablation_graphs.csv", COLUMNS, KEY)
    about = environment.versions()
    rows = {
        f"{model} {variant}": {
            "model": model,
            "variant": variant,
            "what": "training" if MODELS[model].classes else "inference",
        }
        | about
        for model in options.graphs.split(",")
        for variant in variants(options.passes.split(","))
    }
    rows = {name: row for name, row in rows.items() if not table.has(row)}
    common = environment.worker_environment(options.cache)
    own = {
        name: {knobs.passes.name: row["variant"]} if row["variant"] != BASE else {}
        for name, row in rows.items()
    }
    device = environment.at_hand()
    if device == "cpu":
        common["TRITON_INTERPRET"] = "1"
    payloads = {
        name: {
            "model": row["model"],
            "side": "transconv",
            "layout": "nhwc",
            "device": device,
            "quick": device == "cpu",
            "seconds": 0.5,
            "steps": min(1, STEPS),
        }
        for name, row in rows.items()
    }
    groups = {
        name: group
        for name in rows
        for group in waves.groups(WORK, [name], options.together, common | own[name], 1).values()
    }
    for name, found in waves.measured(
        Pool(groups), payloads, options.together, options.limit * 5, options.time_budget
    ):
        rows[name] |= found
        if "error" in found or "ms" in found:
            table.add(rows[name])
            print(f"{name:34} {rows[name].get('gpu_ms', rows[name].get('error', ''))}", flush=True)
    return table


def document(rows: Sequence[Row]) -> str:
    """A line for each variant: the time of each model's kernels over that with all passes, and the
    geometric mean."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    base = _times(rows, BASE)
    lines = []
    for variant in dict.fromkeys(r["variant"] for r in rows if r["variant"] != BASE):
        found = over_base(rows, variant)
        mean = geometric_mean(found.values())
        lines.append(
            [
                f"`{variant}`",
                "-" if mean is None else f"{mean:.3f}",
                *(f"{found[m]:.2f}" if m in found else "-" for m in models),
            ]
        )
    first = ["GPU time, ms", "", *(f"{ms:.2f}" if (ms := base.get(m)) else "-" for m in models)]
    return markdown(["variant", "mean", *models], [first, *lines])


def over_base(rows: Sequence[Row], variant: str) -> dict[str, float]:
    """Of each model that has both, a variant's time over that of the base."""
    base = _times(rows, BASE)
    return {m: ms / base[m] for m, ms in _times(rows, variant).items() if m in base}


def _times(rows: Sequence[Row], variant: str) -> dict[str, float]:
    return {r["model"]: ms for r in rows if r["variant"] == variant and (ms := number(r, "gpu_ms"))}
