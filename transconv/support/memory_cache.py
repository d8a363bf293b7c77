"""The cache in memory: what this process made and need not make again, by its key.

Each module that keeps something has one at its top; ``forget_all`` empties them all, so that everything is
made or read anew. What a function of its arguments keeps is ``functools.cache``'s.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dict of at most ``bound`` entries, and what it is of. It is read as a dict is, which is what calls
    that come back do. Each step of ``keep`` is one of a dict's own, so that threads need no lock."""

    __slots__ = ("bound", "name")  # as fast to read as a dict
    every: ClassVar[list[Cache[Any, Any]]] = []

    def __init__(self, name: str, bound: int = 1 << 16) -> None:
        super().__init__()
        self.name, self.bound = name, bound
        self.every.append(self)

    def keep(self, key: K, value: V) -> V:
        """Keep a value, and return the one that is kept: another thread's, if it was there before. Where
        there is no room, all others are dropped."""
        if len(self) >= self.bound and key not in self:
            self.clear()
        return self.setdefault(key, value)

    def forget(self) -> None:
        """Drop all entries."""
        self.clear()


def forget_all() -> None:
    """Empty every cache."""
    for cache in Cache.every:
        cache.forget()
