"""Inline SVG: elements with escaped text, and many cells of one colour as one path."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from markupsafe import Markup, escape

from transconv.ir import Array


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An element. An underscore in an attribute's name is a hyphen, one at its end is dropped."""
    said = Markup("").join(
        Markup(' {}="{}"').format(k.rstrip("_").replace("_", "-"), _short(v))
        for k, v in attributes.items()
        if v not in (None, "")
    )
    text = Markup("").join(escape(x) for x in inside)
    return Markup("<{}{}>{}</{}>").format(Markup(name), said, text, Markup(name))


def drawing(width: float, height: float, title: str, *parts: Markup, kind: str = "") -> Markup:
    """A picture that shrinks with its column; ``title`` describes it in words."""
    return tag(
        "svg",
        tag("title", title),
        *parts,
        class_=f"drawing {kind}".strip(),
        role="img",
        viewBox=f"0 0 {_short(width)} {_short(height)}",
        width=width,
        height=height,
        aria_label=title,
    )


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "") -> Markup:
    return tag("text", said, x=x, y=y, class_=kind, text_anchor=anchor)


def rect(
    x: float, y: float, width: float, height: float, kind: str, said: str = "", round_: float = 0
) -> Markup:
    inside = (tag("title", said),) if said else ()
    return tag("rect", *inside, x=x, y=y, width=width, height=height, class_=kind, rx=round_ or None)


def cells(chosen: Array, kind: str, size: float, x: float = 0, y: float = 0, gap: float = 0.0) -> Markup:
    """The chosen cells of a grid as one path; neighbours in a row are one rectangle, unless there is a gap
    between cells."""
    if not chosen.any():
        return Markup("")
    side = size - gap
    runs = _runs(chosen) if not gap else ((r, c, 1) for r, c in np.argwhere(chosen))
    path = "".join(
        f"M{_short(x + c * size)} {_short(y + r * size)}"
        f"h{_short(n * size - gap)}v{_short(side)}h{_short(-(n * size - gap))}z"
        for r, c, n in runs
    )
    return tag("path", d=path, class_=kind)


def _runs(chosen: Array) -> Iterable[tuple[int, int, int]]:
    for row, line in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
        for begin, end in edges.reshape(-1, 2):
            yield row, int(begin), int(end - begin)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, (float, np.floating)) else str(value)
