"""Counts of moving a tile between memory and a multiprocessor once: bytes in whole sectors, accesses of
lanes, and how far loads go ahead of the products that need them.

In: a view, a schedule, a computation. Out: a ``FetchCost``. No constant is fitted here.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from transconv.compute import Compute, axis_strides, touched
from transconv.cost.issue import ACCESS, LINE, SECTOR
from transconv.cost.tile_rows import (
    WIDEST,
    TileRow,
    aligned,
    row_along,
    runs_of,
    straddling,
    together,
)
from transconv.ir import View
from transconv.schedule import Block, Box, Schedule, box_of, by_tile, diagonal, wants_rounding

NEAR = 1 << 16  # bytes of a filter, which all programs read, that the L1 cache keeps
ASYNC = 4  # bytes: the smallest asynchronous copy, which does not go through registers


class FetchCost(NamedTuple):
    """Counts of moving a tile once."""

    bytes: float  # in whole sectors
    accesses: float  # of single lanes
    row: float  # contiguous bytes in memory
    ahead: bool = True  # whether it can be in flight while earlier tiles are multiplied
    alone: bool = False  # whether each access has one element
    through: bool = False  # whether it goes through registers, to be transposed or rounded
    stepped: bool = False  # whether the copy engine takes every so many-th position
    near: bool = False  # whether it is not ahead, and of a filter that stays in the L1 cache
    ends: bool = False  # whether a box reaches beyond the part of the tensor's rows that is its group's
    common: bool = False  # whether steps share boxes, and all programs read these: they have no positions


def along_sum(view: View, compute: Compute) -> bool:
    """Whether a view has stride 1 along a summed axis."""
    strides = axis_strides(view, compute)
    return any(strides[x.name] == 1 for x in compute.axes_of("K") if x.size > 1)


def in_rows(copy: Compute) -> int:
    """How many elements along the rows that a copy reads and writes alike always begin at a multiple of
    their number, a power of two."""
    rows = [x.name for x in copy.axes if all(axis_strides(v, copy)[x.name] == 1 for v in (copy.a, copy.c))]
    if not rows:
        return WIDEST
    return min(aligned(v, tuple(rows), copy) for v in (copy.a, copy.c))


def fetch(
    view: View, schedule: Schedule, compute: Compute, word: str, only_along: bool = False
) -> FetchCost:
    """The counts of moving a view's tile once; ``word`` is ``gather`` or ``box``."""
    elements = elements_of(schedule.blocks, compute, view)
    widest = min(ACCESS // view.tensor.dtype.bytes, max(1, elements // (schedule.warps * 32)))
    found = _fetched(schedule.blocks, compute, view, widest, word, only_along)
    if word != "box" or not (view.tensor.extents or compute.axes_of("B")):
        return found
    box = box_of(view, schedule, compute)
    if not isinstance(box, Box):
        return found
    own = box.tensor.shape[-1]
    ends = own < box.extents[-1] and own < view.tensor.layout.blocks[-1].size
    return found._replace(stepped=bool(box.tensor.every), ends=ends)


def within_groups(schedule: Schedule, compute: Compute) -> bool:
    """Whether boxes end within rows of their tensor, with a group; they are slower than others."""
    return any(fetch(v, schedule, compute, word).ends for v, word in (
        (compute.a, schedule.a), (compute.b, schedule.b)) if v is not None)


@by_tile
def _fetched(blocks: tuple[Block, ...], compute: Compute, view: View, widest: int, word: str,
             only_along: bool) -> FetchCost:
    """``fetch`` in accesses of at most so many elements."""
    elements = elements_of(blocks, compute, view)
    size = view.tensor.dtype.bytes
    found = _row_of(blocks, compute, view)
    if only_along and not along_sum(view, compute):
        return FetchCost(
            elements * max(size, found.each), elements * size / ASYNC, found.bytes, through=True
        )
    if word == "box":  # the rates of wider types were fitted without the lines that rows straddle
        lines = straddling(view, found, LINE, compute) if size == 1 else 1.0
        return FetchCost(elements * size * lines, 0, found.bytes)
    vector = min(aligned(view, found.axes, compute), 1 << (min(found.run, widest).bit_length() - 1))
    there = elements / diagonal(view, compute)  # elements off the diagonal are masked
    ahead = vector * size >= ASYNC
    near = (not ahead and view is compute.b and not compute.sums_positions and not view.tensor.extents
            and 0 < touched(view, compute) <= NEAR)
    if near:
        there *= _within(blocks, compute, view)
    row = found.bytes  # the rates of wider types were fitted without the lines that rows share
    if size == 1:
        row *= together(view, found, blocks, compute)
    return FetchCost(there * max(size, found.each), elements / vector, row, ahead,
                 found.run == 1 and elements > 1, only_along and wants_rounding(view, compute), near=near)


@by_tile
def elements_of(tiles: tuple[Block, ...], compute: Compute, view: View) -> int:
    """How many elements a view's tile has."""
    strides = axis_strides(view, compute)
    return prod(b.extent for b in tiles if any(strides[a] for a in b.axes))


@by_tile
def _within(tiles: tuple[Block, ...], compute: Compute, view: View) -> float:
    """The fraction of a view's tile that is not masked: 3 / 16 if a block of 16 features has 3."""
    strides = axis_strides(view, compute)
    return prod(min(1.0, prod(compute.size(a) for a in b.axes) / b.extent) for b in tiles
                if any(strides[a] for a in b.axes))


@by_tile
def _row_of(tiles: tuple[Block, ...], compute: Compute, view: View) -> TileRow:
    """The row of a view's tile that moves the fewest bytes for each element."""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    runs = runs_of(view, compute) if compute.merge > 1 else compute.sizes
    return min((row_along(strides, b, runs, size) for b in tiles
                if any(strides[a] for a in b.axes)), default=TileRow(SECTOR, SECTOR))


def stored(schedule: Schedule, compute: Compute) -> FetchCost:
    """The counts of storing a tile. An explicit kernel stores sums as the matrix unit leaves them, parts
    of 8 rows at a time, and pairs of a thread one by one where rows begin anywhere; with ``swap``, if no
    two elements are contiguous, each lane stores to a sector of its own."""
    found = fetch(compute.c, schedule, compute, schedule.c)
    if schedule.c == "box":
        return found
    if schedule.swap and found.alone and schedule.via == "gluon":
        return found._replace(bytes=found.accesses * SECTOR)
    row = _row_of(schedule.blocks, compute, compute.c)
    single = schedule.via == "gluon" and aligned(compute.c, row.axes, compute) == 1
    return found._replace(bytes=found.bytes * straddling(compute.c, row, SECTOR, compute),
                           alone=found.alone or single)
