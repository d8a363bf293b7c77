"""The corpus: fuzzer trials that have failed, as lines in the files of the folder ``corpus``.

A file holds lines of convolutions (see fuzz/conv_trial.py) and of computations (see
fuzz/compute_trial.py), each after a comment that says what was wrong. Every run of the fuzzer begins with
them, and so does the test suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transconv.disk_cache import read_named
from transconv.errors import ProblemError, TransconvError
from transconv.verify.fuzz import trial_run

FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial and where it is written: ``pipeline.txt:12``."""

    place: str
    trial: Any


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that say a trial, and their numbers. Raises OSError."""
    for number, text in enumerate(read_named(path, "lines as fuzz --line takes them").splitlines(), 1):
        line = text.partition("#")[0].strip()
        if line:
            yield number, line


def read(path: Path, trial: Callable[[str], Any] = trial_run.read) -> Iterator[Entry]:
    """The trials of a file; ``trial``: reads a line. Raises ProblemError naming file and line, OSError."""
    for number, line in lines_of(path):
        try:
            yield Entry(f"{path.name}:{number}", trial(line))
        except (TransconvError, ValueError) as error:
            raise ProblemError(f"{path}:{number}: {error}") from error


def corpus() -> list[Entry]:
    """All trials of the corpus, in the order of file names and lines."""
    return [entry for path in sorted(FOLDER.glob("*.txt")) for entry in read(path)]
