"""Functions of NumPy that move elements of tiles: reshaped, one behind the other, running sums, sorted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from transconv import ir
from transconv.kernel import functions
from transconv.kernel.functions import cast, common, one_axis
from transconv.kernel.source import Refusal
from transconv.kernel.tiles import values
from transconv.kernel.tiles.kernel_builder import Building, aligned, arranged, between, held_type
from transconv.kernel.tiles.values import LAST, Mask, Shape, Tile, joined, lanes_along, tile_of
from transconv.simplify import simplify

MOST_SORTED = 1024  # the network of more takes long to compile


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
            flat = flat * n + (ir.ZERO if lane is None else lane)
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


def stacked(b: Building, tiles: Any, axis: Any = 0) -> Tile:
    """``np.stack``: tiles of one shape along a new dimension."""
    given = _alongside("stack", b, tiles)
    rank = len(given[0].own)
    if len({t.own for t in given}) > 1:
        raise Refusal(f"np.stack of the shapes {' '.join(str(t.own) for t in given)}", "equal shapes")
    if not isinstance(axis, int) or not -rank - 1 <= axis <= rank:
        raise Refusal(f"axis {axis} of a stack of tiles of {rank} dimensions", f"{-rank - 1} to {rank}")
    at = axis % (rank + 1)
    return concatenated(b, [reshaped(b, t, (*t.own[:at], 1, *t.own[at:])) for t in given], at)


def concatenated(b: Building, tiles: Any, axis: Any = 0) -> Tile:
    """``np.concatenate``: tiles one behind the other along a dimension, each as active as it is."""
    given = _alongside("concatenate", b, tiles)
    at = given[0].items + one_axis("concatenate", axis, len(given[0].own), given[0])
    if len({(*t.shape[:at], 0, *t.shape[at + 1 :]) for t in given}) > 1:
        told = " and ".join(str(t.own) for t in given)
        raise Refusal(f"np.concatenate of the shapes {told}", "equal sizes but along the axis")
    dtype, end = common([t.dtype for t in given], []), sum(t.shape[at] for t in given)
    shape = (*given[0].shape[:at], end, *given[0].shape[at + 1 :])
    lane, to = between(shape)[at], lanes_along(shape)[at]
    if lane is None or to is None:
        return given[0]
    made: Tile | None = None
    for t in reversed(given):
        begin = end - t.shape[at]
        place = simplify(ir.minimum(ir.maximum(lane - begin, 0), t.shape[at] - 1), b.facts)
        of = [place if i == at else i for i in range(len(shape))]
        part = arranged(b, replace(t, expr=cast(t.expr, dtype)), shape, of)
        made = part if made is None else _either(b, to < end, part, made)
        end = begin
    assert made is not None
    return made


def _either(b: Building, first: ir.Expr, x: Tile, y: Tile) -> Tile:
    """A tile where a condition holds, and another one elsewhere."""
    mask = x.mask if x.mask == y.mask else (ir.select(first, values.whole(x.mask), values.whole(y.mask)),)
    value = b.let("joined", ir.select(first, x.expr, y.expr))
    return replace(x, expr=value, mask=mask, vector=x.vector or y.vector)


def _alongside(name: str, b: Building, tiles: Any) -> list[Tile]:
    """Tiles, of which each item has one of its own or none does."""
    if not isinstance(tiles, (tuple, list)) or not tiles:
        raise Refusal(
            f"np.{name} of other than several tiles", "a tuple or list of tiles", f"np.{name}((x, y))"
        )
    given = aligned(b, [tile_of(v) for v in tiles])
    each = values.broadcast(*(t.shape[: t.items] for t in given))
    return [replace(t, shape=(*each, *t.own), items=len(each)) for t in given]


def running(b: Building, name: str, x: Tile, axis: Any = None) -> Tile:
    """``np.cumsum``, ``np.cumprod``: of the active elements up to each; active where the tile is."""
    row, at = functions.RUNNING[name], x.items + one_axis(name, axis, len(x.own), x)
    lane = lanes_along(x.shape)[at]
    gives, work = functions.types_of(row, x.dtype)
    value = cast(x.expr, work)
    if lane is None:
        return replace(x, expr=cast(value, gives))
    value = b.where(x.mask, value, ir.REDUCERS[row.op].identity(work))
    return replace(x, expr=cast(b.let(name, ir.Running(row.op, _wide(b, value, x, lane), lane)), gives))


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
    end = [m for m in values.ends(x.shape) if values.mentions(m, [lane], b.scope)]
    value = b.named("value", cast(x.expr, work))
    number = joined(x.mask, end, [ir.eq(value, value)] if floats else [])
    count = lane.extent.bit_length() - 1
    digits = [ir.Lane(f"digit{k}", 2, 2 * LAST - k) for k in range(count)]
    place = ir.sum_of([d * (1 << k) for k, d in enumerate(digits)])
    made: ir.Expr = b.let(
        "apart",
        ir.Gather(b.let("value", _wide(b, b.where(number, value, last), x, lane)), (lane,), (place,)),
    )
    for stage in range(count):
        for k in reversed(range(stage + 1)):
            least, most = (ir.Reduce(op, made, digits[k]) for op in ("min", "max"))
            first = ir.eq(digits[k], digits[stage + 1] if stage + 1 < count else 0)
            made = b.let("sorted", ir.select(first, least, most))
    back = tuple(lane // (1 << k) % 2 for k in reversed(range(count)))
    made = b.let("sorted", ir.Gather(made, tuple(reversed(digits)), back))
    mask = _first_of(b, x.mask, lane, end)
    if floats:
        made = b.where(_first_of(b, number, lane, end), made, ir.Const(float("nan"), work))
    return replace(x, expr=cast(made, x.dtype), mask=mask)


def _first_of(b: Building, mask: Mask, lane: ir.Lane, end: Sequence[ir.Expr]) -> Mask:
    """Where a mask holds, after elements along a lane where it does come before all others."""
    apart = [m for m in mask if not values.mentions(m, [lane], b.scope)]
    if {*mask} <= {*apart, *end}:
        return mask
    there = ir.Cast(ir.all_of([*mask, *end]), ir.i32)
    return joined(apart, [ir.Cast(lane, ir.i32) < b.let("active", ir.Reduce("sum", there, lane))])
