"""What to run: layers of files, and the project's own lists by their names."""

from __future__ import annotations

from pathlib import Path

from transconv.conv import DIRECTIONS, SCHEMA, ListedLayer, from_json, from_problems, problem_lists, select

__all__ = ["DIRECTIONS", "OWN", "SCHEMA", "ListedLayer", "from_json", "from_problems", "read", "select"]

OWN = Path(__file__).parent / "problems"
PACKAGED = Path(problem_lists.__file__).parents[1] / "data"  # lists that the package has, too


def read(source: str | Path) -> list[ListedLayer]:
    """The layers of a file or folder (see ``transconv.layers``), or of a known list by its name."""
    path = Path(source)
    for folder in (OWN, PACKAGED):
        if not path.exists() and (folder / f"{path.name}.txt").exists():
            path = folder / f"{path.name}.txt"
    return problem_lists.read(path)
