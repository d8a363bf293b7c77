"""Records of the checks of generated kernels, by a digest of their text: verdicts, right or wrong, and how
much memory a thread needs for values that have no register.

Verdicts are in memory and on the disk (see ``support/records.py``). An unreadable record, or one of
another version of Triton, is no verdict. A record on disk that a kernel is wrong is never overwritten."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from transconv.support import Cache, Content, Drawer, knobs, triton_version

SCHEMA = 2
RIGHT, WRONG = "right", "wrong"
DRAWER = Drawer("verdicts", SCHEMA, longest=1 << 16)
SPILLS = Drawer("spills", 1, longest=1 << 10, lasting=False)
ALLOWED = 256  # bytes: three kernels that spill 1.5 KB and more took 4 to 73 times their estimates (H200)
MOST_SPILT = 4  # kernels of one computation that spill, the best of which is taken


class KnownVerdict(NamedTuple):
    """A verdict, empty where there is none on disk either, and whether this process found it."""

    verdict: str
    own: bool = False


class _Known(NamedTuple):
    """What this process has read or found, by digest."""

    verdicts: Cache[str, KnownVerdict]
    spills: Cache[str, int]


_known = _Known(Cache("verdicts"), Cache("spills"))


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
        return _known.verdicts.get(name) == KnownVerdict(RIGHT, own=True)
    return look_up(name) == RIGHT


def look_up(name: str) -> str:
    """``right``, ``wrong``, or empty: from memory, else from disk."""
    found = _known.verdicts.get(name) or _known.verdicts.keep(name, KnownVerdict(_read(name)))
    return found.verdict


def record(name: str, verdict: str, keep: bool = True, **about: str) -> None:
    """Record a verdict in memory, and with ``keep`` on disk; ``about`` is for readers of the record."""
    _known.verdicts[name] = KnownVerdict(verdict, own=True)
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


def spilled(key: str) -> int:
    """Bytes of memory that a thread of a kernel needs beyond its registers, if they are more than
    ``ALLOWED``; 0 where they are not, or where it was not compiled yet."""
    found = _known.spills.get(key)
    if found is None:
        kept = SPILLS.get(key) or {}
        size = kept.get("bytes") if kept.get("triton") == triton_version() else 0
        found = _known.spills.keep(key, size if isinstance(size, int) else 0)
    return found


def is_passed_over(keys: Iterable[str], rejected: int, tuned: bool) -> bool:
    """Whether another plan than one with these kernels is to be tried, as one spills. ``rejected``: how
    many were tried before; ``tuned``: whether this one was measured."""
    return not tuned and rejected < MOST_SPILT and any(map(spilled, keys))


def note_spills(key: str, size: int) -> None:
    """Record that a kernel needs so many bytes, in memory and on disk."""
    if size > ALLOWED and spilled(key) < size:
        _known.spills[key] = size
        SPILLS.put(key, {"bytes": size, "triton": triton_version()})


def forget() -> None:
    """Clear what is known in memory; records on disk stay."""
    for kept in _known:
        kept.forget()


def proved() -> tuple[str, ...]:
    """The kernels that this process found correct."""
    return tuple(name for name, known in _known.verdicts.items() if known == KnownVerdict(RIGHT, own=True))
