"""Functions of Python that are written out as text, where calls must take the host little time: what would
be a loop over tensors, or a look at a switch, is then a line. And what threads beside the program do to
the interpreter that they share with it: the search for cycles, and turns."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any


def defined(text: str, name: str, known: Mapping[str, Any] | None = None) -> Any:
    """What a text of Python defines under a name. ``known``: what else it mentions, by name. The text is
    made of the package's own words and of numbers, never of what a user or a file says."""
    return executed(text, known or {})[name]


@lru_cache(maxsize=4096)
def factory(text: str) -> Callable[..., Any]:
    """The function ``made`` that a text defines, which makes another one of what that mentions: equal
    texts, which have names alone, are compiled once."""
    made: Callable[..., Any] = defined(text, "made")
    return made


def executed(text: str, known: Mapping[str, Any], path: str = "<string>") -> dict[str, Any]:
    """All names of a text of Python after it ran, with the ``known`` ones. ``path``: where tracebacks say
    that it is. Who calls this knows where the text is from: it can do all that the program can."""
    scope = dict(known)
    exec(compile(text, path, "exec"), scope)
    return scope


@contextmanager
def without_collections() -> Iterator[None]:
    """Within ``with``, Python looks for no cycles: while graphs are made, of many objects that all stay, a
    fifth of the time goes into that. What has none is freed as ever."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


class LastingObjects:
    """The scope of objects that stay, as modules and plans do (``with lasting():``). They join those
    that Python rarely looks through for cycles, and do not count for when it does so next: with all of
    torch's objects that is a pause of a tenth of a second, in whichever call of the program comes then.
    What the program froze stays so: ``frozen`` says that there was something, which takes Python a
    twentieth of a second to count."""

    def __init__(self) -> None:
        self.frozen, self.lock = False, threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with without_collections():
            yield
            if self.frozen or not self.lock.acquire(blocking=False):
                return  # what another thread freezes is not the program's
            try:
                self.frozen = gc.get_freeze_count() > 0
                if not self.frozen:
                    gc.freeze()
                    gc.unfreeze()  # into the oldest generation
            finally:
                self.lock.release()


lasting = LastingObjects()
"""Around what makes plans, of all threads."""


SOON_S = 0.0005


class SoonTurns:
    """The scope of what a thread does beside the program (``with soon_turns:``). Another thread that waits
    for the interpreter then has its turn within ``SOON_S`` instead of 5 ms (``sys.setswitchinterval``): a
    call of the program waits for a turn whenever it comes back from a library."""

    def __init__(self) -> None:
        self.lock, self.within, self.usual = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self.lock:
            if not self.within:
                self.usual = sys.getswitchinterval()
                sys.setswitchinterval(min(SOON_S, self.usual))
            self.within += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.within -= 1
            if not self.within:
                sys.setswitchinterval(self.usual)


soon_turns = SoonTurns()
"""Of all threads that the package begins beside a program."""
