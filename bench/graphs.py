"""``python -m bench graphs``: whole models through ``torch.compile(model, backend="transconv")``, beside
torch as it is and torch's own compiler.

A row for each model, side and layout, appended to ``graphs.csv`` as it comes: a run that is repeated skips
the rows that are there. Each is measured by a process of its own, with a time limit; ``--together`` has
several compiled at a time and timed one by one. ``--quick`` has a small size of every model, for a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import waves
from bench.environment import VERSIONS, at_hand, versions, worker_environment
from bench.graph_measures import LAYOUTS, STEPS, Row
from bench.graph_models import MODELS
from bench.graph_table import SIDES, graphs_table
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable
from transconv.verify.machine import Pool

COLUMNS = (
    "model",
    "what",
    "side",
    "layout",
    "ms",
    "host_ms",
    "gpu_ms",
    "peak_mb",
    "kernels",
    "ours",
    "copies",
    "encoded",
    "regions",
    "estimated_ms",
    "rmse",
    "reference",
    "losses",
    "compile_s",
    "note",
    "error",
    *VERSIONS,
)
KEY = ("model", "side", "layout")
WORK = "bench.graph_measures:work"
ONE = ("max-autotune", "transconv", "cudagraphs")  # sides that are measured in the first layout alone


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=ranges.some_of(*MODELS), default=",".join(MODELS))
    parser.add_argument(
        "--sides",
        type=ranges.some_of(*SIDES),
        default=",".join(SIDES[:4]),
        help="reduce-overhead and cudagraphs: torch's compiler and ours, recorded as CUDA "
        f"graphs (default: {','.join(SIDES[:4])})",
    )
    parser.add_argument(
        "--layouts",
        type=ranges.some_of(*LAYOUTS),
        default=",".join(LAYOUTS),
        help="max-autotune and transconv are measured in the first alone",
    )
    parser.add_argument("--quick", action="store_true", help="a small size of every model")
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument(
        "--pages",
        action="store_true",
        help="write reports of the kernels, with their times, beside the table",
    )
    parser.add_argument("--seconds", type=ranges.seconds, default=2.0, help="timing of one model")
    parser.add_argument(
        "--steps", type=ranges.at_least(0), default=STEPS, help="of training, whose losses are compared"
    )
    waves.arguments(parser, "row", together=1, limit=600, budget=540)
    parser.add_argument("--retry", default="", help="errors to measure again: timeout,crash,...")


def rows_of(options: argparse.Namespace) -> list[Row]:
    """The rows to fill, model by model."""
    layouts = options.layouts.split(",")
    return [
        {
            "model": model,
            "side": side,
            "layout": layout,
            "what": "training" if MODELS[model].classes else "inference",
        }
        for model in options.models.split(",")
        for side in options.sides.split(",")
        for layout in (layouts[:1] if side in ONE else layouts)
    ]


def main(options: argparse.Namespace) -> int:
    """Fill ``graphs.csv``. Returns 1 if a row has no time."""
    table = CsvTable(Path(options.out) / "graphs.csv", COLUMNS, KEY)
    if options.retry:
        table.drop(options.retry.split(","), "error")
    rows = rows_of(options)
    todo = [r for r in rows if not table.has(r)]
    print(f"{len(rows)} rows, {len(rows) - len(todo)} done before", flush=True)
    variables = worker_environment(options.cache)
    if options.device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    setting = {
        "device": options.device,
        "quick": options.quick,
        "seconds": options.seconds,
        "steps": options.steps,
        "pages": str(Path(options.out).resolve()) if options.pages else "",
    }
    about = versions()
    left = {" ".join(str(row[k]) for k in KEY): row | about for row in todo}
    payloads = {name: {k: row[k] for k in KEY} | setting for name, row in left.items()}
    pool = Pool(waves.groups(WORK, [*left], options.together, variables, waves.gpus(options.device)))
    try:
        for name, found in waves.measured(
            pool, payloads, options.together, options.limit, options.time_budget
        ):
            left[name] |= found
            if "error" in found or "ms" in found:
                print(line(left[name]), flush=True)
                table.add(left.pop(name))
    finally:
        for row in left.values():  # compiled, not timed
            if "rmse" in row:
                table.add(row)
    print(graphs_table(table.rows), flush=True)
    return 1 if any(r["error"] for r in table.rows) else 0


def line(row: Row) -> str:
    """One row, for people."""
    if row.get("error"):
        return f"{row['model']:18} {row['side']:12} {row['layout']}  {row['error'][:200]}"
    peak = f"{row['peak_mb']:8.0f} MB" if isinstance(row["peak_mb"], float) else ""
    return (
        f"{row['model']:18} {row['side']:12} {row['layout']}  {row['ms']:9.3f} ms {peak}  "
        f"{row.get('kernels', '-')} kernels, {row.get('copies', '-')} copies, RMSE {row['rmse']:.2e}, "
        f"{row['compile_s']:.0f} s  {row.get('note', '')[:80]}"
    )
