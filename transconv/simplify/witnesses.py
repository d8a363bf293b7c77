"""Values of a condition at points that the facts allow: two truths show that no proof exists."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from transconv import ir
from transconv.ir import Cast, Const, Expr, Lane, Select, Var, walk
from transconv.simplify.facts import Facts
from transconv.simplify.ranges import range_of

MOST = 24  # points
FAR = 97  # the length of a range without an end
BINARY: dict[type[Expr], Callable[[int, int], int]] = {
    ir.Add: operator.add, ir.Sub: operator.sub, ir.Mul: operator.mul, ir.FloorDiv: operator.floordiv,
    ir.Mod: operator.mod, ir.Min: min, ir.Max: max, ir.Lt: operator.lt, ir.Le: operator.le,
    ir.Eq: operator.eq, ir.Ne: operator.ne, ir.And: operator.and_, ir.Or: operator.or_,
}


def truths_at_points(condition: Expr, facts: Facts) -> set[bool]:
    """The truths of a condition at points where the facts hold, the same points in every process; no more
    are looked at once there are two. Empty if it has other operations, or no point is found."""
    own = variables(condition)
    given = [c for c in facts.true if variables(c) & own]
    everything = dict.fromkeys(v for e in (condition, *given) for v in walk(e)
                               if isinstance(v, (Var, Lane)))
    seen: set[bool] = set()
    try:
        for at in _points(list(everything), facts):
            if all(at_point(c, at) for c in given):
                seen.add(bool(at_point(condition, at)))
                if len(seen) == 2:
                    break
    except (TypeError, ZeroDivisionError):
        return set()
    return seen


def at_point(e: Expr, at: Mapping[Expr, int]) -> int:
    """The value where variables and lanes have the values ``at``, for integers without bounds. Raises
    TypeError for a node that has none."""
    match e:
        case Const(value) if e.dtype.kind != "float":
            return int(value)
        case Var() | Lane():
            return at[e]
        case ir.Neg(x):
            return -at_point(x, at)
        case ir.Not(x) if e.dtype.kind == "bool":
            return not at_point(x, at)
        case Select(cond, yes, no):
            return at_point(yes if at_point(cond, at) else no, at)
        case Cast(x) if e.dtype.kind == "index":
            return at_point(x, at)
        case ir.Binary() if type(e) in BINARY and e.a.dtype.kind != "int" != e.b.dtype.kind:
            return BINARY[type(e)](at_point(e.a, at), at_point(e.b, at))
    raise TypeError(f"{type(e).__name__} has no value here")


def _points(leaves: list[Expr], facts: Facts) -> Iterator[dict[Expr, int]]:
    """The ends of the ranges, all and one by one, then points within."""
    spans: list[tuple[int, int, int]] = []
    for v in leaves:
        r, n = range_of(v, facts), facts.stated_multiple(v)
        lo = r.lo if r.lo is not None else FAR * -n if r.hi is None else r.hi - 2 * FAR * n
        lo = -(-lo // n) * n
        hi = r.hi if r.hi is not None else lo + 2 * FAR * n
        if hi < lo:
            return
        spans.append((lo, (hi - lo) // n, n))
    for number in range(MOST):
        at = {}
        for i, (v, (lo, steps, n)) in enumerate(zip(leaves, spans, strict=True)):
            if number < 2:
                step = steps * number
            elif number < 2 + len(leaves):
                step = steps * (i == number - 2)
            else:  # a fixed sequence that meets all remainders
                step = (number * 7 + i * 5 + number * number * (i + 1)) % (steps + 1)
            at[v] = lo + step * n
        yield at


@lru_cache(maxsize=1 << 14)
def variables(e: Expr) -> frozenset[Expr]:
    """The variables and lanes of an expression."""
    return frozenset(n for n in walk(e) if isinstance(n, (Var, Lane)))
