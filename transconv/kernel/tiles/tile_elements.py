"""Elements of tiles: those at indices, what is written to them, and their order in other shapes. Tiles are
values; ``t[...] = v`` gives names another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transconv import ir
from transconv.kernel.functions import cast, common, held_number
from transconv.kernel.source import ONE_VALUE, Refusal, WrongScope
from transconv.kernel.tiles import rearrangements
from transconv.kernel.tiles.kernel_builder import Building, aligned, deepened, position
from transconv.kernel.tiles.values import (
    Mask,
    Shape,
    Tile,
    broadcast,
    each_dimension,
    either,
    joined,
    lanes_along,
    tile_of,
    whole,
)
from transconv.simplify import simplify


def taken(b: Building, x: Tile, items: Sequence[Any]) -> Tile:
    """``x[items]``: ``:``, None, an ellipsis, indices, which pick one element along a dimension, and tiles
    of them. Numbers of items are each item's own."""
    b.not_of_elements("an index")
    items = [*(slice(None) for _ in range(x.items)), *each_dimension(items, len(x.own), "a tile")]
    if any(isinstance(i, Tile) and i.own for i in items):
        cut = taken(
            b, x, [i if isinstance(i, slice) else slice(None) for i in items[x.items :] if i is not None]
        )
        return rearrangements.picked(b, cut, items)
    numbers = (n for i in items for n in ((i.start, i.stop) if isinstance(i, slice) else (i,)))
    each = [n.shape for n in numbers if isinstance(n, Tile) and n.items == x.items]
    x = b.spread(x, (*broadcast(x.shape[: x.items], *each), *x.own))
    picked, at = x, 0
    for item in items:
        if item is None:
            continue
        if not isinstance(item, slice):
            picked = _picked(b, picked, at, item)
        elif not _is_whole(item, x.shape[at]):
            picked = part(b, picked, at, *_bounds(b, x, item, x.shape[at]))
        at += 1
    of: list[int | None] = []
    shape: list[int] = []
    at = 0
    for item in items:
        if item is None:
            of.append(None)
            shape.append(1)
            continue
        if isinstance(item, slice):
            of.append(at)
            shape.append(picked.shape[at])
        at += 1
    return replace(b.placed(picked, tuple(shape), tuple(of)), items=x.items)


def _bounds(b: Building, x: Tile, item: slice, size: int) -> tuple[ir.Expr, int, int]:
    """The start, the size and the step of a slice whose size is known."""
    step = 1 if item.step is None else item.step
    bounds = (item.start, item.stop)
    if isinstance(step, int) and step > 0 and not any(isinstance(n, Tile) for n in bounds):
        places = range(*item.indices(size))
        if not places:
            raise Refusal("an empty slice of a tile", "at least one element")
        return ir.Const(places.start), len(places), step
    start = ir.ZERO if item.start is None else _number(b, x, item.start, "a bound of a slice")
    stop = ir.as_expr(size) if item.stop is None else _number(b, x, item.stop, "a bound of a slice")
    if not b.is_not_negative(start):
        raise Refusal(
            "a slice of a tile whose start may be below 0 at run time, where NumPy counts from the end",
            "starts from 0 on",
            "x[i:i + 4]",
        )
    count = simplify(stop - start, b.facts)
    if step != 1 or not isinstance(count, ir.Const) or count.value < 1:
        raise Refusal(
            "a slice of a tile whose size is known at run time only",
            "sizes that are numbers",
            "x[i:i + 4]",
        )
    return start, int(count.value), 1


def _number(b: Building, x: Tile, value: Any, what: str) -> ir.Expr:
    """A number as a position along a tile; that of items varies along them."""
    place, given = position(value, what, x.items), tile_of(value)
    return deepened(b, replace(given, expr=place), len(x.own)).expr


def part(b: Building, x: Tile, at: int, start: ir.Expr, size: int, step: int = 1) -> Tile:
    """``size`` elements along a dimension, from ``start`` on; those beyond the tile are inactive."""
    before, shape = x.shape[at], tuple(size if i == at else n for i, n in enumerate(x.shape))
    old, new = lanes_along(x.shape)[at], lanes_along(shape)[at]
    first = start.value if isinstance(start, ir.Const) else None
    inside = first is not None and 0 <= first and first + (size - 1) * step < before
    if old is None:  # one element, which is there or not
        where = [] if inside else [ir.eq(start if new is None else start + new * step, 0)]
        return replace(x, shape=shape, mask=b.proved(joined(x.mask, where)))
    if first == 0 and step == 1 and new is old:
        return replace(x, shape=shape, mask=joined(x.mask, [] if size <= before else [old < before]))
    between = rearrangements.between(shape)[at]
    there = start if between is None else start + (between if step == 1 else between * step)
    bounds = b.proved((there < before, there >= 0))  # also of lanes beyond the end
    place = simplify(ir.minimum(ir.maximum(there, 0), before - 1), b.facts) if bounds else there
    of = [place if i == at else i for i in range(len(shape))]
    return rearrangements.arranged(b, x, shape, of, () if inside else bounds)


def resized(b: Building, x: Tile, shape: Shape) -> Tile:
    """The first elements of a tile in another shape; those that it lacks are inactive."""
    if len(shape) != len(x.own):
        raise Refusal(f"{x} as one of shape {shape}", f"{len(x.own)} sizes", "x.vec(shape=(4, 4))")
    for at, size in enumerate(shape):
        if size != x.own[at]:
            x = part(b, x, x.items + at, ir.ZERO, size)
    return x


def _is_whole(item: slice, size: int) -> bool:
    return (
        item.start in (None, 0)
        and item.step in (None, 1)
        and (item.stop is None or (isinstance(item.stop, int) and item.stop >= size))
    )


def _at(b: Building, x: Tile, at: int, item: Any) -> tuple[ir.Lane | None, ir.Expr, Mask]:
    """The lane of a dimension, an index in it, and where there is one."""
    size, place = x.shape[at], _number(b, x, item, "an index")
    there = b.proved(() if isinstance(place, ir.Const) else (place < size, place >= -size))
    if isinstance(place, ir.Const):
        if not -size <= place.value < size:
            raise Refusal(
                f"index {place.value} in a dimension of {size} elements", f"{-size} to {size - 1}"
            )
        place = ir.Const(int(place.value) % size)
    elif not b.is_not_negative(place):
        place = place % size
    return lanes_along(x.shape)[at], place, there


def _picked(b: Building, x: Tile, at: int, item: Any) -> Tile:
    """One element along a dimension: the sum of it and of zeros."""
    lane, place, there_is = _at(b, x, at, item)
    shape = tuple(1 if i == at else n for i, n in enumerate(x.shape))
    if lane is None:
        return replace(x, shape=shape, mask=joined(x.mask, there_is))
    if ir.lanes_of(place, b.scope):  # another one for each item
        place = simplify(ir.minimum(ir.maximum(place, 0), x.shape[at] - 1), b.facts) if there_is else place
        of = [place if i == at else i for i in range(len(shape))]
        return rearrangements.arranged(b, x, shape, of, there_is)
    if isinstance(x.expr, ir.Const):
        value: ir.Expr = x.expr
    else:
        work = ir.i32 if x.dtype.kind in ("bool", "index") or x.dtype.bits < 16 else x.dtype
        one = ir.Select(
            ir.eq(lane, place), cast(x.expr, work), ir.Const(0.0 if work.kind == "float" else 0, work)
        )
        value = cast(b.let("element", ir.Reduce("sum", one, lane)), x.dtype)
    lanes = {lane: place}
    mask: list[ir.Expr] = []
    for m in x.mask:
        if any(b.scope.get(v) for v in ir.free_vars(m)):
            there = ir.Select(ir.eq(lane, place), cast(m, ir.i32), ir.Const(0, ir.i32))
            mask.append(b.let("active", ir.Reduce("max", there, lane)) > 0)
        else:
            mask.append(ir.substitute(m, lanes))
    return replace(x, shape=shape, expr=value, mask=b.proved(joined(mask, there_is)))


def assigned(b: Building, x: Tile, items: Sequence[Any], value: Any) -> Tile:
    """``x`` after ``x[items] = value``: active where it was, and where active elements are written."""
    if x.items:
        raise WrongScope(
            "an assignment to elements of a tile by items",
            "elements of arrays; kernel.simulate, which orders what items write by barriers",
            "Y[i] = x",
        )
    if x.vector:
        raise Refusal(
            "an assignment to elements of a vector",
            "tiles; vectors do not change",
            "x = np.where(mask, y, x)",
        )
    if x.shape and len(items) == 1 and isinstance(items[0], Tile) and items[0].dtype is ir.boolean:
        return _written_where(b, x, items[0], value)
    items = each_dimension(items, len(x.shape), "a tile")
    if any(i is None for i in items):
        raise Refusal("None in the place of an assignment", "slices and indices")
    where: list[ir.Expr] = []
    left: list[int] = []
    for at, item in enumerate(items):
        if isinstance(item, slice):
            where += _range(x, at, item)
            left.append(at)
        else:
            lane, place, there_is = _at(b, x, at, item)
            where += there_is
            where += [] if lane is None else [ir.eq(lane, place)]
    held_number(value, x.dtype)
    given = tile_of(value)
    shape = tuple(x.shape[i] for i in left)
    if any(isinstance(i, slice) and not _is_whole(i, x.shape[at]) for at, i in enumerate(items)) and (
        given.shape not in ((), (1,) * len(given.shape))
    ):
        raise Refusal(
            "a tile written to a part of a tile",
            "a number there, or a tile in a whole one",
            "x[0:4] = 0.0",
        )
    if broadcast(shape, given.shape) != shape:
        raise Refusal(f"a value of shape {given.shape} written to one of shape {shape}", "what fits")
    rank = len(given.shape)
    of: list[int | None] = [None] * len(x.shape)
    for count, at in enumerate(left):
        source = count - (len(left) - rank)
        of[at] = source if source >= 0 else None
    there = b.placed(given, tuple(given.shape[i] if i is not None else 1 for i in of), tuple(of))
    return written(b, x, cast(there.expr, x.dtype), there.mask, tuple(where))


def _written_where(b: Building, x: Tile, chosen: Tile, value: Any) -> Tile:
    """``x[chosen] = value``: one value wherever a tile of the same shape is active and True."""
    held_number(value, x.dtype)
    given = tile_of(value)
    if chosen.shape != x.shape or given.shape:
        raise Refusal(*ONE_VALUE)
    return written(b, x, cast(given.expr, x.dtype), given.mask, (*chosen.mask, chosen.expr))


def _range(x: Tile, at: int, item: slice) -> list[ir.Expr]:
    """The condition of a slice with numbers for bounds."""
    bounds = (item.start, item.stop, item.step)
    if any(not (n is None or isinstance(n, int)) for n in bounds) or item.step not in (None, 1):
        raise Refusal(
            "a slice of a tile with bounds that are known at run time only, or a step",
            "numbers as bounds",
            "x[0:4] = 0.0",
        )
    start, stop, _ = item.indices(x.shape[at])
    lane = lanes_along(x.shape)[at]
    if lane is None:
        return [] if start < stop else [ir.Const(False, ir.boolean)]
    made: list[ir.Expr] = [lane >= start] if start else []
    return made + ([lane < stop] if stop < x.shape[at] else [])


def written(b: Building, x: Tile, value: ir.Expr, mask: Mask, where: Mask) -> Tile:
    """A tile with a value written where conditions hold and the value is active."""
    part = joined(where, mask)
    made = b.where(part, value, x.expr)
    return Tile(x.shape, made, b.proved(either(x.mask, part)))


def inactive(x: Tile) -> Tile:
    """``x.mask``: True where an element is inactive, as in numpy.ma."""
    if not x.mask or ir.FALSE in x.mask:
        return Tile(x.shape, ir.Const(bool(x.mask), ir.boolean), (), True, x.items)
    return Tile(x.shape, ir.Not(ir.all_of(x.mask)), (), True, x.items)


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


def stacked(b: Building, values: Any, axis: int = 0) -> Tile:
    """``np.stack``: tiles of one shape along a new dimension, each as active as it is."""
    if not isinstance(values, (tuple, list)) or not values:
        raise Refusal(
            "np.stack of other than several tiles", "a tuple or list of tiles", "np.stack((x, y), axis=1)"
        )
    given = aligned(b, [tile_of(v) for v in values])
    if len({t.own for t in given}) > 1:
        raise Refusal(f"np.stack of the shapes {' '.join(str(t.own) for t in given)}", "equal shapes")
    items, rank, n = max(t.items for t in given), len(given[0].own), len(given)
    if not isinstance(axis, int) or not -rank - 1 <= axis <= rank:
        raise Refusal(f"axis {axis} of a stack of tiles of {rank} dimensions", f"{-rank - 1} to {rank}")
    place, dtype = items + axis % (rank + 1), common([t.dtype for t in given], [])
    parts = [
        _deeper(b, b.spread(t, (*broadcast(*(t.shape[: t.items] for t in given)), *t.own)), place)
        for t in given
    ]
    shape = (*parts[0].shape[:place], n, *parts[0].shape[place + 1 :])
    lane = lanes_along(shape)[place]

    def chosen(first: int, last: int, each: Sequence[ir.Expr]) -> ir.Expr:
        if lane is None or last - first == 1 or len({*each[first:last]}) == 1:
            return each[first]
        middle = (first + last) // 2
        return ir.select(lane < middle, chosen(first, middle, each), chosen(middle, last, each))

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
