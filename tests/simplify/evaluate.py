"""The value of an index expression at one point, by Python's own (rounding down) arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from transconv import ir
from transconv.ir import Expr
from transconv.simplify import Range

BINARY: dict[type[Expr], Callable[[int, int], int]] = {
    ir.Add: operator.add,
    ir.Sub: operator.sub,
    ir.Mul: operator.mul,
    ir.FloorDiv: operator.floordiv,
    ir.Mod: operator.mod,
    ir.Min: min,
    ir.Max: max,
    ir.Shl: operator.lshift,
    ir.Shr: operator.rshift,
    ir.Lt: operator.lt,
    ir.Le: operator.le,
    ir.Eq: operator.eq,
    ir.Ne: operator.ne,
    ir.And: operator.and_,
    ir.Or: operator.or_,
    ir.Xor: operator.xor,
}


def value(e: Expr, at: Mapping[Expr, int]) -> int:
    """The value where the variables and lanes have the values ``at``."""
    match e:
        case ir.Const(number):
            return int(number)
        case ir.Var() | ir.Lane():
            return at[e]
        case ir.Neg(x):
            return -value(x, at)
        case ir.Not(x):
            return not value(x, at)
        case ir.Select(cond, yes, no):
            return value(yes if value(cond, at) else no, at)
        case ir.Cast(x):
            return value(x, at)
        case ir.Binary() if type(e) in BINARY:
            return BINARY[type(e)](value(e.a, at), value(e.b, at))
    raise TypeError(f"cannot evaluate {type(e).__name__}")


def points(ranges: Mapping[Expr, Range]) -> Iterator[dict[Expr, int]]:
    """Every assignment within bounded ranges."""
    spans = [range(r.lo, r.hi + 1) for r in ranges.values()]  # type: ignore[operator, arg-type]
    for values in product(*spans):
        yield dict(zip(ranges, values, strict=True))
