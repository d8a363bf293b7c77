"""Reductions of tiles over their active elements.

Inactive elements, and lanes beyond the tile's end, take part as the reduction's neutral element. A result
is active where at least one element is, as in numpy.ma. Sums of 16-bit floats are computed in float32.

Also here: reductions over few elements, written out: in a thread's registers, without exchange between
threads.

    x = load(X, row*3 + col)                   x_0 = load(X, row*3);  x_1 = load(X, row*3 + 1);  ..
    d = x[row] - y[page]             ->        d_0 = x_0[row] - y_0[page];  ..
    s = sum(d * d, over=col)                   s = d_0*d_0 + d_1*d_1 + ..

Elements are added in their order, as a loop adds them, with one rounding for a product and its sum
(``fma(d_2, d_2, fma(d_1, d_1, d_0*d_0))``). Only what nothing else reads is divided, so that nothing is
computed twice; loads may be repeated where they are small beside what is computed of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from transconv.ir import (
    FALSE,
    REDUCERS,
    Alloc,
    Call,
    Cast,
    Const,
    DType,
    Expr,
    ExprMutator,
    Kernel,
    Lane,
    Let,
    Load,
    Mul,
    Node,
    Reduce,
    Renamed,
    Select,
    Spread,
    Stmt,
    Var,
    all_of,
    boolean,
    eq,
    f32,
    free_vars,
    i32,
    lanes_of,
    ne,
    select,
    seq,
    updated,
    walk,
)
from transconv.kernel.functions import cast
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.elementwise import as_type, named
from transconv.kernel.tiles.kernel_builder import Building
from transconv.kernel.tiles.lanes import ends, lanes_along
from transconv.kernel.tiles.masks import at_first, joined, mentions
from transconv.kernel.tiles.values import Mask, Tile
from transconv.simplify import simplify


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


MOST = 16  # elements of a reduction of a tile of three dimensions or more
MOST_OF_ROWS = 4  # of others, whose loads have the reduced dimension innermost and would be strided


def written_out(kernel: Kernel) -> Kernel:
    """The kernel with its short reductions written out where that computes nothing twice."""
    return _Short(kernel).made()


class _Unknown(Exception):
    """An element of a value that cannot be computed alone."""


class _Short:
    """``values``: of names, as they are written so far; ``scope``: their lanes; ``parts``: the names of
    single elements; ``made_of``: their definitions, to be placed behind that of the whole; ``gone``: names
    that nothing reads any more."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.values: dict[Var, Expr] = {}
        self.scope: dict[Var, tuple[Lane, ...]] = {}
        self.readers: dict[Var, set[Var | None]] = {}
        self.changing = updated(kernel.body)
        self.taken = {v.name for v in _bound(kernel)} | {t.name for t in kernel.params}
        self.parts: dict[tuple[Var, Lane, int], Var] = {}
        self.made_of: dict[Var, list[Let]] = {}
        self.gone: set[Var] = set()
        for at in walk(kernel.body):
            if isinstance(at, Alloc):
                self.scope[at.var] = at.lanes
            elif isinstance(at, Let):
                self.scope[at.var] = lanes_of(at.value, self.scope)
                self.values[at.var] = at.value
            if isinstance(at, Stmt):
                reader = at.var if isinstance(at, Let) else None
                for e in (c for c in at.children() if isinstance(c, Expr)):
                    for v in free_vars(e):
                        self.readers.setdefault(v, set()).add(reader)

    def made(self) -> Kernel:
        for var, value in list(self.values.items()):
            if isinstance(value, Reduce) and (found := self.sum_of(var, value)) is not None:
                self.values[var] = found
        if not self.made_of:
            return self.kernel
        elements = (let.value for made in self.made_of.values() for let in made)
        whole = {v for value in elements for v in free_vars(value)}
        for var in reversed(self.made_of):  # what is read comes before what reads it
            if var not in whole and all(
                    r is not None and (r in self.gone or var not in free_vars(self.values[r]))
                    for r in self.readers[var]):
                self.gone.add(var)
        return _Placed(self).rebuilt(self.kernel)

    def sum_of(self, var: Var, value: Reduce) -> Expr | None:
        """The elements, combined in their order; None if the reduction stays."""
        lanes = lanes_of(value.x, self.scope)
        lane, most = value.lane, MOST if len(lanes) > 2 else MOST_OF_ROWS
        if lane.extent > most or len(lanes) < 2 or not self._alone(var, value.x, lane, len(lanes)):
            return None
        neutral = REDUCERS[value.op].identity(value.dtype)
        made: Expr | None = None
        for k in range(lane.extent):
            e = simplify(_LaneElement(self, lane, k).mutate(value.x))
            if e != neutral:
                made = e if made is None else self.combined(value.op, made, e)
        made = neutral if made is None else made
        return made if lanes_of(made, self.scope) == self.scope[var] else Spread(made, self.scope[var])

    def combined(self, op: str, made: Expr, e: Expr) -> Expr:
        """One more element, combined with those before; a product that is summed is not rounded, and the
        factors of one that is inactive are 0."""
        match e:
            case Mul() if op == "sum" and e.dtype is f32:
                return Call("fma", (e.a, e.b, made))
            case Select(cond, Mul(a, b), _) if op == "sum" and e.dtype is f32:
                return Call("fma", (*(Select(cond, x, Const(0.0, f32)) for x in (a, b)), made))
        return REDUCERS[op].node(made, e)

    def _alone(self, var: Var, value: Expr, lane: Lane, rank: int) -> bool:
        """Whether the elements can be computed one by one, and nothing else reads what they are of."""
        try:
            needed = {v for v, _ in self._needed(value, lane)}
        except _Unknown:
            return False
        whole = {var, *needed}
        return bool(needed) and all(
            self.readers[v] <= whole or isinstance(self.values[v], Load) and len(self.scope[v]) < rank
            for v in needed)

    def _needed(self, e: Expr, lane: Lane) -> Iterator[tuple[Var, Lane]]:
        """The names whose elements along a lane are needed. Raises _Unknown."""
        if lane not in lanes_of(e, self.scope):
            return
        if isinstance(e, Var):
            if e not in self.values or e in self.changing or free_vars(self.values[e]) & self.changing:
                raise _Unknown
            yield e, lane
            yield from self._needed(self.values[e], lane)
        elif isinstance(e, Reduce):
            raise _Unknown
        else:
            inner = e.old[e.new.index(lane)] if isinstance(e, Renamed) and lane in e.new else lane
            for c in e.children():
                if isinstance(c, Expr) and not isinstance(c, Lane):
                    yield from self._needed(c, inner)

    def part(self, var: Var, lane: Lane, k: int) -> Expr:
        """The name of an element of a value along a lane."""
        found = self.parts.get((var, lane, k))
        if found is None:
            value = simplify(_LaneElement(self, lane, k).mutate(self.values[var]))
            if isinstance(value, Const):
                return value
            name, number = f"{var.name}_{k}", 2
            while name in self.taken:
                name, number = f"{var.name}_{k}_{number}", number + 1
            self.taken.add(name)
            found = self.parts[var, lane, k] = Var(name, value.dtype)
            self.scope[found] = lanes_of(value, self.scope)
            self.made_of.setdefault(var, []).append(Let(found, value))
        return found


class _LaneElement(ExprMutator):
    """An expression at one place of a lane."""

    def __init__(self, short: _Short, lane: Lane, k: int) -> None:
        super().__init__()
        self.short, self.lane, self.k = short, lane, k
        self.done[lane] = Const(k)

    def mutate_Var(self, at: Var) -> Expr:
        lanes = self.short.scope.get(at, ())
        return self.short.part(at, self.lane, self.k) if self.lane in lanes else at

    def mutate_Select(self, at: Select) -> Expr:
        """Of an element that is inactive nothing is computed."""
        cond = simplify(self.mutate(at.cond))
        if isinstance(cond, Const):
            chosen: Expr = self.mutate(at.yes if cond.value else at.no)
            return chosen
        return Select(cond, self.mutate(at.yes), self.mutate(at.no))

    def mutate_Renamed(self, at: Renamed) -> Expr:
        lane = at.old[at.new.index(self.lane)] if self.lane in at.new else self.lane
        if lane is self.lane and lane in at.old:  # this lane of the result is not that of what is inside
            return at
        x = at.x if lane not in lanes_of(at.x, self.short.scope) else (
            _LaneElement(self.short, lane, self.k).mutate(at.x))
        there = lanes_of(x, self.short.scope)
        kept = [(o, n) for o, n in zip(at.old, at.new, strict=True) if o in there]
        return Renamed(x, *map(tuple, zip(*kept, strict=True))) if kept else x

    def mutate_Spread(self, at: Spread) -> Expr:
        lanes = tuple(lane for lane in at.lanes if lane != self.lane)
        x = self.mutate(at.x)
        return Spread(x, lanes) if lanes else x


class _Placed(ExprMutator):
    """New values of names, and elements behind what they are of."""

    def __init__(self, short: _Short) -> None:
        super().__init__()
        self.short = short

    def mutate_Let(self, at: Let) -> Stmt:
        made = self.short.made_of.get(at.var, ())
        if at.var in self.short.gone:
            return seq(*made)
        return seq(replace(at, value=self.short.values[at.var]), *made)


def _bound(root: Node) -> Iterator[Var]:
    return (n for n in walk(root) if isinstance(n, Var))
