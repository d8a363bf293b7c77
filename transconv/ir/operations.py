"""Expressions without a Python operator: selections, casts, calls, equality and extrema; masks as lists of
conditions, sums as lists of addends; and what removes, adds or renames lanes of a tile."""

from __future__ import annotations

from transconv.ir.dtype import DType, promote
from transconv.ir.expr import TRUE, ZERO, Add, And, Eq, Expr, Lane, Like, Max, Min, Ne, as_expr
from transconv.ir.functions.calls import CALLS
from transconv.ir.node import node


@node
class Select(Expr):
    """``yes`` where ``cond`` holds, else ``no``."""

    cond: Expr
    yes: Expr
    no: Expr

    @property
    def dtype(self) -> DType:
        return promote(self.yes.dtype, self.no.dtype)


@node
class Cast(Expr):
    """``x`` in another type: a float is rounded to nearest, and truncated to an integer."""

    x: Expr
    type: DType

    @property
    def dtype(self) -> DType:
        return self.type


@node
class Call(Expr):
    """A pure function of its arguments, by name (``exp``, ``tanh``, ``fma`` ...)."""

    name: str
    args: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        callee = CALLS.get(self.name)
        return self.taken if callee is None or callee.result is None else callee.result

    @property
    def taken(self) -> DType:
        """The one type that the arguments are converted to."""
        kind = self.args[0].dtype
        for a in self.args[1:]:
            kind = promote(kind, a.dtype)
        return kind


def eq(a: Like, b: Like) -> Expr:
    """The expression ``a == b``; Python's ``==`` compares nodes by identity."""
    return Eq(as_expr(a), as_expr(b))


def ne(a: Like, b: Like) -> Expr:
    """The expression ``a != b``."""
    return Ne(as_expr(a), as_expr(b))


def minimum(a: Like, b: Like) -> Expr:
    """The lesser operand; NaN if one is."""
    return Min(as_expr(a), as_expr(b))


def maximum(a: Like, b: Like) -> Expr:
    """The greater operand; NaN if one is."""
    return Max(as_expr(a), as_expr(b))


def select(cond: Like, yes: Like, no: Like) -> Expr:
    """``yes`` where ``cond`` holds, else ``no``."""
    return Select(as_expr(cond), as_expr(yes), as_expr(no))


def conjuncts(mask: Expr) -> list[Expr]:
    """The parts of ``a & b & ...``; none for a mask that is always true."""
    if isinstance(mask, And):
        return conjuncts(mask.a) + conjuncts(mask.b)
    return [] if mask is TRUE else [mask]


def all_of(parts: list[Expr] | tuple[Expr, ...]) -> Expr:
    """``a & b & ...`` of the parts, without repeats; TRUE if there are none."""
    joined: Expr = TRUE
    for part in dict.fromkeys(p for p in parts if p is not TRUE):
        joined = part if joined is TRUE else And(joined, part)
    return joined


def addends(e: Expr) -> list[Expr]:
    """The terms of a sum, from left to right."""
    return addends(e.a) + addends(e.b) if isinstance(e, Add) else [e]


def sum_of(terms: list[Expr]) -> Expr:
    """``a + b + ...``; ZERO if there are no terms."""
    if not terms:
        return ZERO
    total = terms[0]
    for t in terms[1:]:
        total = Add(total, t)
    return total


@node
class Reduce(Expr):
    """The reduction ``op``, a key of ``REDUCERS``, of ``x`` along a lane; the result lacks that lane."""

    op: str
    x: Expr
    lane: Lane

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Running(Expr):
    """The running reductions ``op``, a key of ``REDUCERS``, of ``x`` along a lane: of each element and
    those before it."""

    op: str
    x: Expr
    lane: Lane

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Gather(Expr):
    """The elements of ``x`` at a place along each of some lanes. The result varies along the lanes of the
    places in the stead of these."""

    x: Expr
    lanes: tuple[Lane, ...]
    places: tuple[Expr, ...]

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Spread(Expr):
    """``x`` broadcast to all of these lanes."""

    x: Expr
    lanes: tuple[Lane, ...]

    @property
    def dtype(self) -> DType:
        return self.x.dtype


@node
class Renamed(Expr):
    """``x`` along other lanes: what varies along ``old[i]`` varies along ``new[i]``, of the same extent.
    Lanes of ``x`` that are not in ``old`` stay. All change at once, so that two lanes can be exchanged."""

    x: Expr
    old: tuple[Lane, ...]
    new: tuple[Lane, ...]

    @property
    def dtype(self) -> DType:
        return self.x.dtype

    def of(self, lane: Lane) -> Lane:
        """What becomes of a lane of ``x``."""
        return dict(zip(self.old, self.new, strict=True)).get(lane, lane)
