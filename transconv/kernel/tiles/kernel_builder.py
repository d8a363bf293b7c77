"""The kernel that is being built: statements, names, and what is known about positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transconv.ir import (
    FALSE,
    Alloc,
    Cast,
    Const,
    DType,
    Expr,
    Lane,
    Let,
    Not,
    Renamed,
    Select,
    Sizes,
    Spread,
    Stmt,
    Update,
    Var,
    all_of,
    free_vars,
    lanes_of,
    readable,
    seq,
    value_at,
)
from transconv.kernel.launch.size_arguments import Needed
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.lanes import Shape, lanes_along, moved, own_lanes
from transconv.kernel.tiles.masks import proved
from transconv.kernel.tiles.values import Mask, Tile
from transconv.simplify import facts_of, range_of, reason, simplify

RESERVED = ("tl", "triton", "range", "float")


class Building:
    """Statements in their order. ``scope``: the lanes of names; ``facts``: of positions; ``changing``: the
    names of the kernel that are assigned more than once; ``decided``: conditions of sizes that are
    arguments, which branches of the source depend on; ``divided``: sizes whose divisors matter."""

    def __init__(self, taken: tuple[str, ...] = (), sizes: Sizes | None = None) -> None:
        self.stmts: list[Stmt] = []
        self.scope: dict[Var, tuple[Lane, ...]] = {}
        self.sizes = sizes
        self.facts = facts_of(sizes)
        self.decided: dict[Expr, None] = {}
        self.divided: set[str] = set()
        self.taken = {*taken, *(sizes.names if sizes else ()), *RESERVED}
        self.changing: set[Var] = set()
        self.notes: dict[str, None] = {}  # masks that were proved away, and why
        self.values: dict[Var, Expr] = {}  # of names that vary along lanes
        self.elements = ""  # the function of its own that is read, which knows single elements alone
        self.multiplied: set[Expr] = set()  # the values of matrix products
        self.zero_unless: dict[Var, frozenset[Expr]] = {}  # values that are 0 where a condition fails

    def fresh(self, stem: str) -> str:
        """A name that no other value has."""
        name, number = stem, 2
        while name in self.taken:
            name, number = f"{stem}_{number}", number + 1
        self.taken.add(name)
        return name

    def let(self, stem: str, value: Expr) -> Var:
        """A name for a value."""
        var = Var(self.fresh(stem), value.dtype)
        self.scope[var] = lanes_of(value, self.scope)
        if self.scope[var]:
            self.values[var] = value
        self.stmts.append(Let(var, value))
        return var

    def named(self, stem: str, value: Expr) -> Expr:
        """A value under a name; itself if repeating it costs nothing and it never changes."""
        leaf = value.x if isinstance(value, Renamed) else value
        if isinstance(leaf, (Const, Lane)) or isinstance(leaf, Var) and leaf not in self.changing:
            return value
        return self.let(stem, value)

    def alloc(self, stem: str, dtype: DType, shape: Shape, init: Expr) -> Var:
        """A name that may change, at first with the value ``init``."""
        var = Var(self.fresh(stem), dtype)
        self.scope[var] = own_lanes(shape)
        self.changing.add(var)
        plain = isinstance(init, Const)
        self.stmts.append(Alloc(var, self.scope[var], init if plain else Const(_zero(dtype), dtype)))
        if not plain:
            self.update(var, init)
        return var

    def update(self, var: Var, value: Expr) -> None:
        """Assign to a name that may change; the value gets all lanes of the name."""
        if value is var:
            return
        lanes = self.scope[var]
        spread = value if lanes_of(value, self.scope) == lanes else Spread(value, lanes)
        self.stmts.append(Update(var, spread if value.dtype is var.type else Cast(spread, var.type)))

    def add(self, s: Stmt) -> None:
        """Append a statement."""
        self.stmts.append(s)

    @contextmanager
    def block(self) -> Iterator[list[Stmt]]:
        """Statements that are collected apart; what is learned inside is forgotten."""
        outer, facts, taken = self.stmts, self.facts, set(self.taken)
        inner: list[Stmt] = []
        self.stmts = inner
        try:
            yield inner
        except BaseException:
            self.taken = taken
            raise
        finally:
            self.stmts, self.facts = outer, facts

    def body(self) -> Stmt:
        """All statements."""
        return seq(*self.stmts)

    # -- tiles --

    def spread(self, tile: Tile, shape: Shape) -> Tile:
        """A tile as one of a larger shape, along which it does not vary."""
        return tile if tile.shape == shape else replace(tile, shape=shape)

    def placed(self, tile: Tile, shape: Shape, of: tuple[int | None, ...]) -> Tile:
        """A tile with its dimensions in other places: dimension ``i`` of the result is ``of[i]`` of the
        tile (None: a new one of one element)."""
        self.not_of_elements("another shape")
        before, after = lanes_along(tile.shape), lanes_along(shape)
        found = {x for e in (tile.expr, *tile.mask) for x in lanes_of(e, self.scope)}
        assert found <= {*before}, f"{tile} varies along {found - {*before}}"
        lanes: dict[Lane, Lane] = {}
        for at, source in enumerate(of):
            lane, new = (None if source is None else before[source]), after[at]
            if lane is not None and new is not None:
                lanes[lane] = new
        return Tile(shape, self.move(tile.expr, lanes), tuple(self.move(m, lanes) for m in tile.mask),
                    tile.vector)

    def move(self, e: Expr, lanes: Mapping[Lane, Lane]) -> Expr:
        """An expression along other lanes."""
        return moved(e, lanes, self.scope)

    def not_of_elements(self, what: str) -> None:
        """Refuse what a function of elements cannot know."""
        if self.elements:
            raise Refusal(f"{what} in {self.elements}, a function of its own, which knows single elements",
                          "operators and functions; @kernel.func, whose body is read in the place of the "
                          "call")

    def proved(self, mask: Mask) -> Mask:
        """The mask without what the facts prove."""
        return proved(mask, self.facts)

    def inside(self, tensor: str, mask: Mask) -> Mask:
        """The bounds of an access without what the facts prove, which is noted."""
        kept = self.proved(mask)
        for part in mask:
            if part not in kept and not isinstance(part, Const) and FALSE not in kept:
                why = reason(part, self.facts)
                self.notes[f"{tensor}: {readable(part)} is always true: {why}"] = None
        return kept

    def where(self, mask: Mask, yes: Expr, no: Expr) -> Expr:
        """``yes`` where a mask holds, else ``no``; both have one type."""
        return Select(all_of(mask), yes, no) if mask else yes

    def is_zero(self, e: Expr, mask: Mask) -> bool:
        """Whether a value is known to be 0 wherever a mask does not hold, as a load's is."""
        var = e.x if isinstance(e, Renamed) else e
        held = self.zero_unless.get(var) if isinstance(var, Var) else None
        if held is None:
            return False
        lanes = dict(zip(e.old, e.new, strict=True)) if isinstance(e, Renamed) else {}
        return {self.move(c, lanes) for c in held} >= {*mask}

    def is_not_negative(self, e: Expr) -> bool:
        """Whether a position is proved not to be negative."""
        low = range_of(e, self.facts).lo
        return low is not None and low >= 0

    # -- sizes that are arguments --

    def is_of_sizes(self, value: object) -> bool:
        """Whether a number is computed from sizes that are arguments, and from nothing else."""
        if self.sizes is None or not isinstance(value, Tile) or value.shape or value.mask:
            return False
        names = {v.name for v in free_vars(value.expr)}
        return bool(names) and names <= {*self.sizes.names} and value.dtype.kind in ("index", "bool")

    def known(self, value: Any) -> Any:
        """A number that has to be known: sizes become constants (Needed). Anything else as it is."""
        if isinstance(value, Tile) and self.is_of_sizes(value):
            raise Needed(v.name for v in free_vars(value.expr))
        if isinstance(value, (tuple, list)):
            return type(value)(self.known(v) for v in value)
        if isinstance(value, slice):
            return slice(*(self.known(v) for v in (value.start, value.stop, value.step)))
        return value

    def divides(self, e: Expr) -> None:
        """Note that it matters what divides the sizes in an expression."""
        if self.sizes is not None:
            self.divided |= {v.name for v in free_vars(e)} & {*self.sizes.names}

    def holds(self, condition: Tile) -> bool:
        """Whether a condition of sizes holds for the call's, which the compiled kernel then requires."""
        assert self.sizes is not None
        found = simplify(condition.expr, self.facts)
        if isinstance(found, Const):
            return bool(found.value)
        held = bool(value_at(found, self.sizes.like))
        told = found if held else simplify(Not(found), self.facts)
        self.decided[told] = None
        self.facts = self.facts.assume(told)
        return held

    def changes(self, e: Expr) -> bool:
        """Whether a value mentions names that are assigned again."""
        return bool(free_vars(e) & self.changing)


def _zero(dtype: DType) -> float | int | bool:
    return False if dtype.kind == "bool" else 0.0 if dtype.kind == "float" else 0
