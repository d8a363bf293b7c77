"""Computes a rank's rows while rows of other ranks travel: all of them from its own rows alone, then those
at the edges again, from the few rows that these read.

    rows of this rank       |-------------------------------|
    from its own alone      |xxxx=======================xxxx|     x: wrong, for lack of rows
    computed again          |====|                     |====|     when the others' rows are there

No copy is made of the rank's own rows. The rows at the edges are computed twice, so this is for shards
that have many more rows than a kernel reaches; else the rows are joined first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from transconv.conv import Prop
from transconv.distributed.halo import RowRange, SpatialAxis, Window, planned, shards
from transconv.distributed.local import LocalConv
from transconv.distributed.transfer import Travelling

Tensor = torch.Tensor
SHARE = 8  # at most the eighth part of the rows is computed twice
Kernel = Callable[[LocalConv, Tensor, Sequence[int]], Tensor]
Sum = Callable[[LocalConv, Tensor, Tensor, bool], Tensor]


class Pair(NamedTuple):
    """Rows of the tensor that is read, and rows of the other one, counted in the whole tensors."""

    read: RowRange
    other: RowRange


class OverlapSplit(NamedTuple):
    """``own``: all that the rank has with all of its rows of the other tensor. ``edges``: rows that read
    rows of others, with all that they read. ``received``: rows of others, with the rank's rows that read
    them: with ``own`` these are each pair of rows once."""

    own: Pair
    edges: tuple[Pair, ...]
    received: tuple[Pair, ...]


@lru_cache(maxsize=1 << 12)
def apart(line: SpatialAxis, prop: Prop, parts: int, rank: int) -> OverlapSplit | None:
    """How one of ``parts`` ranks computes its rows of this direction's result; None if nothing travels,
    and where its rows are too few."""
    plan = planned(line, prop, parts, rank)
    mine = shards(line.o if prop is Prop.FWD else line.i, parts)[rank]
    own = plan.needed.within(plan.owned)
    if not (plan.received and own.size and mine.size):
        return None
    low, high = mine.start, mine.stop
    most = mine.size // SHARE
    while low < mine.stop and low - mine.start <= most and _before(line, prop, low, own):
        low += 1
    while high > low and mine.stop - high <= most and _behind(line, prop, high - 1, own):
        high -= 1
    inner = line.needs(prop, RowRange(low, high))  # rows in the padding alone may end the search too early
    if low - mine.start + mine.stop - high > most or inner.within(own).size < inner.size:
        return None
    edges = tuple(Pair(line.needs(prop, rows), rows)
                  for rows in (RowRange(mine.start, low), RowRange(high, mine.stop)) if rows.size)
    back = Prop.BWD_D if prop is Prop.FWD else Prop.FWD
    others = (RowRange(plan.needed.start, own.start), RowRange(own.stop, plan.needed.stop))
    received = tuple(Pair(rows, line.needs(back, rows).within(mine)) for rows in others if rows.size)
    made = OverlapSplit(Pair(own, mine), edges, tuple(pair for pair in received if pair.other.size))
    pairs = (made.own, *made.edges, *made.received)
    return made if all(window_of(line, prop, pair).low >= 0 for pair in pairs) else None


def _before(line: SpatialAxis, prop: Prop, row: int, own: RowRange) -> bool:
    read = line.needs(prop, RowRange(row, row + 1))
    return read.size > 0 and read.start < own.start


def _behind(line: SpatialAxis, prop: Prop, row: int, own: RowRange) -> bool:
    read = line.needs(prop, RowRange(row, row + 1))
    return read.size > 0 and read.stop > own.stop


def window_of(line: SpatialAxis, prop: Prop, pair: Pair) -> Window:
    """The convolution of a pair of rows."""
    return line.window(*(pair if prop is Prop.FWD else pair[::-1]))


@dataclass(frozen=True)
class Halo:
    """A rank's rows of one tensor with those of others that its rows of another tensor read. ``part`` is
    the convolution of all of them. ``rows``: still on their way along the axis of ``line``, with how to
    compute meanwhile; otherwise ``local`` has them all."""

    local: Tensor
    part: LocalConv
    prop: Prop
    rows: Travelling | None = None
    line: SpatialAxis | None = None
    axis: int = 0
    way: OverlapSplit | None = None

    def computed(self, kernel: Kernel, shape: Sequence[int]) -> Tensor:
        """The rank's rows of the other tensor, of this shape."""
        if self.rows is None or self.way is None:
            return kernel(self.part, self.local, shape)
        dim, (has, mine) = 2 + self.axis, self.way.own
        made = kernel(self._part(self.way.own), self.rows.some(has), shape)
        for pair in self.way.edges:
            edge = kernel(self._part(pair), self.rows.some(pair.read), _resized(shape, dim, pair.other))
            made.narrow(dim, pair.other.start - mine.start, pair.other.size).copy_(edge)
        self.rows.sent.wait()
        return made

    def summed(self, kernel: Sum, other: Tensor) -> Tensor:
        """The gradient of the weight, from the rank's rows of the other tensor: one, or a sum of parts of
        at least 32 bits."""
        if self.rows is None or self.way is None:
            return kernel(self.part, self.local, other, False)
        dim, (has, mine) = 2 + self.axis, self.way.own
        several = len(self.way.received) > 0
        made = kernel(self._part(self.way.own), self.rows.some(has), other, several)
        for pair in self.way.received:
            read = other.narrow(dim, pair.other.start - mine.start, pair.other.size)
            made = made.add_(kernel(self._part(pair), self.rows.some(pair.read), read, True))
        self.rows.sent.wait()
        return made

    def _part(self, pair: Pair) -> LocalConv:
        assert self.line is not None
        windows = list(self.part.windows)
        windows[self.axis] = window_of(self.line, self.prop, pair)
        return self.part._replace(windows=tuple(windows))


def _resized(shape: Sequence[int], dim: int, rows: RowRange) -> tuple[int, ...]:
    return (*shape[:dim], rows.size, *shape[dim + 1:])
