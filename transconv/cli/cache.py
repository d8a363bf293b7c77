"""``cache``: the cached plans and kernels, packed into one file for other machines."""

from __future__ import annotations

import argparse
from pathlib import Path

from transconv import knobs, runtime
from transconv.cli.arguments import options, ranges
from transconv.target import Target, detect


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "cache", "pack the caches into a file, unpack one, or verify the plans",
        "info says what is kept for this version: plans, compiled kernels. pack writes it into a file,\n"
        "unpack puts a file's content into the caches of this user. What another version of transconv\n"
        "or Triton made is ignored with a line; a file that is damaged, or that others can write to, is\n"
        "refused, and one that was packed with another user's key needs the digest that pack printed.\n"
        "--verify makes all plans that are kept again, and exits with 1 if one differs.",
        ("cache info", "cache pack kernels.zip", "cache unpack kernels.zip --target sm_90",
         "cache --verify"), run)
    made.add_argument("what", nargs="?", choices=("info", "pack", "unpack"))
    made.add_argument("file", nargs="?", type=ranges.output, metavar="FILE")
    made.add_argument("--verify", action="store_true",
                      help="choose and lower each kept plan again, and list what differs")
    made.add_argument("--target", default="", metavar="T",
                      help="unpack: only the files for this chip (default: the GPU at hand, or all)")
    made.add_argument("--digest", default="", metavar="HEX",
                      help="unpack: the digest of a file that was packed with another key")


def run(words: argparse.Namespace) -> int:
    if words.what is None and not words.verify or words.what is not None and words.verify:
        raise ValueError("cache: expected one of info, pack, unpack, --verify")
    if (words.file is None) is not (words.what in ("info", None)):
        raise ValueError(f"cache {words.what}: expected " + (
            "no file" if words.what == "info" else "the name of a file"))
    if words.digest and words.what != "unpack":
        raise ValueError("cache: --digest is for unpack")
    if words.verify:
        found = runtime.compare()
        print(f"{knobs.cache()}: {found}")
        return 1 if found.wrong else 0
    if words.what == "info":
        print(f"{knobs.cache()}: {runtime.info()}")
    elif words.what == "pack":
        print(f"{words.file}: {runtime.pack(Path(words.file))}")
    else:
        print(f"{words.file}: "
              f"{runtime.unpack(Path(words.file), _chip(words.target), words.digest)}")
    return 0


def _chip(name: str) -> str:
    """The chip to unpack for; empty: all."""
    found = Target.parse(name) if name else detect()
    return "" if found.backend == "interpreter" and not name else found.name
