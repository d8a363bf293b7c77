"""Reductions of tiles over their active elements, and matrix products.

Inactive elements, and lanes beyond the tile's end, take part as the reduction's neutral element. A result
is active where at least one element is, as in numpy.ma. Sums of 16-bit floats are computed in float32.

``a @ b`` is ``sum(a[:, :, None] * b[None], axis=1)``, as numpy.ma.dot has it: a call of the matrix unit
where the chip has the instruction, else that sum. Products of 16-bit floats give float32, those of int8
int32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from transconv import ir
from transconv.kernel.functions import (
    REDUCTIONS,
    TileReduction,
    cast,
    common,
    product_type,
    reduced_axes,
    types_of,
)
from transconv.kernel.source import Refusal
from transconv.kernel.tiles.kernel_builder import Building, Chip, as_type, named
from transconv.kernel.tiles.values import (
    Mask,
    PendingProduct,
    Tile,
    at_first,
    ends,
    inner_lane,
    joined,
    lanes_along,
    mentions,
)


def reduced(b: Building, row: TileReduction, x: Tile, axis: Any = None, keepdims: bool = False) -> Tile:
    """A tile reduced over an axis, several (a tuple), or all (None)."""
    b.not_of_elements(f"np.{row.name}")
    axes = tuple([a + x.items for a in reduced_axes(axis, len(x.own), x)])
    if row.types == "place":
        return _place(b, row, x, axes, keepdims)
    if row.types == "mean":
        wide = x.dtype if x.dtype.kind == "float" and x.dtype.bits >= 32 else ir.f32
        ones = replace(x, expr=ir.Const(1.0, wide))
        total = reduced(b, REDUCTIONS["sum"], as_type(x, wide), axis, keepdims)
        if ir.FALSE in x.mask:
            return as_type(total, x.dtype if x.dtype.kind == "float" else ir.f32)
        mean = named(b, "divide", total, reduced(b, REDUCTIONS["sum"], ones, axis, keepdims))
        return as_type(mean, x.dtype if x.dtype.kind == "float" else ir.f32)
    gives, work = types_of(row, x.dtype)
    value = cast(x.expr, work)
    if row.types == "bool":
        value = cast(cast(x.expr, ir.boolean), ir.i32)
    made = _over(b, row, value, x, axes)
    kept, active = _kept(keepdims), _active(b, x, axes)
    result = replace(x, expr=cast(made, gives), mask=active)
    return _without(b, result, axes, kept)


def _over(b: Building, row: TileReduction, value: ir.Expr, x: Tile, axes: Sequence[int]) -> ir.Expr:
    """The name of the reduced value, still along the lanes of the dimensions that are left."""
    lanes = _lanes(x, axes)
    neutral = ir.REDUCERS[row.op].identity(value.dtype)
    part = _along(b, x, lanes)
    if ir.FALSE in x.mask:  # no element is active, nor is the result
        return neutral
    if isinstance(value, ir.Const) and not part:
        return _repeated(row, value, prod(x.shape[at] for at in axes))
    if part and not (row.op == "sum" and b.is_zero(value, part)):
        value = ir.Select(ir.all_of(part), value, neutral)
    missing = [lane for lane in lanes if lane not in ir.lanes_of(value, b.scope)]
    if missing:
        all_lanes = {*ir.lanes_of(value, b.scope), *missing}
        value = ir.Spread(value, tuple(sorted(all_lanes, key=lambda lane: lane.axis)))
    for lane in reversed(lanes):  # the last first: its neighbours are in one thread, or one warp
        value = ir.Reduce(row.op, value, lane)
    return b.let(row.name, value) if lanes else b.named(row.name, value)


def _repeated(row: TileReduction, value: ir.Const, times: int) -> ir.Const:
    """The reduction of so many equal elements."""
    if row.op not in ("sum", "prod"):
        return value
    return ir.Const(value.value * times if row.op == "sum" else value.value**times, value.dtype)


def _active(b: Building, x: Tile, axes: Sequence[int]) -> Mask:
    """Where at least one element is active."""
    lanes = _lanes(x, axes)
    return _anywhere(b, x.mask, lanes, [m for m in ends(x.shape) if mentions(m, lanes, b.scope)])


def _along(b: Building, x: Tile, lanes: Sequence[ir.Lane]) -> Mask:
    """The conditions of a tile's mask, and of its ends, that vary along lanes."""
    return joined([m for m in (*x.mask, *ends(x.shape)) if mentions(m, lanes, b.scope)])


def _anywhere(
    b: Building, mask: Sequence[ir.Expr], lanes: Sequence[ir.Lane], within: Sequence[ir.Expr]
) -> Mask:
    """Where a mask holds for at least one element along lanes, which are elements ``within`` these."""
    inside = [m for m in mask if mentions(m, lanes, b.scope)]
    rest = tuple(m for m in mask if m not in inside)
    if not inside:
        return rest
    found = at_first(inside, lanes, b.scope)
    if found is None:
        there: ir.Expr = ir.Cast(ir.all_of([*inside, *within]), ir.i32)
        for lane in lanes:
            there = ir.Reduce("max", there, lane)
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
        return _without(b, replace(x, expr=ir.Const(0, ir.i32), mask=active), axes, kept)
    value = b.named("value", cast(x.expr, ir.i32 if x.dtype is ir.boolean else x.dtype))
    whole = replace(x, expr=value)
    extreme = _over(b, row, value, whole, axes)
    part = _along(b, x, [lane])
    found = ir.eq(value, extreme)
    here = ir.all_of([found | ir.ne(value, value) if value.dtype.kind == "float" else found, *part])
    index_of = ir.Cast(lane, ir.i32)
    first = ir.Reduce("min", ir.select(here, index_of, ir.Const(lane.extent, ir.i32)), lane)
    return _without(b, replace(x, expr=b.let(row.name, first), mask=active), axes, kept)


def _without(b: Building, x: Tile, axes: Sequence[int], kept: bool) -> Tile:
    """A reduced tile without the reduced dimensions, or with one element along them."""
    alone = replace(x, shape=tuple(1 if i in axes else n for i, n in enumerate(x.shape)))
    if kept:
        return alone
    left = [i for i in range(len(x.shape)) if i not in axes]
    return replace(b.placed(alone, tuple(x.shape[i] for i in left), tuple(left)), items=x.items)


def _lanes(x: Tile, axes: Sequence[int]) -> list[ir.Lane]:
    along = lanes_along(x.shape)
    return [lane for at in axes if (lane := along[at]) is not None]


def _kept(keepdims: Any) -> bool:
    """Whether reduced dimensions stay, with one element."""
    if not isinstance(keepdims, bool):
        raise Refusal("keepdims that is known at run time only", "True or False")
    return keepdims


LEAST = 16  # rows and columns of a call of the matrix unit


def product(a: Tile, b: Tile) -> PendingProduct:
    """The product of two matrices. Refuses other ranks and sizes."""
    told = f"{a} and {b}"
    return PendingProduct(a, b, product_type(common([a.dtype, b.dtype], []), a.own, b.own, told))


def computed(b: Building, p: PendingProduct, chip: Chip) -> Tile:
    """The value of a product."""
    made = _computed(b, p, chip)
    b.multiplied.add(made.expr)
    return made


def _computed(b: Building, p: PendingProduct, chip: Chip) -> Tile:
    operands = _operands(b, p, chip)
    if operands is None:
        return _summed(b, p)
    acc = b.alloc("product", p.result, p.own, ir.Const(0.0 if p.result.kind == "float" else 0, p.result))
    b.add(ir.FuncCall(ir.dot(chip.precision), (acc, *operands)))
    b.changing.discard(acc)  # complete
    return Tile(p.own, acc, active(b, p))


def added(b: Building, acc: ir.Var, p: PendingProduct, chip: Chip) -> bool:
    """Add a product to a name that changes, in one call of the matrix unit; whether that is possible."""
    operands = _operands(b, p, chip) if acc.type is p.result else None
    if operands is None:
        return False
    b.add(ir.FuncCall(ir.dot(chip.precision), (acc, *operands)))
    return True


def active(b: Building, p: PendingProduct) -> Mask:
    """Where the result is active: in active rows and columns, where both have an active element."""
    (_, inner), (again, _) = lanes_along(p.a.shape), lanes_along(p.b.shape)
    if inner is None or again is None:
        return joined(p.a.mask, p.b.mask)
    middle = inner_lane(p.a.shape[1])
    masks = [b.move(m, {inner: middle}) for m in p.a.mask]
    masks += [b.move(m, {again: middle}) for m in p.b.mask]
    end = [middle < p.a.shape[1]] if middle.extent != p.a.shape[1] else []
    return b.proved(_anywhere(b, masks, [middle], end))


def _operands(b: Building, p: PendingProduct, chip: Chip) -> tuple[ir.Expr, ir.Expr] | None:
    """The operands of a call of the matrix unit; None where there is no instruction for them, and for
    items, each of which has a product of its own."""
    if p.items:
        return None
    kind = common([p.a.dtype, p.b.dtype], [])
    (rows, inner), (again, cols) = lanes_along(p.a.shape), lanes_along(p.b.shape)
    if rows is None or inner is None or again is None or cols is None:
        return None
    short = min(rows.extent, cols.extent) < LEAST or inner.extent < chip.target.least_steps(kind, kind)
    if short or chip.target.mma(kind, kind, p.result) is None:
        return None
    middle = inner_lane(p.a.shape[1])
    return (_operand(b, p.a, kind, inner, middle, chip), _operand(b, p.b, kind, again, middle, chip))


def _operand(b: Building, x: Tile, kind: ir.DType, lane: ir.Lane, middle: ir.Lane, chip: Chip) -> ir.Expr:
    """A name of the operand, 0 where it is inactive along ``lane``, which becomes ``middle``."""
    value = as_type(x, kind).expr
    mask = _along(b, x, [lane])
    if mask and not b.is_zero(value, mask):
        value = ir.Select(ir.all_of(mask), value, ir.Const(0.0 if kind.kind == "float" else 0, kind))
    if (taken := ir.multiplied_as(kind, chip.precision)) is not kind:
        value = ir.Cast(value, taken)
    if ir.lanes_of(value, b.scope) != x.lanes:
        value = ir.Spread(value, x.lanes)
    if not isinstance(value, (ir.Var, ir.Renamed)):
        value = b.let("operand", value)
    return b.move(value, {lane: middle})


def _summed(b: Building, p: PendingProduct) -> Tile:
    """The product as a sum of products."""
    rows, inner = p.a.own
    cols = p.b.own[1]
    left = _behind(b, as_type(p.a, p.result), (rows, inner, 1), (0, 1, None))
    right = _behind(b, as_type(p.b, p.result), (1, inner, cols), (None, 0, 1))
    return reduced(b, REDUCTIONS["sum"], named(b, "multiply", left, right), 1)


def _behind(b: Building, x: Tile, shape: tuple[int, ...], of: tuple[int | None, ...]) -> Tile:
    """A tile whose own dimensions are in other places."""
    places = (None if i is None else i + x.items for i in of)
    made = b.placed(x, (*x.shape[: x.items], *shape), (*range(x.items), *places))
    return replace(made, items=x.items)
