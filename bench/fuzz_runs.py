"""``python -m bench fuzz-runs``: a row for each summary that ``transconv fuzz --json`` wrote."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench.environment import VERSIONS
from transconv.tuning.table import CsvTable

VERDICTS = ("passed", "refused", "resources", "failed", "crash", "error", "timeout")
COLUMNS = (
    "seed",
    "first",
    "asked",
    "computations",
    *VERDICTS,
    "kernels",
    "seconds",
    "target",
    "interpreted",
    *VERSIONS,
    "programs",
)
KEY = ("seed", "first", "commit")


def row(summary: dict[str, Any]) -> dict[str, Any]:
    """One run: from which trial of which seed, how many, of them of computations or programs of the kernel
    API instead of convolutions, and how many ended in which way. What older summaries do not say stays
    empty. Raises KeyError for what is no summary of ``fuzz``."""
    about = {**summary, **summary.get("versions", {})}
    made = {c: about.get(c, "") for c in COLUMNS}
    return {
        **made,
        "seed": summary["seed"],
        "first": summary.get("first", 0),
        "asked": summary["asked"],
        "kernels": summary["spent"]["kernels"],
        "computations": _counted(summary, "computation"),
        "programs": _counted(summary, "scope"),
        **{v: summary["statuses"].get(v, 0) for v in VERDICTS},
    }


def _counted(summary: dict[str, Any], fact: str) -> int:
    """The trials that have such a fact."""
    return sum(sum(n.values()) for n in summary.get("counts", {}).get(fact, {}).values())


def arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("summaries", nargs="+", help="files of `transconv fuzz --json`")


def main(options: Namespace) -> int:
    """Add a row for each summary to ``fuzz.csv``; one that is there already is not added again.
    Raises ValueError for a file that is no summary."""
    table = CsvTable(Path(options.out) / "fuzz.csv", COLUMNS, KEY)
    for name in options.summaries:
        try:
            made = row(json.loads(Path(name).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} is no summary of `transconv fuzz --json`") from error
        if not table.has(made):
            table.add(made)
    print(f"{table.path}: {len(table.rows)} runs")
    return 0
