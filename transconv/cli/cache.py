"""``cache``: the cached plans and kernels, packed into one file for other machines."""

from __future__ import annotations

import argparse
from pathlib import Path

from transconv import knobs, runtime
from transconv.cli import options, ranges
from transconv.target import Target, detect


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "cache", "pack the caches into a file, or unpack one",
        "info says what is kept for this version: plans, compiled kernels. pack writes it into a file,\n"
        "unpack puts a file's content into the caches of this user. What another version of transconv\n"
        "or Triton made is ignored with a line; a file that is damaged, or that others can write to, is\n"
        "refused.",
        ("cache info", "cache pack kernels.zip", "cache unpack kernels.zip --target sm_90"), run)
    made.add_argument("what", choices=("info", "pack", "unpack"))
    made.add_argument("file", nargs="?", type=ranges.output, metavar="FILE")
    made.add_argument("--target", default="", metavar="T",
                      help="unpack: only the files for this chip (default: the GPU at hand, or all)")


def run(words: argparse.Namespace) -> int:
    if (words.file is None) is not (words.what == "info"):
        raise ValueError(f"cache {words.what}: expected " + (
            "no file" if words.what == "info" else "the name of a file"))
    if words.what == "info":
        print(f"{knobs.cache()}: {runtime.info()}")
    elif words.what == "pack":
        print(f"{words.file}: {runtime.pack(Path(words.file))}")
    else:
        print(f"{words.file}: {runtime.unpack(Path(words.file), _chip(words.target))}")
    return 0


def _chip(name: str) -> str:
    """The chip to unpack for; empty: all."""
    found = Target.parse(name) if name else detect()
    return "" if found.backend == "interpreter" and not name else found.name
