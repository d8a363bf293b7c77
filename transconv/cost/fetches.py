"""Counts of moving a tile between memory and a multiprocessor once: bytes in whole sectors, accesses of
lanes, and how far loads go ahead of the products that need them.

In: a view, a schedule, a computation. Out: a ``FetchCost``. No constant is fitted here.

How the rows of a tile lie in memory: where they begin, and how many sectors or lines they touch.

In: a view, a block of the tile, a computation. Out: counts of elements and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

from transconv.compute import Compute, axis_strides, touched
from transconv.cost.issue import ACCESS, LINE, SECTOR
from transconv.ir import View
from transconv.schedule import (
    WIDEST,
    Block,
    Box,
    Schedule,
    aligned,
    box_of,
    by_tile,
    inner_feature,
    steps_of_any_size,
)
from transconv.schedule.tiles import packing

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
    lines: float = 1.0  # that the lanes of a warp touch in an access, if it is not of whole lines
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
    return any(
        fetch(v, schedule, compute, word).ends
        for v, word in ((compute.a, schedule.a), (compute.b, schedule.b))
        if v is not None
    )


@by_tile
def _fetched(
    blocks: tuple[Block, ...], compute: Compute, view: View, widest: int, word: str, only_along: bool
) -> FetchCost:
    """``fetch`` in accesses of at most so many elements."""
    elements = elements_of(blocks, compute, view)
    size = view.tensor.dtype.bytes
    found = _row_of(blocks, compute, view)
    if only_along and not along_sum(view, compute):
        return FetchCost(
            elements * max(size, found.each), elements * size / ASYNC, found.bytes, through=True
        )
    if word == "box":  # of wider types rows that straddle lines were not slower (one layer)
        lines = straddling(view, found, LINE, compute) if size <= 2 else 1.0
        return FetchCost(elements * size * lines, 0, found.bytes)
    vector = min(aligned(view, found.axes, compute), 1 << (min(found.run, widest).bit_length() - 1))
    there = elements / packing.diagonal(view, compute)  # elements off the diagonal are masked
    ahead = vector * size >= ASYNC
    near = (
        not ahead
        and view is compute.b
        and not compute.sums_positions
        and not view.tensor.extents
        and 0 < touched(view, compute) <= NEAR
    )
    if near:
        there *= _within(blocks, compute, view)
    row = found.bytes  # the rates of wider types were fitted without the lines that rows share
    if size == 1:
        row *= together(view, found, blocks, compute)
    return FetchCost(
        there * max(size, found.each),
        elements / vector,
        row,
        ahead,
        found.run == 1 and elements > 1,
        only_along and packing.wants_rounding(view, compute),
        near=near,
        lines=_lines(view, blocks, found.run, vector, compute),
    )


def _lines(view: View, blocks: tuple[Block, ...], run: int, vector: int, compute: Compute) -> float:
    """The cache lines that 32 lanes touch in accesses of so many elements, where runs are shorter: one for
    each run, or those from the first run to the last."""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    runs = 32 * vector / run
    gap = min((abs(s) for b in blocks if (s := strides[b.last]) and abs(s) >= run), default=run)
    return max(1.0, min(runs, runs * gap * size / LINE))


@by_tile
def elements_of(tiles: tuple[Block, ...], compute: Compute, view: View) -> int:
    """How many elements a view's tile has."""
    strides = axis_strides(view, compute)
    return prod(b.extent for b in tiles if any(strides[a] for a in b.axes))


@by_tile
def _within(tiles: tuple[Block, ...], compute: Compute, view: View) -> float:
    """The fraction of a view's tile that is not masked: 3 / 16 if a block of 16 features has 3."""
    strides = axis_strides(view, compute)
    return prod(
        min(1.0, prod(compute.size(a) for a in b.axes) / b.extent)
        for b in tiles
        if any(strides[a] for a in b.axes)
    )


@by_tile
def _row_of(tiles: tuple[Block, ...], compute: Compute, view: View) -> TileRow:
    """The row of a view's tile that moves the fewest bytes for each element."""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    runs = runs_of(view, compute) if compute.merge > 1 else compute.sizes
    return min(
        (row_along(strides, b, runs, size) for b in tiles if any(strides[a] for a in b.axes)),
        default=TileRow(SECTOR, SECTOR),
    )


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
    return found._replace(
        bytes=found.bytes * straddling(compute.c, row, SECTOR, compute), alone=found.alone or single
    )


@lru_cache(maxsize=1024)
def straddling(view: View, row: TileRow, unit: int, compute: Compute) -> float:
    """The factor by which rows of a tensor touch more sectors, or cache lines, of ``unit`` bytes than if
    each began at one: of runs of 16 bytes in images of 65 x 65 elements of 2 bytes, which begin anywhere,
    7 of 16 end in the next sector; rows of 128 bytes at each multiple of 320 touch 1.5 lines."""
    size, strides = view.tensor.dtype.bytes, axis_strides(view, compute)
    steps = [s for a, s in strides.items() if a not in row.axes and (not a or compute.size(a) > 1)]
    length = row.run * size
    begins = gcd(unit, length, *(s * size for s in (*steps, *steps_of_any_size(view, row.axes, compute))))
    return (length + unit - begins) / unit / -(-length // unit)


@dataclass(frozen=True, slots=True, order=True)
class TileRow:
    """A row of a tile in memory: bytes moved for each element and for the whole row, the number of
    contiguous elements, and the axes along which it runs."""

    each: float
    bytes: float
    run: int = 1
    axes: tuple[str, ...] = ()


def runs_of(view: View, compute: Compute) -> dict[str, int]:
    """How many positions along each axis have a constant stride: all, or the features of one group of a
    block diagonal view."""
    across = inner_feature(view, compute)
    return compute.sizes | {across.name: across.size // compute.merge} if across else compute.sizes


def row_along(strides: dict[str, int], block: Block, runs: dict[str, int], size: int) -> TileRow:
    """The row along the innermost axes of a block. Elements with gaps may share sectors as well."""
    step, length, axes = 0, 1, []
    for name in reversed(block.axes):
        if runs[name] == 1:
            continue
        step = step or abs(strides[name])
        if abs(strides[name]) != step * length or not step:
            break
        length *= runs[name]
        axes.append(name)
    length = max(1, min(length, block.extent))  # an axis may be empty
    sectors = -(-((length - 1) * step + 1) * size // SECTOR)
    moved = min(sectors, length) * SECTOR
    return TileRow(moved / length, moved, length if step == 1 else 1, tuple(axes))


def together(view: View, row: TileRow, blocks: tuple[Block, ...], compute: Compute) -> int:
    """How many rows of a tile follow one another in memory: those of whole positions of 32 features do,
    as many as a block has positions."""
    if not row.run or row.run != prod(compute.size(a) for a in row.axes):
        return 1
    strides = axis_strides(view, compute)
    return max(
        (
            min(b.extent, compute.size(b.last))
            for b in blocks
            if b.last not in row.axes and strides[b.last] == row.run
        ),
        default=1,
    )
