"""Pictures of timing tables: the ratio of every layer, where layers lie under the roof, and all ratios of
several tables in one picture for the README."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.roofline import ceiling_of, intensity
from bench.tables import counted, geometric_mean, one_dimensional
from transconv.conv import DIRECTIONS, ConvProblem
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
        axes.errorbar(
            xs,
            [names[_name(r)] for r in mine],
            xerr=errors,
            fmt="o",
            ms=4,
            lw=1,
            color=colour,
            label=direction,
        )
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
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    timed = [r for r in rows if r["verdict"] == "right" and number(r, "ours_us")]
    for direction, colour in COLOURS.items():
        mine = [r for r in timed if r["direction"] == direction]
        points = [point(r) for r in mine]
        axes.scatter(
            [x for x, _, _ in points], [y for _, y, _ in points], s=18, color=colour, label=direction
        )
        shares = [1 / (number(r, "ratio") or float("nan")) for r in mine]  # NaN is not drawn
        both = [(x, y * s) for s, (x, y, _) in zip(shares, points, strict=True)]
        axes.scatter(
            [x for x, _ in both],
            [y for _, y in both],
            s=22,
            facecolors="none",
            edgecolors=colour,
            linewidths=0.8,
        )
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


def point(row: Row) -> tuple[float, float, float]:
    """(operations a byte, our TFLOP/s, the ceiling there) of a timed row."""
    p = ConvProblem.parse(row["problem"])
    ceiling = ceiling_of(row["device"])
    at = intensity(p)
    return at, number(row, "tflops") or 0.0, min(ceiling.rate(p), at * ceiling.terabytes)


@dataclass(frozen=True, slots=True)
class Colours:
    """What the README's picture is drawn with."""

    text: str
    faint: str
    dense: str
    others: str
    loss: str


THEMES = {
    "light": Colours("#1f2328", "#8c959f", "#0969da", "#bc4c00", "#cf222e14"),
    "dark": Colours("#e6edf3", "#7d8590", "#58a6ff", "#f0883e", "#f8514922"),
}
LAYOUTS = {"nhwc": "channels last", "nchw": "channels first"}
NAMES = {"fwd": "forward", "bwd_d": "input gradient", "bwd_w": "weight gradient"}


def digest(rows: list[Row]) -> str:
    """The digest of the picture's data, which is written into it."""
    shown = sorted((*_strip(r), r["layer"], r["kind"], r["ratio"]) for r in counted(rows))
    return "rows " + hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def _strip(row: Row) -> tuple[str, str, str]:
    return row["dtype"], row["layout"], row["direction"]


def overview(rows: list[Row], path: Path, theme: str) -> None:
    """A strip of dots for each type, layout and direction, a dot per layer, its place cuDNN's time over
    ours on a logarithmic axis; the geometric mean of each strip as a bar and a number. SVG, for a page of
    the theme ``light`` or ``dark``."""
    plt = _pyplot()
    colours = THEMES[theme]
    good = counted(rows)
    tensors = list(dict.fromkeys((r["dtype"], r["layout"]) for r in good))
    strips = [(*t, d) for t in tensors for d in DIRECTIONS]
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "transconv",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": colours.text,
        "axes.edgecolor": colours.faint,
        "xtick.color": colours.text,
        "ytick.color": colours.text,
    }
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(8.4, 1.2 + 0.42 * len(strips)))
        axes.axvspan(0.01, 1, color=colours.loss, lw=0)
        axes.axvline(1, color=colours.faint, lw=1)
        places = {}
        for at, strip in enumerate(strips):
            places[strip] = at + 0.35 * (at // len(DIRECTIONS))
            _draw(axes, [r for r in good if _strip(r) == strip], places[strip], colours)
        _scales(axes, places, good, colours)
        figure.tight_layout(pad=0.4)
        figure.savefig(
            path,
            format="svg",
            transparent=True,
            metadata={
                "Date": None,
                "Title": "Time of cuDNN over the time of transconv, a dot per layer",
                "Description": digest(rows),
            },
        )
        plt.close(figure)


def _draw(axes: Any, rows: list[Row], y: float, colours: Colours) -> None:
    """One strip: dots that would lie on one another are moved up and down in turn."""
    taken: list[tuple[float, float]] = []
    styles: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=_times):
        x = _times(row)
        steps = (0, 0.13, -0.13, 0.26, -0.26)
        dy = next((s for s in steps if all(x / at > 1.045 or d != s for at, d in taken)), 0.0)
        taken.append((x, dy))
        colour = colours.dense if row["kind"] == "dense" else colours.others
        fill = "none" if row["kind"] == "dense" and one_dimensional(row) else colour
        styles.setdefault((colour, fill), []).append((x, y + dy))
    for (colour, fill), points in styles.items():
        axes.plot(*zip(*points, strict=True), "o", ms=4.2, color=colour, mfc=fill, mew=0.9, alpha=0.85)
    mean = geometric_mean(map(_times, rows)) or 1.0
    flat = geometric_mean(_times(r) for r in rows if r["kind"] == "dense" and not one_dimensional(r))
    axes.plot([mean, mean], [y - 0.36, y + 0.36], color=colours.text, lw=2, solid_capstyle="butt")
    _beside(axes, y, f"{mean:.2f}", "-" if flat is None else f"{flat:.2f}")


def _times(row: Row) -> float:
    return number(row, "ratio") or 1.0


def _beside(axes: Any, y: float, mean: str, flat: str) -> None:
    """Two numbers at the right of a strip, or their heads."""
    for x, text, weight in ((1.05, mean, "bold"), (1.17, flat, "normal")):
        axes.annotate(
            text, (x, y), xycoords=("axes fraction", "data"), va="center", ha="center", fontweight=weight
        )


def _scales(
    axes: Any, places: dict[tuple[str, str, str], float], rows: list[Row], colours: Colours
) -> None:
    ticks = (0.5, 1, 2, 4, 8, 16)
    axes.set_xscale("log")
    axes.set_xlim(0.36, 1.15 * max(map(_times, rows)))
    _beside(axes, -1.0, "mean\n", "dense\n2D, 3D")
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(
        list(places.values()), [f"{dtype} {LAYOUTS[layout]}, {NAMES[d]}" for dtype, layout, d in places]
    )
    axes.set_ylim(max(places.values()) + 0.6, -0.6)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("time of cuDNN / time of transconv (left of 1: cuDNN is faster)", color=colours.text)
    kinds = (
        ("dense 2D, 3D", colours.dense, colours.dense),
        ("dense 1D", colours.dense, "none"),
        ("depthwise, grouped, first, last", colours.others, colours.others),
    )
    for name, colour, fill in kinds:
        axes.plot([], [], "o", ms=4.2, color=colour, mfc=fill, label=name)
    axes.plot([], [], color=colours.text, lw=2, label="geometric mean")
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.4, 1.09),
        ncols=4,
        frameon=False,
        handletextpad=0.3,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
