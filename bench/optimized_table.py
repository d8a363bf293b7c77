"""Rows of ``optimized.csv`` as a Markdown table."""

from __future__ import annotations

from bench.tables import geometric_mean, markdown, two_digits
from transconv.tuning.table import Row, number

# What ``transconv.optimize`` calls each side.
SIDES = {
    "eager": "eager",
    "inductor": "torch.compile",
    "transconv": "transconv",
    "recorded": "transconv, CUDA graphs",
}
OURS = (SIDES["transconv"], SIDES["recorded"])


def optimized_table(rows: list[Row]) -> str:
    """A line for each model, the smallest gain over eager first; how often ours is kept, and means."""
    times = [{side: number(r, f"{side}_ms") for side in SIDES} for r in rows]
    found = []
    for r, t in zip(rows, times, strict=True):
        best = min((x for x in t.values() if x is not None), default=None)
        own = min((x for s in ("transconv", "recorded") if (x := t[s]) is not None), default=None)
        found.append(
            (
                t["eager"] / best if best and t["eager"] else None,
                t["inductor"] / own if own and t["inductor"] else None,
                r,
                t,
            )
        )
    found.sort(key=lambda row: (row[0] is None, row[0] or 0.0))
    cells = [
        [
            r["model"],
            r["phase"],
            r["error"][:40] or r["kept"].removeprefix("transconv, "),
            *("-" if t[s] is None else f"{t[s]:.3g}" for s in SIDES),
            two_digits(gain),
            two_digits(over),
        ]
        for gain, over, r, t in found
    ]
    means = [
        two_digits(geometric_mean(x)) if (x := [row[i] for row in found if row[i]]) else "-"
        for i in (0, 1)
    ]
    done = [r for r in rows if not r["error"]]
    ours = sum(r["kept"] in OURS for r in done)
    cells.append([f"{len(done)} models", "", f"ours: {ours}", *[""] * len(SIDES), *means])
    return markdown(
        [
            "model",
            "phase",
            "kept",
            "eager ms",
            "torch.compile ms",
            "transconv ms",
            "CUDA graphs ms",
            "eager / kept",
            "torch.compile / ours",
        ],
        cells,
    )
