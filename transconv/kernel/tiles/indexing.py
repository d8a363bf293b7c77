"""Elements of arrays at places that tiles tell: ``x[i, j]`` read, written, and added to.

What slices tell is in tiles/arrays.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transconv.ir import (
    ATOMIC_ADD,
    FALSE,
    ZERO,
    Const,
    Expr,
    FuncCall,
    Load,
    Spread,
    Store,
    all_of,
    index,
    select,
)
from transconv.kernel.functions import cast, held_number
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.arrays import (
    default,
    lifted,
    offset_of,
    plus,
    size_along,
    sliced,
    stops,
    sure,
    written,
)
from transconv.kernel.tiles.elementwise import aligned, deepened
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import (
    Shape,
    broadcast,
    each_dimension,
    ends,
    lanes_along,
    own_lanes,
)
from transconv.kernel.tiles.masks import joined
from transconv.kernel.tiles.values import ArrayView, DimSlice, Mask, Tile, tile_of
from transconv.simplify import simplify


def _places(b: Building, view: ArrayView, items: Sequence[Any],
            mapped: bool = False) -> tuple[Shape, int, Expr, Mask]:
    """The elements of ``view[items]`` where tiles are indices of the first dimensions: their shape, how
    many of its dimensions are work-items, their offsets, and where they exist. Indices below 0 count from
    the end, as in NumPy; ``mapped``: they are those of a mapping, and outside."""
    items = each_dimension(items, view.ndim)
    count = sum(not (isinstance(x, slice) and x == slice(None)) for x in items)
    tiles = aligned(b, [tile_of(x) for x in items[:count]])
    behind = [_known(b, along) for along in view.along[count:]]
    each = broadcast(*(t.shape for t in tiles))
    shape = (*each, *behind)
    coords: list[Expr] = [view.at.get(d, ZERO) for d in range(view.dims)]
    masks: list[Mask] = [view.mask]
    for along, tile in zip(view.along, tiles, strict=False):
        if not tile.dtype.is_integer:
            raise Refusal(f"{tile} as an index", "whole numbers")
        if along is None:
            raise Refusal("an index of a dimension that None made", "dimensions of the array")
        of = (*(None for _ in range(len(each) - len(tile.shape))), *range(len(tile.shape)))
        wide = tuple(1 if i is None else tile.shape[i] for i in of)
        at = b.placed(tile, (*wide, *(1 for _ in behind)), (*of, *(None for _ in behind)))
        sure(along)
        place, there = cast(at.expr, index), []
        if not mapped and not b.is_not_negative(place):
            size = size_along(along)
            there = [place >= -size]
            place = select(place < 0, place + size, place)
        elif mapped:
            there = [place >= 0]
        coords[along.dim] = plus(along.start, place * along.step if along.step != 1 else place)
        masks.append((*at.mask, *there, *(coords[along.dim] < stop for stop in stops(along.stop))))
    for along, lane in zip(view.along[count:], lanes_along(shape)[len(each):], strict=True):
        assert along is not None
        sure(along)
        far = ZERO if lane is None else lane if along.step == 1 else lane * along.step
        coords[along.dim] = plus(along.start, far)
    mask = b.inside(view.tensor.name, joined(*masks))
    return shape, max(t.items for t in tiles), offset_of(b, view, coords), mask


def _known(b: Building, along: DimSlice | None) -> int:
    """The size of a dimension behind those with indices."""
    size = None if along is None else simplify(size_along(along), b.facts)
    b.known(None if size is None else Tile((), size))
    if not isinstance(size, Const) or size.value < 1:
        raise Refusal("a dimension behind an index whose size is not known, or 0", "whole dimensions",
                      "X[i]")
    return int(size.value)


def gathered(b: Building, view: ArrayView, items: Sequence[Any], stem: str,
             mapped: bool = False) -> Tile:
    """``view[items]`` where tiles are indices of the first dimensions: the elements at these places, one
    for each of the tiles' elements; inactive where a place is outside of the array."""
    shape, work, offset, mask = _places(b, view, items, mapped)
    value = b.let(stem or default(view), Load(view.tensor, offset, all_of(joined(mask, ends(shape)))))
    b.zero_unless[value] = frozenset((*mask, *ends(shape)))
    return Tile(shape, value, mask, items=work)


def scattered(b: Building, view: ArrayView, items: Sequence[Any], value: Any, where: Mask,
              each: Shape, mapped: bool = False) -> None:
    """``view[items] = value`` where tiles are indices, for the active elements of the value where a
    condition of the items holds and that are inside of the array. ``each``: the shape of the items."""
    _, offset, out, e = scattered_places(b, view, items, value, where, each, mapped)
    b.add(Store(view.tensor, offset, e, all_of(out)))


def scattered_places(b: Building, view: ArrayView, items: Sequence[Any], value: Any, where: Mask,
                     each: Shape, mapped: bool = False) -> tuple[Shape, Expr, Mask, Expr]:
    """The shape, the offsets and the mask of what is written to ``view[items]``, and the values."""
    held_number(value, view.tensor.dtype)
    shape, rank, offset, mask = _places(b, view, items, mapped)
    tile = deepened(b, tile_of(value), len(shape) - rank)
    if broadcast(tile.shape, shape) != shape:
        raise Refusal(f"{tile} stored to elements of shape {shape}", "a value for each element")
    where = tuple(lifted(b, m, each, len(shape) - rank) for m in where)
    out = b.proved(joined(mask, tile.mask, where, ends(shape)))
    return shape, offset, out, cast(tile.expr, view.tensor.dtype)


def added(b: Building, view: ArrayView, items: Sequence[Any], value: Any, where: Mask,
          each: Shape) -> None:
    """Add the active elements of a value to those of ``view[items]`` in one step each, where a condition
    of the items, whose shape is ``each``, holds. Each item adds, also where all add to one element."""
    items = each_dimension(items, view.ndim)
    if any(isinstance(i, Tile) and i.own or isinstance(i, Tile) and i.shape and not each for i in items):
        shape, offset, out, e = scattered_places(b, view, items, value, where, each)
    else:
        part = sliced(b, view, items, each)
        tile = tile_of(value)
        if each and not tile.items:  # each item has it
            tile = Tile((*each, *tile.shape), tile.expr, tile.mask, items=len(each))
        shape, offset, out, e = written(b, replace(part, items=each), tile, where)
        shape = (*each, *shape[len(each):])
    if FALSE in out:
        return
    lanes = own_lanes(shape)
    out = joined(out, ends(shape))
    if lanes:  # also where they vary so: simplified they may not, but there are as many additions
        offset, e = Spread(offset, lanes), Spread(e, lanes)
    b.add(FuncCall(ATOMIC_ADD, (view.tensor, offset, e, all_of(out))))
