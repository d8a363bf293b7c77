"""Beside the compiler. What is known of generated kernels, right or wrong, by their text.

A verdict lives in memory and in a small JSON file in the cache, in a folder that only the user can
write to. A file that cannot be read, or speaks of something else, counts as no verdict.
"""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.metadata import PackageNotFoundError, version

from transconv import knobs
from transconv.backend_triton.module import cache_directory, replace_text

SCHEMA = 1
RIGHT, WRONG = "right", "wrong"
LONGEST = 1 << 16  # characters of a file that can be ours

_known: dict[str, str] = {}  # by digest; "": nothing on disk either
_proved: set[str] = set()  # found right by this process itself


@functools.cache
def triton_version() -> str:
    """Of the installed Triton, without importing it; empty where there is none."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def digest(source: str, machine: str) -> str:
    """The key of a kernel: its text, what it is compiled for, and by which Triton."""
    text = f"{SCHEMA}\n{triton_version()}\n{machine}\n{source}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def variant(key: str, aligned: bool) -> str:
    """Triton compiles one text twice: for tensors at multiples of 16 bytes, and for others."""
    return key if aligned else f"{key}-unaligned"


def is_wrong(key: str) -> bool:
    """Whether a kernel, in either variant, gave a wrong result once."""
    return knobs.trust() != "never" and any(
        look_up(variant(key, aligned)) == WRONG for aligned in (True, False))


def is_right(key: str, aligned: bool) -> bool:
    """Whether a kernel needs no check any more; with TRANSCONV_TRUST=always only what this process
    has checked itself."""
    name = variant(key, aligned)
    return name in _proved if knobs.trust() == "always" else look_up(name) == RIGHT


def look_up(name: str) -> str:
    """``right``, ``wrong``, or empty: from memory, else from disk."""
    found = _known.get(name)
    if found is None:
        found = _known[name] = _read(name)
    return found


def record(name: str, verdict: str, keep: bool = True, **about: str) -> None:
    """Remember a verdict, and with ``keep`` also for other processes; ``about`` is for people."""
    _known[name] = verdict
    if verdict == RIGHT:
        _proved.add(name)
    folder = cache_directory("verdicts") if keep else None
    if folder is None:
        return
    content = {"schema": SCHEMA, "kernel": name, "verdict": verdict, "triton": triton_version(),
               **about}
    try:
        replace_text(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")
    except OSError:
        pass  # a full or read-only disk: the next process checks again


def _read(name: str) -> str:
    folder = cache_directory("verdicts")
    if folder is None:
        return ""
    path = folder / f"{name}.json"
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LONGEST:
            return ""
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    expected = {"schema": SCHEMA, "kernel": name, "triton": triton_version()}
    if not isinstance(found, dict) or any(found.get(k) != v for k, v in expected.items()):
        return ""
    return next((word for word in (RIGHT, WRONG) if found.get("verdict") == word), "")


def forget() -> None:
    """Drop what is in memory; files stay."""
    _known.clear()
    _proved.clear()
