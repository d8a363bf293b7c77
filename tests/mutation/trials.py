"""Trials of mutants: a pytest that has imported and collected everything once, and forks for each mutant.

In the child the functions of the mutant's file get the mutant's code, and the tests that execute the line
run until one fails. The file in the copy of the project is the mutant's meanwhile, for programs that tests
start. What imports execute (tables, classes, what a collection computes) is tried by a fresh process. A
test that kills has to pass without the mutant, in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.covering import PLANTED, SELECTED, Covering
from tests.mutation.operators import Mutant

LIMIT_S = 60  # of the processor; others may use it meanwhile
WAIT_S = 15 * LIMIT_S
STAMPS = itertools.count(int(time.time()) - 2 * 10**8)  # times of files with mutants
FRESH_FILES = 12  # a process imports and collects them


@dataclass(frozen=True)
class Outcome:
    verdict: str  # killed, survived, timeout
    test: str = ""
    tests: int = 0
    seconds: float = 0.0


# -- code of a mutant in place of that of functions ---------------------------------------------------


def changed_code(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Functions whose code differs, outer ones first. Raises ValueError where a module's or a class's
    does."""
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    function = bool(old.co_flags & 0x2)  # fast locals: neither a module nor a class
    if function:
        if old != new:
            yield old, new
    elif [len(each) for each in inner] != [len(inner[0])] * 2 or _bare(old) != _bare(new):
        raise ValueError("not inside a function")
    for a, b in zip(*inner, strict=False):
        yield from changed_code(a, b)


def _bare(code: CodeType) -> CodeType:
    return code.replace(co_consts=tuple(None if isinstance(c, CodeType) else c for c in code.co_consts))


def live_functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """Functions of the package by the place where they are defined."""
    gc.unfreeze()
    found = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(str(PLANTED / "transconv")):
            found[_place(each.__code__)].append(each)
    gc.freeze()
    return dict(found)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


# -- trials -------------------------------------------------------------------------------------------


class Trials:
    """A plugin of pytest: instead of the tests it runs ``work``, which asks for outcomes of mutants."""

    def __init__(self, work: Callable[[Trials], None], budget: float) -> None:
        """``budget``: how long the tests for one mutant may take, in recorded seconds."""
        self.work, self.budget = work, budget
        self.covering = Covering()
        self.items: dict[str, pytest.Item] = {}
        self.unreliable: set[str] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.functions = live_functions()
        self.work(self)
        return True

    def has_tests(self, mutant: Mutant) -> bool:
        """Whether what the tests of the mutant's room execute was recorded."""
        room = mutant.file.split("/")[1]
        return not (PLANTED / "tests" / room).is_dir() or any(
            test.startswith(f"tests/{room}/") for test in self.covering.size
        )

    def outcome(self, mutant: Mutant) -> Outcome:
        begun = time.perf_counter()
        tests, early = self.covering.tests(mutant.file, mutant.line, self.items)
        tests = [t for t in tests if t not in self.unreliable]
        with _planted(mutant):
            verdict, test, count = "survived", "", 0
            found = self._code(mutant)
            if found is not None:
                verdict, test, count = self._tried(
                    self._chosen(tests), functools.partial(self._forked, found)
                )
            if found is None or (early and verdict == "survived"):
                chosen = self._chosen(tests, FRESH_FILES)
                verdict, test, more = self._tried(chosen, _fresh)
                count += more
        if test in self.items and self._forked([], [test])[0] != "survived":
            self.unreliable.add(test)
            return self.outcome(mutant)
        return Outcome(verdict, test, count, round(time.perf_counter() - begun, 1))

    def _chosen(self, tests: Sequence[str], files: int = 10**6) -> list[str]:
        chosen, seen, total = [], set[str](), 0.0
        for test in tests:
            file = test.partition("::")[0]
            cost = self.covering.taken(test)
            if total + cost <= self.budget and (file in seen or len(seen) < files):
                chosen.append(test)
                seen.add(file)
                total += cost
        return chosen

    def _tried(
        self, tests: list[str], run: Callable[[list[str]], tuple[str, str]]
    ) -> tuple[str, str, int]:
        verdict, test = run(tests) if tests else ("survived", "")
        return verdict, test, len(tests)

    def _code(self, mutant: Mutant) -> list[tuple[FunctionType, CodeType]] | None:
        """Functions and what they execute; None where the change is outside of functions."""
        path = str(PLANTED / mutant.file)
        old, new = (
            compile(text, path, "exec", dont_inherit=True) for text in (_original(mutant), mutant.text)
        )
        try:
            pairs = list(changed_code(old, new))
        except ValueError:
            return None
        found = [(f, b) for a, b in pairs for f in self.functions.get(_place(a), ()) if f.__code__ == a]
        if not found or any(f.__code__.co_freevars != b.co_freevars for f, b in found):
            return None
        return found

    def _forked(self, code: list[tuple[FunctionType, CodeType]], tests: list[str]) -> tuple[str, str]:
        """The verdict of the tests, and the one that failed."""
        read, write = os.pipe()
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            child = os.fork()
            if child == 0:
                os.close(read)
                self._child(code, tests, folder, write)
            os.close(write)
            said = _waited(child, read)
        if said is None:
            return "timeout", ""
        return ("killed", said) if said else ("survived", "")

    def _child(
        self, code: list[tuple[FunctionType, CodeType]], tests: list[str], folder: str, write: int
    ) -> None:
        """Never returns. Says ``+`` when all pass, else the test that fails; a crash says nothing."""
        now = "?"
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.environ |= _environment(folder)
            tempfile.tempdir = None
            for function, new in code:
                function.__code__ = new
            order = [self.items[t] for t in tests]
            for item, following in zip(order, [*order[1:], None], strict=True):
                now = item.nodeid
                os.write(write, f"{now}\n".encode())
                reports = runtestprotocol(item, log=False, nextitem=following)
                if any(report.failed for report in reports):
                    os.write(write, b"-\n")
                    os._exit(1)
            os.write(write, b"+\n")
        except BaseException:
            os.write(write, b"-\n")
        finally:
            os._exit(0)


def _waited(child: int, read: int) -> str | None:
    """The test that failed or crashed the child, "" when all passed, None when it took too long."""
    until, text = time.monotonic() + WAIT_S, b""
    while (left := until - time.monotonic()) > 0:
        if select.select([read], [], [], left)[0]:
            more = os.read(read, 1 << 16)
            text += more
            if not more or text.endswith((b"\n+\n", b"\n-\n")):
                break
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    lines = text.decode().splitlines()
    if lines[-1:] == ["+"]:
        return ""
    if left <= 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return None
    return next((line for line in reversed(lines) if line not in "+-"), "?")


def _environment(folder: str) -> dict[str, str]:
    return {
        "TMPDIR": folder,
        "TRANSCONV_CACHE": f"{folder}/cache",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/hypothesis",
    }


def _fresh(tests: list[str]) -> tuple[str, str]:
    """The same in a process that imports the mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        listed = Path(folder) / "tests"
        listed.write_text("\n".join(sorted(tests, key=lambda t: t.partition("::")[0])))
        environment = {**os.environ, **_environment(folder), "PYTHONPATH": str(PLANTED)}
        for name in ("TRANSCONV_CACHE", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        ran = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "--no-header",
                "--tb=no",
                "-rfE",
                *SELECTED,
                f"@{listed}",
            ],
            cwd=PLANTED,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = ran.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            out = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
        ran.wait()
    if out is None:
        return "timeout", ""
    if ran.returncode == 0:
        return "survived", ""
    said = [line.split(" ")[1] for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return "killed", said[0] if said else "?"


def _original(mutant: Mutant) -> str:
    return (PLANTED / mutant.file).with_suffix(".py.original").read_text()


@contextlib.contextmanager
def _planted(mutant: Mutant) -> Iterator[None]:
    """The mutant in its file. Each has a time of its own, by which Python tells what it has compiled."""
    path = PLANTED / mutant.file
    kept = path.with_suffix(".py.original")
    shutil.copy2(path, kept)
    try:
        path.write_text(mutant.text)
        os.utime(path, (stamp := next(STAMPS), stamp))
        yield
    finally:
        os.replace(kept, path)
