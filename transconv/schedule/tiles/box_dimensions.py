"""Dimensions of a box, and what tiles, the matrix unit and TMA require of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transconv.compute import Compute, axis_facts
from transconv.ir import Const, DType, Expr, Tensor, Var, free_vars, substitute
from transconv.schedule.schedule import Block, Schedule
from transconv.simplify import Facts, multiple_of, prove, range_of, simplify

ENGINE_RANK = 5
ENGINE_EXTENT = 256
ENGINE_STEP = 8
ENGINE_ALIGN = 16
"""Bytes of which a box's strides, and its begin along the innermost dimension, are multiples."""
LONGEST = 2**31 - 2**16  # elements along a dimension: coordinates, those of the last tile too, are 32 bits
ROW = 128
"""Bytes of a row of shared memory."""
INTEGERS = 128
"""The most columns of an asynchronous product of integers in Triton 3.6."""
SHORTEST = 32  # bytes: the shortest rows of boxes that lie side by side


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of a tensor in memory, and the view's coordinate along it. Size, stride and extent count
    elements. ``bound`` and ``pitch``: size and stride as expressions of sizes that are arguments; None
    where they are numbers. ``every``: the step in which the box takes positions."""

    name: str
    size: int
    stride: int
    coord: Expr
    moving: Var | None  # the axis (or fused axes) whose block the box covers along it; None: one position
    extent: int  # of the box
    piled: bool = False  # whether the block consists of several such boxes
    plane: bool = False  # whether it numbers interleaved planes, or elements of windows that may overlap
    bound: Expr | None = None
    pitch: Expr | None = None
    every: int = 1

    @property
    def length(self) -> Expr:
        """The size as an expression."""
        return Const(self.size) if self.bound is None else self.bound

    @property
    def apart(self) -> Expr:
        """The stride as an expression."""
        return Const(self.stride) if self.pitch is None else self.pitch

    @property
    def named(self) -> bool:
        """Whether size or stride are expressions."""
        return self.bound is not None or self.pitch is not None


@lru_cache(maxsize=1024)
def whole(compute: Compute, axes: tuple[str, ...]) -> Expr:
    """The number of positions of axes, as an expression."""
    found: Expr = Const(1)
    by_name = {x.name: x for x in compute.axes}
    for x in map(by_name.__getitem__, axes):
        found = found * (Const(x.size) if x.extent is None else x.extent)
    return simplify(found, axis_facts(compute))


def planes_of(d: Dim, step: int, facts: Facts) -> list[Dim]:
    """A dimension in steps of 2 as two interleaved planes in steps of 1.

        i = oh*2 + kh - 1     ->     row oh + (kh - 1)//2 of plane (kh - 1) % 2

    If the size is odd, some planes have one row less. If the plane is a constant, as in a stride phase,
    the size is the number of its rows."""
    assert d.moving is not None
    rest = simplify(d.coord - d.moving * step, facts)
    row, plane = simplify(d.moving + rest // step, facts), simplify(rest % step, facts)
    before = int(plane.value) if isinstance(plane, Const) else 0
    bound = None if d.bound is None else simplify((d.bound + (step - 1 - before)) // step, facts)
    pitch = None if d.pitch is None else simplify(d.pitch * step)
    return [
        Dim(
            d.name,
            -(-(d.size - before) // step),
            d.stride * step,
            row,
            d.moving,
            d.extent,
            bound=bound,
            pitch=pitch,
        ),
        Dim(f"{d.name}_plane", step, d.stride, plane, None, 1, plane=True, pitch=d.pitch),
    ]


def windows_of(
    d: Dim, moving: Sequence[Var], schedule: Schedule, compute: Compute, facts: Facts
) -> list[Dim]:
    """A dimension that a position and an element of its window move along, as two: in memory windows
    overlap. None of both may be beyond the end, where an engine that counts windows sees no end.

        i = ow*2 + kw     ->     element kw of window ow, which begins 2 elements after the one before
    """
    seen = range_of(d.coord, facts)
    if len(moving) != 2 or seen.lo is None or seen.hi is None or seen.lo < 0 or seen.hi >= d.size:
        return []
    if d.named or any(compute.axis(v.name).extent is not None for v in moving):
        return []
    for position, element in (moving, moving[::-1]):
        step = simplify(substitute(d.coord, {position: position + 1}) - d.coord, facts)
        if d.coord is not simplify(position * step + element, facts) or not isinstance(step, Const):
            continue
        blocks = [schedule.block_of(v.name) for v in (position, element)]
        if any(b is None for b in blocks) or blocks[0] is blocks[1]:
            continue
        sizes, steps = (compute.size(position.name), compute.size(element.name)), (int(step.value), 1)
        names, lanes = (d.name, f"{d.name}_window"), (position, element)
        return [
            Dim(name, size, d.stride * by, v, v, b.extent, plane=v is element)
            for name, size, by, v, b in zip(names, sizes, steps, lanes, blocks, strict=True)
            if b is not None
        ]
    return []


def groups_of(d: Dim, block: Block, compute: Compute, facts: Facts) -> list[Dim] | None:
    """A dimension that groups share as two, if a block is no part of a group: the box then ends with the
    group, beyond which the engine reads zeros and drops writes. None if it is one dimension.

        c = g*48 + f in blocks of 64     ->     f in 0..47 of group g
    """
    assert d.moving is not None
    size = compute.size(d.moving.name)
    if d.named or len(block.axes) > 1 or size in (1, d.size) or size % block.extent == 0 or d.size % size:
        return None
    group = simplify(d.coord - d.moving, facts)
    if d.moving in free_vars(group) or multiple_of(group, facts) % size:
        return None
    group_at = simplify(group // size, facts)
    outer = Dim(f"{d.name}_group", d.size // size, d.stride * size, group_at, None, 1)
    return [outer, replace(d, size=size, coord=d.moving)]


def why_not_dims(
    dims: list[Dim], schedule: Schedule, compute: Compute, tensor: Tensor, stored: bool, facts: Facts
) -> str | None:
    """None if the dimensions are legal for a box, else the reason in a few words."""
    return (
        _lanes(dims, schedule, compute)
        or _engine(dims, tensor, facts)
        or _tails(dims, schedule, compute, tensor, stored, facts)
    )


def _lanes(dims: list[Dim], schedule: Schedule, compute: Compute) -> str | None:
    """A lane runs through its blocks in the order of the axes, or in that of the schedule. The dimensions
    of one kind must be adjacent in memory and in this order."""
    given = schedule.order.split(".") if schedule.order else []
    axes = sorted((x.name for x in compute.axes), key=lambda n: given.index(n) if n in given else 0)
    order = [a for x in axes for b in schedule.blocks if b.first == x for a in b.axes]
    moved = [(b, (Var("_".join(b.axes)), Var(b.last))) for b in schedule.blocks]
    runs: list[str] = []
    last: dict[str, int] = {}
    for d in dims:
        if d.moving is None or d.extent == 1:
            continue
        axis = next(b.first for b, lanes in moved if d.moving in lanes)
        kind = compute.kind(axis)
        if order.index(axis) < last.get(kind, -1):
            return f"memory does not have {d.name} in the order of the tile's lanes"
        last[kind] = order.index(axis)
        if not runs or runs[-1] != kind:
            runs.append(kind)
    if len(runs) > len(set(runs)):
        return "the dimensions of one side of the tile are apart in memory"
    return None


def _engine(dims: list[Dim], tensor: Tensor, facts: Facts) -> str | None:
    """The limits of the copy engine: rank, strides, extents, and the length of rows."""
    if len(dims) > ENGINE_RANK:
        return f"{len(dims)} dimensions, a box has at most {ENGINE_RANK}"
    inner = dims[-1]
    if inner.stride != 1 or inner.pitch is not None:
        return f"{inner.name} has stride {inner.apart}, the innermost dimension of a box has 1"
    for d in dims[:-1]:
        if multiple_of(d.apart, facts) * tensor.dtype.bytes % ENGINE_ALIGN:
            return f"{d.name} has stride {d.apart}, which is not a multiple of 16 bytes"
        if d.named and not prove(d.length <= LONGEST, facts):
            return f"{d.name} may be longer than {LONGEST}, which 32 bits count"
    for d in dims:
        if d.extent * d.every > ENGINE_EXTENT:
            return f"the box reaches {d.extent * d.every} along {d.name}, at most {ENGINE_EXTENT}"
        if d.size == 0:
            return f"{d.name} is empty"
    row = inner.extent * tensor.dtype.bytes
    if row < ENGINE_ALIGN:
        return f"the box reaches {inner.extent} along {inner.name}, less than 16 bytes"
    if any(d.piled for d in dims) and not SHORTEST <= row <= ROW:
        return (
            f"window elements of {row} bytes are boxes of their own, which can be read across from "
            f"{SHORTEST} to {ROW} bytes"
        )
    return None


def fewest_positions(dtype: DType) -> int:
    """The fewest summed positions of a tile of boxes: as many as elements fill a row of shared memory, or
    a quarter of one if they are bytes."""
    return ROW // 4 if dtype.bits == 8 else ROW // dtype.bytes


@lru_cache(maxsize=1024)
def _no_tile_divides(compute: Compute) -> bool:
    """Whether each tile of boxes reaches beyond the end of a sum over positions. Extents are powers of
    two, so a tile that divides the sizes has at most as many positions as the powers of two in them say:

        n=8 y=13 x=13    8 * 1 * 1 = 8 positions, no tile of 64
        n=8 y=28 x=28    8 * 4 * 4 = 128, the tile n:4 y:4 x:4 is one of those that divide them
    """
    axes = compute.axes_of("K")
    divided = prod(x.size & -x.size for x in axes if x.role == "position")
    return compute.sums_positions and 0 < divided < fewest_positions(compute.a.tensor.dtype)


def _is_zero_beyond(block: Block, tensor: Tensor, compute: Compute, facts: Facts) -> bool:
    """Whether the other factor is 0 beyond the end of a block's axis, because there its tensor ends. Then
    what this one holds there adds nothing, unless it is no number: an infinity or NaN gives NaN. So a tile
    must not reach beyond sizes that others divide: this is for sizes that are arguments, and for positions
    whose given sizes no tile divides."""
    given = compute.named is None
    if len(block.axes) > 1 or (
        given and (compute.axis(block.first).role != "position" or not _no_tile_divides(compute))
    ):
        return False
    others = [v for v in (compute.a, compute.b) if v is not None and v.tensor is not tensor]
    return any(
        simplify(d.coord, facts) is Var(block.first) and simplify(n, facts) == whole(compute, block.axes)
        for v in others
        for d, n in zip(v.dims, v.tensor.bounds, strict=True)
    )


def _tails(
    dims: list[Dim], schedule: Schedule, compute: Compute, tensor: Tensor, stored: bool, facts: Facts
) -> str | None:
    """A block that does not divide its axes reaches beyond their end. That is legal only if it is also
    beyond the end of the tensor, where the engine reads zeros and drops writes: otherwise a sum would
    include, or a store overwrite, other elements. (A sum may if they are multiplied by 0.)"""
    for block in schedule.blocks:
        total = whole(compute, block.axes)
        kind = compute.kind(block.first)
        if multiple_of(total, facts) % block.extent == 0 or (kind != "K" and not stored):
            continue
        name = Var("_".join(block.axes))
        for d in dims:
            if (
                d.moving is name
                and not (d.coord is name and simplify(d.length, facts) == total)
                and not (kind == "K" and _is_zero_beyond(block, tensor, compute, facts))
            ):
                return f"block {block} does not divide {total}, and {d.name} goes on beyond it"
    return None
