"""docs/images/rooms_light.svg and rooms_dark.svg: the rooms of transconv, drawn from its imports.

A room stands above every room that it imports from; a line is left out where a longer way says the
same. ``python -m docs.site.rooms`` draws them anew.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "transconv"
FOLDER = ROOT / "docs" / "images"
# What is not a room: the package's own files, and those that everything may read.
EVERYWHERE = ("errors", "support")
FRONT = ("__init__", "__main__", "nn")

WIDTH, HEIGHT, GAP, RISE = 230, 74, 20, 104
INK = {
    "light": ("#1f2328", "#57606a", "#f6f8fa", "#8c959f", "#0969da"),
    "dark": ("#e6edf3", "#9198a1", "#161b22", "#6e7681", "#58a6ff"),
}


def imported(path: Path) -> Iterator[str]:
    """The rooms that a file imports from, in functions and for types too."""
    for at in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = (
            [at.module or ""]
            if isinstance(at, ast.ImportFrom)
            else ([a.name for a in at.names] if isinstance(at, ast.Import) else [])
        )
        if isinstance(at, ast.ImportFrom) and at.module == "transconv":
            names = [f"transconv.{a.name}" for a in at.names]
        yield from (name.split(".")[1] for name in names if name.startswith("transconv."))


@functools.cache
def rooms() -> dict[str, set[str]]:
    """Each room with the rooms that it imports from."""
    found: dict[str, set[str]] = {}
    for door in sorted(PACKAGE.glob("*/__init__.py")):
        own = door.parent.name
        found[own] = {
            other
            for path in sorted(door.parent.rglob("*.py"))
            for other in imported(path)
            if other not in (own, *EVERYWHERE, *FRONT)
        }
    return {room: below & found.keys() for room, below in found.items()}


def levels(below: dict[str, set[str]]) -> dict[str, int]:
    """Where each room stands: as high as it can, below all that import from it; 0 is the lowest."""
    known: dict[str, int] = {}

    def down(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((down(above) for above in below if room in below[above]), default=-1)
        return known[room]

    deepest = max(down(room) for room in below)
    return {room: deepest - down(room) for room in below}


def direct(below: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The lines that no longer way implies."""

    def reached(room: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in below[room]))

    return {
        (room, other)
        for room, others in below.items()
        for other in others
        if not any(other in reached(between) for between in others)
    }


def purpose(room: str) -> str:
    """What the room's docstring says first."""
    said = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8"))) or ""
    return re.sub(r"^transconv\.\w+: ", "", " ".join(said.split("\n\n")[0].split())).rstrip(".")


def wrapped(text: str, most: int = 37, lines: int = 3) -> list[str]:
    made = [""]
    for word in text.split():
        if len(made[-1]) + len(word) >= most:
            made.append("")
        made[-1] = f"{made[-1]} {word}".strip()
    return made if len(made) <= lines else [*made[: lines - 1], made[lines - 1] + " ..."]


def svg(mode: str) -> str:
    """The picture in ``light`` or ``dark`` colours."""
    ink, faint, fill, line, strong = INK[mode]
    below = rooms()
    rank = levels(below)
    rows = [sorted(r for r in rank if rank[r] == n) for n in range(max(rank.values()) + 1)]
    wide = max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    high = len(rows) * RISE + GAP
    at = {
        room: (
            (wide - len(row) * (WIDTH + GAP) + GAP) // 2 + i * (WIDTH + GAP),
            (len(rows) - 1 - n) * RISE + GAP,
        )
        for n, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" font-family="system-ui, sans-serif">',
        "<title>The rooms of transconv: each imports only from rooms below it</title>",
    ]
    for upper, lower in sorted(direct(below)):
        (x, y), (u, v) = at[upper], at[lower]
        x, u, y = x + WIDTH // 2, u + WIDTH // 2, y + HEIGHT
        bend = (v - y) // 2
        parts.append(
            f'<path d="M{x} {y} C{x} {y + bend} {u} {v - bend} {u} {v}" fill="none" '
            f'stroke="{strong}" stroke-width="1.2"/>'
        )
    for room, (x, y) in sorted(at.items()):
        parts.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" '
            f'stroke="{line}"/>'
        )
        parts.append(
            f'<text x="{x + 10}" y="{y + 20}" font-size="14" font-weight="600" fill="{ink}">{room}</text>'
        )
        for n, words in enumerate(wrapped(purpose(room))):
            parts.append(
                f'<text x="{x + 10}" y="{y + 37 + 14 * n}" font-size="11" '
                f'fill="{faint}">{escape(words)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for mode in INK:
        (FOLDER / f"rooms_{mode}.svg").write_text(svg(mode), "utf-8")


if __name__ == "__main__":
    main()
