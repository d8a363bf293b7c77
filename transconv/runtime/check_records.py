"""Verdicts on generated kernels, right or wrong, keyed by their text.

Verdicts are in memory and on the disk (see ``support/records.py``). An unreadable record, or one of
another version of Triton, is no verdict. A record on disk that a kernel is wrong is never overwritten.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from transconv.support import Cache, Content, Drawer, knobs, triton_version

SCHEMA = 2
RIGHT, WRONG = "right", "wrong"
DRAWER = Drawer("verdicts", SCHEMA, longest=1 << 16)


class KnownVerdict(NamedTuple):
    """A verdict, empty where there is none on disk either, and whether this process found it."""

    verdict: str
    own: bool = False


_known: Cache[str, KnownVerdict] = Cache("verdicts")  # by digest


def digest(source: str, machine: str) -> str:
    """The key of a kernel: a digest of its text, the target with its options, and Triton's version."""
    text = f"{SCHEMA}\n{triton_version()}\n{machine}\n{source}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def variant(key: str, aligned: bool) -> str:
    """The key for an alignment: Triton compiles one text separately for tensors at multiples of 16 bytes
    (``aligned``) and for others."""
    return key if aligned else f"{key}-unaligned"


def is_wrong(key: str) -> bool:
    """Whether a kernel, in either variant, is known to be wrong; False with TRANSCONV_TRUST=never."""
    return knobs.trust() != "never" and any(
        look_up(variant(key, aligned)) == WRONG for aligned in (True, False)
    )


def is_right(key: str, aligned: bool) -> bool:
    """Whether a kernel needs no further check; with TRANSCONV_TRUST=always only what this process
    has checked itself."""
    name = variant(key, aligned)
    if knobs.trust() == "always":
        return _known.get(name) == KnownVerdict(RIGHT, own=True)
    return look_up(name) == RIGHT


def look_up(name: str) -> str:
    """``right``, ``wrong``, or empty: from memory, else from disk."""
    found = _known.get(name) or _known.keep(name, KnownVerdict(_read(name)))
    return found.verdict


def record(name: str, verdict: str, keep: bool = True, **about: str) -> None:
    """Record a verdict in memory, and with ``keep`` on disk; ``about`` is for readers of the record."""
    _known[name] = KnownVerdict(verdict, own=True)
    if keep:
        news = {**about, "verdict": verdict, "triton": triton_version()}
        DRAWER.update(
            name, lambda old: old if old and _verdict(old) == WRONG else news, lasting=verdict == WRONG
        )  # what was right is checked again


def _read(name: str) -> str:
    found = DRAWER.get(name)
    return _verdict(found) if found else ""


def _verdict(content: Content) -> str:
    if content.get("triton") != triton_version():
        return ""
    return next((word for word in (RIGHT, WRONG) if content.get("verdict") == word), "")


def forget() -> None:
    """Clear the verdicts in memory; records on disk stay."""
    _known.forget()


def proved() -> tuple[str, ...]:
    """The kernels that this process found correct."""
    return tuple(name for name, known in _known.items() if known == KnownVerdict(RIGHT, own=True))
