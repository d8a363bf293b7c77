"""The time of each kernel of a model of ``python -m bench zoo``, beside its estimate and its limit.

Kernels with the same text are timed once, alone, on random data; ``times`` says how often the model has
it. A region of torch has neither estimate nor limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import log
from statistics import median
from typing import Any

import torch

from transconv.graph import KernelRow, Report, TorchRow
from transconv.runtime import timing

Row = dict[str, Any]
COLUMNS = (
    "model",
    "what",
    "phase",
    "kernel",
    "does",
    "times",
    "us",
    "estimate_us",
    "limit_us",
    "limit",
    "text",
    "device",
    "torch",
    "triton",
    "commit",
)
BUDGET_MS = 8.0  # of timing of one kernel
MOST_SAID = 120  # letters of what a kernel does


def kernel_rows(report: Report) -> list[Row]:
    """A row for each kernel of the graphs, with its text; without its time where there is no GPU."""
    clock = timing.Clock("cuda", BUDGET_MS) if torch.cuda.is_available() else None
    found: dict[tuple[str, str], Row] = {}
    for graph in report.graphs:
        for row in graph.rows:
            text = row.text if isinstance(row, KernelRow) else row.operations
            known = found.get((graph.phase, text))
            if known is not None:
                known["times"] += 1
                continue
            found[graph.phase, text] = {"phase": graph.phase, "times": 1, "whole": text} | _timed(
                row, clock
            )
    return [*found.values()]


def _timed(row: KernelRow | TorchRow, clock: timing.Clock) -> Row:
    made: Row = {"does": row.title[:MOST_SAID], "us": row.measure(clock), "kernel": "torch"}
    if isinstance(row, KernelRow):
        digest = hashlib.sha256(row.text.encode()).hexdigest()[:16]
        made |= {"kernel": row.name, "text": digest}
        made |= {"estimate_us": row.us, "limit_us": row.limit_us, "limit": row.limit}
    return made


def spread(rows: Iterable[Row]) -> str:
    """How far measured times are from estimates: the median and the largest, for people."""
    off = sorted(
        abs(log(float(r["us"]) / float(r["estimate_us"])))
        for r in rows
        if r.get("us") and r.get("estimate_us")
    )
    if not off:
        return "no kernel was timed"
    above = sum(x > log(2) for x in off)
    return (
        f"{len(off)} kernels: the median of |log(time / estimate)| is {median(off):.3f}, "
        f"{above} are off by more than 2x"
    )
