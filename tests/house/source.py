"""The package's source files as syntax trees: imports, rooms, and the graphs that imports make.

A room is a folder of ``transconv/`` or a file in its root. An import counts wherever it stands, in
functions too, except below ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "transconv"

Graph = Mapping[str, frozenset[str]]
Node = TypeVar("Node", bound=ast.stmt)
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@functools.cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def relative(path: Path) -> str:
    """A file or folder, seen from the package's folder."""
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return relative(path).split("/")[0].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def parts(at: ast.AST) -> Iterator[ast.AST]:
    """The statements right below a node, and the branches that have some."""
    return (child for child in ast.iter_child_nodes(at) if isinstance(child, STATEMENTS))


@functools.cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """All statements of a file, in functions and classes too."""
    found: list[ast.AST] = [*parts(tree_of(path))]
    for at in found:
        found += parts(at)
    return tuple(found)


@functools.cache
def lines_of(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text().splitlines())


@functools.cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Every imported module, and whether it is imported when the file is (not in a function, not
    for types alone)."""

    def visit(at: ast.AST, early: bool) -> Iterator[tuple[str, bool]]:
        for child in parts(at):
            if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
                yield from visit(child, False)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from visit(child, False)
            elif isinstance(child, ast.Import):
                yield from ((a.name, early) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{relative(path)}: a relative import"
                assert child.module is not None
                whole = child.module == "transconv"
                yield from ((f"transconv.{a.name}" if whole else child.module, early) for a in child.names)
            else:
                yield from visit(child, early)

    return tuple(visit(tree_of(path), True))


@functools.cache
def imported_files(path: Path) -> frozenset[Path]:
    """The files of the package that a file imports, in functions and for types too."""
    found = set()
    for at in statements(path):
        if isinstance(at, ast.ImportFrom) and (at.module or "").split(".")[0] == "transconv":
            for alias in at.names:
                found |= {file_of(f"{at.module}.{alias.name}") or file_of(str(at.module))}
        elif isinstance(at, ast.Import):
            found |= {file_of(a.name) for a in at.names if a.name.split(".")[0] == "transconv"}
    return frozenset(p for p in found if p and p != path)


def file_of(module: str) -> Path | None:
    place = ROOT.joinpath(*module.split("."))
    if place.with_suffix(".py").exists():
        return place.with_suffix(".py")
    return place / "__init__.py" if (place / "__init__.py").exists() else None


def room_graph() -> Graph:
    """Which rooms each room imports; the root's ``__init__`` and ``__main__`` are no rooms."""
    rooms: dict[str, set[str]] = {}
    for path in sources():
        if room_of(path) in ("__init__", "__main__"):
            continue
        rooms.setdefault(room_of(path), set()).update(
            room_of(other)
            for other in imported_files(path)
            if room_of(other) not in (room_of(path), "__init__", "__main__")
        )
    return {room: frozenset(others) for room, others in rooms.items()}


def file_graph(room: str) -> Graph:
    """Which files of a room each of its files imports, ``__init__`` left out."""
    files = [p for p in sources() if room_of(p) == room and p.name != "__init__.py"]
    return {relative(p): frozenset(relative(q) for q in imported_files(p) if q in files) for p in files}


def components(graph: Graph) -> list[frozenset[str]]:
    """The strongly connected components, each behind those that it reaches (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(at: str) -> None:
        index[at] = low[at] = len(index)
        stack.append(at)
        for other in sorted(graph.get(at, ())):
            if other not in index:
                visit(other)
                low[at] = min(low[at], low[other])
            elif other in stack:
                low[at] = min(low[at], index[other])
        if low[at] == index[at]:
            cut = stack.index(at)
            found.append(frozenset(stack[cut:]))
            del stack[cut:]

    for start in sorted(graph):
        if start not in index:
            visit(start)
    return found


def floors(graph: Graph) -> int:
    """The length of the longest chain of imports; files of a circle stand on one floor."""
    height: dict[str, int] = {}
    for part in components(graph):
        below = [height[other] for at in part for other in graph.get(at, ()) if other not in part]
        height.update(dict.fromkeys(part, 1 + max(below, default=0)))
    return max(height.values(), default=0)


def circles(graph: Graph) -> list[frozenset[str]]:
    return [part for part in components(graph) if len(part) > 1]


def walk(*kinds: type[Node]) -> Iterator[tuple[Path, Node]]:
    """All statements of some kinds in the package, with their files."""
    for path in sources():
        for at in statements(path):
            if isinstance(at, kinds):
                yield path, at
