"""The kernel that is being built: statements, names, what is known about positions; elements of tiles at
other places; and functions and operators applied to tiles and numbers: broadcasting, types, masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transconv import ir
from transconv.compute import OPS
from transconv.kernel import functions
from transconv.kernel.launch.arguments import Needed
from transconv.kernel.source import Refusal, is_number
from transconv.kernel.tiles.values import (
    Mask,
    Shape,
    Tile,
    between_lane,
    broadcast,
    combined,
    is_leaf,
    joined,
    lanes_along,
    moved,
    own_lanes,
    proved,
    renamed,
    tile_of,
)
from transconv.simplify import facts_of, range_of, reason, simplify
from transconv.target import Target

RESERVED = ("tl", "triton", "range", "float")


class Building:
    """Statements in their order. ``scope``: the lanes of names; ``facts``: of positions; ``changing``: the
    names of the kernel that are assigned more than once; ``decided``: conditions of sizes that are
    arguments, which branches of the source depend on; ``divided``: sizes whose divisors matter."""

    def __init__(self, taken: tuple[str, ...] = (), sizes: ir.Sizes | None = None) -> None:
        self.stmts: list[ir.Stmt] = []
        self.scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.sizes = sizes
        self.facts = facts_of(sizes)
        self.decided: dict[ir.Expr, None] = {}
        self.divided: set[str] = set()
        self.taken = {*taken, *(sizes.names if sizes else ()), *RESERVED}
        self.changing: set[ir.Var] = set()
        self.notes: dict[str, None] = {}  # masks that were proved away, and why
        self.values: dict[ir.Var, ir.Expr] = {}  # of names that vary along lanes
        self.elements = ""  # the function of its own that is read, which knows single elements alone
        self.multiplied: set[ir.Expr] = set()  # the values of matrix products
        self.zero_unless: dict[
            ir.Var, frozenset[ir.Expr]
        ] = {}  # values that are 0 where a condition fails

    def fresh(self, stem: str) -> str:
        """A name that no other value has."""
        name, number = stem, 2
        while name in self.taken:
            name, number = f"{stem}_{number}", number + 1
        self.taken.add(name)
        return name

    def let(self, stem: str, value: ir.Expr) -> ir.Var:
        """A name for a value."""
        var = ir.Var(self.fresh(stem), value.dtype)
        self.scope[var] = ir.lanes_of(value, self.scope)
        if self.scope[var]:
            self.values[var] = value
        self.stmts.append(ir.Let(var, value))
        return var

    def named(self, stem: str, value: ir.Expr) -> ir.Expr:
        """A value under a name; itself if repeating it costs nothing and it never changes."""
        leaf = value.x if isinstance(value, ir.Renamed) else value
        if isinstance(leaf, (ir.Const, ir.Lane)) or (
            isinstance(leaf, ir.Var) and leaf not in self.changing
        ):
            return value
        return self.let(stem, value)

    def alloc(self, stem: str, dtype: ir.DType, shape: Shape, init: ir.Expr) -> ir.Var:
        """A name that may change, at first with the value ``init``."""
        var = ir.Var(self.fresh(stem), dtype)
        self.scope[var] = own_lanes(shape)
        self.changing.add(var)
        plain = isinstance(init, ir.Const)
        self.stmts.append(ir.Alloc(var, self.scope[var], init if plain else ir.Const(_zero(dtype), dtype)))
        if not plain:
            self.update(var, init)
        return var

    def update(self, var: ir.Var, value: ir.Expr) -> None:
        """Assign to a name that may change; the value gets all lanes of the name."""
        if value is var:
            return
        lanes = self.scope[var]
        spread = value if ir.lanes_of(value, self.scope) == lanes else ir.Spread(value, lanes)
        self.stmts.append(ir.Update(var, spread if value.dtype is var.type else ir.Cast(spread, var.type)))

    def add(self, s: ir.Stmt) -> None:
        """Append a statement."""
        self.stmts.append(s)

    @contextmanager
    def block(self) -> Iterator[list[ir.Stmt]]:
        """Statements that are collected apart; what is learned inside is forgotten."""
        outer, facts, taken = self.stmts, self.facts, set(self.taken)
        inner: list[ir.Stmt] = []
        self.stmts = inner
        try:
            yield inner
        except BaseException:
            self.taken = taken
            raise
        finally:
            self.stmts, self.facts = outer, facts

    def body(self) -> ir.Stmt:
        """All statements."""
        return ir.seq(*self.stmts)

    # -- tiles --

    def spread(self, tile: Tile, shape: Shape) -> Tile:
        """A tile as one of a larger shape, along which it does not vary."""
        return tile if tile.shape == shape else replace(tile, shape=shape)

    def placed(self, tile: Tile, shape: Shape, of: tuple[int | None, ...]) -> Tile:
        """A tile with its dimensions in other places: dimension ``i`` of the result is ``of[i]`` of the
        tile (None: a new one of one element)."""
        self.not_of_elements("another shape")
        before, after = lanes_along(tile.shape), lanes_along(shape)
        found = {x for e in (tile.expr, *tile.mask) for x in ir.lanes_of(e, self.scope)}
        assert found <= {*before}, f"{tile} varies along {found - {*before}}"
        lanes: dict[ir.Lane, ir.Lane] = {}
        for at, source in enumerate(of):
            lane, new = (None if source is None else before[source]), after[at]
            if lane is not None and new is not None:
                lanes[lane] = new
        return Tile(
            shape, self.move(tile.expr, lanes), tuple(self.move(m, lanes) for m in tile.mask), tile.vector
        )

    def move(self, e: ir.Expr, lanes: dict[ir.Lane, ir.Lane]) -> ir.Expr:
        """An expression along other lanes."""
        return moved(e, lanes, self.scope)

    def not_of_elements(self, what: str) -> None:
        """Refuse what a function of elements cannot know."""
        if self.elements:
            raise Refusal(
                f"{what} in {self.elements}, a function of its own, which knows single elements",
                "operators and functions; @kernel.func, whose body is read in the place of the call",
            )

    def proved(self, mask: Mask) -> Mask:
        """The mask without what the facts prove."""
        return proved(mask, self.facts)

    def inside(self, tensor: str, mask: Mask) -> Mask:
        """The bounds of an access without what the facts prove, which is noted."""
        kept = self.proved(mask)
        for part in mask:
            if part not in kept and not isinstance(part, ir.Const) and ir.FALSE not in kept:
                why = reason(part, self.facts)
                self.notes[f"{tensor}: {ir.readable(part)} is always true: {why}"] = None
        return kept

    def where(self, mask: Mask, yes: ir.Expr, no: ir.Expr) -> ir.Expr:
        """``yes`` where a mask holds, else ``no``; both have one type."""
        return ir.Select(ir.all_of(mask), yes, no) if mask else yes

    def is_zero(self, e: ir.Expr, mask: Mask) -> bool:
        """Whether a value is known to be 0 wherever a mask does not hold, as a load's is."""
        var = e.x if isinstance(e, ir.Renamed) else e
        held = self.zero_unless.get(var) if isinstance(var, ir.Var) else None
        if held is None:
            return False
        lanes = dict(zip(e.old, e.new, strict=True)) if isinstance(e, ir.Renamed) else {}
        return {self.move(c, lanes) for c in held} >= {*mask}

    def is_not_negative(self, e: ir.Expr) -> bool:
        """Whether a position is proved not to be negative."""
        low = range_of(e, self.facts).lo
        return low is not None and low >= 0

    # -- sizes that are arguments --

    def is_of_sizes(self, value: object) -> bool:
        """Whether a number is computed from sizes that are arguments, and from nothing else."""
        if self.sizes is None or not isinstance(value, Tile) or value.shape or value.mask:
            return False
        names = {v.name for v in ir.free_vars(value.expr)}
        return bool(names) and names <= {*self.sizes.names} and value.dtype.kind in ("index", "bool")

    def known(self, value: Any) -> Any:
        """A number that has to be known: sizes become constants (Needed). Anything else as it is."""
        if isinstance(value, Tile) and self.is_of_sizes(value):
            raise Needed(v.name for v in ir.free_vars(value.expr))
        if isinstance(value, (tuple, list)):
            return type(value)(self.known(v) for v in value)
        if isinstance(value, slice):
            return slice(*(self.known(v) for v in (value.start, value.stop, value.step)))
        return value

    def divides(self, e: ir.Expr) -> None:
        """Note that it matters what divides the sizes in an expression."""
        if self.sizes is not None:
            self.divided |= {v.name for v in ir.free_vars(e)} & {*self.sizes.names}

    def holds(self, condition: Tile) -> bool:
        """Whether a condition of sizes holds for the call's, which the compiled kernel then requires."""
        assert self.sizes is not None
        found = simplify(condition.expr, self.facts)
        if isinstance(found, ir.Const):
            return bool(found.value)
        held = bool(ir.value_at(found, self.sizes.like))
        told = found if held else simplify(ir.Not(found), self.facts)
        self.decided[told] = None
        self.facts = self.facts.assume(told)
        return held

    def changes(self, e: ir.Expr) -> bool:
        """Whether a value mentions names that are assigned again."""
        return bool(ir.free_vars(e) & self.changing)


# -- elements at other places ----------------------------------------------------------------------


def between(shape: Shape) -> tuple[ir.Lane | None, ...]:
    """The lanes along which places in another tile are computed, one for each dimension of this shape."""
    rank = len(shape)
    return tuple(None if n == 1 else between_lane(rank - 1 - at, n) for at, n in enumerate(shape))


def ways_from(shape: Shape) -> dict[ir.Lane, ir.Lane]:
    """The lane of a dimension, by that between."""
    found = zip(between(shape), lanes_along(shape), strict=True)
    return {lane: to for lane, to in found if lane is not None and to is not None}


def arranged(b: Building, x: Tile, shape: Shape, of: Sequence[int | ir.Expr], inside: Mask = ()) -> Tile:
    """The elements of a tile in another shape. ``of``: for each dimension of the tile the one that it
    becomes, or the place in it, along the lanes between; ``inside``: where there is such a place."""
    after, ways = lanes_along(shape), ways_from(shape)
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
        held = ir.Gather(functions.cast(at, work), along, tuple(self.places[lane] for lane in along))
        var = self.b.let("taken", held)
        found = {lane: self.ways.get(lane, lane) for lane in self.b.scope[var]}
        return functions.cast(renamed(var, found), at.dtype)

    mutate_Renamed = mutate_Var


def held_type(dtype: ir.DType) -> ir.DType:
    """The type in which elements are moved: one of 16 bits or more, of the same values."""
    if dtype.kind == "bool" or dtype.bits < 16:
        return ir.f32 if dtype.kind == "float" else ir.i32
    return dtype


# -- functions and operators -----------------------------------------------------------------------


def _zero(dtype: ir.DType) -> float | int | bool:
    return False if dtype.kind == "bool" else 0.0 if dtype.kind == "float" else 0


SUMS = ("add", "subtract")


def apply(b: Building, row: functions.TileFunction, values: list[Any]) -> Tile:
    """A row applied to tiles and numbers: active where all of them are."""
    if len(values) != row.arity:
        raise Refusal(f"{row.name} of {len(values)} values", f"{row.arity}")
    if (summed := _with_product(b, row, values)) is not None:
        return summed
    tiles = aligned(b, [tile_of(v) for v in values])
    broadcast(*(t.shape for t in tiles))  # refused before their types are
    if row.types == "choice":
        kind = _shared(tiles[1:], values[1:])
        args = [_condition(tiles[0]), *(functions.cast(t.expr, kind) for t in tiles[1:])]
        made = row.expression(*args)
    else:
        shared = _shared(tiles, values)
        work, gives = functions.operand_type(row, shared), functions.result_type(row, shared)
        if functions.beyond(row, work, [_numbers(b, t, work, row.types == "bool") for t in tiles]):
            if any(isinstance(t.expr, ir.Const) for t in tiles):
                return _decided(row, tiles)
            work = ir.index
        args = [functions.cast(t.expr, work) for t in tiles]
        if row.often and work.kind != "index":
            args = [e if is_leaf(e) else b.let("value", e) for e in args]
        known = [e for e in args if isinstance(e, ir.Const)]
        made = (
            folded(row, known, gives)
            if len(known) == row.arity
            else functions.cast(row.expression(*args), gives if work is not gives else row_type(row, work))
        )
    return combined(tiles, made)


def _numbers(b: Building, tile: Tile, work: ir.DType, compared: bool) -> tuple[int, int] | None:
    """The least and the largest number of an operand that gives way to the types of tiles; None for
    others. A position has those of 32 bits, if nothing else is known of it or it is not compared."""
    if tile.dtype.kind != "index" or work.kind != "int":
        return None
    if isinstance(tile.expr, ir.Const):
        return int(tile.expr.value), int(tile.expr.value)
    if work.bits >= ir.index.bits and not compared:
        return None
    known, (least, most) = range_of(tile.expr, b.facts), ir.index.limits
    found = least if known.lo is None else int(known.lo), most if known.hi is None else int(known.hi)
    if compared or not b.is_of_sizes(tile):
        return found
    inside = Tile((), (tile.expr >= work.limits[0]) & (tile.expr <= work.limits[1]))
    return work.limits if b.holds(inside) else found


def _decided(row: functions.TileFunction, tiles: list[Tile]) -> Tile:
    """A comparison with a number that the type of a tile does not hold: all its values compare alike."""
    values = [int(t.expr.value) if isinstance(t.expr, ir.Const) else t.dtype.limits[0] for t in tiles]
    return combined(tiles, ir.Const(bool(row.numpy(*values)), ir.boolean))


def _with_product(b: Building, row: functions.TileFunction, values: list[Any]) -> Tile | None:
    """A sum or difference of float32 in which a product is written, rounded once; of two products the
    second is not rounded. None for other rows and operands. A product that has a name is rounded, and one
    beside a matrix product, which the matrix unit adds."""
    given = [tile_of(v) for v in values]
    at = next((i for i in (1, 0) if row.name in SUMS and isinstance(given[i].expr, ir.Mul)), None)
    if at is None or given[1 - at].expr in b.multiplied:
        return None
    if _shared(given, values) is not ir.f32 or given[at].dtype is not ir.f32:
        return None
    product, other = given[at].expr, given[1 - at]
    assert isinstance(product, ir.Mul)
    sides = [replace(given[at], expr=functions.cast(e, ir.f32)) for e in (product.a, product.b)]
    x, y, z = aligned(b, [*sides, other])
    first, added = x.expr, functions.cast(z.expr, ir.f32)
    if row.name == "subtract":
        first, added = (negated(first), added) if at == 1 else (first, negated(added))
    return combined([x, y, z], ir.Call("fma", (first, y.expr, added)))


def negated(e: ir.Expr) -> ir.Expr:
    """``-e`` of a float."""
    if isinstance(e, ir.Const):
        return ir.Const(-e.value, e.type)
    return e.x if isinstance(e, ir.Neg) else -e


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


def folded(row: functions.TileFunction, operands: list[ir.Const], gives: ir.DType) -> ir.Const:
    """The value of a row of constants, as NumPy computes it: 0.0 / 0.0 is NaN."""
    held = [ir.convert(np.asarray(c.value), c.type) for c in operands]
    with np.errstate(all="ignore"):
        return ir.Const(ir.convert(np.asarray(row.numpy(*held)), gives).item(), gives)


def row_type(row: functions.TileFunction, work: ir.DType) -> ir.DType:
    """The type of the expression of a row that computes in ``work``."""
    return ir.boolean if row.types in ("bool", "logic") else work


def named(b: Building, name: str, *values: Any) -> Tile:
    """The row of this name, applied."""
    return apply(b, functions.FUNCTIONS[name], list(values))


def power(b: Building, base: Any, exponent: Any) -> Tile:
    """``base ** exponent``; a small whole exponent, or one with a half, needs no logarithm."""
    x = tile_of(base)
    if not is_number(exponent) or x.dtype is ir.boolean:
        return named(b, "power", base, exponent)
    whole = float(exponent).is_integer()
    if x.dtype.is_integer:
        if not whole or exponent < 0 or isinstance(exponent, float):
            return named(b, "power", base, float(exponent))
        functions.held_number(exponent, x.dtype)
        work = x.dtype
    else:
        shared = functions.common([x.dtype], [])
        work = functions.operand_type(functions.FUNCTIONS["square" if whole else "sqrt"], shared)
    e = functions.cast(x.expr, work)
    e = e if is_leaf(e) else b.let("base", e)
    made = _repeated(b, e, exponent) if work.is_integer else OPS["pow"](e, ir.Const(float(exponent), work))
    gives = x.dtype if work.is_integer else functions.common([x.dtype], [])
    return replace(x, expr=functions.cast(made, gives))


def _repeated(b: Building, e: ir.Expr, times: int) -> ir.Expr:
    """The product of so many integers, by squares: the last bits are right in any order."""
    made: ir.Expr = ir.Const(1, e.dtype)
    while times:
        if times % 2:
            made = e if isinstance(made, ir.Const) else made * e
        times //= 2
        e = b.named("base", e * e) if times > 1 and e.dtype.kind == "int" else e * e
    return made


def clip(b: Building, x: Any, low: Any = None, high: Any = None) -> Tile:
    """``x`` between limits; None for no limit."""
    made = tile_of(x)
    low, high = functions.clipped(made.dtype, low, high)
    if low is not None:
        made = named(b, "maximum", made, low)
    return made if high is None else named(b, "minimum", made, high)


def as_type(tile: Tile, dtype: ir.DType) -> Tile:
    """The tile in another type."""
    return replace(tile, expr=functions.cast(tile.expr, dtype))


def position(value: Any, what: str = "an index", each: int = 0) -> ir.Expr:
    """A number as a position. Refuses tiles with dimensions, floats, and what may be inactive. ``each``:
    the dimensions of items, each of which may have a number of its own."""
    tile = tile_of(value)
    if tile.own or tile.items not in (0, each) or not tile.dtype.is_integer or tile.mask:
        found = tile if tile.shape or not tile.mask else "a number that may be inactive"
        raise Refusal(f"{found} as {what}", "a whole number")
    return functions.cast(tile.expr, ir.index) if tile.dtype.kind != "index" else tile.expr


def _condition(tile: Tile) -> ir.Expr:
    if tile.dtype is not ir.boolean:
        raise Refusal(f"{tile} as a condition", "a boolean tile", "np.where(x > 0, x, 0.0)")
    return tile.expr


def _shared(tiles: list[Tile], values: list[Any]) -> ir.DType:
    weak: list[type] = [type(v) for v in values if is_number(v)]
    strong = [t.dtype for t, v in zip(tiles, values, strict=True) if not is_number(v)]
    return functions.common(strong or [t.dtype for t in tiles], weak)


@dataclass(frozen=True, slots=True)
class Chip:
    """The chip that a kernel is for, and the precision of products of float32 there."""

    target: Target
    asked: str = "ieee"

    @property
    def precision(self) -> str:
        """The precision asked for if the chip has it, else ieee."""
        held = not self.target.upcast16 and self.asked in self.target.precisions
        return self.asked if held else "ieee"
