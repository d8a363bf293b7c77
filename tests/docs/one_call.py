"""The calls that docs/follow_one_call.md follows, traced: which functions of the package run in each.

``python -m tests.docs.one_call WHAT`` prints, of the functions that the page links to,

    tree     each below the one that called it, and in which of the calls it runs
    warm     every function of a repeated call on a GPU, and the text of those that are made of text
    keys     the keys under which the calls are cached

The calls are made in processes of their own with an empty cache folder: what is printed depends on the
sources alone. Without a GPU kernels run in Triton's interpreter; the call on a GPU is made for an H100 as
``bench/faked_launches.py`` makes it, its launch recorded in place of started.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

from tests import programs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "follow_one_call.md"
PACKAGE = f"{ROOT / 'transconv'}{os.sep}"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./(transconv/[\w./]+\.py)\)")
TEXT = "<string>"  # the file of functions that the package writes as text
# What is followed, each with its letter.
CALLS = {"first": "1", "anew": "n", "second": "2", "third": "3", "repeated": "r", "gpu": "g"}
REPEATS = 6  # after so many calls nothing changes
# A kernel's first result is checked on a GPU; in Triton's interpreter if this is asked for.
PROCESSES = ({"TRANSCONV_TRUST": "always"}, {}, {})
SETTINGS = {
    "TRITON_INTERPRET": "1",
    "TRANSCONV_TUNED": "0",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, order=True)
class Function:
    """A function of the package: its file below the root, and its name with its classes'."""

    file: str
    name: str

    def answers_to(self, label: str) -> bool:
        """Whether a link's label means it: its name, if need be behind that of its file."""
        return label in (self.name, f"{Path(self.file).stem}.{self.name}")


class Trace:
    """What ran in one call: every function once, in order, and the tree of those that are ``wanted``, each
    with the number of wanted ones above it."""

    def __init__(self, wanted: Callable[[Function], bool]) -> None:
        self.wanted = wanted
        self.ran: dict[Function, None] = {}
        self.tree: dict[tuple[int, Function], None] = {}
        self._above: list[bool] = []  # for each frame, whether it is wanted
        self._known: dict[CodeType, tuple[Function | None, bool]] = {}

    def of(self, call: Callable[[], object]) -> Trace:
        """Of a call, which is made."""
        sys.setprofile(self._profile)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            made, wanted = self._function(frame.f_code)
            if made is not None:
                self.ran.setdefault(made)
            if made is not None and wanted:
                self.tree.setdefault((sum(self._above), made))
            self._above.append(wanted)
        elif event == "return" and self._above:
            self._above.pop()

    def _function(self, code: CodeType) -> tuple[Function | None, bool]:
        if code not in self._known:
            made, name = None, code.co_qualname
            if code.co_filename.startswith(PACKAGE):
                made = Function(str(Path(code.co_filename).relative_to(ROOT)), name)
            elif code.co_filename == TEXT and name.startswith(("make", "made")):
                made = Function(TEXT, name.rpartition(".")[2])
            self._known[code] = made, made is not None and self.wanted(made)
        return self._known[code]

    def content(self) -> dict[str, Any]:
        return {
            "ran": [astuple(f) for f in self.ran],
            "tree": [(depth, astuple(f)) for depth, f in self.tree],
        }


def labels(page: str) -> list[str]:
    """The names of functions that a page links to, in their order, each once."""
    return list(dict.fromkeys(m[1] for m in LINK.finditer(page)))


# -- the processes that call --------------------------------------------------------------------------


def follow(process: int) -> dict[str, Any]:
    """What one of the processes does: the traces of its calls, and what else is shown of them."""
    import torch

    import transconv

    names = labels(PAGE.read_text("utf-8"))
    x, w = torch.ones(1, 16, 6, 6), torch.ones(16, 16, 3, 3)

    def call() -> object:
        return transconv.conv2d(x, w, padding=1)

    def traced() -> dict[str, Any]:
        return Trace(lambda f: any(f.answers_to(n) for n in names)).of(call).content()

    transconv.config.cpu = "interpret"
    if process == 1:
        return {"anew": traced()}
    if process == 2:
        return _on_gpu(call, traced)
    found = {"first": traced(), "second": traced(), "third": traced()}
    for _ in range(REPEATS):
        call()
    return {**found, "repeated": traced(), "keys": _keys()}


def _on_gpu(call: Callable[[], object], traced: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A repeated call as on a GPU, with the texts that the functions in it are made of."""
    import transconv
    from bench.faked_launches import as_on_gpu
    from transconv.calls import guard
    from transconv.support import defined, python_functions

    texts: list[str] = []

    def noted(text: str, name: str) -> Any:
        texts.append(text)
        return defined(text, name)

    written = patch.object(python_functions, "defined", noted)
    with as_on_gpu(), patch.object(guard, "defined", noted), written:
        transconv.config.sizes = "exact"
        for _ in range(REPEATS):
            call()
        return {"gpu": traced(), "texts": texts}


def _keys() -> list[str]:
    """The keys of this process's caches, and how many records of each kind are on the disk."""
    from transconv.calls import route_cache
    from transconv.support import Cache
    from transconv.torch_ops.calls import call_attributes, call_entries

    found: list[tuple[str, Any]] = [
        ("call_attributes._requests", call_attributes._requests),
        ("route_cache.routes", route_cache.routes),
        *(("plans", c) for c in Cache.every if c.name == "plans"),
        ("call_entries.CALLS", ["id(weight)" for _ in call_entries.CALLS.entries]),
    ]
    kinds = sorted(p for p in Path(os.environ["TRANSCONV_CACHE"]).iterdir() if p.is_dir())
    return [f"{name:25}  {', '.join(_told(key))}" for name, keys in found for key in keys] + [
        f"{'on disk':25}  {', '.join(p.name.rpartition('-')[0] for p in kinds if any(p.iterdir()))}"
    ]


def _told(key: Any) -> Iterator[str]:
    """The parts of a key, each short."""
    for part in key if type(key) is tuple else (key,):
        if type(part).__name__ in ("ConvFunction", "Target", "CallAttributes"):
            yield str(part.name)
        elif type(part) in (type, tuple) or not isinstance(part, (int, tuple)):
            yield part.__name__ if isinstance(part, type) else str(part)
        else:
            yield str(tuple(part)) if isinstance(part, tuple) else str(part)


@functools.cache
def followed() -> dict[str, Any]:
    """What all processes found."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for process, more in enumerate(PROCESSES):
            environment = {k: v for k, v in os.environ.items() if not k.startswith("TRANSCONV_")}
            environment |= {
                **SETTINGS,
                **more,
                "TRANSCONV_CACHE": f"{folder}/{process // 2}",
                "TRANSCONV_KEY": f"{folder}/key",
                "PYTHONPATH": str(ROOT),
            }
            words = ["-m", "tests.docs.one_call", f"--process={process}"]
            done = programs.run(words, cwd=ROOT, env=environment)
            if done.returncode:
                raise RuntimeError(done.stderr[-3000:])
            found |= json.loads(done.stdout.splitlines()[-1])
    return found


# -- what is printed ----------------------------------------------------------------------------------


def ran(call: str) -> list[Function]:
    """The functions that run in a call, in the order in which they first do."""
    return [Function(*f) for f in followed()[call]["ran"]]


@functools.cache
def meant(label: str) -> Function:
    """The one function that a label names. Raises LookupError if no call runs one, or several."""
    found = {f for call in CALLS for f in ran(call) if f.answers_to(label)}
    if len(found) != 1:
        raise LookupError(f"{label} is {', '.join(map(str, sorted(found))) or 'no function that runs'}")
    return found.pop()


def tree() -> str:
    """The functions of the page below their callers: the letters of the calls in which each runs, dots for
    the others, its name, its file."""
    names, runs = {meant(n): n for n in labels(PAGE.read_text("utf-8"))}, {c: set(ran(c)) for c in CALLS}
    found: dict[Function, int] = {}  # as deep as it is where it first runs
    for call in CALLS:
        for depth, f in followed()[call]["tree"]:
            found.setdefault(Function(*f), depth)
    rows = [
        (
            "".join(letter if f in runs[call] else "." for call, letter in CALLS.items()),
            "  " * depth + names[f],
            f.file.removeprefix("transconv/"),
        )
        for f, depth in found.items()
    ]
    wide = max(len(name) for _, name, _ in rows)
    return "\n".join(f"{letters}  {name:{wide}}  {file}" for letters, name, file in rows)


def warm() -> str:
    """The functions of a repeated call on a GPU, each with its file or its text."""
    lines: list[str] = []
    for f in ran("gpu"):
        if f.file != TEXT:
            lines.append(f"{f.name}  {f.file.removeprefix('transconv/')}")
            continue
        text = next(t for t in reversed(followed()["texts"]) if f"def {f.name}(" in t)
        for line in [f"{f.name}  of text", *text.splitlines()]:
            lines += textwrap.wrap(line, 100, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 8))
    return "\n".join(lines)


def keys() -> str:
    return "\n".join(
        line
        for found in followed()["keys"]
        for line in textwrap.wrap(found, 100, subsequent_indent=" " * 20)
    )


PRINTED = {"tree": tree, "warm": warm, "keys": keys}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.one_call",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=PRINTED, default="tree")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    print(json.dumps(follow(given.process)) if given.process is not None else PRINTED[given.what]())


if __name__ == "__main__":
    main()
