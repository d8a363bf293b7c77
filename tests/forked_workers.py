"""Worker processes of pools as forks of one process that has imported what they import, which takes longer
than most of their tasks do. Triton is not there: it reads its variables when it is imported. Some of
tests/verify/test_pool.py start them as the pool does, each anew."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext
from types import SimpleNamespace
from typing import Any

import pytest

from transconv.verify import machine


class Forked(ForkServerContext):
    """A way to start processes that have this process's environment as it is then."""

    def Process(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> Any:  # type: ignore[override]
        return super().Process(target=_run, daemon=daemon, args=(dict(os.environ), target, args))


def _run(environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def _context(start: str) -> BaseContext:
    return Forked() if start == "spawn" else multiprocessing.get_context(start)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Inside, pools fork; afterwards the process that they fork has ended, so that its time is counted."""
    multiprocessing.set_forkserver_preload(["torch", "sympy", "transconv.cli.check"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "multiprocessing", SimpleNamespace(get_context=_context))
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
