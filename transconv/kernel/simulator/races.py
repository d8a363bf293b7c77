"""The order of a simulation: whose turn it is, and accesses to one element that nothing orders (races).

Groups run one after the other, and so do the items of a group between two barriers. On a chip they run in
any order: two accesses conflict if they belong to different groups, or to different items of a group with
no barrier between them, and one of them writes."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from transconv.kernel.source import Refusal, SourcePlace

SKIPPED = (str(Path(__file__).parents[1]), str(Path(np.__file__).parent))
"""Files in these folders are no user's."""


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """Who accessed elements, when (``epoch`` counts barriers), where, and whether in one indivisible
    step."""

    group: int
    item: int
    epoch: int
    who: str
    place: SourcePlace
    atomic: bool = False

    def conflicts(self, other: AccessRecord) -> bool:
        """Whether no barrier is between these two."""
        if self.atomic and other.atomic:
            return False
        if self.group != other.group:
            return True
        return self.epoch == other.epoch and self.item != other.item


WHOLE = -1  # the item of accesses at the scope of the group


class Order:
    """Whose turn it is. ``here``: the group, sub-group or work-item that runs; ``who``: in words."""

    def __init__(self) -> None:
        self.group, self.item, self.epoch = 0, WHOLE, 0
        self.here: Any = None
        self.who = ""
        self.accesses: list[AccessRecord] = []
        self.known: dict[AccessRecord, int] = {}

    @property
    def inside(self) -> bool:
        """Whether an item of the group runs, not the group as a whole."""
        return self.item != WHOLE

    def access(self, atomic: bool = False) -> int:
        """The number of the access that the current line makes."""
        made = AccessRecord(
            self.group, self.item, self.epoch, self.who, users_line(sys._getframe(1)), atomic
        )
        if made not in self.known:
            self.known[made] = len(self.accesses)
            self.accesses.append(made)
        return self.known[made]


class AccessTrace:
    """Who accessed the elements of one array: the last writer of each, its last reader, and the last ones
    of another item and of another group before that."""

    def __init__(self, order: Order, name: str, size: int) -> None:
        self.order, self.name = order, name
        never = np.full((4, size), -1, np.int32)
        self.writer, self.reader, self.other, self.foreign = never

    def read(self, places: np.ndarray[Any, Any]) -> None:
        """The current line reads elements."""
        at, now = places.ravel(), self.order.access()
        self.check(self.writer[at], now, "read", "written")
        before = self.reader[at]
        for last in np.unique(before):
            if last < 0 or last == now:
                continue
            a, b = self.order.accesses[last], self.order.accesses[now]
            if a.group != b.group:
                self.foreign[at[before == last]] = last
            elif a.item != b.item:
                self.other[at[before == last]] = last
        self.reader[at] = now

    def write(self, places: np.ndarray[Any, Any], atomic: bool = False) -> None:
        """The current line writes elements; ``atomic``: it adds to them in one step each."""
        at, now = places.ravel(), self.order.access(atomic)
        self.check(self.writer[at], now, "written", "written")
        for readers in (self.reader, self.other, self.foreign):
            self.check(readers[at], now, "written", "read")
        self.writer[at] = now

    def check(self, before: np.ndarray[Any, Any], now: int, here: str, there: str) -> None:
        """Refuse a race with one of the accesses before."""
        mine = self.order.accesses[now]
        for number in np.unique(before):
            if number >= 0 and mine.conflicts(other := self.order.accesses[number]):
                raise Refusal(
                    f"a race: an element of {self.name} is {here} by {mine.who} here, and "
                    f"{there} by {other.who} at {other.place}",
                    "accesses of one group that a barrier orders",
                    "group.barrier()" if mine.group == other.group else "",
                )


def is_users(file: str) -> bool:
    """Whether a file is neither of this package nor of NumPy."""
    return not file.startswith(SKIPPED)


def users_line(frame: FrameType | None) -> SourcePlace:
    """The line of the user's file that runs."""
    while frame is not None and frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    assert frame is not None
    return _place(frame.f_code.co_filename, frame.f_lineno)


def failed_line(trace: TracebackType | None) -> SourcePlace:
    """The user's line in which an exception was raised."""
    found: tuple[str, int] = ("?", 0)
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = file, trace.tb_lineno
        trace = trace.tb_next
    return _place(*found)


def _place(file: str, line: int) -> SourcePlace:
    return SourcePlace(Path(file).name, line, linecache.getline(file, line))
