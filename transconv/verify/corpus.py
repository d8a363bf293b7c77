"""The corpus: fuzzer trials that have failed, as lines in the files of the folder ``corpus``.

A file holds lines of convolutions (see fuzz_trial.py) and of computations (see fuzz_compute.py), each
after a comment that says what was wrong. Every run of the fuzzer begins with them, and so does the test
suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transconv.disk_cache import read_named
from transconv.errors import ProblemError, TransconvError
from transconv.verify import trials

FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial and where it is written: ``pipeline.txt:12``."""

    place: str
    trial: trials.Either


def read(path: Path) -> Iterator[Entry]:
    """The trials of a file. Raises ProblemError naming file and line, OSError."""
    for number, text in enumerate(read_named(path, "lines as fuzz --line takes them").splitlines(), 1):
        line = text.partition("#")[0].strip()
        if line:
            try:
                yield Entry(f"{path.name}:{number}", trials.read(line))
            except (TransconvError, ValueError) as error:
                raise ProblemError(f"{path}:{number}: {error}") from error


def corpus() -> list[Entry]:
    """All trials of the corpus, in the order of file names and lines."""
    return [entry for path in sorted(FOLDER.glob("*.txt")) for entry in read(path)]
