"""Functions and operators applied to tiles and numbers: broadcasting, types, masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from transconv.compute import OPS
from transconv.ir import Call, Const, DType, Expr, Mul, Neg, boolean, convert, f32, index
from transconv.kernel.functions import (
    FUNCTIONS,
    TileFunction,
    beyond,
    cast,
    clipped,
    common,
    held_number,
    operand_type,
    result_type,
)
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import Shape, broadcast
from transconv.kernel.tiles.masks import joined
from transconv.kernel.tiles.values import Tile, is_leaf, is_number, tile_of
from transconv.simplify import range_of

SUMS = ("add", "subtract")


def apply(b: Building, row: TileFunction, values: list[Any]) -> Tile:
    """A row applied to tiles and numbers: active where all of them are."""
    if len(values) != row.arity:
        raise Refusal(f"{row.name} of {len(values)} values", f"{row.arity}")
    if (summed := _with_product(b, row, values)) is not None:
        return summed
    tiles = aligned(b, [tile_of(v) for v in values])
    shape = broadcast(*(t.shape for t in tiles))
    if row.types == "choice":
        args = [_condition(tiles[0]), *_cast(tiles[1:], _shared(tiles[1:], values[1:]))]
        made = row.expression(*args)
    else:
        shared = _shared(tiles, values)
        work, gives = operand_type(row, shared), result_type(row, shared)
        if beyond(row, work, [_numbers(b, t, work, row.types == "bool") for t in tiles]):
            if any(isinstance(t.expr, Const) for t in tiles):
                return _decided(row, tiles, shape)
            work = index
        args = _cast(tiles, work)
        if row.often and work.kind != "index":
            args = [e if is_leaf(e) else b.let("value", e) for e in args]
        known = [e for e in args if isinstance(e, Const)]
        made = folded(row, known, gives) if len(known) == row.arity else cast(
            row.expression(*args), gives if work is not gives else row_type(row, work))
    return Tile(shape, made, joined(*(t.mask for t in tiles)), any(t.vector for t in tiles),
                max(t.items for t in tiles))


def _numbers(b: Building, tile: Tile, work: DType, compared: bool) -> tuple[int, int] | None:
    """The least and the largest number of an operand that gives way to the types of tiles; None for
    others. A position has those of 32 bits, if nothing else is known of it or it is not compared."""
    if tile.dtype.kind != "index" or work.kind != "int":
        return None
    if isinstance(tile.expr, Const):
        return int(tile.expr.value), int(tile.expr.value)
    if work.bits >= index.bits and not compared:
        return None
    known, (least, most) = range_of(tile.expr, b.facts), index.limits
    found = least if known.lo is None else int(known.lo), most if known.hi is None else int(known.hi)
    if compared or not b.is_of_sizes(tile):
        return found
    inside = Tile((), (tile.expr >= work.limits[0]) & (tile.expr <= work.limits[1]))
    return work.limits if b.holds(inside) else found


def _decided(row: TileFunction, tiles: list[Tile], shape: Shape) -> Tile:
    """A comparison with a number that the type of a tile does not hold: all its values compare alike."""
    values = [int(t.expr.value) if isinstance(t.expr, Const) else t.dtype.limits[0] for t in tiles]
    return Tile(shape, Const(bool(row.numpy(*values)), boolean), joined(*(t.mask for t in tiles)),
                any(t.vector for t in tiles), max(t.items for t in tiles))


def _with_product(b: Building, row: TileFunction, values: list[Any]) -> Tile | None:
    """A sum or difference of float32 in which a product is written, rounded once; of two products the
    second is not rounded. None for other rows and operands. A product that has a name is rounded, and one
    beside a matrix product, which the matrix unit adds."""
    given = [tile_of(v) for v in values]
    at = next((i for i in (1, 0) if row.name in SUMS and isinstance(given[i].expr, Mul)), None)
    if at is None or given[1 - at].expr in b.multiplied:
        return None
    if _shared(given, values) is not f32 or given[at].dtype is not f32:
        return None
    product, other = given[at].expr, given[1 - at]
    assert isinstance(product, Mul)
    sides = [replace(given[at], expr=cast(e, f32)) for e in (product.a, product.b)]
    x, y, z = aligned(b, [*sides, other])
    first, added = x.expr, cast(z.expr, f32)
    if row.name == "subtract":
        first, added = (negated(first), added) if at == 1 else (first, negated(added))
    return Tile(broadcast(*(t.shape for t in (x, y, z))), Call("fma", (first, y.expr, added)),
                joined(x.mask, y.mask, z.mask), any(t.vector for t in given),
                max(t.items for t in (x, y, z)))


def negated(e: Expr) -> Expr:
    """``-e`` of a float."""
    if isinstance(e, Const):
        return Const(-e.value, e.type)
    return e.x if isinstance(e, Neg) else -e


def aligned(b: Building, tiles: list[Tile]) -> list[Tile]:
    """Tiles of which those of work-items have own values of one rank."""
    rank = max(len(t.own) for t in tiles)
    return [deepened(b, t, rank) for t in tiles]


def deepened(b: Building, t: Tile, rank: int) -> Tile:
    """A tile whose own value has this rank at least, if it is one of items."""
    if not t.items or len(t.own) >= rank:
        return t
    new, at = rank - len(t.own), t.items
    shape = (*t.shape[:at], *(1 for _ in range(new)), *t.own)
    of = (*range(at), *(None for _ in range(new)), *range(at, len(t.shape)))
    return replace(b.placed(t, shape, of), items=at)


def folded(row: TileFunction, operands: list[Const], gives: DType) -> Const:
    """The value of a row of constants, as NumPy computes it: 0.0 / 0.0 is NaN."""
    held = [convert(np.asarray(c.value), c.type) for c in operands]
    with np.errstate(all="ignore"):
        return Const(convert(np.asarray(row.numpy(*held)), gives).item(), gives)


def row_type(row: TileFunction, work: DType) -> DType:
    """The type of the expression of a row that computes in ``work``."""
    return boolean if row.types in ("bool", "logic") else work


def named(b: Building, name: str, *values: Any) -> Tile:
    """The row of this name, applied."""
    return apply(b, FUNCTIONS[name], list(values))


def power(b: Building, base: Any, exponent: Any) -> Tile:
    """``base ** exponent``; a small whole exponent, or one with a half, needs no logarithm."""
    x = tile_of(base)
    if not is_number(exponent) or x.dtype is boolean:
        return named(b, "power", base, exponent)
    whole = float(exponent).is_integer()
    if x.dtype.is_integer:
        if not whole or exponent < 0 or isinstance(exponent, float):
            return named(b, "power", base, float(exponent))
        held_number(exponent, x.dtype)
        work = x.dtype
    else:
        shared = common([x.dtype], [])
        work = operand_type(FUNCTIONS["square" if whole else "sqrt"], shared)
    e = cast(x.expr, work)
    e = e if is_leaf(e) else b.let("base", e)
    made = _repeated(b, e, exponent) if work.is_integer else OPS["pow"](e, Const(float(exponent), work))
    gives = x.dtype if work.is_integer else common([x.dtype], [])
    return replace(x, expr=cast(made, gives))


def _repeated(b: Building, e: Expr, times: int) -> Expr:
    """The product of so many whole numbers, by squares: the last bits are right in any order."""
    made: Expr = Const(1, e.dtype)
    while times:
        if times % 2:
            made = e if isinstance(made, Const) else made * e
        times //= 2
        e = b.named("base", e * e) if times > 1 and e.dtype.kind == "int" else e * e
    return made


def clip(b: Building, x: Any, low: Any = None, high: Any = None) -> Tile:
    """``x`` between limits; None for no limit."""
    made = tile_of(x)
    low, high = clipped(made.dtype, low, high)
    if low is not None:
        made = named(b, "maximum", made, low)
    return made if high is None else named(b, "minimum", made, high)


def as_type(tile: Tile, dtype: DType) -> Tile:
    """The tile in another type."""
    return replace(tile, expr=cast(tile.expr, dtype))


def position(value: Any, what: str = "an index", each: int = 0) -> Expr:
    """A number as a position. Refuses tiles with dimensions, floats, and what may be inactive. ``each``:
    the dimensions of items, each of which may have a number of its own."""
    tile = tile_of(value)
    if tile.own or tile.items not in (0, each) or not tile.dtype.is_integer or tile.mask:
        found = tile if tile.shape or not tile.mask else "a number that may be inactive"
        raise Refusal(f"{found} as {what}", "a whole number")
    return cast(tile.expr, index) if tile.dtype.kind != "index" else tile.expr


def _condition(tile: Tile) -> Expr:
    if tile.dtype is not boolean:
        raise Refusal(f"{tile} as a condition", "a boolean tile", "np.where(x > 0, x, 0.0)")
    return tile.expr


def _shared(tiles: list[Tile], values: list[Any]) -> DType:
    weak: list[type] = [type(v) for v in values if is_number(v)]
    strong = [t.dtype for t, v in zip(tiles, values, strict=True) if not is_number(v)]
    return common(strong or [t.dtype for t in tiles], weak)


def _cast(tiles: list[Tile], dtype: DType) -> list[Expr]:
    return [cast(t.expr, dtype) for t in tiles]


