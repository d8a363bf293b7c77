"""The tables of ``python -m bench quantized``."""

from __future__ import annotations

from bench.tables import markdown, two_digits
from transconv.tuning.table import Row, number

LOSSES = 6  # that a table shows, evenly spaced


def quantized_table(rows: list[Row]) -> str:
    """A line for each model and kind: its time beside torch's bf16, how many elements behind int8
    convolutions are not those of exact sums, and how far results are from bf16's in the 2-norm."""
    def line(r: Row) -> list[str]:
        ms, bf16 = number(r, "ms"), number(r, "bf16_ms")
        ratio = two_digits(bf16 / ms) if ms and bf16 else "-"
        exact = f"{r['other']} of {r['elements']}" if number(r, "elements") else "-"
        return [r["model"], r["kind"], r["ms"], r["bf16_ms"], ratio, r["convolutions"], r["left"], exact,
                r["off"]]

    return markdown(["model", "kind", "ms", "torch, bf16 [ms]", "bf16 / ours", "convolutions", "left",
                     "elements that differ", "off"], map(line, rows))


def training_table(rows: list[Row]) -> str:
    """Losses of steps that are evenly spaced, the first and the last among them."""
    if not rows:
        return ""
    at = sorted({round(i * (len(rows) - 1) / (LOSSES - 1)) for i in range(LOSSES)})
    return markdown(["losses", *(f"step {rows[i]['step']}" for i in at)],
                    [[kind, *(rows[i][kind] for i in at)] for kind in ("fp8", "bf16")])
