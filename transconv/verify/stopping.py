"""Stops a long run cleanly on Ctrl-C or SIGTERM.

Whoever catches KeyboardInterrupt to say what was done so far ends with ``code`` of it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def code(stop: KeyboardInterrupt) -> int:
    """The exit code of a command that was stopped, as shells have it: 128 and the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated in the main thread."""
    try:
        before = signal.signal(signal.SIGTERM, _terminate)
    except ValueError:  # in another thread, which cannot say what signals do
        yield
        return
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that Python does not know
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, signals are blocked. A process that is started inside inherits this, and unblocks them
    itself (``leave_to_parent``)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """For a worker: ignore the signals. The parent handles them and kills its workers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
