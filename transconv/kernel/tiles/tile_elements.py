"""Elements of tiles: those at indices, what is written to them, and their order in other shapes. Tiles are
values; ``t[...] = v`` gives names another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transconv import ir
from transconv.kernel.functions import cast, held_number
from transconv.kernel.source import ONE_VALUE, Refusal, WrongScope
from transconv.kernel.tiles.kernel_builder import (
    Building,
    arranged,
    between,
    deepened,
    position,
    ways_from,
)
from transconv.kernel.tiles.values import (
    Mask,
    Shape,
    Tile,
    broadcast,
    each_dimension,
    either,
    joined,
    lanes_along,
    side_by_side,
    tile_of,
)
from transconv.simplify import simplify


def taken(b: Building, x: Tile, items: Sequence[Any]) -> Tile:
    """``x[items]``: ``:``, None, an ellipsis, indices, which pick one element along a dimension, and tiles
    of them. Numbers of items are each item's own."""
    b.not_of_elements("an index")
    items = [*(slice(None) for _ in range(x.items)), *each_dimension(items, len(x.own), "a tile")]
    if any(isinstance(i, Tile) and i.own for i in items):
        slices = (i if isinstance(i, slice) else slice(None) for i in items[x.items :] if i is not None)
        cut = taken(b, x, [*slices])
        return found(b, cut, items)
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
    along = between(shape)[at]
    there = start if along is None else start + (along if step == 1 else along * step)
    bounds = b.proved((there < before, there >= 0))  # also of lanes beyond the end
    place = simplify(ir.minimum(ir.maximum(there, 0), before - 1), b.facts) if bounds else there
    of = [place if i == at else i for i in range(len(shape))]
    return arranged(b, x, shape, of, () if inside else bounds)


def found(b: Building, x: Tile, items: Sequence[Any]) -> Tile:
    """``x[:, t]``: elements at places along dimensions side by side, one for each element of the tiles;
    inactive where a place is not in the tile. Places below 0 count from the end."""
    at = [i for i, item in enumerate(items) if isinstance(item, Tile)]
    places = [tile_of(items[i]) for i in at]
    side_by_side([isinstance(i, Tile) for i in items], items)
    if x.items or any(t.items for t in places):
        raise WrongScope("a tile as an index of a tile inside of items", "the scope of the group; numbers")
    if any(not t.dtype.is_integer for t in places):
        raise Refusal(f"{places[0]} as an index of a tile", "whole numbers", "np.where(x > 0, x, 0.0)")
    mine = broadcast(*(t.shape for t in places))
    shape = (*x.shape[: at[0]], *mine, *x.shape[at[-1] + 1 :])
    of: list[int | ir.Expr] = [i if i < at[0] else i - len(at) + len(mine) for i in range(len(x.shape))]
    ways = {to: lane for lane, to in ways_from(shape).items()}
    inside: list[ir.Expr] = []
    for i, t in zip(at, places, strict=True):
        wide = (*(None for _ in range(len(mine) - len(t.shape))), *range(len(t.shape)))
        dims = (*(None for _ in range(at[0])), *wide, *(None for _ in items[at[-1] + 1 :]))
        there = b.placed(t, tuple(1 if k is None else t.shape[k] for k in dims), dims)
        e = b.named("place", b.move(cast(there.expr, ir.index), ways))
        e = e if b.is_not_negative(e) else b.named("place", ir.select(e < 0, e + x.shape[i], e))
        bounds = b.proved((e >= 0, e < x.shape[i]))
        inside += (*(b.move(m, ways) for m in there.mask), *bounds)
        of[i] = b.named("place", ir.select(ir.all_of(bounds), e, ir.ZERO) if bounds else e)
    return arranged(b, x, shape, of, joined(inside))


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
        return arranged(b, x, shape, of, there_is)
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
