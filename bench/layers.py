"""What to run: layers of files, and the project's own lists by their names."""

from __future__ import annotations

from pathlib import Path

from transconv.conv import DIRECTIONS, SCHEMA, ListedLayer, from_json, from_problems, problem_lists, select

__all__ = ["DIRECTIONS", "OWN", "SCHEMA", "ListedLayer", "from_json", "from_problems", "read", "select"]

OWN = Path(__file__).parent / "problems"


def read(source: str | Path) -> list[ListedLayer]:
    """The layers of a file or folder (see ``transconv.layers``), or of an own list by its name."""
    path = Path(source)
    if not path.exists() and (OWN / f"{path.name}.txt").exists():
        path = OWN / f"{path.name}.txt"
    return problem_lists.read(path)
