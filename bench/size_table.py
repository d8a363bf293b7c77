"""The tables of ``python -m bench sizes``: kernels for any size beside those for one, and cuDNN."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from bench.size_layers import Size
from bench.tables import geometric_mean, markdown, two_digits
from transconv.tuning.table import Row, number


def sizes_table(rows: list[Row]) -> str:
    """A line for each layer and direction, and one for all. Ratios are the other's device time over that
    of the kernel for any size: geometric mean and least. Rows of ``--layout nchw`` have a table of their
    own behind it."""
    first = [r for r in rows if _channels_first(r)]
    others = [r for r in rows if not _channels_first(r)]
    parts = [_table(others)] if others or not first else []
    if first:
        parts += ["In torch's own order, channels first (`--layout nchw`):", _table(first)]
    return "\n\n".join(parts)


def _channels_first(row: Row) -> bool:
    """Whether a row is of a run with ``--layout nchw``: the order of images of one side is no choice."""
    return bool(row["layout"] == "nchw" and len(Size.parse(row["size"]).sides) > 1)


def _table(rows: list[Row]) -> str:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["direction"]), []).append(row)
    lines = [_line([layer, direction], of) for (layer, direction), of in groups.items()]
    if len(lines) > 1:
        lines.append(_line(["all", ""], rows))
    return markdown(
        [
            "layer",
            "direction",
            "sizes",
            "exact",
            "kernels",
            "compiled",
            "elsewhere",
            "first call [us]",
            "worst",
            "later calls",
            "cuDNN's first",
            "kernel for the size",
            "cuDNN",
            "cuDNN, benchmark",
        ],
        lines,
        keys=2,
        cuts=(7,),
    )


def _line(head: list[str], rows: list[Row]) -> list[str]:
    # The first use of a kernel, which is loaded then, is no first call of a size.
    firsts = _numbers((r for r in rows if r["first_use"] != "1"), "first_us")
    right = sum(not r["wrong"] for r in rows)
    kernels = max(_numbers(rows, "kernels"), default=0)
    return [
        *head,
        str(len(rows)),
        f"{right} of {len(rows)}",
        f"{kernels:g}",
        f"{sum(_numbers(rows, 'compiled')):g}",
        f"{sum(_numbers(rows, 'elsewhere')):g}",
        _middle(firsts),
        f"{max(firsts):.0f}" if firsts else "-",
        _middle(_numbers(rows, "later_us")),
        _middle(_numbers(rows, "cudnn_first_us")),
        *(_ratios(rows, side) for side in ("exact_us", "cudnn_us", "benchmark_us")),
    ]


def _numbers(rows: Iterable[Row], column: str) -> list[float]:
    return [x for r in rows if (x := number(r, column)) is not None]


def _middle(values: list[float]) -> str:
    return f"{median(values):.0f}" if values else "-"


def _ratios(rows: list[Row], side: str) -> str:
    found = [theirs / us for r in rows if (us := number(r, "us")) and (theirs := number(r, side))]
    if not found:
        return "-"
    return f"{two_digits(geometric_mean(found))}, {min(found):.2f} ({len(found)})"


def first_calls_table(rows: list[Row]) -> str:
    """A line for each layer and direction: what calls cost the host, in microseconds."""
    columns = ("first_us", "worst_us", "known_us", "later_us", "functions")
    return markdown(
        [
            "layer",
            "direction",
            "new size [us]",
            "worst",
            "known size",
            "again at once",
            "functions of Python",
        ],
        ([r["layer"], r["direction"], *(r[c] for c in columns)] for r in rows),
    )


def models_table(rows: list[Row]) -> str:
    """A line for each side of the calls of a model."""

    def told(row: Row, column: str) -> str:
        value = number(row, column)
        return "-" if value is None else f"{value:.4g}"

    columns = (
        "sizes",
        "graphs",
        "first_ms",
        "worst_ms",
        "stalls",
        "later_ms",
        "compiled",
        "prepare_s",
        "far",
    )
    return markdown(
        [
            "case",
            "side",
            "sizes",
            "graphs",
            "first calls [ms]",
            "worst",
            "above 50 ms",
            "later calls",
            "compiled",
            "prepared in [s]",
            "largest error",
        ],
        ([r["case"], r["side"], *(told(r, c) for c in columns)] for r in rows),
        keys=2,
        cuts=(8,),
    )
