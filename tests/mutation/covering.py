"""Which tests execute a statement of the package: recorded once, and read for each mutant.

``python -m tests.mutation.covering [FOLDER or FILE ..]`` records in a copy of the project, a process for
each. The rooms are imported with a mark in front of each statement of a function, since a tracer would
double the time. Of a test with many cases a few are recorded; the others are taken to execute the same. A
line that has been moved since is looked up where it was; one that is new has the tests of the one before.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("MUTATION", ROOT / "build" / "mutation"))
TREE = FOLDER / "tree"  # where tests are recorded
PLANTED = FOLDER / "planted"  # where mutants are tried
# Tests of other things than numbers and kernels, or of several processes.
NOT_RUN = (
    "tests/docs",
    "tests/bench",
    "tests/report",
    "tests/gpu",
    "tests/distributed",
    "tests/test_release.py",
    "tests/docs/test_readme.py",
    "tests/verify/test_mutants.py",
    "tests/mutation",
)
ROOMS = (
    "ir",
    "simplify",
    "compute",
    "conv",
    "schedule",
    "selection",
    "passes",
    "backend_triton",
    "graph",
    "kernel",
    "functional",
    "torch_ops",
    "runtime",
    "calls",
    "support",
    "verify",
)
SELECTED = (
    "-q",
    "-m",
    "not gpu and not slow and not integrations",
    "-p",
    "no:cacheprovider",
    *(f"--ignore={path}" for path in NOT_RUN),
)
CASES = 5


def copy_project(to: Path) -> None:
    """The files of the project, without those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    wanted = {name for name in listed if (ROOT / name).is_file()}
    for old in to.rglob("*"):
        name = str(old.relative_to(to))
        if old.suffix == ".py" and name not in wanted:
            old.unlink(missing_ok=True)
    for name in wanted:
        source, target = ROOT / name, to / name
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


# -- recording, in a process of its own ---------------------------------------------------------------


class Marked(importlib.machinery.PathFinder):
    """Finds the modules of ROOMS, and has them marked. Place ``n`` of ``ran`` is that of ``places[n]``."""

    ran = bytearray(1 << 20)
    places: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(name, path, target)
        if spec and spec.origin and name.startswith(tuple(f"transconv.{r}" for r in ROOMS)):
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        _Marker(str(Path(self.path).relative_to(TREE))).visit(tree)
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__ran__"] = Marked.ran
        super().exec_module(module)


class _Marker(ast.NodeTransformer):
    """Writes ``__ran__[n] = 1`` before each statement of a function, but its docstring."""

    def __init__(self, file: str) -> None:
        self.file, self.depth = file, 0

    def visit_FunctionDef(self, node: Any) -> Any:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody") if self.depth else ():
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                setattr(node, name, [s for each in inner for s in (*self.mark(each), each)])
        return node

    def mark(self, at: ast.stmt) -> list[ast.stmt]:
        if isinstance(at, ast.Expr) and isinstance(at.value, ast.Constant):
            return []
        Marked.places.append((self.file, at.lineno))
        made = ast.parse(f"__ran__[{len(Marked.places) - 1}] = 1").body
        return [ast.copy_location(s, at) for s in made]


class Recorder:
    """A plugin of pytest that runs some cases of each test, and takes its processor's time and what it
    executes. What an import or a collection executes is that of the test ``""``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.ran: dict[str, np.ndarray[Any, Any]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cases = defaultdict(list)
        for item in items:
            cases[item.nodeid.partition("[")[0]].append(item)
        items[:] = [
            each[i]
            for each in cases.values()
            for i in sorted({k * (len(each) - 1) // (CASES - 1) for k in range(CASES)})
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self.ran:
            self.take("")
        begun = time.process_time()
        result = yield
        self.seconds[item.nodeid] = round(time.process_time() - begun, 4)
        self.take(item.nodeid)
        return result

    def take(self, test: str) -> None:
        marks = np.frombuffer(Marked.ran, np.uint8)
        self.ran[test] = np.flatnonzero(marks).astype(np.int32)
        marks[:] = 0


def record(name: str, tests: Sequence[str]) -> None:
    """Runs tests of this folder's copy; leaves ``NAME.npz`` and ``NAME.json``."""
    sys.meta_path.insert(0, Marked)
    recorder = Recorder()
    pytest.main([*SELECTED, *tests], plugins=[recorder])
    save(name, recorder.seconds, recorder.ran, Marked.places)


def save(
    name: str,
    seconds: dict[str, float],
    ran: dict[str, np.ndarray[Any, Any]],
    places: list[tuple[str, int]],
) -> None:
    """``ran``: of each test the numbers of the places that it executes."""
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        ran=np.concatenate([np.zeros(0, np.int32), *ran.values()]),
        counts=[len(each) for each in ran.values()],
    )
    (FOLDER / f"{name}.json").write_text(
        json.dumps({"seconds": seconds, "tests": [*ran], "places": places})
    )


def groups(tree: Path) -> dict[str, list[str]]:
    """Test files by folder: those of one folder are recorded by one process."""
    found = defaultdict(list)
    for path in sorted((tree / "tests").rglob("test_*.py")):
        name = str(path.relative_to(tree))
        if not name.startswith(NOT_RUN):
            found[path.parent.name].append(name)
    return dict(found)


def record_all(wanted: Sequence[str]) -> None:
    """All folders of tests that were not recorded yet; or the folders and files that are named, again."""
    copy_project(TREE)
    if not (FOLDER / "sources").exists():
        shutil.copytree(
            TREE / "transconv",
            FOLDER / "sources" / "transconv",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    each = groups(TREE)
    asked = {name.replace("/", "-"): each.get(name, [name]) for name in wanted} or {
        name: tests for name, tests in each.items() if not (FOLDER / f"{name}.json").exists()
    }
    for name, tests in asked.items():
        path = os.pathsep.join([str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            [sys.executable, "-m", "tests.mutation.covering", "--one", name, *tests],
            cwd=TREE,
            env={**os.environ, "PYTHONPATH": path, "MUTATION": str(FOLDER)},
        )


# -- looking up ---------------------------------------------------------------------------------------


class Recorded:
    """What one process has recorded."""

    def __init__(self, path: Path) -> None:
        known = json.loads(path.read_text())
        self.seconds: dict[str, float] = known["seconds"]
        self.tests: list[str] = known["tests"]
        self.places: list[tuple[str, int]] = known["places"]
        arrays = np.load(path.with_suffix(".npz"))
        self.ran, counts = arrays["ran"], arrays["counts"]
        self.counts = dict(zip(self.tests, counts.tolist(), strict=True))
        self.test = np.repeat(np.arange(len(counts)), counts)

    def lines(self, file: str) -> Iterator[tuple[int, str]]:
        """The lines of a file, each with every test that executes it."""
        own = [i for i, (name, _) in enumerate(self.places) if name == file]
        for at in np.flatnonzero(np.isin(self.ran, own)):
            yield self.places[self.ran[at]][1], self.tests[self.test[at]]


class Covering:
    """What was recorded: the tests that execute a statement, and what each costs."""

    def __init__(self) -> None:
        files = sorted(FOLDER.glob("*.json"), key=lambda p: p.stat().st_mtime)
        self.recorded = [Recorded(path) for path in files]
        self.seconds: dict[str, float] = {}
        self.size: dict[str, int] = {}  # how many statements a test executes
        for each in self.recorded:
            self.seconds |= each.seconds
            self.size |= each.counts
        cases: dict[str, list[float]] = defaultdict(list)
        for test, seconds in self.seconds.items():
            cases[_function(test)].append(seconds)
        self.usual = {name: statistics.median(each) for name, each in cases.items()}
        self.lines = functools.cache(self._lines)
        self.places = functools.cache(self._places)

    def _lines(self, file: str) -> dict[int, set[str]]:
        found: dict[int, set[str]] = defaultdict(set)
        for each in self.recorded:
            for line, test in each.lines(file):
                found[line].add(test)
        return found

    def _places(self, file: str) -> Places:
        return Places((FOLDER / "sources" / file).read_text(), (PLANTED / file).read_text())

    def tests(self, file: str, line: int, known: Iterable[str]) -> tuple[list[str], bool]:
        """Of the tests that are known those that execute the statement of this line, the best first, and
        whether it is executed by an import, too. A statement outside of functions has the tests of all
        functions of the file; a file that only other processes execute has those of files that name it.
        Last come cases that were not recorded, of tests that execute the file."""
        places, lines = self.places(file), self.lines(file)
        found = set[str]().union(*(lines.get(n, ()) for n in places.recorded(line)))
        early = "" in found
        if not places.in_function(line):
            found, early = set[str]().union(*lines.values()), True
        if not any(lines.values()):
            found = self.tests_of_starters(file)
        near = {_function(test) for test in found}
        far = {_function(test) for each in lines.values() for test in each}
        cases = [t for t in known if t in found or (t not in self.seconds and _function(t) in near)]
        more = [t for t in known if t not in self.seconds and _function(t) in far - near]
        return self.ordered(cases) + self.ordered(more), early

    def tests_of_starters(self, file: str) -> set[str]:
        """The tests of files that name the module of this file as a word."""
        word = re.compile(rf"\b{Path(file).stem}\b")
        others = (
            path.relative_to(PLANTED).as_posix()
            for path in (PLANTED / "transconv").rglob("*.py")
            if word.search(path.read_text())
        )
        return set[str]().union(*(tests for name in others for tests in self.lines(name).values()))

    def taken(self, test: str) -> float:
        """The seconds of a test; of a case that was not recorded those of most that were."""
        if test not in self.seconds:
            return self.usual.get(_function(test), 1.0)
        return self.seconds[test] + 0.005

    def cost(self, test: str) -> float:
        """Seconds, times how much of the package the test executes."""
        return self.taken(test) * (self.size.get(test, 1000) + 100)

    def ordered(self, tests: Iterable[str]) -> list[str]:
        """Cheap and specific ones first; a case costs the more, the more cases of its test precede it."""
        cases: dict[str, int] = defaultdict(int)
        weighed = []
        for test in sorted(tests, key=lambda t: (t not in self.size, self.cost(t), t)):
            cases[_function(test)] += 1
            weighed.append((self.cost(test) * cases[_function(test)], test))
        return [test for _, test in sorted(weighed)]


def _function(test: str) -> str:
    return test.partition("[")[0]


class Places:
    """Where lines of a file's text were when it was recorded, and which of them make a statement."""

    def __init__(self, old: str, new: str) -> None:
        self.old: dict[int, int] = {}
        matched = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), False)
        for block in matched.get_matching_blocks():
            self.old |= {block.b + i + 1: block.a + i + 1 for i in range(block.size)}
        self.tree = ast.parse(new)

    def in_function(self, line: int) -> bool:
        for at in ast.walk(self.tree):
            if isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if at.body[0].lineno <= line <= (at.end_lineno or line):
                    return True
        return False

    def recorded(self, line: int) -> list[int]:
        """The lines of the innermost statement; where it is new, of the one before it."""
        return [self.old[n] for n in self.statement(line) if n in self.old] or [
            self.old[n] for n in range(line, 0, -1) if n in self.old
        ][:1]

    def statement(self, line: int) -> range:
        """Of a statement with others inside, the lines before these."""
        best = range(line, line + 1)
        for at in ast.walk(self.tree):
            last = getattr(at, "end_lineno", None) or 0
            if isinstance(at, ast.stmt) and at.lineno <= line <= last:
                inner = getattr(at, "body", None)
                end = inner[0].lineno if isinstance(inner, list) and inner else last + 1
                if at.lineno <= line < max(end, at.lineno + 1):
                    best = range(at.lineno, max(end, at.lineno + 1))
        return best


if __name__ == "__main__":
    from tests.mutation import covering  # the module that the marks are of has one name

    if sys.argv[1:2] == ["--one"]:
        covering.record(sys.argv[2], sys.argv[3:])
    else:
        covering.record_all(sys.argv[1:])
