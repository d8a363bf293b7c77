"""The value of an expression of sizes, such as the extent of a tensor or a requirement."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from transconv.ir import expr as ex
from transconv.ir.operations import Cast, Select

Values = Mapping[str, int]
"""Sizes by name."""

MEANING: dict[type, Callable[[int, int], int]] = {
    ex.Add: operator.add, ex.Sub: operator.sub, ex.Mul: operator.mul, ex.FloorDiv: operator.floordiv,
    ex.Mod: operator.mod, ex.Min: min, ex.Max: max, ex.Lt: operator.lt, ex.Le: operator.le,
    ex.Eq: operator.eq, ex.Ne: operator.ne, ex.And: operator.and_, ex.Or: operator.or_}


def value_at(e: ex.Expr, values: Values) -> int:
    """The value of an expression of sizes; 0 or 1 for a condition. KeyError for a name without a size,
    TypeError for a node that is no arithmetic of sizes."""
    match e:
        case ex.Const(value):
            return int(value)
        case ex.Var(name):
            return values[name]
        case ex.Neg(x):
            return -value_at(x, values)
        case ex.Not(x):
            return not value_at(x, values)
        case Cast(x):
            return value_at(x, values)
        case Select(cond, yes, no):
            return value_at(yes if value_at(cond, values) else no, values)
        case ex.Binary():
            return MEANING[type(e)](value_at(e.a, values), value_at(e.b, values))
    raise TypeError(f"{e} is no expression of sizes")


SPELLING = {ex.Add: "+", ex.Sub: "-", ex.Mul: "*", ex.FloorDiv: "//", ex.Mod: "%", ex.Lt: "<", ex.Le: "<=",
            ex.Eq: "==", ex.Ne: "!=", ex.And: "and", ex.Or: "or"}


def values_of(expressions: Sequence[ex.Expr], names: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """A function of sizes, in the order of their names, that computes expressions as ``value_at`` does, as
    fast as Python can. KeyError for a name that has no size."""
    given = {name: f"_{at}" for at, name in enumerate(names)}
    texts = "".join(f"{_spelled(e, given)}, " for e in expressions)
    made: Callable[..., tuple[int, ...]] = eval(f"lambda {', '.join(given.values())}: ({texts})", {
        "__builtins__": {"min": min, "max": max}})
    return made


def _spelled(e: ex.Expr, given: Mapping[str, str]) -> str:
    match e:
        case ex.Const(value):
            return f"({int(value)})"
        case ex.Var(name):
            return given[name]
        case ex.Neg(x):
            return f"(-{_spelled(x, given)})"
        case ex.Not(x):
            return f"(not {_spelled(x, given)})"
        case Cast(x):
            return _spelled(x, given)
        case Select(cond, yes, no):
            return f"({_spelled(yes, given)} if {_spelled(cond, given)} else {_spelled(no, given)})"
        case ex.Min() | ex.Max():
            return f"{type(e).__name__.lower()}({_spelled(e.a, given)}, {_spelled(e.b, given)})"
        case ex.Binary():
            return f"({_spelled(e.a, given)} {SPELLING[type(e)]} {_spelled(e.b, given)})"
    raise TypeError(f"{e} is no expression of sizes")
