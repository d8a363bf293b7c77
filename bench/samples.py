"""``python -m bench samples``: torch's own samples of the functions of ``transconv.functional`` and of the
operations that work element by element, tried on a GPU in several processes: a row for each function and
type, written when its test has ended. A repeated run tries what has no row, and what has failed."""

from __future__ import annotations

import argparse
import os
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import dropin
from bench.environment import VERSIONS, versions
from transconv.support import knobs
from transconv.tuning.table import CsvTable

COLUMNS = (
    "test",
    "function",
    "dtype",
    "samples",
    "passed",
    "gradients",
    "handed",
    "failed",
    "reasons",
    "verdict",
    "error",
    "seconds",
    "interpreted",
    *VERSIONS,
)


def arguments(parser: argparse.ArgumentParser) -> None:
    dropin.arguments(parser)
    parser.set_defaults(tests=["tests/gpu/test_samples.py"])


def about() -> dict[str, Any]:
    """On what the tests run: with DROPIN_DEVICE=cpu it is not the GPU."""
    device = {"device": "cpu"} if os.environ.get("DROPIN_DEVICE") == "cpu" else {}
    return {**versions(), **device, "interpreted": knobs.interpret()}


def row(test: str, outcome: str, seconds: float, text: str, cases: dict[str, Any]) -> dict[str, Any]:
    """The counts of one test. ``gradients``: of the samples that passed, those whose gradients were
    compared; ``reasons``: why samples are torch's, each with how many. A test whose process died has an
    error and no counts."""
    function, _, dtype = test.partition("[")[2].removesuffix("]").partition("-")
    made: dict[str, Any] = {
        "test": test,
        "function": function,
        "dtype": dtype.removeprefix("torch."),
        "seconds": seconds,
        "verdict": "right" if outcome == "passed" else outcome,
        "error": " ".join((cases.get("failures") or [text])[0].split())[-300:],
    }
    if "passed" in cases:
        counts = {"passed": cases["passed"], "handed": cases["fell_back"], "failed": cases["failed"]}
        reasons = sorted(cases["fallback"].items())
        made |= {
            **counts,
            "samples": sum(counts.values()),
            "gradients": cases["gradients"],
            "reasons": "; ".join(f"{reason}={n}" for reason, n in reasons),
        }
    return made


class Recorded(dropin.Run):
    """A run that writes a row for each test that has ended."""

    def __init__(self, options: Namespace, folder: Path, table: CsvTable, without: Sequence[str]) -> None:
        super().__init__(options, folder, without)
        self.table, self.about = table, about()

    def add(self, test: str, **found: Any) -> None:
        super().add(test, **found)
        if found["outcome"] != "skipped":
            self.table.add(row(test, **found) | self.about)


def main(options: Namespace) -> int:
    """Add rows to ``samples.csv``; 0 if each function has one, and none has failed."""
    out = Path(options.out)
    table = CsvTable(out / "samples.csv", COLUMNS, ("test",))
    table.drop(("failed",), "verdict")
    folder = out / "samples"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = Recorded(options, folder, table, [r["test"] for r in table.rows])
    run.watch()
    shutil.rmtree(folder, ignore_errors=True)
    sums = {c: sum(int(r[c] or 0) for r in table.rows) for c in ("samples", "passed", "handed", "failed")}
    print(f"{table.path}: {len(table.rows)} rows; " + ", ".join(f"{n} {c}" for c, n in sums.items()))
    print(f"{len(run.results)} of {run.total} tests were run on {run.about['device']}")
    wrong = [r["test"] for r in table.rows if r["verdict"] != "right"]
    return 0 if len(run.results) == run.total and not wrong else 1
