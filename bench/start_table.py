"""The table of ``python -m bench start``: first steps and epochs, beside torch."""

from __future__ import annotations

from bench.tables import markdown
from transconv.tuning.table import Row, number

SHOWN = {"import_s": "import [s]", "prepare_s": "prepare [s]", "forward1_s": "first forward [s]",
         "step1_s": "first step [s]",
         "step2_s": "second", "settled_s": "all kernels after [s]",
         "handover_ms": "slowest step until then [ms]", "last_ms": "last [ms]", "inputs": "inputs",
         "epoch1_s": "first epoch [s]",
         "worst_ms": "its worst step [ms]", "later_s": "later epoch [s]",
         "later_worst_ms": "its worst step [ms]", "busy_ms": "GPU in a step [ms]",
         "elsewhere": "results by torch", "cores": "cores"}


def start_table(rows: list[Row]) -> str:
    """A line for each side and start of a model; what a process that was stopped had not measured is
    missing."""
    def told(row: Row, column: str) -> str:
        value = number(row, column)
        return "-" if value is None else f"{value:.4g}"

    return markdown(["model", "side", "start", *SHOWN.values(), ""],
                    ([r["model"], r["side"], r["start"], *(told(r, c) for c in SHOWN),
                      f"stopped {r['stopped']}" if r["stopped"] else ""] for r in rows))
