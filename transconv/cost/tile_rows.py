"""How the rows of a tile lie in memory: where they begin, and how many sectors or lines they touch.

In: a view, a block of the tile, a computation. Out: counts of elements and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from transconv.compute import Compute, axis_facts, axis_strides
from transconv.cost.issue import SECTOR
from transconv.ir import View, free_vars
from transconv.schedule import Block, inner_feature
from transconv.simplify import multiple_of, simplify

WIDEST = 1 << 10  # more elements than one access takes


@lru_cache(maxsize=1024)
def straddling(view: View, row: TileRow, unit: int, compute: Compute) -> float:
    """The factor by which rows of a tensor touch more sectors, or cache lines, of ``unit`` bytes than if
    each began at one: of runs of 16 bytes in images of 65 x 65 elements of 2 bytes, which begin anywhere,
    7 of 16 end in the next sector; rows of 128 bytes at each multiple of 320 touch 1.5 lines."""
    size, strides = view.tensor.dtype.bytes, axis_strides(view, compute)
    steps = [s for a, s in strides.items() if a not in row.axes and (not a or compute.size(a) > 1)]
    length = row.run * size
    begins = gcd(unit, length, *(s * size for s in (*steps, *_steps_of_any_size(view, row.axes, compute))))
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
    return max((min(b.extent, compute.size(b.last)) for b in blocks if b.last not in row.axes
                and strides[b.last] == row.run), default=1)


@lru_cache(maxsize=512)
def aligned(view: View, row: tuple[str, ...], compute: Compute) -> int:
    """The alignment of all rows of the tensor along these axes: elements, a power of two."""
    steps = [s for a, s in axis_strides(view, compute).items()
             if a not in row and (not a or compute.size(a) > 1)]
    common = gcd(WIDEST, *steps, *_steps_of_any_size(view, row, compute))
    return common & -common


def _steps_of_any_size(view: View, row: tuple[str, ...], compute: Compute) -> Iterator[int]:
    """What the strides of dimensions that other axes move along are known to be multiples of, where these
    strides are sizes that are arguments."""
    for seen, step in zip(view.dims, view.tensor.steps if view.tensor.extents else (), strict=False):
        if free_vars(step) and not {v.name for v in free_vars(seen.coord)} <= {*row}:
            yield multiple_of(simplify(step), axis_facts(compute))
