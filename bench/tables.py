"""Rows of timings as Markdown tables: layers beside cuDNN, torch.compile, oneDNN and matrix products.

Only rows whose result is right count. A ratio is cuDNN's time over ours, above 1 is faster; it is
inside the noise when it differs from 1 by less than the spread of the two times together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from transconv.conv import DIRECTIONS, KINDS, ConvProblem
from transconv.tuning.table import Row, number

WIDEST = 9  # columns on a page
NOTHING = ("", "-", "not run")  # cells of what was not measured


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def counted(rows: Iterable[Row]) -> list[Row]:
    """The rows that have a ratio and a right result."""
    return [r for r in rows if r["verdict"] == "right" and number(r, "ratio")]


def outcome(row: Row) -> str:
    """``win``, ``loss`` or ``noise``."""
    ratio, spread = number(row, "ratio") or 1.0, number(row, "spread") or 0.0
    return "noise" if abs(ratio - 1) <= spread else "win" if ratio > 1 else "loss"


def two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def markdown(head: list[str], rows: Iterable[list[str]], keys: int = 0, cuts: Sequence[int] = ()) -> str:
    """A table of cells. ``cuts``: the columns where a wide one is cut into tables that fit a page, each
    of which begins with the first ``keys`` columns; columns that were not run are left out of these."""
    rows = list(rows)
    shown = [c for c in range(keys, len(head)) if not cuts or any(row[c] not in NOTHING for row in rows)]
    if keys + len(shown) <= WIDEST:
        cuts = ()
    tables = []
    for begin, end in zip((keys, *cuts), (*cuts, len(head)), strict=True):
        if columns := [c for c in shown if begin <= c < end]:
            cells = [*range(keys), *columns]
            tables.append(
                "\n".join(
                    "| " + " | ".join(row[c] for c in cells) + " |"
                    if row is not None
                    else "|" + "|".join("---" for _ in cells) + "|"
                    for row in (head, None, *rows)
                )
            )
    return "\n\n".join(tables)


def _tensors(row: Row) -> str:
    """What is compared: dtype, layout, epilogue."""
    return " ".join(filter(None, (row["dtype"], row["layout"], row["epilogue"])))


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by comparison."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_tensors(row), []).append(row)
    return found


def ratios_table(rows: list[Row]) -> str:
    """The short form of ``summary_table``, a cell per direction: the geometric means of all layers and of
    the dense ones with two and three axes in space, how many are slower than cuDNN beyond the noise, and
    the slowest."""
    lines = []
    for name, group in _groups(rows).items():
        cells = []
        for direction in DIRECTIONS:
            good = counted(r for r in group if r["direction"] == direction)
            flat = [r for r in good if r["kind"] == "dense" and not one_dimensional(r)]
            means = (
                two_digits(geometric_mean(number(r, "ratio") or 1.0 for r in of)) for of in (good, flat)
            )
            least = min(good, key=lambda r: number(r, "ratio") or 1.0)
            slower = sum(outcome(r) == "loss" for r in good)
            cells.append(
                "{} ({}); {} of {} slower; least {} `{}`".format(
                    *means, slower, len(good), two_digits(number(least, "ratio")), least["layer"]
                )
            )
        lines.append([name, *cells])
    return markdown(["tensors", *(f"{d}: mean (dense 2D, 3D)" for d in DIRECTIONS)], lines)


def one_dimensional(row: Row) -> bool:
    """Whether the layer has one axis in space, for which cuDNN has no channels-last kernels."""
    return ConvProblem.parse(row["problem"]).ndims == 1


NEIGHBOURS = {"cudnn_fused_us": "cuDNN's fused call", "inductor_us": "torch.compile"}


def losses_table(rows: list[Row]) -> str:
    """Every layer in which another library needs less time, the largest difference first: cuDNN beyond
    the noise, cuDNN's fused call and torch.compile always."""
    found = [(number(r, "ratio") or 1.0, "cuDNN", r) for r in counted(rows) if outcome(r) == "loss"]
    for column, name in NEIGHBOURS.items():
        shares = [((number(r, column) or 0.0) / (number(r, "ours_us") or 1.0), r) for r in counted(rows)]
        found += [(share, name, r) for share, r in shares if 0 < share < 1]
    lines = [
        [
            f"`{r['layer']}`",
            _tensors(r),
            r["direction"],
            name,
            f"{share:.3f}",
            f"{number(r, 'spread') or 0.0:.1%}",
        ]
        for share, name, r in sorted(found, key=lambda f: f[0])
    ]
    return markdown(
        ["layer", "tensors", "direction", "beside", "its time / ours", "spread of cuDNN's ratio"], lines
    )


def products_table(rows: list[Row]) -> str:
    """Layers beside a product of matrices with as many rows, columns and terms: times, and its time over
    ours, above 1 where the convolution runs at a higher rate."""
    lines = []
    for row in counted(rows):
        ours, product = number(row, "ours_us"), number(row, "gemm_us")
        if ours and product:
            lines.append(
                [
                    f"`{row['layer']}`",
                    row["direction"],
                    f"{ours:.1f}",
                    f"{product:.1f}",
                    f"{product / ours:.3f}",
                    f"{number(row, 'tflops') or 0.0:.0f}",
                ]
            )
    return markdown(
        ["layer", "direction", "ours us", "product us", "product / ours", "ours TFLOP/s"], lines
    )


def ceilings_table(rows: list[Row]) -> str:
    """What the machine reached in the runs: a product of two square matrices of 8192 rows, in bf16, and a
    copy of 1 GiB, read and written bytes together."""
    return markdown(
        ["run at commit", "product TFLOP/s", "copy TB/s"],
        ([str(r["commit"]), f"{r['gemm_tflops']:.0f}", f"{r['copy_tbs']:.2f}"] for r in rows),
    )


def summary_table(rows: list[Row]) -> str:
    """Geometric means of the ratio, wins, ties and losses, per direction and kind of layer; beside
    torch.compile where a row has its time."""
    lines = []
    tuned_by_torch = any(number(r, "inductor_us") for r in rows)
    for name, group in _groups(rows).items():
        for kind in (*KINDS, "all"):
            mine = [r for r in group if kind in ("all", r["kind"])]
            if not mine or (kind == "all" and len({r["kind"] for r in mine}) == 1):
                continue
            for direction in DIRECTIONS:
                here = [r for r in mine if r["direction"] == direction]
                good = counted(here)
                if not here:
                    continue
                ratios = [number(r, "ratio") or 1.0 for r in good]
                results = [outcome(r) for r in good]
                share = geometric_mean(
                    (number(r, "roofline_us") or 0.0) / (number(r, "ours_us") or 1.0) for r in good
                )
                beside = [number(r, "inductor_us") or 0.0 for r in good] if tuned_by_torch else []
                compared = (
                    [
                        two_digits(
                            geometric_mean(
                                t / (number(r, "ours_us") or 1.0)
                                for t, r in zip(beside, good, strict=True)
                                if t
                            )
                        )
                    ]
                    if tuned_by_torch
                    else []
                )
                lines.append(
                    [
                        name,
                        kind,
                        direction,
                        two_digits(geometric_mean(ratios)),
                        two_digits(min(ratios, default=None)),
                        two_digits(max(ratios, default=None)),
                        *compared,
                        "-" if share is None else f"{share:.0%}",
                        str(len(good)),
                        str(len(here) - len(good)),
                        *(str(results.count(w)) for w in ("win", "noise", "loss")),
                    ]
                )
    more = ["torch.compile / ours"] if tuned_by_torch else []
    return markdown(
        [
            "tensors",
            "layers",
            "direction",
            "geomean",
            "worst",
            "best",
            *more,
            "of the roofline",
            "timed",
            "not",
            "faster",
            "in the noise",
            "slower",
        ],
        lines,
        keys=3,
        cuts=(len(more) + 7,),
    )


def layer_table(rows: list[Row]) -> str:
    """One line per layer: our time, cuDNN's in the same layout and in NCHW, and the ratio with its
    spread; bold where we are faster, ``~`` where the difference is inside the noise."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for name, group in _groups(rows).items():
        for row in group:
            found.setdefault((name, row["layer"]), {}).setdefault(row["direction"], row)
    lines = []
    for (name, layer), by_direction in found.items():
        cells = [layer, name]
        for direction in DIRECTIONS:
            cells.append(_cell(by_direction.get(direction)))
        lines.append(cells)
    head = ["layer", "tensors", *(f"{d}: ours / cuDNN cl / NCHW us, ratio" for d in DIRECTIONS)]
    return markdown(head, lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "right":
        return f"{row['verdict']}: {row['reason'][:60]}".replace("|", "/")
    times = [number(row, c) for c in ("ours_us", "cudnn_cl_us", "cudnn_nchw_us")]
    text = " / ".join("-" if t is None else f"{t:.1f}" if t < 100 else f"{t:.0f}" for t in times)
    mark = {"win": "**", "loss": "", "noise": "~"}[outcome(row)]
    ratio = two_digits(number(row, "ratio"))
    spread = number(row, "spread") or 0.0
    return f"{text}, {mark}{ratio}{mark if mark == '**' else ''} ±{spread:.0%}"


def cpu_table(rows: list[Row]) -> str:
    """Without a GPU: whether our kernels were right, interpreted, and the times of torch's
    libraries on this CPU (microseconds; the interpreter's own say nothing about a kernel)."""
    lines = []
    for row in rows:
        times = [number(row, c) for c in ("onednn_cl_us", "onednn_nchw_us", "inductor_us")]
        lines.append(
            [
                row["layer"],
                row["direction"],
                f"{row['dtype']} {row['layout']}",
                row["verdict"],
                *("-" if t is None else f"{t:.0f}" for t in times),
            ]
        )
    return markdown(
        [
            "layer",
            "direction",
            "tensors",
            "ours, interpreted",
            "oneDNN cl us",
            "oneDNN NCHW us",
            "torch.compile us",
        ],
        lines,
    )
