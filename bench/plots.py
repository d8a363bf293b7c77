"""Two pictures of a timing table: the ratio of every layer, and where layers lie under the roof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.roofline import ceiling_of
from transconv.tuning.table import Row, number

COLOURS = {"fwd": "#1b6ca8", "bwd_d": "#d1495b", "bwd_w": "#3a7d44"}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def ratios(rows: list[Row], path: Path) -> None:
    """A line per layer (and kind of tensors), a dot per direction, bars for the spread."""
    plt = _pyplot()
    names: dict[str, int] = {}
    for row in rows:
        names.setdefault(_name(row), len(names))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.22 * max(1, len(names))))
    for direction, colour in COLOURS.items():
        mine = [r for r in rows if r["direction"] == direction]
        xs = [number(r, "ratio") or 1.0 for r in mine]
        errors = [x * (number(r, "spread") or 0.0) for x, r in zip(xs, mine, strict=True)]
        axes.errorbar(xs, [names[_name(r)] for r in mine], xerr=errors, fmt="o", ms=4, lw=1,
                      color=colour, label=direction)
    axes.axvline(1, color="0.3", lw=1)
    axes.set_xscale("log")
    axes.set_yticks(list(names.values()), list(names), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time of cuDNN / ours (right of 1: ours is faster)")
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _name(row: Row) -> str:
    return " ".join(filter(None, (row["layer"], row["layout"], row["epilogue"])))


def roofline(rows: list[Row], path: Path) -> None:
    """TFLOP/s over operations a byte, ours filled and cuDNN's hollow, under the ceiling."""
    from bench.report import point

    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    timed = [r for r in rows if r["verdict"] == "right" and number(r, "ours_us")]
    for direction, colour in COLOURS.items():
        mine = [r for r in timed if r["direction"] == direction]
        points = [point(r) for r in mine]
        axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=18, color=colour,
                     label=direction)
        shares = [1 / (number(r, "ratio") or float("nan")) for r in mine]  # NaN is not drawn
        both = [(x, y * s) for s, (x, y, _) in zip(shares, points, strict=True)]
        axes.scatter([x for x, _ in both], [y for _, y in both], s=22, facecolors="none",
                     edgecolors=colour, linewidths=0.8)
    if timed:
        ceiling = ceiling_of(timed[0]["device"])
        xs = [2.0**e for e in range(0, 13)]
        axes.plot(xs, [min(ceiling.tflops, x * ceiling.terabytes) for x in xs], color="0.3", lw=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("operations per byte of compulsory traffic")
    axes.set_ylabel("TFLOP/s (filled: ours, hollow: cuDNN)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
