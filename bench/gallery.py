"""``python -m bench gallery``: every demonstration of examples/gallery as torch, torch's compiler and
transconv compute it: a row each, written when it has been timed. Some are compiled at a time, each by a
process of its own with a limit of time, and each is timed alone; a run that is repeated skips the rows it
has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import waves
from bench.environment import ROOT, at_hand, versions, worker_environment
from bench.gallery_measures import read
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable, number
from transconv.verify.machine import Pool

Row = dict[str, Any]
SCRIPTS = tuple(sorted(p.stem for p in (ROOT / "examples" / "gallery").glob("*.py")))
COLUMNS = (
    *("name", "ours_ms", "eager_ms", "compile_ms"),
    *("ours_difference", "eager_difference", "compile_difference"),
    *("ours_first_s", "eager_first_s", "compile_first_s", "kernels", "regions"),
    *("error", "device", "torch", "triton", "commit"),
)
WORK = "bench.gallery_measures:work"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=ranges.some_of(*SCRIPTS), default=",".join(SCRIPTS))
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--small", action="store_true", help="a few features, as a CPU has them")
    waves.arguments(parser, "demonstration", together=6, limit=130, budget=250)


def main(options: argparse.Namespace) -> int:
    """Fill ``gallery.csv``. Returns 1 if a row has an error."""
    table = CsvTable(Path(options.out) / "gallery.csv", COLUMNS, ("name",))
    names = [n for n in options.only.split(",") if not table.has({"name": n})]
    small = options.small or options.device == "cpu"
    payloads: dict[str, Row] = {n: {"name": n, "device": options.device, "small": small} for n in names}
    variables = worker_environment(options.cache)
    if options.device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    left: dict[str, Row] = {n: {"name": n} | versions() for n in names}
    pool = Pool(waves.groups(WORK, names, options.together, variables, waves.gpus(options.device)))
    at_once, budget = options.together, options.time_budget
    for name, found in waves.measured(pool, payloads, at_once, options.limit, budget):
        left[name] |= found
        print(line(left[name]), flush=True)
        if "error" in found or "ours_ms" in found:
            table.add(left.pop(name))
    for name in left:
        print(f"{name}: not measured within the time; run the command again", flush=True)
    return 1 if left or any(r["error"] for r in table.rows) else 0


def line(row: Row) -> str:
    """A row, for people."""
    if row.get("error"):
        return f"{row['name']:24} {row['error'][:200]}"
    known = [s for s in ("ours", "eager", "compile") if f"{s}_difference" in row]
    unit = "ms" if "ours_ms" in row else "first_s"
    times = ", ".join(f"{s} {row[f'{s}_{unit}']:.3f} {unit}" for s in known)
    return (
        f"{row['name']:18} {times}; difference {row['ours_difference']:.1e}, eager's "
        f"{row['eager_difference']:.1e}; {row['kernels']} kernels, {row['regions']} regions of torch"
    )


def gallery_table(rows: list[Row]) -> str:
    """Of each script what its thread reports, and ours beside torch's; those without a row are not
    measured."""
    known = {r["name"]: r for r in rows}
    lines = [
        "| demonstration | what the thread reports | ours | eager | torch.compile | ours / eager off |",
        "|---|---|---|---|---|---|",
    ]
    for name in SCRIPTS:
        row, shown = known.get(name, {}), read(name)
        *_, repository, _, number_of = shown.thread.split("/")
        told = f"[{repository}#{number_of}]({shown.thread}): {shown.reported}"
        cells = [_milliseconds(row, f"{side}_ms") for side in ("ours", "eager", "compile")]
        off = [number(row, f"{side}_difference") if row else None for side in ("ours", "eager")]
        cells.append(" / ".join(f"{x:.0e}" for x in off if x is not None) or "not measured")
        lines.append(f"| `{name}` | {told} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _milliseconds(row: Row, column: str) -> str:
    found = number(row, column) if row else None
    return f"{found:.4g} ms" if found is not None else "not measured"
