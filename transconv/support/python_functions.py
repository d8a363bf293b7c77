"""Functions of Python that are written out as text, where calls must take the host little time: what would
be a loop over tensors, or a look at a switch, is then a line. And a pause of Python's search for cycles.
"""

from __future__ import annotations

import gc
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
