"""``words``: what the words of a schedule mean."""

from __future__ import annotations

import argparse

from transconv.cli.arguments import options
from transconv.errors import ScheduleError, nearest
from transconv.schedule import words


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "words", "explain the words of a schedule",
        "Prints each word of a schedule with its default, its values and its meaning.",
        ("words", "words split_k reduce"), show)
    made.add_argument("word", nargs="*", help="the words to print; default: all")


def show(given: argparse.Namespace) -> int:
    known = {w.name: w for w in words()}
    if unknown := [name for name in given.word if name not in known]:
        raise ScheduleError(f"there is no word '{unknown[0]}'; expected some of {' '.join(known)}"
                            f"{nearest(unknown[0], known)}")
    for name in given.word or known:
        word = known[name]
        default = f"default {word.default}" if word.default != "" else "default: none"
        print(f"{name:<9} {word.expected} ({default})\n          {word.says}")
    return 0
