"""The table of ``python -m bench start``: first steps and epochs, beside torch."""

from __future__ import annotations

from bench.tables import markdown
from transconv.tuning.table import Row, number

SHOWN = {
    "import_s": "import [s]",
    "prepare_s": "prepare [s]",
    "forward1_s": "first forward [s]",
    "step1_s": "first step [s]",
    "step2_s": "second",
    "settled_s": "all kernels after [s]",
    "handover_ms": "slowest step until then [ms]",
    "last_ms": "last [ms]",
    "inputs": "inputs",
    "epoch1_s": "first epoch [s]",
    "worst_ms": "its worst step [ms]",
    "later_s": "later epoch [s]",
    "later_worst_ms": "worst step of a later one [ms]",
    "busy_ms": "GPU in a step [ms]",
    "elsewhere": "results by torch",
    "cores": "cores",
}


def start_table(rows: list[Row]) -> str:
    """A table for each model, with the columns that its rows have: a line for each side and start; what a
    process that was stopped had not measured is missing."""
    return "\n\n".join(
        f"**{model}**\n\n{_of_model([r for r in rows if r['model'] == model])}"
        for model in dict.fromkeys(r["model"] for r in rows)
    )


def _of_model(rows: list[Row]) -> str:
    shown = {c: name for c, name in SHOWN.items() if any(number(r, c) is not None for r in rows)}
    stopped = [""] if any(r["stopped"] for r in rows) else []

    def told(row: Row, column: str) -> str:
        value = number(row, column)
        return "-" if value is None else f"{value:.4g}"

    return markdown(
        ["side", "start", *shown.values(), *stopped],
        (
            [
                r["side"],
                r["start"],
                *(told(r, c) for c in shown),
                *([f"stopped {r['stopped']}" if r["stopped"] else ""] if stopped else []),
            ]
            for r in rows
        ),
        keys=2,
        cuts=(8,),
    )
