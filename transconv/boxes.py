"""Which views a copy engine can fetch or store as boxes, and why the others cannot be.

A box is a rectangular piece of a tensor: per dimension a first coordinate and an extent. The engine
fills what lies outside the tensor with zeros and drops writes there, so a view qualifies when its
mask says nothing more than "inside", when along each dimension at most one block of the tile moves,
in steps of 1 (or in equal steps that divide the dimension into interleaved planes), and when memory
suits the engine: unit step innermost, all other strides multiples of 16 bytes, at most five
dimensions.

Dimensions along which a box does not reach are merged into their inner neighbour where memory allows:
weights ``[oc, kh, kw, ic]`` seen tap by tap are the matrix ``[oc, kh*kw*ic]``. A block that fuses
whole dimensions (``mb.oh.ow:128`` of a 1x1 filter) runs along one merged dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from transconv.algorithm import Algorithm
from transconv.algorithm_text import axis_facts
from transconv.ir import (
    Const,
    Expr,
    Layout,
    LayoutBlock,
    Tensor,
    Var,
    View,
    ViewDim,
    conjuncts,
    free_vars,
    substitute,
)
from transconv.ir.reading import readable
from transconv.simplify import Facts, multiple_of, prove, range_of, simplify

if TYPE_CHECKING:
    from transconv.config import Block, Config

ENGINE_RANK = 5
ENGINE_EXTENT = 256
ENGINE_ALIGN = 16  # bytes
ROW = 128  # bytes of a row of shared memory
SHORTEST = 32  # bytes of the rows of boxes that lie side by side
FEWEST_ROWS = 16  # of boxes that lie below one another: the pattern of a swizzle is 8 rows long


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dimension of memory: its size and stride, where the view is along it, and what moves there."""

    name: str
    size: int
    stride: int
    coord: Expr
    moving: Var | None  # the axis (or fused axes) whose block the box reaches along
    extent: int
    piled: bool = False  # whether the block is several such boxes
    apart: bool = False  # whether every position of a block along it is a box of its own


@dataclass(frozen=True, slots=True)
class Box:
    """A view as a box: the tensor with its dimensions in memory order, coordinates over axes, the
    axis that moves along each dimension, and how far the box reaches. ``shifted``: where it begins
    along the innermost dimension, if that is not always a multiple of 16 bytes."""

    tensor: Tensor
    coords: tuple[Expr, ...]
    moving: tuple[Var | None, ...]
    extents: tuple[int, ...]
    shifted: str = ""


def box_of(view: View, config: Config, algorithm: Algorithm, stored: bool = False) -> Box | str:
    """The box that fetches (or stores) a tile of a view, or the reason why there is none."""
    along = _along(view)
    other = "N" if view is algorithm.a else "M" if view is algorithm.b else "K"
    for b in config.blocks:  # a mask may be all that knows of an axis
        if b.extent > 1 and algorithm.kind(b.axes[0]) != other and not along.intersection(b.axes):
            return f"{view.tensor.name}: no dimension moves along block {b}"
    blocks = tuple(b for b in config.blocks if along.intersection(b.axes))
    return _box_of(view, type(config)(blocks, via=config.via, order=config.order), algorithm, stored)


@lru_cache(maxsize=512)
def _along(view: View) -> frozenset[str]:
    """The axes that move along some dimension of a view."""
    return frozenset(v.name for d in view.dims for v in free_vars(d.coord))


@lru_cache(maxsize=4096)
def _box_of(view: View, config: Config, algorithm: Algorithm, stored: bool) -> Box | str:
    """The same from the blocks that matter: many configs of one algorithm share them."""
    facts = _facts(algorithm)
    layout = view.tensor.layout
    if layout.strides() is None:
        return f"{view.tensor.name} has a blocked layout, a box has one stride per dimension"
    if layout.offset:
        return f"{view.tensor.name} begins {layout.offset} elements into its memory, a box does not"
    dims: list[_Dim] = []
    apart = rows_apart(view, config, algorithm)
    for b in layout.blocks:
        found = _dim(view, b, config, algorithm, facts, apart)
        if isinstance(found, str):
            return f"{view.tensor.name}: {found}"
        dims += found
    fused = _fuse(dims, config, algorithm)
    if isinstance(fused, str):
        return f"{view.tensor.name}: {fused}"
    dims = _merge(fused, facts, algorithm.phase)
    if reason := (_still(dims, view, config, algorithm) or _lanes(dims, config, algorithm)
                  or _engine(dims, view.tensor) or _tails(dims, config, algorithm, stored)):
        return f"{view.tensor.name}: {reason}"
    return _box(view.tensor, dims, _shift(dims[-1], view.tensor, facts))


@lru_cache(maxsize=64)
def _facts(algorithm: Algorithm) -> Facts:
    return axis_facts(algorithm)


@lru_cache(maxsize=512)
def _seen(seen: ViewDim, size: int, algorithm: Algorithm) -> tuple[Expr, Expr | None]:
    """The coordinate, simplified, and the part of the mask that says more than "inside", if any."""
    facts = _facts(algorithm)
    coord = simplify(seen.coord, facts)
    inside = facts.assume(coord >= 0).assume(coord < size)
    for part in conjuncts(seen.mask):
        if not prove(simplify(part, facts), inside):
            return coord, part
    return coord, None


def _dim(view: View, b: LayoutBlock, config: Config, algorithm: Algorithm, facts: Facts,
         apart: frozenset[str]) -> list[_Dim] | str:
    name = view.tensor.dims[b.dim]
    coord, beyond = _seen(view.dims[b.dim], b.size, algorithm)
    if beyond is not None:
        return f"the mask {beyond} says more than that {name} is inside"
    moving = [v for v in sorted(free_vars(coord), key=lambda v: v.name)
              if (own := config.block_of(v.name)) and own.extent > 1
              and (v.name == own.axes[-1] or not pile(own, view, config, algorithm))]
    if not moving:
        return [_Dim(name, b.size, b.stride, coord, None, 1)]
    if len(moving) > 1:
        return f"lanes {' and '.join(v.name for v in moving)} both move along {name}"
    axis = moving[0]
    block = config.block_of(axis.name)
    assert block is not None
    if axis.name in apart:
        return [_Dim(name, b.size, b.stride, coord, None, 1, apart=True)]
    step = _step(coord, axis, facts)
    if step == 1 and (wide := pile(block, view, config, algorithm)):
        return [_Dim(name, b.size, b.stride, coord, axis, wide, piled=True)]
    if step == 1:
        return [_Dim(name, b.size, b.stride, coord, axis, block.extent)]
    if step > 1 and b.size % step == 0:
        return _planes(_Dim(name, b.size, b.stride, coord, axis, block.extent), step, facts)
    why = f" and {b.size} is no multiple of {step}" if step > 1 else ""
    return f"lane {axis.name} moves along {name} as {readable(coord)}, a box steps by 1{why}"


def pile(block: Block, view: View, config: Config, algorithm: Algorithm) -> int:
    """How many channels each box of a pile holds, 0 for a block that is no pile.

    A block that runs through the taps of a filter and then its channels (``kh.kw.ic:256``) is no
    box: every tap looks at the same pixels from another corner. An explicit kernel fetches a box per
    tap. Where channels are innermost, boxes of up to 128 bytes of them (a row of shared memory) lie
    side by side; rows of less than 32 bytes have no layout that could be read across boxes. Where
    the pixels that are summed are, boxes of as many channels as there are lie below one another.
    """
    *taps, channel = block.axes
    roles = {x.name: x.role for x in algorithm.axes}
    if (config.via != "gluon" or not taps or roles[channel] != "channel"
            or any(roles[a] != "tap" for a in taps) or algorithm.kind(channel) == "K"
            or view is algorithm.c):
        return 0
    pixels = [x for x in algorithm.axes_of("K") if x.role == "pixel"]
    seen = {v.name for d in view.dims for v in free_vars(d.coord)}
    if not any(x.name in seen for x in pixels):
        return 0
    inner = {v for b in view.tensor.layout.blocks if b.stride == 1
             for v in free_vars(view.dims[b.dim].coord)}
    if Var(channel) in inner:
        most, least = ROW // view.tensor.dtype.bytes, SHORTEST // view.tensor.dtype.bytes
    elif inner & {x.var for x in pixels}:
        most, least = ENGINE_EXTENT, FEWEST_ROWS
    else:
        return 0
    wide = min(block.extent, most)
    while algorithm.size(channel) % wide:
        wide //= 2
    return wide if wide >= least else 0


def rows_apart(view: View, config: Config, algorithm: Algorithm) -> frozenset[str]:
    """The axes whose every position is a box of its own, in a pile.

    Where pixels lie innermost, a tile of 2 rows x 64 columns x 64 channels is no box: memory has the
    channels outside of the rows, but the matrix unit reads rows side by side, per channel. An explicit
    kernel fetches a box of 64 columns x 64 channels per row, and lays them side by side.
    """
    if config.via != "gluon" or view is algorithm.c:
        return frozenset()
    inner = next((free_vars(view.dims[b.dim].coord) for b in view.tensor.layout.blocks
                  if b.stride == 1), frozenset())
    last = next((b for b in config.blocks if b.extent > 1 and Var(b.axes[-1]) in inner), None)
    if last is None:
        return frozenset()
    side = [b for b in config.blocks if b.extent > 1 and len(b.axes) == 1 and b is not last
            and algorithm.kind(b.axes[0]) == algorithm.kind(last.axes[0])]
    across = any(b.extent > 1 and algorithm.kind(b.axes[0]) != algorithm.kind(last.axes[0])
                 for b in config.blocks)
    return frozenset(b.axes[0] for b in side) if across else frozenset()


def turned(view: View, config: Config, algorithm: Algorithm) -> bool:
    """Whether an explicit kernel has to turn the boxes of a view before it multiplies them.

    The matrix unit reads 16-bit operands from shared memory along either side, wider ones along K
    only. A box of the latter whose innermost dimension is not summed (pixels times channels, where
    pixels are summed) is written once more with K innermost, by warps that do nothing else.
    """
    if config.via != "gluon" or view.tensor.dtype.bits <= 16:
        return False
    box = box_of(view, config, algorithm)
    if isinstance(box, str):
        return False
    inner = box.moving[-1]
    return inner is not None and algorithm.kind(inner.name.partition("_")[0]) != "K"


def _step(coord: Expr, axis: Var, facts: Facts) -> int:
    """How far a coordinate moves per step of an axis; 0 if that is not a constant forward step."""
    ahead = simplify(substitute(coord, {axis: axis + 1}) - coord, facts)
    if isinstance(ahead, Const) and int(ahead.value) > 0 and (
            axis not in free_vars(simplify(coord - axis * int(ahead.value), facts))):
        return int(ahead.value)
    return 0


def _planes(d: _Dim, step: int, facts: Facts) -> list[_Dim]:
    """A dimension in steps of 2 is one of two interleaved planes in steps of 1.

        i = oh*2 + kh - 1     ->     row oh + (kh - 1)//2 of plane (kh - 1) % 2
    """
    assert d.moving is not None
    rest = simplify(d.coord - d.moving * step, facts)
    row, plane = simplify(d.moving + rest // step, facts), simplify(rest % step, facts)
    return [_Dim(d.name, d.size // step, d.stride * step, row, d.moving, d.extent),
            _Dim(f"{d.name}_plane", step, d.stride, plane, None, 1)]


def _fuse(dims: list[_Dim], config: Config, algorithm: Algorithm) -> list[_Dim] | str:
    """Merge the dimensions that a fused block runs through, all of them, from end to end."""
    out: list[_Dim] = []
    at = 0
    while at < len(dims):
        d = dims[at]
        block = config.block_of(d.moving.name) if d.moving is not None else None
        if block is None or len(block.axes) == 1 or d.piled:
            out.append(d)
            at += 1
            continue
        run = dims[at:at + len(block.axes)]
        whole = [(x.coord, x.size) for x in run] == [(Var(a), algorithm.size(a)) for a in block.axes]
        packed = all(x.stride == y.stride * y.size for x, y in zip(run, run[1:], strict=False))
        if not whole or not packed:
            return f"the lanes of block {block} do not follow one another in memory"
        name = "_".join(block.axes)
        out.append(_Dim(name, prod(x.size for x in run), run[-1].stride, Var(name), Var(name),
                        block.extent))
        at += len(run)
    return out


def _merge(dims: list[_Dim], facts: Facts, phase: bool) -> list[_Dim]:
    """Fold a dimension that the box does not reach along into its inner neighbour. Phases differ in
    where that may be done: they keep what the engine can take, so that one launch can do them all."""
    out: list[_Dim] = []
    # The stride of a dimension of size 1 means nothing, and may be odd.
    wide = [d for d in dims if not (d.size == 1 and d.extent == 1 and _stays(d, facts))]
    if phase and 0 < len(wide) <= ENGINE_RANK:
        return wide
    for d in wide or dims[-1:]:
        if out and out[-1].extent == 1 and not out[-1].apart and d.size % d.extent == 0 and (
                out[-1].stride == d.stride * d.size) and _stays(out[-1], facts) and _stays(d, facts):
            outer = out.pop()
            d = replace(d, name=f"{outer.name}_{d.name}", size=outer.size * d.size,
                        coord=simplify(outer.coord * d.size + d.coord))
        out.append(d)
    return out


def _stays(d: _Dim, facts: Facts) -> bool:
    """Whether the coordinate never leaves the tensor (and so never reads a neighbour when merged)."""
    r = range_of(d.coord, facts)
    return r.lo is not None and r.hi is not None and r.lo >= 0 and r.hi < d.size


def _still(dims: list[_Dim], view: View, config: Config, algorithm: Algorithm) -> str | None:
    """A block of the tile that no dimension moves with, because its axis has one position: a box
    without it has too few elements."""
    moved = {d.moving for d in dims} | {x for d in dims if d.apart for x in free_vars(d.coord)}
    for b in config.blocks:
        if b.extent > 1 and Var("_".join(b.axes)) not in moved and not pile(
                b, view, config, algorithm):
            return f"no dimension moves along block {b}, there is only one position"
    return None


def _lanes(dims: list[_Dim], config: Config, algorithm: Algorithm) -> str | None:
    """A lane counts its blocks in the order of the axes, or in the one that the config gives; memory
    must have them so, in one run."""
    given = config.order.split(".") if config.order else []
    axes = sorted((x.name for x in algorithm.axes), key=lambda n: given.index(n) if n in given else 0)
    order = [a for x in axes for b in config.blocks if b.axes[0] == x for a in b.axes]
    runs: list[str] = []
    last: dict[str, int] = {}
    if any(d.apart for d in dims) and (reason := _pile_of_rows(dims, order, config, algorithm)):
        return reason
    for d in dims:
        if d.moving is None or d.extent == 1:
            continue
        axis = next(a for b in config.blocks if d.moving in (Var("_".join(b.axes)), Var(b.axes[-1]))
                    for a in b.axes)
        kind = algorithm.kind(axis)
        if order.index(axis) < last.get(kind, -1):
            return f"memory does not have {d.name} in the order of the tile's lanes"
        last[kind] = order.index(axis)
        if not runs or runs[-1] != kind:
            runs.append(kind)
    if len(runs) > len(set(runs)):
        return "the dimensions of one side of the tile are apart in memory"
    return None


def _pile_of_rows(dims: list[_Dim], order: list[str], config: Config,
                  algorithm: Algorithm) -> str | None:
    """A lane is in the box that its row says, at the place that its column says."""
    inner = dims[-1]
    block = next((b for b in config.blocks if inner.moving is Var("_".join(b.axes))), None)
    if block is None:
        return f"rows are boxes of their own, and nothing moves along {inner.name} inside of them"
    kind = algorithm.kind(block.axes[0])
    others = [b.axes[0] for b in config.blocks if b is not block and algorithm.kind(b.axes[0]) == kind]
    if any(order.index(a) > order.index(block.axes[-1]) for a in others):
        return f"memory does not have {inner.name} in the order of the tile's lanes"
    return None


def _shift(inner: _Dim, tensor: Tensor, facts: Facts) -> str:
    shift = inner.coord if inner.moving is None else simplify(inner.coord - inner.moving, facts)
    if multiple_of(shift, facts) * tensor.dtype.bytes % ENGINE_ALIGN:
        return (f"{tensor.name}: the box begins at {readable(inner.coord)} along {inner.name}, "
                "not at 16 bytes")
    return ""


def _engine(dims: list[_Dim], tensor: Tensor) -> str | None:
    """What the copy engine asks of memory."""
    if len(dims) > ENGINE_RANK:
        return f"{len(dims)} dimensions, a box has at most {ENGINE_RANK}"
    inner = dims[-1]
    if inner.stride != 1:
        return f"{inner.name} has stride {inner.stride}, the innermost dimension of a box has 1"
    for d in dims[:-1]:
        if d.stride * tensor.dtype.bytes % ENGINE_ALIGN:
            return f"{d.name} has stride {d.stride}, which is not a multiple of 16 bytes"
    for d in dims:
        if d.extent > ENGINE_EXTENT:
            return f"the box reaches {d.extent} along {d.name}, at most {ENGINE_EXTENT}"
        if d.size == 0:
            return f"{d.name} is empty"
    row = inner.extent * tensor.dtype.bytes
    if row < ENGINE_ALIGN:
        return f"the box reaches {inner.extent} along {inner.name}, less than 16 bytes"
    if any(d.apart for d in dims) and not SHORTEST <= row <= ROW:
        return (f"rows of {row} bytes are boxes of their own, which can be read across from "
                f"{SHORTEST} to {ROW} bytes")
    return None


def _tails(dims: list[_Dim], config: Config, algorithm: Algorithm, stored: bool) -> str | None:
    """A block that does not divide its axes ends outside the tensor, where the engine reads zeros.

    That is right only where leaving the block's axes means leaving the tensor: a sum must not
    take in elements from beyond, nor a store write there.
    """
    for block in config.blocks:
        total = prod(algorithm.size(a) for a in block.axes)
        kind = algorithm.kind(block.axes[0])
        if total % block.extent == 0 or (kind != "K" and not stored):
            continue
        name = Var("_".join(block.axes))
        for d in dims:
            moves = d.moving is name or d.apart and name in free_vars(d.coord)
            if moves and not (d.coord is name and d.size == total):
                return f"block {block} does not divide {total}, and {d.name} goes on beyond it"
    return None


def _box(tensor: Tensor, dims: list[_Dim], shifted: str) -> Box:
    blocks = tuple(LayoutBlock(i, d.size, d.stride) for i, d in enumerate(dims))
    layout = Layout(tensor.dtype, len(dims), blocks, tensor.layout.offset)
    names = tuple(d.name for d in dims)
    seen = Tensor(tensor.name, names, tuple(d.size for d in dims), layout)
    return Box(seen, tuple(d.coord for d in dims), tuple(d.moving for d in dims),
               tuple(d.extent for d in dims), shifted)
