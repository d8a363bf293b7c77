"""The tables of ``python -m bench quantized``."""

from __future__ import annotations

from bench.tables import markdown, two_digits
from transconv.tuning.table import Row, number

LOSSES = 6  # that a table shows, evenly spaced
AS_TORCH = {"folded": "eager"}  # torch folds nothing


def quantized_table(rows: list[Row]) -> str:
    """A line for each model, kind and setting: its time beside bf16 in the same setting, of torch
    (compiled: by Inductor) and of transconv; kernels and regions of torch of compiled graphs; how many
    elements behind int8 convolutions are not those of exact sums; how far results are from bf16's in the
    2-norm."""
    times = {(r["model"], r["kind"], r.get("setting", "eager")): number(r, "ms") for r in rows}

    def line(r: Row) -> list[str]:
        model, setting, ms = r["model"], r.get("setting") or "eager", number(r, "ms")
        theirs = number(r, "bf16_ms") or times.get((model, "torch", AS_TORCH.get(setting, setting)))
        own = times.get((model, "bf16", setting))
        exact = f"{r['other']} of {r['elements']}" if number(r, "elements") else "-"
        kernels = f"{r['kernels']} + {r['regions']}" if r.get("kernels") else "-"
        return [
            model,
            r["kind"],
            setting,
            r["ms"],
            _ratio(theirs, ms),
            _ratio(own, ms),
            kernels,
            r["left"],
            exact,
            r["off"],
        ]

    shown = [r for r in rows if r["kind"] != "torch"]
    return markdown(
        [
            "model",
            "kind",
            "setting",
            "ms",
            "torch's bf16 / ours",
            "our bf16 / ours",
            "kernels + regions",
            "left",
            "elements that differ",
            "off",
        ],
        map(line, shown),
    )


def _ratio(bf16: float | None, ms: float | None) -> str:
    return two_digits(bf16 / ms) if ms and bf16 else "-"


def training_table(rows: list[Row]) -> str:
    """Losses of steps that are evenly spaced, the first and the last among them."""
    if not rows:
        return ""
    at = sorted({round(i * (len(rows) - 1) / (LOSSES - 1)) for i in range(LOSSES)})
    return markdown(
        ["losses", *(f"step {rows[i]['step']}" for i in at)],
        [[kind, *(rows[i][kind] for i in at)] for kind in ("fp8", "bf16")],
    )
