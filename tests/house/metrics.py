"""The figures of the architecture: ``make house`` prints them as one table.

Each row is a figure, what it is today, its limit and what is meant. ``allowed.json`` has the limits, which
may only be lowered: ``python -m tests.house.metrics --lower`` does it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import (
    ROOT,
    circles,
    file_graph,
    floors,
    lines_of,
    relative,
    room_graph,
    room_of,
    sources,
    statements,
    tree_of,
    walk,
)

ALLOWED = Path(__file__).with_name("allowed.json")
# What makes a container that may change while the program runs.
CONTAINERS = (
    "dict",
    "list",
    "set",
    "defaultdict",
    "OrderedDict",
    "Counter",
    "deque",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
    "WeakIdKeyDictionary",
    "Cache",
    "local",
    "ContextVar",
)


def lines() -> int:
    return sum(len(lines_of(p)) for p in sources())


def median_file() -> int:
    return int(statistics.median(n for p in sources() if (n := len(lines_of(p))) > 1))


def largest_file() -> int:
    return max(len(lines_of(p)) for p in sources())


def crowded_folders(most: int = 15) -> list[str]:
    """Folders with more files than fit on a screen, their ``__init__`` not counted."""
    files = Counter(relative(p.parent) for p in sources() if p.stem != "__init__")
    return [folder for folder, n in files.items() if n > most]


def highest_room() -> int:
    """The floors of the room that has the most."""
    return max(floors(file_graph(room)) for room in {room_of(p) for p in sources()})


def file_circles() -> int:
    """Groups of files of one room that import each other, in functions or for types too."""
    return sum(len(circles(file_graph(room))) for room in sorted({room_of(p) for p in sources()}))


def class_names() -> list[str]:
    """The names that stand for more than one class."""
    found = Counter(at.name for _, at in walk(ast.ClassDef))
    return [name for name, n in found.items() if n > 1]


def mutable_objects() -> list[str]:
    """Containers at the top of modules that are empty at first, and names that functions rebind."""
    found = []
    for path in sources():
        tree = tree_of(path)
        rebound = {name for at in statements(path) if isinstance(at, ast.Global) for name in at.names}
        for at in tree.body:
            value = getattr(at, "value", None)
            if isinstance(at, (ast.Assign, ast.AnnAssign)) and value is not None:
                targets = at.targets if isinstance(at, ast.Assign) else [at.target]
                names = [t.id for t in targets if isinstance(t, ast.Name)]
                found += [
                    f"{relative(path)}: {name}"
                    for name in names
                    if name in rebound or (name != "__all__" and starts_empty(value))
                ]
    return sorted(found)


def starts_empty(value: ast.expr) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set)):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func).split("[")[0].split(".")[-1]
        return called in CONTAINERS and all(isinstance(a, (ast.Name, ast.Constant)) for a in value.args)
    return False


def ignored_types() -> int:
    return sum("type: ignore" in line for p in sources() for line in lines_of(p))


def private_torch() -> list[str]:
    """Files that use what torch calls private: ``torch._C``, ``torch._dynamo`` and others."""
    private = re.compile(r"\btorch\._[a-zA-Z]")
    return [
        relative(p)
        for p in sources()
        if any(private.search(line) and not line.lstrip().startswith("#") for line in lines_of(p))
    ]


def import_lines() -> int:
    return sum(
        at.end_lineno - at.lineno + 1 for _, at in walk(ast.Import, ast.ImportFrom) if at.end_lineno
    )


def lazy_imports() -> int:
    """Imports inside of functions."""
    functions = defaultdict(set)
    for path, at in walk(ast.FunctionDef, ast.AsyncFunctionDef):
        functions[path] |= {*range(at.lineno, (at.end_lineno or at.lineno) + 1)}
    return sum(at.lineno in functions[path] for path, at in walk(ast.Import, ast.ImportFrom))


def named_alike(*words: str) -> Callable[[], list[str]]:
    """Classes whose names end in one of the words, by file."""

    def found() -> list[str]:
        return [
            f"{relative(path)}: {at.name}"
            for path, at in walk(ast.ClassDef)
            if re.search(rf"({'|'.join(words)})$", at.name)
        ]

    return found


def written_functions() -> list[str]:
    """Files where text becomes functions."""
    return [
        relative(path)
        for path in sources()
        if any("exec(" in line for line in lines_of(path))
        for at in ast.walk(tree_of(path))
        if isinstance(at, ast.Call) and getattr(at.func, "id", "") == "exec"
    ]


# No noun: what a file's name may not be. Nouns of the field that end alike are listed behind it.
NO_NOUN = re.compile(
    r"(ed|en|ing|ly)$|^(behind|apart|ahead|whole|alike|own|such|told|kept|held|made|lost|"
    r"out|over|more|less|once|again|back|away|around|late|early|sooner|upright|beside)$"
)
FRESH = 300  # commits for which an ablation stands
NOUNS = frozenset(
    (
        "packing tiling streaming sharding padding indexing folding lowering merging timing tuning "
        "pooling scheduling sampling batching reading binding rounding upsampling broadcasting tracing "
        "inlining string codegen aliasing"
    ).split()
)
# Modules that users import by such a name, which stays: what is in it is in rooms whose files have nouns.
PUBLIC = ("quantized.py",)


def names_without_noun() -> list[str]:
    return [
        relative(p)
        for p in sources()
        if p.stem != "__init__"
        and relative(p) not in PUBLIC
        and (word := p.stem.split("_")[-1]) not in NOUNS
        and NO_NOUN.search(word)
    ]


@dataclass(frozen=True)
class Figure:
    """A row of the table: what is counted, and how many are meant. A figure that is a list has its members
    in ``allowed.json``; one that is a number has its limit there."""

    name: str
    meant: int
    found: Callable[[], int | Iterable[str]]

    @functools.cached_property
    def counted(self) -> int | list[str]:
        found = self.found()
        return found if isinstance(found, int) else sorted(found)

    @property
    def members(self) -> list[str] | None:
        return None if isinstance(self.counted, int) else self.counted

    @property
    def value(self) -> int:
        return self.counted if isinstance(self.counted, int) else len(self.counted)


FIGURES = (
    Figure("lines", 82_000, lines),
    Figure("files", 400, lambda: len(sources())),
    Figure("lines of the median file", 250, median_file),
    Figure("lines of the largest file", 600, largest_file),
    Figure("lines that import", 7_000, import_lines),
    Figure("imports inside functions", 200, lazy_imports),
    Figure("folders of more than 15 files", 4, crowded_folders),
    Figure("arrows between rooms", 150, lambda: sum(len(others) for others in room_graph().values())),
    Figure("floors of rooms", 13, lambda: floors(room_graph())),
    Figure("floors of files in a room", 8, highest_room),
    Figure("circles of files in a room", 4, file_circles),
    Figure("class names of several classes", 15, class_names),
    Figure("file names without a noun", 0, names_without_noun),
    Figure("mutable objects of modules", 25, mutable_objects),
    Figure("classes of routes", 1, named_alike("Route")),
    Figure("classes of launches", 1, named_alike("Launch", "Launcher")),
    Figure("places that make functions of text", 1, written_functions),
    Figure("files with torch's private names", 1, private_torch),
    Figure("ignored types", 60, ignored_types),
)


def limits() -> dict[str, int | list[str]]:
    """For each figure its limit, or the members that it may have."""
    read: dict[str, int | list[str]] = json.loads(ALLOWED.read_text())
    return read


def limit_of(figure: Figure) -> int:
    allowed = limits()[figure.name]
    return allowed if isinstance(allowed, int) else len(allowed)


def lower_limits() -> None:
    """Write today's figures where they are below their limits: none is raised, nor lowered below what is
    meant."""
    allowed = limits()
    for figure in FIGURES:
        known = allowed.get(figure.name)
        if figure.members is not None:
            allowed[figure.name] = [m for m in figure.members if not isinstance(known, list) or m in known]
        else:
            step = 500 if figure.value > 9_999 else 50 if figure.value > 999 else 1
            most = max(-(-figure.value // step) * step, figure.meant)  # lines vary with each change
            allowed[figure.name] = min(most, known) if isinstance(known, int) else most
    ALLOWED.write_text(json.dumps(allowed, indent=1) + "\n")


def table(measured: bool) -> str:
    """The table, with today's figures or with their limits alone."""
    rows = [f"{'figure':36}{'is' * measured:>{8 * measured}}{'at most':>9}{'meant':>9}"]
    for figure in FIGURES:
        value = f"{figure.value:8,}" if measured else ""
        rows.append(f"{figure.name:36}{value}{limit_of(figure):9,}{figure.meant:9,}")
    return "\n".join(rows)


def stale_ablation() -> str:
    """A warning where docs/ablation.md was measured more than ``FRESH`` commits ago; else nothing."""
    found = re.search(r"commit (\w+)", (ROOT / "docs" / "ablation.md").read_text(encoding="utf-8"))
    done = (
        subprocess.run(
            ["git", "-C", str(ROOT), "rev-list", "--count", f"{found[1]}..HEAD"],
            capture_output=True,
            text=True,
        )
        if found
        else None
    )
    if done is None or done.returncode:
        return "docs/ablation.md: its commit is not in this repository"
    behind = int(done.stdout)
    return f"docs/ablation.md: measured {behind} commits ago" if behind > FRESH else ""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house.metrics", description=__doc__)
    parser.add_argument("--limits", action="store_true", help="print the limits alone")
    parser.add_argument("--lower", action="store_true", help="lower the limits to today's figures")
    given = parser.parse_args(words)
    if given.lower:
        lower_limits()
    print(table(measured=not given.limits))
    if not given.limits and (warning := stale_ablation()):
        print(warning)


if __name__ == "__main__":
    main()
