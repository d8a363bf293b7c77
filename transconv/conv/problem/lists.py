"""Lists of problems: parses benchdnn batch files, whose options apply to the problems after them.

A token is an option or a descriptor. An option lists alternatives; a descriptor yields one problem for
each combination of the current alternatives of all options. ``#`` starts a comment, a trailing backslash
joins a token with the next one, ``--batch=FILE`` reads another file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from transconv.conv.problem.conv_problem import ConvProblem, Prop
from transconv.conv.problem.descriptor import parse_descriptor
from transconv.support import ProblemError, read_named

T = TypeVar("T")
Source = str | Path | Iterable[str]

DIRECTIONS: dict[str, Prop | None] = {
    "": None, "FWD_D": Prop.FWD, "FWD_B": Prop.FWD, "FWD_I": Prop.FWD, "BWD_D": Prop.BWD_D,
    "BWD_W": Prop.BWD_W, "BWD_WB": Prop.BWD_W,
}
MAX_NESTING = 16
OPEN = (",", "+", ":", "=")  # what no token ends with


def _direction(word: str) -> Prop | None:
    word = word.upper()  # oneDNN's files have both
    if word not in DIRECTIONS:
        raise ProblemError(f"direction '{word}' is unknown; "
                           f"expected one of {' '.join(filter(None, DIRECTIONS))}")
    return DIRECTIONS[word]


def _minibatch(word: str) -> int:
    if not (word or "0").isdecimal():
        raise ProblemError(f"minibatch '{word}' is no number; expected --mb=N, 0 for its own")
    return int(word or "0")


# The parser of one alternative of each option; an empty text gives the default. Problems of a descriptor
# vary the first option slowest.
OPTIONS: dict[str, Callable[[str], Any]] = {
    "dir": _direction, "dt": lambda word: word or "f32", "stag": str, "wtag": str, "dtag": str,
    "mb": _minibatch,
}


@dataclass(slots=True)
class State:
    """The current alternatives of every option."""

    options: dict[str, list[Any]]

    @staticmethod
    def initial() -> State:
        return State({option: [read("")] for option, read in OPTIONS.items()})

    def set(self, option: str, value: str) -> None:
        """Set one option. Raises ProblemError for an unknown option or a bad value."""
        if option == "reset":
            self.options = State.initial().options
        elif option in OPTIONS:
            self.options[option] = [OPTIONS[option](word) for word in value.split(",")]
        else:
            raise ProblemError(f"option '--{option}' is unknown; expected one of "
                               f"{' '.join('--' + name for name in ('batch', 'reset', *OPTIONS))}")

    def problems(self, text: str) -> Iterator[tuple[ConvProblem, Prop | None]]:
        """The problems of one descriptor: the product of the alternatives."""
        shape = parse_descriptor(text)
        for values in itertools.product(*self.options.values()):
            now = dict(zip(self.options, values, strict=True))
            sized = replace(shape, mb=now["mb"] or shape.mb)
            tags = tuple(now[option] for option in ("stag", "wtag", "dtag"))
            yield (ConvProblem.of_descriptor(sized, now["dt"], tags if any(tags) else "nchw"),
                   now["dir"])


def iter_problems(source: Source) -> Iterator[tuple[ConvProblem, Prop | None]]:
    """Yield (problem, direction) of a batch file or of its lines; the direction is None without ``--dir``.
    Raises ProblemError naming file and line, OSError for a missing file."""
    state = State.initial()
    return walk(source, state.set, lambda text, where: state.problems(text))


def read_problems(source: Source, *, prop: Prop | None = None) -> list[ConvProblem]:
    """The problems of a batch file or of its lines, in order. With ``prop``, only those that run in
    this direction (a list without ``--dir`` runs in all)."""
    return [p for p, way in iter_problems(source) if prop in (None, way) or way is None]


def walk(source: Source, option: Callable[[str, str], None],
         descriptor: Callable[[str, str], Iterable[T]], depth: int = 0) -> Iterator[T]:
    """Read a batch file, or lines, and the files that they name: call ``option(name, value)`` for each
    option, and yield from ``descriptor(text, where)`` for each descriptor. Raises ProblemError naming file
    and line."""
    path, lines = (None, source) if not isinstance(source, (str, Path)) else _open(source)
    for number, token in _tokens(lines):
        yield from take(token, option, descriptor, path, f"{path or 'list'}:{number}", depth)


def take(token: str, option: Callable[[str, str], None],
         descriptor: Callable[[str, str], Iterable[T]], path: Path | None, where: str,
         depth: int = 0) -> Iterator[T]:
    """One token of a batch, read in the file ``path`` at ``where``. See ``walk``."""
    name, _, value = token.removeprefix("--").partition("=")
    if name == "batch" and token.startswith("--"):
        if depth >= MAX_NESTING:
            raise ProblemError(f"{path}: batch files are nested {depth + 1} deep; expected no cycle")
        yield from walk(path.parent / value if path else Path(value), option, descriptor, depth + 1)
        return
    try:
        if token.startswith("--"):
            option(name, value)
        else:
            yield from descriptor(token, where)
    except ProblemError as error:
        raise ProblemError(f"{where}: {error}") from error


def _open(source: str | Path) -> tuple[Path, list[str]]:
    path = Path(source)
    try:
        return path, read_named(path, "a benchdnn batch file").splitlines()
    except ValueError as error:
        raise ProblemError(str(error)) from error


def _tokens(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Tokens with their line numbers, without comments; tokens that end in a backslash are joined with the
    next, and so are those before one that are not at their end."""
    glued = ""
    last: list[tuple[int, str]] = []
    number = 0
    for number, line in enumerate(lines, start=1):
        for word in line.split():
            if word.startswith("#"):
                break
            if word == "\\" and last and last[0][1].endswith(OPEN):
                glued = last.pop()[1]
            elif word.endswith("\\"):
                glued += word[:-1]
            else:
                yield from last
                last, glued = [(number, glued + word)], ""
    yield from last
    if glued:
        yield number, glued
