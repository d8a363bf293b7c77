"""Which tests execute a line of the package: recorded once by coverage.py, and read for each mutant.

``python -m tests.mutation.covering [FOLDER or FILE ..]`` records in a copy of the project, a process for
each, and leaves in ``build/mutation`` the lines of each test, its seconds, and the sources as they were. A
line that has been moved since is looked up where it was; one that is new has the tests of the one before.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("MUTATION", ROOT / "build" / "mutation"))
TREE = FOLDER / "tree"
# Tests of other things than numbers and kernels, or of several processes.
NOT_RUN = ("tests/docs", "tests/bench", "tests/report", "tests/gpu", "tests/distributed",
           "tests/test_release.py", "tests/test_readme.py", "tests/verify/test_mutants.py",
           "tests/mutation")
ROOMS = ("ir", "simplify", "compute", "conv", "passes", "backend_triton", "graph", "kernel", "functional",
         "torch_ops", "runtime")
SELECTED = ("-q", "-m", "not gpu and not slow", "-p", "no:cacheprovider",
            *(f"--ignore={path}" for path in NOT_RUN))


def copy_tree() -> None:
    """The files of the project, without those that git ignores, in a folder where mutants are planted."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.splitlines()
    wanted = {name for name in listed if (ROOT / name).is_file()}
    for old in TREE.rglob("*"):
        name = str(old.relative_to(TREE))
        if old.suffix == ".py" and name not in wanted:
            old.unlink(missing_ok=True)
    for name in wanted:
        source, target = ROOT / name, TREE / name
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


# -- recording, in a process of its own ---------------------------------------------------------------


class Recorder:
    """A plugin of pytest that tells coverage.py which test runs, and takes its time."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        begun = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = round(time.perf_counter() - begun, 4)
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def record(name: str, tests: Sequence[str]) -> None:
    """Runs tests of this folder's copy under coverage.py; leaves ``NAME.coverage`` and ``NAME.json``."""
    import coverage

    measured = coverage.Coverage(data_file=str(FOLDER / f"{name}.coverage"),
                                 include=[f"{TREE}/transconv/{room}/*" for room in (*ROOMS, "verify")])
    measured.erase()
    measured.start()
    recorder = Recorder(measured)
    pytest.main([*SELECTED, *tests], plugins=[recorder])
    measured.stop()
    measured.save()
    (FOLDER / f"{name}.json").write_text(json.dumps({
        "seconds": recorder.seconds, "failed": sorted(recorder.failed)}))


def groups() -> dict[str, list[str]]:
    """Test files by folder: those of one folder are recorded by one process."""
    found = defaultdict(list)
    for path in sorted((TREE / "tests").rglob("test_*.py")):
        name = str(path.relative_to(TREE))
        if not name.startswith(NOT_RUN):
            found[path.parent.name].append(name)
    return dict(found)


def record_all(wanted: Sequence[str]) -> None:
    """All folders of tests that were not recorded yet; or the folders and files that are named, again."""
    copy_tree()
    if not (FOLDER / "sources").exists():
        shutil.copytree(TREE / "transconv", FOLDER / "sources" / "transconv",
                        ignore=shutil.ignore_patterns("__pycache__"))
    each = groups()
    asked = {name.replace("/", "-"): each.get(name, [name]) for name in wanted} or {
        name: tests for name, tests in each.items() if not (FOLDER / f"{name}.json").exists()}
    for name, tests in asked.items():
        path = os.pathsep.join([str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run([sys.executable, "-m", "tests.mutation.covering", "--one", name, *tests],
                       cwd=TREE, env={**os.environ, "PYTHONPATH": path, "MUTATION": str(FOLDER)})


# -- looking up ---------------------------------------------------------------------------------------


class Covering:
    """What was recorded: the tests that execute a statement, and what each costs."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.files: dict[str, int] = defaultdict(int)
        self.data = []
        self.contexts = functools.cache(self._contexts)
        self.places = functools.cache(self._places)
        for path in sorted(FOLDER.glob("*.json"), key=lambda p: p.stat().st_mtime):
            known = json.loads(path.read_text())
            self.seconds |= known["seconds"]
            self.failed = self.failed - known["seconds"].keys() | set(known["failed"])
            data = CoverageData(str(path.with_suffix(".coverage")))
            data.read()
            self.data.append(data)
            with sqlite3.connect(path.with_suffix(".coverage")) as lines:
                self.files |= dict(lines.execute(
                    "select c.context, count(distinct l.file_id) from line_bits l "
                    "join context c on c.id = l.context_id group by l.context_id"))

    def _contexts(self, file: str) -> dict[int, set[str]]:
        """The tests of each line of the file as it was recorded; "" is an import or a collection."""
        found: dict[int, set[str]] = defaultdict(set)
        for data in self.data:
            for line, contexts in data.contexts_by_lineno(str(TREE / file)).items():
                found[line].update(contexts)
        return found

    def _places(self, file: str) -> Places:
        return Places((FOLDER / "sources" / file).read_text(), (TREE / file).read_text())

    def tests(self, file: str, line: int) -> tuple[list[str], bool]:
        """The tests that execute the statement of this line, the best first, and whether it is
        executed by an import, too. A statement outside of functions has the tests of all functions."""
        places, contexts = self.places(file), self.contexts(file)
        lines = places.recorded(line)
        found = set().union(*(contexts.get(n, ()) for n in lines))
        early = "" in found
        if not places.in_function(line):
            found, early = set().union(*contexts.values()), True
        return self.ordered(found - {""} - self.failed), early

    def cost(self, test: str) -> float:
        """Seconds, times how many files of the package the test executes."""
        return (self.seconds.get(test, 0.0) + 0.005) * (self.files.get(test, 0) + 5)

    def ordered(self, tests: Iterable[str]) -> list[str]:
        """Cheap and specific ones first; of the cases of one test function first one, then two, .."""
        cases: dict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda t: (self.cost(t), t)):
            cases[test.partition("[")[0]].append(test)
        functions = sorted(cases.values(), key=lambda each: self.cost(each[0]))
        rounds = [[t for each in functions for t in each[2**r - 1:2**(r + 1) - 1]] for r in range(13)]
        return [test for each in rounds for test in each]


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
            if isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                first = at.body if isinstance(at, ast.Lambda) else at.body[0]
                if first.lineno <= line <= (at.end_lineno or line):
                    return True
        return False

    def recorded(self, line: int) -> list[int]:
        """The lines of the innermost statement; where it is new, of the one before it."""
        return [self.old[n] for n in self.statement(line) if n in self.old] or [
            self.old[n] for n in range(line, 0, -1) if n in self.old][:1]

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
    if sys.argv[1:2] == ["--one"]:
        record(sys.argv[2], sys.argv[3:])
    else:
        record_all(sys.argv[1:])
