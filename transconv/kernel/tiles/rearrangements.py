"""Tiles whose elements are at other places: reshaped, concatenated, sorted, at places that tiles tell, and
running sums.

The expression of a tile is read at places that are computed along the lanes of the result. Names are
gathered, along lanes between those of dimensions, which then become those of the result:

    x.reshape(8, 4)    from (2, 16): y[i, j] is x[(i * 4 + j) // 16, (i * 4 + j) % 16]
    x[:, t]            y[i, j] is x[i, t[j]], inactive where t[j] is no place of x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from transconv import ir
from transconv.kernel.functions import RUNNING, cast, common, one_axis, types_of
from transconv.kernel.source import Refusal, WrongScope
from transconv.kernel.tiles.kernel_builder import Building, aligned
from transconv.kernel.tiles.values import (
    LAST,
    Mask,
    Shape,
    Tile,
    between_lane,
    broadcast,
    ends,
    joined,
    lanes_along,
    mentions,
    renamed,
    side_by_side,
    tile_of,
    whole,
)
from transconv.simplify import simplify

Places = Sequence["int | ir.Expr"]
MOST_SORTED = 1024  # the network of more takes long to compile


def between(shape: Shape) -> tuple[ir.Lane | None, ...]:
    """The lanes along which places in another tile are computed, one for each dimension of this shape."""
    rank = len(shape)
    return tuple(None if n == 1 else between_lane(rank - 1 - at, n) for at, n in enumerate(shape))


def _ways(shape: Shape) -> dict[ir.Lane, ir.Lane]:
    """The lane of a dimension, by that between."""
    found = zip(between(shape), lanes_along(shape), strict=True)
    return {lane: to for lane, to in found if lane is not None and to is not None}


def arranged(b: Building, x: Tile, shape: Shape, of: Places, inside: Mask = ()) -> Tile:
    """The elements of a tile in another shape. ``of``: for each dimension of the tile the one that it
    becomes, or the place in it, along the lanes between; ``inside``: where there is such a place."""
    after, ways = lanes_along(shape), _ways(shape)
    places: dict[ir.Lane, ir.Expr] = {}
    for lane, place in zip(lanes_along(x.shape), of, strict=True):
        if lane is not None and isinstance(place, ir.Expr):
            places[lane] = place
        elif lane is not None and isinstance(place, int) and (to := after[place]) is not None:
            ways[lane] = to
    value = b.named("value", x.expr) if places and len(ir.free_vars(x.expr)) > 1 else x.expr
    at = _Arranged(b, places, ways)
    mask = joined(map(at.mutate, x.mask), (b.move(m, ways) for m in inside))
    return replace(x, shape=shape, expr=at.mutate(value), mask=b.proved(mask))


class _Arranged(ir.ExprMutator):
    """An expression at places along some lanes, of which all then go other ways."""

    def __init__(self, b: Building, places: dict[ir.Lane, ir.Expr], ways: dict[ir.Lane, ir.Lane]) -> None:
        super().__init__()
        self.b, self.places, self.ways = b, places, ways

    def mutate_Lane(self, at: ir.Lane) -> ir.Expr:
        place = self.places.get(at)
        return self.ways.get(at, at) if place is None else self.b.move(place, self.ways)

    def mutate_Var(self, at: ir.Expr) -> ir.Expr:
        lanes = ir.lanes_of(at, self.b.scope)
        along = tuple(lane for lane in lanes if lane in self.places)
        if not along:
            return self.b.move(at, {lane: self.ways.get(lane, lane) for lane in lanes})
        work = held_type(at.dtype)
        held = ir.Gather(cast(at, work), along, tuple(self.places[lane] for lane in along))
        var = self.b.let("taken", held)
        found = {lane: self.ways.get(lane, lane) for lane in self.b.scope[var]}
        return cast(renamed(var, found), at.dtype)

    mutate_Renamed = mutate_Var


def held_type(dtype: ir.DType) -> ir.DType:
    """The type in which elements are moved: one of 16 bits or more, of the same values."""
    if dtype.kind == "bool" or dtype.bits < 16:
        return ir.f32 if dtype.kind == "float" else ir.i32
    return dtype


# -- functions of NumPy ----------------------------------------------------------------------------


def reshaped(b: Building, x: Tile, shape: Sequence[Any]) -> Tile:
    """The elements of a tile in another shape, in the same order; -1: the size that is left."""
    sizes = tuple(shape)
    if sizes.count(-1) == 1 and prod(x.own) % prod(sizes) == 0:
        sizes = tuple(prod(x.own) // -prod(sizes) if n == -1 else n for n in sizes)
    if any(not isinstance(n, int) or n < 1 for n in sizes) or prod(sizes) != prod(x.own):
        raise Refusal(f"{x} reshaped to {tuple(shape)}", f"sizes of {prod(x.own)} elements", "x[:, None]")
    new = (*x.shape[: x.items], *sizes)
    old, lanes = x.shape, between(new)
    of: list[int | ir.Expr] = [0] * len(old)
    for left, right in _alike(old, new):
        if len(left) == len(right) == 1:
            of[left[0]] = right[0]
            continue
        flat: ir.Expr = ir.ZERO
        for lane, n in ((lanes[i], new[i]) for i in right):
            flat = flat * n + ir.as_expr(lane)
        for i in reversed(left):
            of[i], flat = simplify(flat % old[i], b.facts), flat // old[i]
    return arranged(b, x, new, of)


def _alike(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The dimensions of more than one element in pairs of runs of as many, as short as can be."""
    a, b = ([i for i, n in enumerate(shape) if n > 1] for shape in (old, new))
    while a:
        left, right = [a.pop(0)], [b.pop(0)]
        while (n := prod(old[i] for i in left)) != (m := prod(new[i] for i in right)):
            left, right = ([*left, a.pop(0)], right) if n < m else (left, [*right, b.pop(0)])
        yield left, right


def picked(b: Building, x: Tile, items: Sequence[Any]) -> Tile:
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
    ways = {to: lane for lane, to in _ways(shape).items()}
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


def concatenated(b: Building, values: Any, axis: Any = 0) -> Tile:
    """``np.concatenate``: tiles one behind the other along a dimension, each as active as it is."""
    if not isinstance(values, (tuple, list)) or not values:
        raise Refusal("np.concatenate of other than several tiles", "a tuple or list of tiles", "(x, y)")
    given = aligned(b, [tile_of(v) for v in values])
    at = given[0].items + one_axis("concatenate", axis, len(given[0].own), given[0])
    if len({(*t.shape[:at], *t.shape[at + 1 :]) for t in given}) > 1:
        told = " and ".join(str(t.own) for t in given)
        raise Refusal(f"np.concatenate of the shapes {told}", "equal sizes but along the axis")
    dtype, total = common([t.dtype for t in given], []), sum(t.shape[at] for t in given)
    shape = (*given[0].shape[:at], total, *given[0].shape[at + 1 :])
    made: Tile | None = None
    begin = total
    for t in reversed(given):
        begin -= t.shape[at]
        lane, to = between(shape)[at], lanes_along(shape)[at]
        if lane is None or to is None:
            return t
        place = simplify(ir.minimum(ir.maximum(lane - begin, 0), t.shape[at] - 1), b.facts)
        of = [place if i == at else i for i in range(len(shape))]
        moved = arranged(b, replace(t, expr=cast(t.expr, dtype)), shape, of)
        if made is not None:
            mine = to < begin + t.shape[at]
            either = (
                () if moved.mask == made.mask else (ir.select(mine, whole(moved.mask), whole(made.mask)),)
            )
            value = b.let("joined", ir.select(mine, moved.expr, made.expr))
            moved = replace(moved, expr=value, mask=either or made.mask, vector=made.vector or t.vector)
        made = moved
    assert made is not None
    return made


def running(b: Building, name: str, x: Tile, axis: Any = None) -> Tile:
    """``np.cumsum``, ``np.cumprod``: of the active elements up to each; active where the tile is."""
    row, at = RUNNING[name], x.items + one_axis(name, axis, len(x.own), x)
    lane = lanes_along(x.shape)[at]
    gives, work = types_of(row, x.dtype)
    value = cast(x.expr, work)
    if lane is None:
        return replace(x, expr=cast(value, gives))
    value = b.where(x.mask, value, ir.REDUCERS[row.op].identity(work))
    return replace(x, expr=cast(b.let(name, ir.Scan(row.op, _wide(b, value, x, lane), lane)), gives))


def _wide(b: Building, value: ir.Expr, x: Tile, lane: ir.Lane) -> ir.Expr:
    """A value that varies along a lane of its tile."""
    lanes = ir.lanes_of(value, b.scope)
    return (
        value if lane in lanes else ir.Spread(value, tuple(n for n in x.lanes if n is lane or n in lanes))
    )


def ordered(b: Building, x: Tile, axis: Any = -1) -> Tile:
    """``np.sort``: active elements from the least to the largest, NaN behind them, inactive ones at the
    end. Elements change places in pairs, in a network that is written out (Batcher's bitonic one); those
    of a pair differ in one digit of their place, along which there is a lane."""
    at = x.items + one_axis("sort", axis, len(x.own), x)
    lane = lanes_along(x.shape)[at]
    if lane is None:
        return x
    if lane.extent > MOST_SORTED:
        raise Refusal(f"np.sort along {x.shape[at]} elements", f"up to {MOST_SORTED}")
    work = held_type(x.dtype)
    floats = work.kind == "float"
    last = ir.Const(float("inf") if floats else work.limits[1], work)
    end = [m for m in ends(x.shape) if mentions(m, [lane], b.scope)]
    value = b.named("value", cast(x.expr, work))
    number = joined(x.mask, end, [ir.eq(value, value)] if floats else [])
    count = lane.extent.bit_length() - 1
    digits = [ir.Lane(f"digit{k}", 2, 2 * LAST - k) for k in range(count)]
    place = ir.sum_of([d * (1 << k) for k, d in enumerate(digits)])
    made = b.let(
        "apart",
        ir.Gather(b.let("value", _wide(b, b.where(number, value, last), x, lane)), (lane,), (place,)),
    )
    for stage in range(count):
        for k in reversed(range(stage + 1)):
            least, most = (ir.Reduce(op, made, digits[k]) for op in ("min", "max"))
            first = ir.eq(digits[k], digits[stage + 1] if stage + 1 < count else 0)
            made = b.let("sorted", ir.select(first, least, most))
    back = tuple(lane // (1 << k) % 2 for k in range(count))
    made = b.let("sorted", ir.Gather(made, tuple(digits), back))
    mask = _first_of(b, x.mask, lane, end)
    if floats:
        made = b.where(_first_of(b, number, lane, end), made, ir.Const(float("nan"), work))
    return replace(x, expr=cast(made, x.dtype), mask=mask)


def _first_of(b: Building, mask: Mask, lane: ir.Lane, end: Sequence[ir.Expr]) -> Mask:
    """Where a mask holds, after elements along a lane where it does come before all others."""
    apart = [m for m in mask if not mentions(m, [lane], b.scope)]
    if {*mask} <= {*apart, *end}:
        return mask
    there = ir.Cast(ir.all_of([*mask, *end]), ir.i32)
    return joined(apart, [ir.Cast(lane, ir.i32) < b.let("active", ir.Reduce("sum", there, lane))])
