"""Reductions of tiles over their active elements.

Inactive elements, and lanes beyond the tile's end, take part as the reduction's neutral element. A result
is active where at least one element is, as in numpy.ma. Sums of 16-bit floats are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from transconv.ir import (
    FALSE,
    REDUCERS,
    Cast,
    Const,
    DType,
    Expr,
    Lane,
    Reduce,
    Select,
    Spread,
    all_of,
    boolean,
    eq,
    f32,
    i32,
    lanes_of,
    ne,
    select,
)
from transconv.kernel.functions import cast
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.elementwise import as_type, named
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import ends, lanes_along
from transconv.kernel.tiles.masks import at_first, joined, mentions
from transconv.kernel.tiles.values import Mask, Tile


@dataclass(frozen=True, slots=True)
class TileReduction:
    """A reduction of NumPy: ``op``, its row in ``ir.REDUCERS``; ``types``: ``sum`` (small integers in
    int32), ``same``, ``bool``, ``mean`` or ``place`` (the index of the first extreme element)."""

    name: str
    op: str
    numpy: Any
    types: str = "same"
    others: tuple[Any, ...] = ()


ROWS = (
    TileReduction("sum", "sum", np.sum, "sum", (sum,)),
    TileReduction("prod", "prod", np.prod, "sum"),
    TileReduction("max", "max", np.max, others=(np.amax, max)),
    TileReduction("min", "min", np.min, others=(np.amin, min)),
    TileReduction("any", "max", np.any, "bool", (any,)),
    TileReduction("all", "min", np.all, "bool", (all,)),
    TileReduction("mean", "sum", np.mean, "mean"),
    TileReduction("argmax", "max", np.argmax, "place"),
    TileReduction("argmin", "min", np.argmin, "place"),
)
REDUCTIONS = {row.name: row for row in ROWS}
"""Every reduction, by NumPy's name; methods of tiles have these names."""


def reduction_of(callee: Any) -> TileReduction | None:
    """The row of a function of NumPy, or of Python; None if there is none."""
    return next((r for r in ROWS if callee is r.numpy or any(callee is f for f in r.others)), None)


def reduced(b: Building, row: TileReduction, x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """A tile reduced over an axis, several (a tuple), or all (None)."""
    b.not_of_elements(f"np.{row.name}")
    axes = _axes(x, axis)
    if row.types == "place":
        return _place(b, row, x, axes, keepdims)
    if row.types == "mean":
        wide = x.dtype if x.dtype.kind == "float" and x.dtype.bits >= 32 else f32
        ones = replace(x, expr=Const(1.0, wide))
        total = reduced(b, REDUCTIONS["sum"], as_type(x, wide), axis, keepdims)
        if FALSE in x.mask:
            return as_type(total, x.dtype if x.dtype.kind == "float" else f32)
        mean = named(b, "divide", total, reduced(b, REDUCTIONS["sum"], ones, axis, keepdims))
        return as_type(mean, x.dtype if x.dtype.kind == "float" else f32)
    gives, work = types_of(row, x.dtype)
    value = cast(x.expr, work)
    if row.types == "bool":
        value = cast(cast(x.expr, boolean), i32)
    made = _over(b, row, value, x, axes)
    kept, active = _kept(keepdims), _active(b, x, axes)
    result = replace(x, expr=cast(made, gives), mask=active)
    return _without(b, result, axes, kept)


def _over(b: Building, row: TileReduction, value: Expr, x: Tile, axes: Sequence[int]) -> Expr:
    """The name of the reduced value, still along the lanes of the dimensions that are left."""
    lanes = _lanes(x, axes)
    neutral = REDUCERS[row.op].identity(value.dtype)
    part: Mask = joined([m for m in x.mask if mentions(m, lanes, b.scope)],
                        [m for m in ends(x.shape) if mentions(m, lanes, b.scope)])
    if FALSE in x.mask:  # no element is active, nor is the result
        return neutral
    if isinstance(value, Const) and not part:
        return _repeated(row, value, prod(x.shape[at] for at in axes))
    if part and not (row.op == "sum" and b.is_zero(value, part)):
        value = Select(all_of(part), value, neutral)
    missing = [lane for lane in lanes if lane not in lanes_of(value, b.scope)]
    if missing:
        all_lanes = {*lanes_of(value, b.scope), *missing}
        value = Spread(value, tuple(sorted(all_lanes, key=lambda lane: lane.axis)))
    for lane in reversed(lanes):  # the last first: its neighbours are in one thread, or one warp
        value = Reduce(row.op, value, lane)
    return b.let(row.name, value) if lanes else b.named(row.name, value)


def _repeated(row: TileReduction, value: Const, times: int) -> Const:
    """The reduction of so many equal elements."""
    if row.op not in ("sum", "prod"):
        return value
    return Const(value.value * times if row.op == "sum" else value.value**times, value.dtype)


def _active(b: Building, x: Tile, axes: Sequence[int]) -> Mask:
    """Where at least one element is active."""
    lanes = _lanes(x, axes)
    inside = [m for m in x.mask if mentions(m, lanes, b.scope)]
    rest = tuple(m for m in x.mask if m not in inside)
    if not inside:
        return rest
    found = at_first(inside, lanes, b.scope)
    if found is None:
        within = [m for m in ends(x.shape) if mentions(m, lanes, b.scope)]
        there: Expr = Cast(all_of([*inside, *within]), i32)
        for lane in lanes:
            there = Reduce("max", there, lane)
        found = (b.let("active", there) > 0,)
    return b.proved(joined(rest, found))


def _place(b: Building, row: TileReduction, x: Tile, axes: Sequence[int], keepdims: bool) -> Tile:
    """The first index of the extreme element; a NaN is the extreme, as in NumPy."""
    if len(axes) != 1:
        raise Refusal(f"{row.name} over {len(axes)} dimensions", "one axis", f"x.{row.name}(axis=1)")
    (at,) = axes
    lane = lanes_along(x.shape)[at]
    kept, active = _kept(keepdims), _active(b, x, axes)
    if lane is None:
        return _without(b, replace(x, expr=Const(0, i32), mask=active), axes, kept)
    value = b.named("value", cast(x.expr, i32 if x.dtype is boolean else x.dtype))
    whole = replace(x, expr=value)
    extreme = _over(b, row, value, whole, axes)
    part = joined([m for m in x.mask if mentions(m, [lane], b.scope)],
                  [m for m in ends(x.shape) if mentions(m, [lane], b.scope)])
    found = eq(value, extreme)
    here = all_of([found | ne(value, value) if value.dtype.kind == "float" else found, *part])
    index_of = Cast(lane, i32)
    first = Reduce("min", select(here, index_of, Const(lane.extent, i32)), lane)
    return _without(b, replace(x, expr=b.let(row.name, first), mask=active), axes, kept)


def _without(b: Building, x: Tile, axes: Sequence[int], kept: bool) -> Tile:
    """A reduced tile without the reduced dimensions, or with one element along them."""
    alone = replace(x, shape=tuple(1 if i in axes else n for i, n in enumerate(x.shape)))
    if kept:
        return alone
    left = [i for i in range(len(x.shape)) if i not in axes]
    return replace(b.placed(alone, tuple(x.shape[i] for i in left), tuple(left)), items=x.items)


def types_of(row: TileReduction, dtype: DType) -> tuple[DType, DType]:
    """The type of the result, and that in which it is computed; of a place, in which elements are
    compared."""
    if row.types == "bool":
        return boolean, i32
    if row.types == "place":
        return i32, i32 if dtype is boolean else dtype
    if dtype.kind == "float":
        gives = f32 if dtype.bits == 8 else dtype
        return gives, gives if gives.bits >= 32 else f32
    if dtype.kind in ("index", "bool") or row.types == "sum" and dtype.bits < 32:
        return i32, i32
    return dtype, i32 if dtype.bits < 32 else dtype


def _lanes(x: Tile, axes: Sequence[int]) -> list[Lane]:
    along = lanes_along(x.shape)
    return [lane for at in axes if (lane := along[at]) is not None]


def _kept(keepdims: Any) -> bool:
    """Whether reduced dimensions stay, with one element."""
    if not isinstance(keepdims, bool):
        raise Refusal("keepdims that is known at run time only", "True or False")
    return keepdims


def _axes(x: Tile, axis: Any) -> tuple[int, ...]:
    """The reduced dimensions; those of a work-item's value are counted behind the items'."""
    rank = len(x.own)
    if axis is None:
        return tuple(range(x.items, len(x.shape)))
    given = axis if isinstance(axis, tuple) else (axis,)
    found = []
    for a in given:
        if not isinstance(a, int) or not -rank <= a < rank:
            raise Refusal(f"axis {a} of {x}", f"a number from {-rank} to {rank - 1}")
        found.append(a % rank + x.items)
    if len(set(found)) < len(found):
        raise Refusal(f"an axis twice in {given}", "each axis once")
    return tuple(sorted(found))
