"""``python -m bench benchdnn``: whole lists of oneDNN's driver benchdnn through ``transconv check``.

Each list, a file of ``tests/benchdnn/inputs/conv`` of oneDNN's source, is one run of ``transconv check
--batch``, with its own options; those given here come before it. A row has what became of its problems:

===============  =====================================================================
``right``        run and compared with the exact answer, or, by --mode=I, only built
``refused``      there is no kernel, so that torch computes it; the reasons say why
``skipped``      too large for the interpreter or the memory, or the list's time is spent
``wrong``        a wrong number, an error, the time limit of a problem
===============  =====================================================================

A list that has a row is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.check import VERDICTS
from bench.environment import VERSIONS, versions
from bench.tables import markdown
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable, Row

NAME = "benchdnn.csv"
WORDS = {**VERDICTS, "INITIALIZED": "right", "EXECUTED": "right"}
COLUMNS = (
    "list", "options", "problems", "right", "refused", "skipped", "wrong", "reasons", "seconds", *VERSIONS
)  # fmt: skip
REASONS = 3  # of a row, those of the most problems


def arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("lists", nargs="+", type=Path, help="files of benchdnn's, such as harness_conv_f32")
    to.add_argument("--options", default="", help="of transconv check, such as '--mode=I --shard 0/10'")
    to.add_argument(
        "--each", type=ranges.seconds, default=60.0, metavar="SECONDS", help="for one list (default: 60)"
    )


def main(options: argparse.Namespace) -> int:
    """Add a row for each list that has none; 1 if a problem is wrong."""
    table = CsvTable(Path(options.out) / NAME, COLUMNS, ("list", "options"))
    for path in options.lists:
        row: Row = {"list": path.name, "options": options.options}
        if not table.has(row):
            table.add(row | totals(path, options.options.split(), options.each) | versions())
            print(" ".join(f"{c}={table.rows[-1][c]}" for c in COLUMNS[:7]), flush=True)
    return int(any(r["wrong"] not in ("", "0") for r in table.rows))


def totals(path: Path, words: list[str], seconds: float) -> dict[str, Any]:
    """What became of a list's problems. Raises ValueError if check wrote nothing."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "checked.json"
        run = [sys.executable, "-m", "transconv", "check", "--quiet", f"--json={out}"]
        run += [f"--time-budget={seconds}", *words, f"--batch={path}"]
        made = subprocess.run(run, capture_output=True, text=True)
        if not out.exists():
            raise ValueError(f"{path}: transconv check wrote no results: {made.stderr[-400:]}")
        checked = json.loads(out.read_text(encoding="utf-8"))
    counts: Counter[str] = Counter()
    for status, n in checked["counts"].items():
        counts[WORDS[status]] += n
    why = [f"{r['count']} {r['reason']}" for r in checked["reasons"][:REASONS]]
    return {
        "problems": checked["asked"],
        **{word: counts[word] for word in COLUMNS[3:7]},
        "reasons": " ;; ".join(why),
        "seconds": round(time.monotonic() - started, 1),
    }


def lists_table(rows: list[Row]) -> str:
    """A line for each list, and their sums."""
    counted = COLUMNS[2:7]
    lines = [[str(r[c]) for c in ("list", *counted)] + [first_reason(r)] for r in rows]
    sums = [str(sum(int(r[c]) for r in rows)) for c in counted]
    return markdown(["list", *counted, "of most that are not right"], [*lines, ["all", *sums, ""]])


def first_reason(row: Row) -> str:
    """The reason of the most problems, without what a table cannot have."""
    return str(row["reasons"]).split(" ;; ")[0].replace("|", ",").replace("\n", " ")[:120]
