"""``python -m bench integrations``: models of other packages, by their own classes and with random
weights, as transconv, torch and torch's own compiler run them.

A process for each model and side: some are compiled at a time, and each is timed alone. A row is printed
and appended to ``integrations.csv`` when it is complete; a run that is repeated skips the rows it has, and
models whose package is not installed, which it names.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from bench import waves
from bench.environment import at_hand, versions, worker_environment
from bench.integration_measures import SIDES, Row
from bench.integration_models import SUBJECTS
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable
from transconv.verify.machine import Pool

COLUMNS = (
    "model",
    "side",
    "package",
    "ms",
    "first_s",
    "peak_MB",
    "held_MB",
    "rmse",
    "loss",
    "ours",
    "regions",
    "note",
    "error",
    "device",
    "torch",
    "triton",
    "commit",
)
WORK = "bench.integration_measures:work"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=ranges.some_of(*SUBJECTS), default=",".join(SUBJECTS))
    parser.add_argument("--sides", type=ranges.some_of(*SIDES), default=",".join(SIDES))
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--small", action="store_true", help="a few features, as a CPU has them")
    waves.arguments(parser, "model", together=4, limit=240, budget=540)
    parser.add_argument("--retry", default="", help="errors to measure again: timeout,crash,...")


def main(options: argparse.Namespace) -> int:
    """Fill ``integrations.csv``. Returns 1 if a row has an error."""
    table = CsvTable(Path(options.out) / "integrations.csv", COLUMNS, ("model", "side"))
    if options.retry:
        table.drop(options.retry.split(","), "error")
    models = [name for name in options.models.split(",") if installed(SUBJECTS[name].package)]
    payloads: dict[str, Row] = {
        f"{name} {side}": {
            "model": name,
            "side": side,
            "device": options.device,
            "small": options.small or options.device == "cpu",
        }
        for name in models
        for side in options.sides.split(",")
        if not table.has({"model": name, "side": side})
    }
    variables = worker_environment(options.cache)
    if options.device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    about = versions()
    left = {
        key: {"model": p["model"], "side": p["side"], "package": SUBJECTS[p["model"]].package} | about
        for key, p in payloads.items()
    }
    pool = Pool(waves.groups(WORK, [*payloads], options.together, variables, waves.gpus(options.device)))
    try:
        for key, found in waves.measured(
            pool, payloads, options.together, options.limit, options.time_budget
        ):
            left[key] |= found
            if "error" in found or "ms" in found:
                print(line(left[key]), flush=True)
                table.add(left.pop(key))
    finally:
        for row in left.values():  # compiled, not timed
            if "first_s" in row:
                table.add(row)
    return 1 if any(r["error"] for r in table.rows) else 0


def installed(package: str) -> bool:
    """Whether a package is there; says so if it is not."""
    name = {"nnunetv2": "dynamic_network_architectures"}.get(package, package)
    there = importlib.util.find_spec(name) is not None
    if not there:
        print(f"not measured: {name} is not installed", flush=True)
    return there


def line(row: Row) -> str:
    """A row, for people."""
    head = f"{row['model']:22} {row['side']:10}"
    if row.get("error"):
        return f"{head} {row['error'][:200]}"
    right = f"loss {row['loss']:.5f}" if "loss" in row else f"RMSE {row['rmse']:.2e}"
    ours = f"  {row['ours']} kernels, {row['regions']} regions of torch" if "ours" in row else ""
    return (
        f"{head} {row['ms']:9.3f} ms  first {row['first_s']:6.1f} s  "
        f"peak {row['peak_MB']:8.0f} MB  {right}{ours}"
    )
