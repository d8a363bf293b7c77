"""A plane as a picture: cells in the colours of their phases, what is outside of the tensor hatched."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from transconv.report.pictures import svg
from transconv.report.pictures.planes import FILLED, FIRST, LATER, Plane

SIDE = 320  # of the picture, at most
LEFT, ABOVE = 34, 22  # for labels
HUES = 8
MOST_MARKED = 64  # more outlined cells would hide the others


def draw(plane: Plane) -> Markup:
    """The picture of a plane with its labels."""
    height, width = plane.state.shape
    size = float(max(4.0, min(24.0, SIDE / max(height, width, 1))))
    inside = _inside(plane)
    parts = [svg.rect(LEFT + inside[1] * size, ABOVE + inside[0] * size, (inside[3] - inside[1]) * size,
                      (inside[2] - inside[0]) * size, "ground")]
    gap = 1.0 if size >= 7 else 0.0
    for phase in np.unique(plane.phase):
        for level, kind in ((LATER, "later"), (FIRST, "first")):
            chosen = (plane.state == level) & (plane.phase == phase)
            parts.append(svg.cells(chosen, f"{kind} hue{int(phase) % HUES}", size, LEFT, ABOVE, gap))
    parts.append(svg.cells(plane.state == FILLED, "filled", size, LEFT, ABOVE, gap))
    if size >= 7:
        parts.append(_lines(inside, size))
    parts.append(svg.rect(LEFT + inside[1] * size, ABOVE + inside[0] * size,
                          (inside[3] - inside[1]) * size, (inside[2] - inside[0]) * size, "edge"))
    if plane.marked.sum() <= MOST_MARKED:
        parts.append(svg.cells(plane.marked, "marked", size, LEFT, ABOVE, gap or 0.6))
    parts += _labels(plane, size)
    return svg.drawing(LEFT + width * size + 12, ABOVE + height * size + 8, said(plane), *parts,
                       kind="plane")


def said(plane: Plane) -> str:
    """The picture in words."""
    verb = "stores" if plane.stored else "reads"
    text = f"The tile {verb} {plane.touched} of {plane.sizes[0]} x {plane.sizes[1]} elements of this plane"
    if plane.marked.sum() > MOST_MARKED:
        text += f", {plane.needed} of them for a single element of the result"
    if plane.pads:
        text += f"; {plane.outside} hatched ones lie outside of the tensor or of its mask"
    if plane.scale > 1:
        text += f". A cell stands for {plane.scale} x {plane.scale} elements"
    return text


def _inside(plane: Plane) -> tuple[int, int, int, int]:
    """The cells of the picture that are elements: top, left, bottom, right."""
    height, width = plane.state.shape
    rows, columns = (-(-n // plane.scale) for n in plane.sizes)
    return (max(0, -plane.top), max(0, -plane.left), min(height, rows - plane.top),
            min(width, columns - plane.left))


def _lines(inside: tuple[int, int, int, int], size: float) -> Markup:
    top, left, bottom, right = inside
    path = "".join(f"M{LEFT + c * size:g} {ABOVE + top * size:g}V{ABOVE + bottom * size:g}"
                   for c in range(left + 1, right))
    path += "".join(f"M{LEFT + left * size:g} {ABOVE + r * size:g}H{LEFT + right * size:g}"
                    for r in range(top + 1, bottom))
    return svg.tag("path", d=path, class_="mesh") if path else Markup("")


def _labels(plane: Plane, size: float) -> list[Markup]:
    height, width = plane.state.shape
    top, left, bottom, right = _inside(plane)
    made = [svg.text(LEFT + width * size / 2, 11, plane.dims[1], "axis", "middle")]
    if plane.dims[0]:
        middle = ABOVE + height * size / 2
        made.append(svg.tag("text", plane.dims[0], x=10, y=middle, class_="axis", text_anchor="middle",
                            transform=f"rotate(-90 10 {middle:g})"))
    for at in dict.fromkeys((left, right - 1)):
        number = (at + plane.left) * plane.scale
        made.append(svg.text(LEFT + (at + 0.5) * size, 20, str(number), "tick", "middle"))
    for at in dict.fromkeys((top, bottom - 1)) if plane.dims[0] else ():
        number = (at + plane.top) * plane.scale
        made.append(svg.text(LEFT - 4, ABOVE + (at + 0.5) * size + 3, str(number), "tick", "end"))
    return made
