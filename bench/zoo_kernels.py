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

from bench.environment import VERSIONS
from bench.tables import markdown
from transconv.graph import KernelRow, Report, TorchRow
from transconv.runtime import timing
from transconv.tuning.table import number

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
    *VERSIONS,
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


HEAD = ("model", "phase", "kernels", "measured ms", "estimated ms", "limit ms", "off by", "beyond 2x")


def estimates_table(rows: list[Row]) -> str:
    """A line for each model: its kernels one by one, what they take together, and how far estimates are
    off: the median of the logarithms, and how many by more than twice. The farthest off first."""
    models: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if number(row, "us") and number(row, "estimate_us"):
            models.setdefault((row["model"], row["what"]), []).append(row)
    lines = sorted(((_off(own), name, own) for name, own in models.items()), reverse=True)
    cells = [
        [*name, str(len(own)), *_together(own), f"{median(off):.2f}", _beyond(off)]
        for off, name, own in lines
    ]
    every = _off([r for own in models.values() for r in own])
    if every:
        cells.append(["all", "", str(len(every)), "", "", "", f"{median(every):.2f}", _beyond(every)])
    return markdown([*HEAD], cells)


def _off(rows: list[Row]) -> list[float]:
    return sorted((abs(log(float(r["us"]) / float(r["estimate_us"]))) for r in rows), reverse=True)


def _beyond(off: list[float]) -> str:
    return str(sum(x > log(2) for x in off))


def _together(rows: list[Row]) -> list[str]:
    """Milliseconds of all launches: measured, estimated, and the limits."""
    each = ("us", "estimate_us", "limit_us")
    return [f"{sum(float(r[c]) * int(r['times']) for r in rows) / 1e3:.3g}" for c in each]


def spread(rows: Iterable[Row]) -> str:
    """How far measured times are from estimates: the median and the largest, for people."""
    off = _off([r for r in rows if r.get("us") and r.get("estimate_us")])
    if not off:
        return "no kernel was timed"
    return (
        f"{len(off)} kernels: the median of |log(time / estimate)| is {median(off):.3f}, "
        f"{_beyond(off)} are off by more than 2x"
    )
