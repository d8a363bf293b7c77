"""The tables of docs/issues.md: what was reported, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bench.issue_cases import CASES
from transconv.tuning.table import Row, number


def cases_table() -> str:
    """Every case, by the thread that reports it."""
    return _table(
        ["thread", "what it reports", "the call", "computed"],
        (
            [
                f"[{c.issue}]({c.url})",
                c.matter,
                f"`{c.call()}` {c.dtype}{_how(c.layout, c.ndims)}",
                c.direction,
            ]
            for c in CASES
        ),
    )


def _how(layout: str, ndims: int) -> str:
    return ", channels last" if layout == "nhwc" and ndims > 1 else ""


def issues_table(rows: list[Row]) -> str:
    """Of each case ours beside torch's: verdicts, microseconds, their ratio, the largest error as a share
    of the largest element, and megabytes beside the operands."""
    lines = [
        [
            f"[{r['issue']}]({r['url']}) {r['direction']}",
            _result(r, "our"),
            _result(r, "torch"),
            _number(r, "ratio", "{:.2f}"),
            _pair(r, "err", "{:.0e}"),
            _pair(r, "peak_mb", "{:.0f}"),
        ]
        for r in rows
    ]
    ratios = [x for r in rows if (x := number(r, "ratio"))]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append([f"geometric mean of {len(ratios)}", "", "", f"{mean:.2f}", "", ""])
    return _table(
        ["thread", "ours", "torch", "torch / ours", "error, ours / torch", "MB, ours / torch"], lines
    )


def _result(r: Row, side: str) -> str:
    """A time, and the verdict where it is not simply right."""
    us = number(r, f"{side}_us")
    words = [f"{us:.4g} us" if us else "", f"({r[f'{side}_layout']})" if us else ""]
    if r[f"{side}_verdict"] != "right" or not us:
        words.append(r[f"{side}_verdict"])
    if r[f"{side}_reason"] == "computed by torch":
        words.append("by torch")
    return " ".join(filter(None, words)).replace("|", "/")


def _pair(r: Row, what: str, form: str) -> str:
    return " / ".join(_number(r, f"{side}_{what}", form) for side in ("our", "torch"))


def _number(r: Row, column: str, form: str) -> str:
    found = number(r, column)
    return "-" if found is None else form.format(found)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
