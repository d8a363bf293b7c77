"""Which rows of a sharded image a rank needs for its rows of the result, from the convolution's relation.

Along one spatial axis, src has the positions i, dst the positions o (see conv/relation.py). A rank owns an
interval of each. What it needs of the other tensor is the range of the relation's coordinate over its own
interval and all taps; what it then computes is a convolution of these intervals, with a padding of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from transconv.conv import ConvProblem, Prop, reading
from transconv.simplify import Facts, range_of


class RowRange(NamedTuple):
    """The rows from ``start`` up to ``stop``, which is not one of them."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, other: RowRange) -> RowRange:
        """The rows of both; with size 0 if there are none."""
        start = max(self.start, other.start)
        return RowRange(start, max(start, min(self.stop, other.stop)))

    def seen_from(self, first: int) -> RowRange:
        """The same rows, counted from ``first``."""
        return RowRange(self.start - first, self.stop - first)


def shards(size: int, parts: int) -> tuple[RowRange, ...]:
    """The rows of each rank as DTensor's Shard deals them: equally many, the last ones fewer or none."""
    each = -(-size // parts)
    return tuple(RowRange(min(size, r * each), min(size, (r + 1) * each)) for r in range(parts))


class Window(NamedTuple):
    """A convolution of some rows of src with some of dst: its low and high padding, and how many rows at
    the end of src no row of dst reaches, beyond those that the stride leaves out."""

    low: int
    high: int
    unread: int


@dataclass(frozen=True, slots=True)
class SpatialAxis:
    """The convolution along one spatial axis: sizes of src, dst and the kernel, and its numbers."""

    i: int
    o: int
    k: int
    stride: int
    dilation: int
    pad: int

    def needs(self, prop: Prop, rows: RowRange) -> RowRange:
        """The rows of src that these rows of dst read (``FWD``), or the rows of dst that these rows of src
        read (``BWD_D``), without those that lie in the padding."""
        if not rows.size:
            return RowRange(0, 0)
        found = _hull(self, prop, rows)
        return found.within(RowRange(0, self.i if prop is Prop.FWD else self.o))

    def window(self, src: RowRange, dst: RowRange) -> Window:
        """The convolution of these rows. For the rows that one rank needs, ``low`` is never negative."""
        low = self.pad + src.start - dst.start * self.stride
        high = (dst.size - 1) * self.stride + (self.k - 1) * self.dilation + 1 - src.size - low
        return Window(low, max(0, high), min(src.size, -high) if high <= -self.stride else 0)


@lru_cache(maxsize=1 << 14)
def _hull(line: SpatialAxis, prop: Prop, rows: RowRange) -> RowRange:
    problem = ConvProblem.make(1, 1, 1, (line.i,), line.k, line.stride, line.dilation, line.pad, line.o)
    position, tap, view = reading(problem, prop, 0)
    facts = Facts().with_range(position.var, rows.start, rows.stop - 1)
    found = range_of(view.coord, facts.with_range(tap.var, 0, tap.size - 1))
    assert found.lo is not None and found.hi is not None
    return RowRange(found.lo, found.hi + 1)


class HaloRows(NamedTuple):
    """Rows that a rank sends to, or has from, the one with this index along its axis of the mesh."""

    rank: int
    rows: RowRange


class Exchange(NamedTuple):
    """What a rank does to have the rows that it needs. Sent rows are counted from its first; ``pieces``
    are all that it then has, in order, its own included, counted in the whole tensor."""

    owned: RowRange
    needed: RowRange
    sends: tuple[HaloRows, ...]
    pieces: tuple[HaloRows, ...]

    @property
    def received(self) -> int:
        """The number of rows that come from other ranks."""
        return self.needed.size - sum(p.rows.size for p in self.pieces if p.rank < 0)


def exchange(owned: Sequence[RowRange], needed: Sequence[RowRange], rank: int) -> Exchange:
    """The exchange of one rank, where rank r owns ``owned[r]`` and needs ``needed[r]``. A piece of its own
    has -1 for a rank."""
    mine = owned[rank]
    sends = [HaloRows(r, rows.seen_from(mine.start)) for r, want in enumerate(needed)
             if r != rank and (rows := want.within(mine)).size]
    pieces = [HaloRows(-1 if r == rank else r, rows) for r, have in enumerate(owned)
              if (rows := needed[rank].within(have)).size]
    return Exchange(mine, needed[rank], tuple(sends), tuple(pieces))


@lru_cache(maxsize=1 << 12)
def planned(line: SpatialAxis, prop: Prop, parts: int, rank: int) -> Exchange:
    """The exchange of one of ``parts`` ranks that deal the rows of both images, for its rows of the result
    of this direction."""
    size, wanted = (line.i, line.o) if prop is Prop.FWD else (line.o, line.i)
    return exchange(shards(size, parts), [line.needs(prop, rows) for rows in shards(wanted, parts)], rank)
