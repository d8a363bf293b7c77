"""TMA boxes: which views can be loaded or stored with them, and why others cannot be.

A box is a rectangular piece of a tensor: per dimension a first coordinate and an extent. The engine
reads elements outside the tensor as zeros and drops writes there. A view can be a box if

* its mask requires nothing but "inside the tensor";
* along each dimension at most one block of the tile moves, in steps of 1 (equal steps greater than 1 see
  the dimension as interleaved planes, or the engine takes every so many-th position of it); or a position
  and an element of its window, which see it as windows that may overlap;
* the tensor suits the engine: at most five dimensions, innermost stride 1, other strides multiples of 16
  bytes. Along the innermost dimension a box begins at a multiple of 16 bytes; the GPU stops a kernel that
  breaks this with an illegal instruction.

Dimensions in which a box has extent 1 are merged into their inner neighbour if the strides allow it: a
factor ``[n, kh, kw, c]`` with one element of ``kh.kw`` per step is the matrix ``[n, kh*kw*c]``. A block
that fuses whole dimensions (``n.h.w:128``) runs along one merged dimension.

Some blocks of a tile a Gluon kernel loads as several boxes, placed side by side or below one another in
shared memory: a pile.

    kh.kw.c:256   features innermost: a box of 64 features per window element   64 columns | 64 columns
    kh.c:256      positions innermost: a box per window element, its features are rows below one another

Several steps of a sum may share boxes (``slide=``):

    X[n, c, oh + kh - 1, ow + kw - 1]     the tiles of kh = 0, 1, 2 are rows 0..7, 1..8 and 2..9

Along an axis that moves a tile by whole rows, the tiles of its steps overlap. An explicit kernel fetches
all of their rows once, each as a box of its own, and a step multiplies those that are its tile: of a 3x3
filter and tiles of 8 rows 10 rows are fetched instead of 24. The other operand has the boxes of each step.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transconv import ir
from transconv.compute import Compute, axis_facts
from transconv.schedule.schedule import Block, Schedule
from transconv.schedule.tiles.box_dimensions import (
    ENGINE_ALIGN,
    ENGINE_EXTENT,
    ENGINE_RANK,
    ENGINE_STEP,
    ROW,
    SHORTEST,
    Dim,
    groups_of,
    planes_of,
    whole,
    why_not_dims,
    windows_of,
)
from transconv.simplify import Facts, multiple_of, prove, range_of, simplify


@dataclass(frozen=True, slots=True)
class Box:
    """A view as a box: the tensor with its dimensions in memory order and, per dimension, the coordinate
    over axes, the axis that moves (None if none does), the extent of the box in elements, and the kind of
    that axis (B, M, N or K; empty if none moves)."""

    tensor: ir.Tensor
    coords: tuple[ir.Expr, ...]
    moving: tuple[ir.Var | None, ...]
    extents: tuple[int, ...]
    kinds: tuple[str, ...]


def box_of(view: ir.View, schedule: Schedule, compute: Compute, stored: bool = False) -> Box | str:
    """The box that loads (or stores) a tile of a view, or the reason why there is none."""
    return _of_blocks(view, schedule.blocks, schedule.via, schedule.order, compute, stored)


@lru_cache(maxsize=4096)
def _of_blocks(
    view: ir.View, blocks: tuple[Block, ...], via: str, order: str, compute: Compute, stored: bool
) -> Box | str:
    """``box_of`` for the words that it depends on, which many schedules share, so that the cache hits."""
    from transconv.schedule.schedule import Schedule

    along = _along(view)
    other = "N" if view is compute.a else "M" if view is compute.b else "K"
    for b in blocks:  # an axis may occur in the mask alone
        if b.extent > 1 and compute.kind(b.first) != other and not along.intersection(b.axes):
            return f"{view.tensor.name}: no dimension moves along block {b}"
    blocks = tuple(b for b in blocks if along.intersection(b.axes))
    return _box_of(view, Schedule(blocks, via=via, order=order), compute, stored)


@lru_cache(maxsize=512)
def _along(view: ir.View) -> frozenset[str]:
    """The axes that move along some dimension of a view."""
    return frozenset(v.name for d in view.dims for v in ir.free_vars(d.coord))


@lru_cache(maxsize=4096)
def _box_of(view: ir.View, schedule: Schedule, compute: Compute, stored: bool) -> Box | str:
    """``box_of`` for a schedule of only the relevant blocks, which many schedules of a computation share,
    so that the cache hits."""
    facts = axis_facts(compute)
    layout = view.tensor.layout
    if layout.strides() is None:
        return f"{view.tensor.name} has a blocked layout, a box has one stride per dimension"
    if layout.offset:
        return f"{view.tensor.name} begins {layout.offset} elements into its memory, a box does not"
    dims: list[Dim] = []
    for b, apart, own in _seen_blocks(view):
        blocks = tuple([s for s in schedule.blocks if not own.isdisjoint(s.axes)])
        found = _dim(view, b, apart, blocks, schedule.via, compute, stored)
        if isinstance(found, str):
            return f"{view.tensor.name}: {found}"
        dims += found
    fused = _fuse(dims, schedule, compute)
    if isinstance(fused, str):
        return f"{view.tensor.name}: {fused}"
    dims = _merge(fused, facts, compute.phase)
    if reason := (
        _still(dims, view, schedule, compute)
        or why_not_dims(dims, schedule, compute, view.tensor, stored, facts)
        or _shifted(dims[-1], view.tensor, facts)
    ):
        return f"{view.tensor.name}: {reason}"
    return _box(view.tensor, dims, schedule, compute)


@lru_cache(maxsize=512)
def _seen_blocks(view: ir.View) -> list[tuple[ir.LayoutBlock, ir.Expr | None, frozenset[str]]]:
    """The blocks of a view's layout, each with its stride, if that is no number, and the axes that move
    along it."""
    apart = _strides(view.tensor)
    return [
        (b, apart.get(b.dim), frozenset(v.name for v in ir.free_vars(view.dims[b.dim].coord)))
        for b in view.tensor.layout.blocks
    ]


def _strides(tensor: ir.Tensor) -> dict[int, ir.Expr]:
    """The strides that are expressions of sizes, by dimension."""
    steps = map(simplify, tensor.steps) if tensor.extents else ()
    return {dim: step for dim, step in enumerate(steps) if ir.free_vars(step)}


@lru_cache(maxsize=512)
def _seen(seen: ir.ViewDim, size: ir.Expr, compute: Compute) -> tuple[ir.Expr, ir.Expr | None]:
    """The simplified coordinate, and a condition of the mask other than "inside the tensor", or None."""
    facts = axis_facts(compute)
    coord = simplify(seen.coord, facts)
    inside = facts.assume(coord >= 0).assume(coord < size)
    for part in ir.conjuncts(seen.mask):
        if not prove(simplify(part, facts), inside):
            return coord, part
    return coord, None


@lru_cache(maxsize=4096)  # blocks of other dimensions differ more often
def _dim(
    view: ir.View,
    b: ir.LayoutBlock,
    apart: ir.Expr | None,
    blocks: tuple[Block, ...],
    via: str,
    compute: Compute,
    stored: bool,
) -> list[Dim] | str:
    """The dimension of a block of the layout (two if it is seen as planes), or why it is not legal.
    ``apart``: its stride, if that is no number; ``blocks``: those of the tile that move along it. The
    engine takes every so many-th position only where sizes are arguments: what makes such descriptors is
    the launcher of such kernels."""
    facts, schedule = axis_facts(compute), Schedule(blocks, via=via)
    name, of = view.tensor.dims[b.dim], view.tensor
    bound = simplify(of.extents[b.dim], facts) if of.extents and ir.free_vars(of.extents[b.dim]) else None
    coord, beyond = _seen(view.dims[b.dim], ir.Const(b.size) if bound is None else bound, compute)
    if beyond is not None:
        return f"the mask {beyond} says more than that {name} is inside"
    moving = [
        v
        for v in sorted(ir.free_vars(coord), key=lambda v: v.name)
        if (own := schedule.block_of(v.name))
        and own.extent > 1
        and (own.last == v.name or not pile(own, view, schedule, compute))
    ]
    if not moving:
        return [Dim(name, b.size, b.stride, coord, None, 1, bound=bound, pitch=apart)]
    if len(moving) > 1:
        whole = Dim(name, b.size, b.stride, coord, None, 1, bound=bound, pitch=apart)
        return (
            windows_of(whole, moving, schedule, compute, facts)
            or f"lanes {' and '.join(v.name for v in moving)} both move along {name}"
        )
    axis = moving[0]
    block = schedule.block_of(axis.name)
    assert block is not None
    step = _step(coord, axis, facts)
    if step == 1 and (wide := pile(block, view, schedule, compute)):
        return [Dim(name, b.size, b.stride, coord, axis, wide, piled=True)]
    if step == 1:
        one = Dim(name, b.size, b.stride, coord, axis, block.extent, bound=bound, pitch=apart)
        ends = stored or compute.kind(block.first) == "K"  # others may load more than is stored
        return (ends and groups_of(one, block, compute, facts)) or [one]
    if step > 1:
        whole = Dim(name, b.size, b.stride, coord, axis, block.extent, bound=bound, pitch=apart)
        planes = planes_of(whole, step, facts)
        if (
            multiple_of(whole.length, facts) % step == 0
            or isinstance(planes[1].coord, ir.Const)
            or (bound is None and _ends_within(coord, b.size, schedule, compute, facts))
        ):
            return planes
        if of.extents and not stored and step <= ENGINE_STEP:
            return [replace(whole, every=step)]
    size = b.size if bound is None else bound
    why = f" and {size} is no multiple of {step}" if step > 1 else ""
    return f"lane {axis.name} moves along {name} as {ir.readable(coord)}, a box steps by 1{why}"


def transposed(view: ir.View, schedule: Schedule, compute: Compute) -> bool:
    """Whether an explicit kernel must transpose the boxes of a view before it multiplies them.

    The matrix unit reads 16-bit operands from shared memory in either order, those of 8 and of 32 bits
    only with K innermost. Boxes of the latter with another innermost dimension (features, if the sum runs
    over positions) are written to shared memory again, with K innermost, by warps of their own."""
    if schedule.via != "gluon" or view.tensor.dtype.bits == 16:
        return False
    box = box_of(view, schedule, compute)
    if isinstance(box, str):
        return False
    return box.kinds[-1] not in ("", "K")


@lru_cache(maxsize=4096)
def _step(coord: ir.Expr, axis: ir.Var, facts: Facts) -> int:
    """The change of a coordinate per step of an axis; 0 unless it is a positive constant."""
    ahead = simplify(ir.substitute(coord, {axis: axis + 1}) - coord, facts)
    if (
        isinstance(ahead, ir.Const)
        and int(ahead.value) > 0
        and (axis not in ir.free_vars(simplify(coord - axis * int(ahead.value), facts)))
    ):
        return int(ahead.value)
    return 0


def _ends_within(coord: ir.Expr, size: int, schedule: Schedule, compute: Compute, facts: Facts) -> bool:
    """Whether no lane is beyond the end of a dimension, not even beyond the end of its axis. Then no lane
    reads the last row of planes that lack it."""
    last = range_of(coord, facts).hi
    used = {schedule.block_of(v.name) for v in ir.free_vars(coord)} - {None}
    return (
        last is not None
        and last < size
        and all(prod(compute.size(a) for a in b.axes) % b.extent == 0 for b in used if b is not None)
    )


def _fuse(dims: list[Dim], schedule: Schedule, compute: Compute) -> list[Dim] | str:
    """Merge the dimensions of a fused block, which must be whole, adjacent and in its order; otherwise
    return the reason."""
    out: list[Dim] = []
    at = 0
    while at < len(dims):
        d = dims[at]
        block = schedule.block_of(d.moving.name) if d.moving is not None else None
        if block is None or len(block.axes) == 1 or d.piled:
            out.append(d)
            at += 1
            continue
        run = dims[at : at + len(block.axes)]
        all_of_it = [(x.coord, x.length) for x in run] == [
            (ir.Var(a), whole(compute, (a,))) for a in block.axes
        ]
        packed = all(x.apart == simplify(y.apart * y.length) for x, y in itertools.pairwise(run))
        if not all_of_it or not packed:
            return f"the lanes of block {block} do not follow one another in memory"
        name = "_".join(block.axes)
        bound = whole(compute, block.axes) if any(x.bound is not None for x in run) else None
        out.append(
            Dim(
                name,
                prod(x.size for x in run),
                run[-1].stride,
                ir.Var(name),
                ir.Var(name),
                block.extent,
                plane=any(x.plane for x in run),
                bound=bound,
                pitch=run[-1].pitch,
            )
        )
        at += len(run)
    return out


def _merge(dims: list[Dim], facts: Facts, phase: bool) -> list[Dim]:
    """Merge dimensions in which the box has extent 1 into their inner neighbours. Stride phases differ in
    which can be merged, so they merge none if the engine can take all: one launch then serves all
    phases."""
    out: list[Dim] = []
    # The stride of a dimension of size 1 has no effect, and need not be a multiple of 16 bytes.
    wide = [
        d for d in dims if not (d.size == 1 and d.bound is None and d.extent == 1 and _stays(d, facts))
    ]
    if phase and 0 < len(wide) <= ENGINE_RANK:
        return wide
    for d in wide or dims[-1:]:
        numbers = out and not d.named and not out[-1].named and d.every == 1
        if (
            numbers
            and out[-1].extent == 1
            and d.size % d.extent == 0
            and (out[-1].stride == d.stride * d.size)
            and _stays(out[-1], facts)
            and _stays(d, facts)
            and (not out[-1].plane or _begins_whole(d, facts))
        ):
            outer = out.pop()
            d = replace(
                d,
                name=f"{outer.name}_{d.name}",
                size=outer.size * d.size,
                coord=simplify(outer.coord * d.size + d.coord),
                plane=outer.plane or d.plane,
            )
        out.append(d)
    return out


def _stays(d: Dim, facts: Facts) -> bool:
    """Whether the coordinate is always inside the dimension, so that merging it reads no other
    elements."""
    if d.bound is not None:
        return False
    r = range_of(d.coord, facts)
    return r.lo is not None and r.hi is not None and r.lo >= 0 and r.hi < d.size


def _begins_whole(d: Dim, facts: Facts) -> bool:
    """Whether the box begins at multiples of its extent, so that no lane is in the next plane: behind the
    last element of a tensor there is none; the engine, which counts whole rows of planes, sees no end."""
    return d.moving is None or multiple_of(simplify(d.coord - d.moving), facts) % d.extent == 0


def _still(dims: list[Dim], view: ir.View, schedule: Schedule, compute: Compute) -> str | None:
    """The reason if no dimension moves along some block, because its axis has one position: the box would
    have fewer elements than the tile."""
    moved = {d.moving for d in dims}
    for b in schedule.blocks:
        if b.extent > 1 and ir.Var("_".join(b.axes)) not in moved and not pile(b, view, schedule, compute):
            return f"no dimension moves along block {b}, there is only one position"
    return None


def _shifted(inner: Dim, tensor: ir.Tensor, facts: Facts) -> str | None:
    """The reason if the box may begin between multiples of 16 bytes along the innermost dimension."""
    shift = inner.coord if inner.moving is None else simplify(inner.coord - inner.moving, facts)
    if multiple_of(shift, facts) * tensor.dtype.bytes % ENGINE_ALIGN:
        return f"the box begins at {ir.readable(inner.coord)} along {inner.name}, not at 16 bytes"
    return None


def _box(tensor: ir.Tensor, dims: list[Dim], schedule: Schedule, compute: Compute) -> Box:
    blocks = tuple(ir.LayoutBlock(i, d.size, d.stride) for i, d in enumerate(dims))
    layout = ir.Layout(tensor.dtype, len(dims), blocks, tensor.layout.offset)
    names = tuple(d.name for d in dims)
    extents = tuple(d.length for d in dims) if any(d.named for d in dims) else ()
    planes = any(d.plane for d in dims)
    pitches = tuple(d.apart for d in dims) if extents and (planes or tensor.pitches) else ()
    every = tuple(d.every for d in dims)
    seen = replace(
        tensor,
        dims=names,
        shape=tuple(d.size for d in dims),
        layout=layout,
        planes=planes,
        extents=extents,
        pitches=pitches,
        every=every if max(every) > 1 else (),
    )
    fused = {ir.Var("_".join(b.axes)): b.first for b in schedule.blocks}
    return Box(
        seen,
        tuple(d.coord for d in dims),
        tuple(d.moving for d in dims),
        tuple(d.extent for d in dims),
        tuple(_kind(d.moving, fused, compute) for d in dims),
    )


def _kind(moving: ir.Var | None, fused: dict[ir.Var, str], compute: Compute) -> str:
    """The kind of an axis, or of the fused axes of a block; empty for None."""
    return "" if moving is None else compute.kind(fused.get(moving, moving.name))


FEWEST_ROWS = 16  # of boxes that lie below one another; the swizzle repeats every 8 rows


def pile(block: Block, view: ir.View, schedule: Schedule, compute: Compute) -> int:
    """The number of features in each box of a pile; 0 if the block is not a pile.

    A block that runs through window elements and then through features (``kh.kw.c:256``) is not one box,
    because each window element has a corner of its own. An explicit kernel loads a box per window element.
    If features are innermost, boxes of at most 128 bytes of features (a row of shared memory) lie side by
    side; rows of less than 32 bytes have no layout that can be read across boxes. If summed positions are
    innermost, boxes of all features lie below one another."""
    *window, feature = block.axes
    roles = {x.name: x.role for x in compute.axes}
    if (
        schedule.via != "gluon"
        or not window
        or roles[feature] != "feature"
        or any(roles[a] != "window" for a in window)
        or compute.kind(feature) == "K"
        or view is compute.c
    ):
        return 0
    positions = [x for x in compute.axes_of("K") if x.role == "position"]
    seen = {v.name for d in view.dims for v in ir.free_vars(d.coord)}
    if feature not in seen or not any(x.name in seen for x in positions):
        return 0
    inner = {
        v for b in view.tensor.layout.blocks if b.stride == 1 for v in ir.free_vars(view.dims[b.dim].coord)
    }
    if ir.Var(feature) in inner:
        most, least = ROW // view.tensor.dtype.bytes, SHORTEST // view.tensor.dtype.bytes
    elif inner & {x.var for x in positions}:
        most, least = ENGINE_EXTENT, FEWEST_ROWS
    else:
        return 0
    wide = min(block.extent, most)
    while compute.size(feature) % wide:
        wide //= 2
    return wide if wide >= least else 0


SWIZZLED = 8  # rows after which the order of bytes in shared memory repeats


def rows_of(view: ir.View | None, schedule: Schedule, compute: Compute) -> tuple[int, int]:
    """How many boxes of one row the steps of a group share, and how many of them one step reads; two
    zeros where they share none, and where the schedule does not ask for it."""
    if view is None or not schedule.slide:
        return 0, 0
    box = box_of(view, schedule, compute)
    found = None if isinstance(box, str) else along(box, schedule.slide, compute)
    if found is None or isinstance(box, str):
        return 0, 0
    dim, step = found
    own = box.extents[dim]
    return own + (compute.size(schedule.slide) - 1) * abs(step), own


def moves(view: ir.View, schedule: Schedule) -> bool:
    """Whether an operand depends on the axis at all."""
    return any(ir.Var(schedule.slide) in ir.free_vars(d.coord) for d in view.dims)


@lru_cache(maxsize=1024)
def along(box: Box, axis: str, compute: Compute) -> tuple[int, int] | None:
    """The dimension that an axis moves a box through by whole rows of it, and by how many a step; None
    where it moves otherwise, or where the tiles do not overlap: those of boxes that take every so
    many-th position do not."""
    if box.tensor.every:
        return None
    facts, var = axis_facts(compute), ir.Var(axis)
    ahead = [simplify(ir.substitute(c, {var: var + 1}) - c, facts) for c in box.coords]
    if any(not isinstance(x, ir.Const) for x in ahead):
        return None
    steps = {d: int(x.value) for d, x in enumerate(ahead) if isinstance(x, ir.Const) and x.value}
    if len(steps) != 1:
        return None
    ((dim, step),) = steps.items()
    below = box.extents[dim + 1 :]
    if (
        prod(box.extents[:dim]) > 1
        or not below
        or box.extents[dim] <= abs(step)
        or prod(below[:-1]) % SWIZZLED
        or below[-1] * box.tensor.dtype.bytes > ROW
    ):
        return None
    return dim, step
