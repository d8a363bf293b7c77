"""The tables of ``python -m bench sizes``: kernels for any size beside those for one, and cuDNN."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from bench import environment
from bench.size_layers import Size
from bench.tables import geometric_mean, markdown, two_digits
from transconv.tuning.table import Row, number

SIDES = ("exact", "cudnn", "benchmark")
LINE = (
    *("layer", "direction", "order", "sizes", "right", "kernels", "compiled", "elsewhere"),
    *("first_us", "worst_us", "later_us", "cudnn_first_us"),
    *(f"{side}_{what}" for side in SIDES for what in ("mean", "least", "timed")),
    *environment.VERSIONS,
)
FIRST = "nchw"  # of a line: images in torch's own order; empty: of their layer's


def lines_of(rows: list[Row]) -> list[Row]:
    """What ``<gpu>_sizes.csv`` has of all sizes: a line for each layer and direction, and one for all.
    Ratios are the other's device time over that of the kernel for any size: geometric mean and least.
    Rows of ``--layout nchw`` have lines of their own behind them."""
    made = []
    for order in ("", FIRST):
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in (r for r in rows if _channels_first(r) == (order == FIRST)):
            groups.setdefault((row["layer"], row["direction"]), []).append(row)
        for (layer, direction), of in groups.items():
            versions = {column: of[0].get(column, "") for column in environment.VERSIONS}
            made.append({"layer": layer, "direction": direction, "order": order, **_line(of), **versions})
        if len(groups) > 1:
            versions |= {"commit": ""}  # of all is in the lines before
            every = [r for of in groups.values() for r in of]
            made.append({"layer": "all", "direction": "", "order": order, **_line(every), **versions})
    return made


def sizes_table(lines: list[Row]) -> str:
    """The lines of all sizes; those of images in torch's own order have a table of their own."""
    first = [x for x in lines if x["order"] == FIRST]
    others = [x for x in lines if x["order"] != FIRST]
    parts = [_table(others)] if others or not first else []
    if first:
        parts += ["In torch's own order, channels first (`--layout nchw`):", _table(first)]
    return "\n\n".join(parts)


def _channels_first(row: Row) -> bool:
    """Whether a row is of a run with ``--layout nchw``: the order of images of one side is no choice."""
    return bool(row["layout"] == "nchw" and len(Size.parse(row["size"]).sides) > 1)


def _table(lines: list[Row]) -> str:
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
        [
            [
                x["layer"],
                x["direction"],
                str(x["sizes"]),
                f"{x['right']} of {x['sizes']}",
                *(f"{number(x, c) or 0:g}" for c in ("kernels", "compiled", "elsewhere")),
                *(_rounded(x, c) for c in ("first_us", "worst_us", "later_us", "cudnn_first_us")),
                *(_ratio(x, side) for side in SIDES),
            ]
            for x in lines
        ],
        keys=2,
        cuts=(7,),
    )


def _line(rows: list[Row]) -> Row:
    # The first use of a kernel, which is loaded then, is no first call of a size.
    firsts = _numbers((r for r in rows if r["first_use"] != "1"), "first_us")
    made: Row = {"sizes": len(rows), "right": sum(not r["wrong"] for r in rows)}
    made["kernels"] = max(_numbers(rows, "kernels"), default=0)
    made |= {c: sum(_numbers(rows, c)) for c in ("compiled", "elsewhere")}
    middles = {
        "first_us": firsts,
        "later_us": _numbers(rows, "later_us"),
        "cudnn_first_us": _numbers(rows, "cudnn_first_us"),
    }
    made |= {column: median(found) for column, found in middles.items() if found}
    made |= {"worst_us": max(firsts)} if firsts else {}
    for side in SIDES:
        found = [
            theirs / us for r in rows if (us := number(r, "us")) and (theirs := number(r, f"{side}_us"))
        ]
        if found:
            made |= {f"{side}_mean": geometric_mean(found), f"{side}_least": min(found)}
            made[f"{side}_timed"] = len(found)
    return made


def _rounded(line: Row, column: str) -> str:
    found = number(line, column)
    return "-" if found is None else f"{found:.0f}"


def _ratio(line: Row, side: str) -> str:
    mean, least = number(line, f"{side}_mean"), number(line, f"{side}_least")
    return "-" if mean is None else f"{two_digits(mean)}, {least:.2f} ({line[f'{side}_timed']})"


def _numbers(rows: Iterable[Row], column: str) -> list[float]:
    return [x for r in rows if (x := number(r, column)) is not None]


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
