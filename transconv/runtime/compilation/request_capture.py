"""Requests that are only recorded: those of a model, before its kernels are compiled."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transconv.runtime.compilation.plan_request import Batch, PlanRequest

_lock = threading.Lock()
_collected: dict[PlanRequest, Batch] | None = None


def collect(batch: Batch) -> None:
    """Record requests that belong together, while ``collecting`` does."""
    with _lock:
        if _collected is not None:
            for question in batch.questions:
                _collected.setdefault(question, batch)


def is_collecting() -> bool:
    """Whether questions are only noted at this moment (``collecting``)."""
    return _collected is not None


@contextmanager
def collecting() -> Iterator[dict[PlanRequest, Batch]]:
    """Within ``with``, record the requests of all threads, each with those it belongs to, and refuse them.
    RuntimeError if nested."""
    global _collected
    with _lock:
        if _collected is not None:
            raise RuntimeError("the calls of another model are being recorded; expected one at a time")
        _collected = {}
    try:
        yield _collected
    finally:
        _collected = None


def _forked() -> None:
    """After a fork, no thread is left that holds the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
