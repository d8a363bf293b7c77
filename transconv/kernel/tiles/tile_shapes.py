"""Shapes of tiles, and what is said of a tile as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transconv.ir import FALSE, Const, Expr, Not, all_of, boolean, select
from transconv.kernel.functions import cast, common, held_number
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.elementwise import aligned
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import Shape, broadcast, lanes_along
from transconv.kernel.tiles.masks import whole
from transconv.kernel.tiles.values import Tile, tile_of


def inactive(x: Tile) -> Tile:
    """``x.mask``: True where an element is inactive, as in numpy.ma."""
    if not x.mask or FALSE in x.mask:
        return Tile(x.shape, Const(bool(x.mask), boolean), (), True, x.items)
    return Tile(x.shape, Not(all_of(x.mask)), (), True, x.items)


def without_mask(b: Building, x: Tile, fill_value: Any) -> Tile:
    """``x.filled(v)``, as in numpy.ma: ``v`` where an element is inactive; active everywhere."""
    held_number(fill_value, x.dtype)
    value = tile_of(fill_value)
    if value.shape or value.mask:
        raise Refusal(f"{value} in the place of inactive elements", "a number", "x.filled(0.0)")
    made = b.where(x.mask, x.expr, cast(value.expr, x.dtype))
    return replace(x, expr=made, mask=())


def transposed(b: Building, x: Tile, axes: Sequence[int] | None = None) -> Tile:
    """The tile with its dimensions in another order, by default reversed."""
    rank = len(x.own)
    order = tuple(reversed(range(rank))) if axes is None else tuple(axes)
    if sorted(a % max(1, rank) for a in order) != list(range(rank)):
        raise Refusal(f"the axes {order} of {x}", "each axis once")
    order = (*range(x.items), *(x.items + a % rank for a in order))
    return replace(b.placed(x, tuple(x.shape[a] for a in order), order), items=x.items)


def reshaped(b: Building, x: Tile, shape: Shape) -> Tile:
    """The tile with dimensions of one element added or removed."""
    if [n for n in shape if n != 1] != [n for n in x.shape if n != 1]:
        raise Refusal(f"{x} reshaped to {shape}", "other dimensions of one element only", "x[:, None]")
    sources = [i for i, n in enumerate(x.shape) if n != 1]
    of = [sources.pop(0) if n != 1 else None for n in shape]
    return b.placed(x, shape, tuple(of))


def stacked(b: Building, values: Any, axis: int = 0) -> Tile:
    """``np.stack``: tiles of one shape along a new dimension, each as active as it is."""
    if not isinstance(values, (tuple, list)) or not values:
        raise Refusal("np.stack of other than several tiles", "a tuple or list of tiles",
                      "np.stack((x, y), axis=1)")
    given = aligned(b, [tile_of(v) for v in values])
    if len({t.own for t in given}) > 1:
        raise Refusal(f"np.stack of the shapes {' '.join(str(t.own) for t in given)}", "equal shapes")
    items, rank, n = max(t.items for t in given), len(given[0].own), len(given)
    if not isinstance(axis, int) or not -rank - 1 <= axis <= rank:
        raise Refusal(f"axis {axis} of a stack of tiles of {rank} dimensions", f"{-rank - 1} to {rank}")
    place, dtype = items + axis % (rank + 1), common([t.dtype for t in given], [])
    parts = [_deeper(b, b.spread(t, (*broadcast(*(t.shape[:t.items] for t in given)), *t.own)), place)
             for t in given]
    shape = (*parts[0].shape[:place], n, *parts[0].shape[place + 1:])
    lane = lanes_along(shape)[place]

    def chosen(first: int, last: int, each: Sequence[Expr]) -> Expr:
        if lane is None or last - first == 1 or len({*each[first:last]}) == 1:
            return each[first]
        middle = (first + last) // 2
        return select(lane < middle, chosen(first, middle, each), chosen(middle, last, each))

    made = b.let("stacked", chosen(0, n, [cast(t.expr, dtype) for t in parts]))
    masks = [whole(t.mask) for t in parts]
    mask = parts[0].mask if len({*masks}) == 1 else (chosen(0, n, masks),)
    return Tile(shape, made, mask, any(t.vector for t in given), items)


def _deeper(b: Building, x: Tile, place: int) -> Tile:
    """A tile with one more dimension, of one element."""
    of = (*range(place), None, *range(place, len(x.shape)))
    return b.placed(x, (*x.shape[:place], 1, *x.shape[place:]), of)


def spread(x: Tile, shape: Shape) -> Tile:
    """The tile broadcast to a shape."""
    if broadcast(x.shape, shape) != shape:
        raise Refusal(f"{x} broadcast to {shape}", "a shape that it fits")
    return Tile(shape, x.expr, x.mask, x.vector)


def filled(shape: Shape, value: Any, dtype: Any, vector: bool = False) -> Tile:
    """A tile of one value, active everywhere."""
    held_number(value, dtype)
    made = tile_of(value)
    if made.shape:
        raise Refusal(f"{made} as a fill value", "a number")
    return Tile(shape, cast(made.expr, dtype), made.mask, vector)

