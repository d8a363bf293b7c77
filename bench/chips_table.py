"""The table of two GPUs: what the schedules that the package ships reach on each, relative to cuDNN, over
the layers that were measured on both."""

from __future__ import annotations

from bench.tables import counted, geometric_mean, markdown, two_digits
from transconv.conv import DIRECTIONS
from transconv.tuning.table import Row, number

SAME = ("problem", "direction", "dtype", "epilogue", "layout", "against")  # what is measured on both


def chips_table(rows: list[Row]) -> str:
    """A line for each direction and one for all: the geometric means of cuDNN's time over ours on both
    GPUs, the second mean over the first, and the layer that differs most; empty without a second GPU."""
    devices = list(dict.fromkeys(r["device"] for r in rows))
    if len(devices) != 2:
        return ""
    on = [{tuple(r[c] for c in SAME): r for r in counted(rows) if r["device"] == d} for d in devices]
    both = [(on[0][key], on[1][key]) for key in on[0] if key in on[1]]
    lines = [
        _line(name, pairs)
        for name, pairs in (
            *((d, [p for p in both if p[0]["direction"] == d]) for d in DIRECTIONS),
            ("all", both),
        )
        if pairs
    ]
    head = [
        "direction",
        "layers",
        *(f"cuDNN over transconv on {d}" for d in devices),
        "the second over the first",
        "least",
    ]
    return markdown(head, lines)


def _line(name: str, pairs: list[tuple[Row, Row]]) -> list[str]:
    means = [
        geometric_mean(number(r, "ratio") or 1.0 for r in of) or 1.0 for of in zip(*pairs, strict=True)
    ]
    least = min(pairs, key=_change)
    return [
        name,
        str(len(pairs)),
        *map(two_digits, means),
        two_digits(means[1] / means[0]),
        f"{two_digits(_change(least))} `{least[0]['layer']}`",
    ]


def _change(pair: tuple[Row, Row]) -> float:
    """The ratio on the second GPU over that on the first."""
    first, second = (number(r, "ratio") or 1.0 for r in pair)
    return second / first
