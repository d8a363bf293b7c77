"""Argument types of the command line: numbers in a range, words of a list, files that can be written.

Each is for ``type=`` of an option: it returns the value, or raises ArgumentTypeError, one line that
argparse prints with the option's name."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from transconv.support import why_unwritable

LARGEST = 2**63 - 1
PROCESSES = 1024  # more are a mistake


def at_least(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """An integer that is not smaller, and not larger than ``most``."""

    def whole(text: str) -> int:
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdecimal() and len(digits) < 30 and least <= int(text) <= most:
            return int(text)
        upto = f" to {most}" if most < LARGEST else ""
        raise ArgumentTypeError(f"'{text}' is no whole number from {least}{upto}")

    return whole


def number(legal: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """A legal number; ``expected``: which are, in words."""

    def read(text: str) -> float:
        with suppress(ValueError):
            if legal(found := float(text)):
                return found
        raise ArgumentTypeError(f"'{text}' is no number {expected}")

    return read


def _above_0(unit: str) -> Callable[[str], float]:
    return number(lambda n: 0 < n <= 1e6, f"of {unit} above 0, at most 1e+06")


processes = at_least(1, PROCESSES)
limit, milliseconds, gigabytes = map(_above_0, ("seconds", "milliseconds", "gigabytes"))
seconds = number(lambda n: n >= 0, "of seconds from 0")  # or endless (``inf``)
fraction = number(lambda n: 0 <= n <= 1, "from 0 to 1")


def part(text: str) -> tuple[int, int]:
    """``I/N``, the I-th of N parts, counted from 0."""
    first, _, parts = text.partition("/")
    try:
        count = at_least(1)(parts)
        return at_least(0, count - 1)(first), count
    except ArgumentTypeError:
        raise ArgumentTypeError(f"'{text}' is no I/N with I from 0 to N-1") from None


def some_of(*legal: str) -> Callable[[str], str]:
    """Some of these words, joined by commas."""

    def words(text: str) -> str:
        if unknown := [w for w in text.split(",") if w not in legal]:
            raise ArgumentTypeError(f"'{unknown[0]}' is none of {', '.join(legal)}")
        return text

    return words


def output(text: str) -> Path:
    """A file to write; whether it can be written is checked before the work begins."""
    path = Path(text)
    if not text or (reason := why_unwritable(path)):
        raise ArgumentTypeError(f"'{text}' cannot be written: {reason if text else 'it has no name'}")
    return path


def folder(text: str) -> Path:
    """A folder to write files in, made at the first file."""
    path = Path(text)
    reason = "it is a file" if path.exists() and not path.is_dir() else why_unwritable(path / "x")
    if reason:
        raise ArgumentTypeError(f"no file can be written in '{text}': {reason}")
    return path
