"""What the term of a reduction is beyond the end of an axis, where its loads have their fills.

    sum(a*b; k)              0, as a is loaded as 0 there and b is finite
    sum(a*(1/b); k)          perhaps 0 times infinity: the term needs a mask
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from transconv.ir import (
    Add,
    Cast,
    Const,
    Expr,
    Load,
    Max,
    Min,
    Mul,
    Neg,
    Select,
    Sub,
    Var,
    free_vars,
)

Lets = Mapping[Var, Expr]


def roots_of(e: Expr, lets: Lets) -> frozenset[Var]:
    """The loop variables that an expression depends on, directly or through lets."""
    found: set[Var] = set()
    for v in free_vars(e):
        found |= roots_of(lets[v], lets) if v in lets else {v}
    return frozenset(found)


def vanishes(term: Expr, axis: Var, nothing: float, lets: Lets) -> bool:
    """Whether a term equals ``nothing``, the neutral element, beyond the end of an axis, because it is
    loaded with that fill; in a sum, also if a factor of it is, and the others are finite."""
    if isinstance(term, Mul) and nothing == 0:
        return any(vanishes(x, axis, nothing, lets) and is_finite(y, axis, lets)
                   for x, y in ((term.a, term.b), (term.b, term.a)))
    value = term.x if isinstance(term, Cast) else term
    load = lets.get(value) if isinstance(value, Var) else None
    if isinstance(load, Select):  # between two loads
        return vanishes(load.yes, axis, nothing, lets) and vanishes(load.no, axis, nothing, lets)
    return isinstance(load, Load) and load.fill == nothing and axis in roots_of(load.offset, lets)


def is_finite(e: Expr, axis: Var, lets: Lets) -> bool:
    """Whether a value beyond the end of an axis is finite, if the elements of tensors are: it is loaded,
    moved, added and multiplied, or it is the same along the axis."""
    match e:
        case Const(value):
            return isfinite(value)
        case Load():
            return isfinite(e.fill)
        case Cast(x) | Neg(x):
            return is_finite(x, axis, lets)
        case Select(_, x, y) | Add(x, y) | Sub(x, y) | Mul(x, y) | Max(x, y) | Min(x, y):
            return is_finite(x, axis, lets) and is_finite(y, axis, lets)
        case Var() if e in lets:
            return is_finite(lets[e], axis, lets)
    return axis not in roots_of(e, lets)
