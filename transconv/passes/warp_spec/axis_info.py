"""What a compiler sees of how a tile lies in memory: along which lanes elements follow one another, and
along which lane they are closest.

The first follows the analysis of axes in Triton: numbers are known, sizes that are arguments are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

from transconv.ir import Add, Cast, Const, Expr, FloorDiv, Lane, Mod, Mul, Sub, Var

Values = Mapping[Var, Expr]
"""What the variables of a kernel stand for."""


class LaneRun(NamedTuple):
    """Of how many lanes, each time, a number is the ``same``, and in how many it counts up (``next``)."""

    same: int
    next: int


def run_of(e: Expr, lane: Lane, values: Values) -> LaneRun:
    """The runs of an expression along a lane."""
    def of(x: Expr) -> LaneRun:
        return run_of(x, lane, values)

    match e:
        case Lane():
            return LaneRun(1, lane.extent) if e is lane else LaneRun(lane.extent, 1)
        case Var():
            return of(values[e]) if e in values else LaneRun(lane.extent, 1)
        case Cast(x, _):
            return of(x)
        case Add(a, b):
            (same_a, next_a), (same_b, next_b) = of(a), of(b)
            return LaneRun(gcd(same_a, same_b), max(gcd(next_a, same_b), gcd(same_a, next_b)))
        case Sub(a, b):
            (same_a, next_a), (same_b, _) = of(a), of(b)
            return LaneRun(gcd(same_a, same_b), gcd(next_a, same_b))
        case FloorDiv(a, Const(c)):
            return LaneRun(max(of(a).same, gcd(of(a).next, int(c))), 1)
        case Mod(a, Const(c)):
            return LaneRun(of(a).same, gcd(of(a).next, int(c)))
    return LaneRun(gcd(lane.extent, *(of(x).same for x in e.children() if isinstance(x, Expr))), 1)


def steps_of(e: Expr, values: Values) -> dict[Lane, int]:
    """By how much a number grows from one element to the next along each lane, as far as that is a number,
    within the runs of a remainder; the least where there are several."""
    match e:
        case Lane():
            return {e: 1}
        case Var():
            return steps_of(values[e], values) if e in values else {}
        case Cast(x, _) | Mod(x, _) | Sub(x, _):
            return steps_of(x, values)
        case Mul(x, Const(c)) | Mul(Const(c), x):
            return {lane: n * abs(int(c)) for lane, n in steps_of(x, values).items()}
        case Add(a, b):
            found = steps_of(a, values)
            for lane, n in steps_of(b, values).items():
                found[lane] = min(n, found.get(lane, n))
            return found
    return {}
