"""The cache of entries: guarded functions of repeated calls, by what finds them.

A key only finds an entry; a reused address does no harm, because the entry checks everything that its
route depends on. A call that fails a check tries the next entry and at last the general way. Calls that
never come back earn few entries: the longer none is found again, the longer the next one waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, ClassVar

Call = Callable[..., Any]

CHAIN = 3  # entries under one key: other sizes, training and inference
KINDS = 4096  # keys kept; beyond it all are dropped
PATIENCE = 2  # calls with a known route before an entry is made; doubles when entries had to go
MOST_PATIENCE = 1 << 12


class CallCache:
    """The entries of one front end, and the calls that found none. ``patience``: calls with a known route
    before the first entry; ``chain``: entries under one key."""

    every: ClassVar[list[CallCache]] = []

    def __init__(self, patience: int = PATIENCE, chain: int = CHAIN) -> None:
        self.entries: dict[Hashable, Call] = {}
        self.find = self.entries.get
        self.patience, self.chain = patience, chain
        # Calls since the last entry, calls to wait for, entries.
        self._visits: dict[Hashable, list[int]] = {}
        self._elsewhere: list[MutableMapping[Any, Any]] = []  # entries that others hold, such as routes
        self.every.append(self)

    def due(self, key: Hashable, chain: int = 0) -> int:
        """Count a call that found no entry. 0: no entry is due; 1: the first, or a replacement of all; n:
        one before the n - 1 existing ones, of which there are at most ``chain``, if it is given."""
        visits = self._visits.get(key)
        if visits is None:
            if len(self._visits) >= KINDS:
                self.clear()
            visits = self._visits[key] = [0, self.patience, 0]
        visits[0] += 1
        if visits[0] < visits[1]:
            return 0
        visits[0] = 0
        if visits[2] >= (chain or self.chain):  # wait longer: sizes that do not repeat get no entries
            visits[1], visits[2] = min(2 * max(visits[1], PATIENCE), MOST_PATIENCE), 0
        visits[2] += 1
        return visits[2]

    def others(self, key: Hashable, place: int, onward: Call) -> Call:
        """What an entry in this place (see ``due``) goes on with: entries so far, or the general way."""
        return self.entries.get(key, onward) if place > 1 else onward

    def keep(self, key: Hashable, entry: Call) -> None:
        """Make an entry, with those that it goes on with, the only one of its key."""
        if len(self.entries) >= KINDS:
            self.clear()
        self.entries[key] = entry

    def keep_in(self, held: MutableMapping[Any, Any], key: Hashable, entry: Call) -> None:
        """Keep an entry in a mapping that is cleared with the others."""
        if all(one is not held for one in self._elsewhere):
            self._elsewhere.append(held)
        held[key] = entry

    def drop(self, key: Hashable) -> None:
        """Drop the entries of a key, if there are any."""
        self.entries.pop(key, None)

    def clear(self) -> None:
        """Drop all entries."""
        self.entries.clear()
        for held in self._elsewhere:
            held.clear()
        self._elsewhere.clear()
        self._visits.clear()


def forget() -> None:
    """Drop all entries of all front ends: what they run may be another now."""
    for cache in CallCache.every:
        cache.clear()
