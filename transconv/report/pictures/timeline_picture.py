"""The timeline of roles as a picture: a row for each role and for each slot of the buffers."""

from __future__ import annotations

from markupsafe import Markup

from transconv.report.pictures import svg
from transconv.report.pictures.timeline import Timeline

WIDTH, LEFT, ROW, THIN = 1120.0, 128.0, 24.0, 13.0
PRODUCTS = 26  # shown in the picture


def draw(line: Timeline) -> Markup:
    """The beginning of the timeline, to scale."""
    until = _until(line)
    scale = (WIDTH - LEFT - 8) / max(until, 1.0)
    tops: dict[str, float] = {}
    y = 6.0
    parts: list[Markup] = []
    for rows, height in ((line.roles, ROW), (line.slots, THIN)):
        for row in rows:
            tops[row] = y
            parts += [svg.text(LEFT - 8, y + height / 2 + 3.5, row, "row", "end"),
                      svg.rect(LEFT, y, WIDTH - LEFT - 8, height - 3, "ground", round_=2)]
            y += height
        y += 6
    for s in line.spans:
        if s.start < until and s.row in tops:
            end, height = min(s.end, until), (ROW if s.row in line.roles else THIN) - 3
            length = max(0.8, (end - s.start) * scale - 0.4)
            parts.append(svg.rect(LEFT + s.start * scale, tops[s.row], length, height, f"span {s.kind}",
                                  f"{s.said}: {s.start / 1e3:.2f} to {s.end / 1e3:.2f} us"))
    parts += _scale(until, scale, y)
    words = (f"{', '.join(line.roles)} and {len(line.slots)} slots of shared memory during the first "
             f"{until / 1e3:.1f} us of program 0")
    return svg.drawing(WIDTH, y + 18, words, *parts, kind="wide")


def _until(line: Timeline) -> float:
    """The end of the picture: after ``PRODUCTS`` products, or at the end."""
    ends = sorted(s.end for s in line.spans if s.kind == "multiply")
    return min(line.end, ends[PRODUCTS] * 1.05) if len(ends) > PRODUCTS else line.end


def _scale(until: float, scale: float, y: float) -> list[Markup]:
    step = next(s for n in range(0, 9) for s in (10**n, 2 * 10**n, 5 * 10**n) if until / s <= 8)
    made = []
    for i in range(int(until // step) + 1):
        x = LEFT + i * step * scale
        made += [svg.tag("path", d=f"M{x:g} 2V{y:g}", class_="mesh"),
                 svg.text(x, y + 12, f"{i * step / 1e3:g} us", "tick", "middle" if i else "start")]
    return made
