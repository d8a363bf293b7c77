"""The range of a sum where conditions hold, computed at all points of its variables.

Terms and conditions that have no variable in common are independent, so that each group of variables has
points of its own, and the ranges of the groups add up:

    (pid//2)*16 + (pid % 2)*9 + m*24        where m < 7 and pid < 5        pid in 0..7, m in 0..31
    8 points of pid and 32 of m, not 256 of both
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from transconv import ir
from transconv.simplify.facts import Facts
from transconv.simplify.presburger import variables
from transconv.simplify.ranges import Range, range_of

POINTS = 1 << 21  # of one group of variables

Values = np.ndarray[Any, np.dtype[Any]]


def range_at_points(e: ir.Expr, conditions: Iterable[ir.Expr], facts: Facts) -> Range | None:
    """The range of an index where conditions and the facts hold: 0..-1 if they do at no point. None if
    there are too many points, or an operation has no value here."""
    p = facts.poly(e)
    given = [*conditions]
    known = [c for c in dict.fromkeys((*given, *facts.true)) if variables(c)]
    terms = [(frozenset[ir.Expr]().union(*map(variables, mono)), mono, c) for mono, c in p.terms]
    asked = frozenset[ir.Expr]().union(*(own for own, _, _ in terms), *map(variables, given))
    fixed = [c for c in given if not variables(c) and not ir.find(c, ir.MemoryRead)]
    known = [c for c in known if variables(c) & asked]
    try:  # conditions and monomials without variables, such as 7 // 2, are in no group
        if not all(bool(_value(c, {})) for c in fixed):
            return Range(0, -1)
        low = p.const + sum(
            c * prod(int(_value(a, {})) for a in mono) for own, mono, c in terms if not own
        )
    except TypeError:
        return None
    high = low
    for group in groups([own for own, _, _ in terms] + [variables(c) for c in known]):
        at = _points(group, facts)
        if at is None:
            return None
        try:
            holds, total = np.asarray(True), np.asarray(0)
            for c in known:
                if variables(c) <= group:
                    holds = holds & _value(c, at)
            for own, mono, times in terms:
                if own and own <= group:
                    total = total + times * prod((_value(a, at) for a in mono), start=np.asarray(1))
        except TypeError:
            return None
        total, holds = np.broadcast_arrays(total, holds)
        held = total[holds]
        if not held.size:
            return Range(0, -1)
        low, high = low + int(held.min()), high + int(held.max())
    return Range(low, high)


def groups(sets: Iterable[frozenset[ir.Expr]]) -> list[frozenset[ir.Expr]]:
    """Sets of variables joined where they have one in common; without empty ones."""
    made: list[frozenset[ir.Expr]] = []
    for own in sets:
        if own:
            near = [g for g in made if g & own]
            made = [g for g in made if not g & own] + [own.union(*near)]
    return made


def _points(group: frozenset[ir.Expr], facts: Facts) -> dict[ir.Expr, Values] | None:
    """The values of each variable, along an axis of its own; None if there are too many together."""
    leaves = sorted(group, key=str)
    ranges = [range_of(v, facts) for v in leaves]
    at: dict[ir.Expr, Values] = {}
    count = 1
    for i, (v, r) in enumerate(zip(leaves, ranges, strict=True)):
        if r.lo is None or r.hi is None or (count := count * max(0, r.hi - r.lo + 1)) > POINTS:
            return None
        shape = [1] * len(leaves)
        shape[i] = -1
        at[v] = np.arange(r.lo, r.hi + 1, dtype=np.int64).reshape(shape)
    return at


def _value(e: ir.Expr, at: Mapping[ir.Expr, Values]) -> Values:
    """The values of an expression at points. Raises TypeError for a node that has none."""
    match e:
        case ir.Const(value) if e.dtype.kind != "float":
            return np.asarray(value)
        case ir.Var() | ir.Lane():
            return at[e]
        case ir.Neg(x):
            return -_value(x, at)
        case ir.Not(x) if e.x.dtype.kind == "bool":
            return ~_value(x, at)
        case ir.Select(cond, yes, no):
            return np.where(_value(cond, at), _value(yes, at), _value(no, at))
        case ir.Min(a, b):
            return np.minimum(_value(a, at), _value(b, at))
        case ir.Max(a, b):
            return np.maximum(_value(a, at), _value(b, at))
        case ir.Call("quotient", (a, b)):
            return _value(a, at) // _value(b, at)
        case ir.Call("remainder", (a, b)):
            return _value(a, at) % _value(b, at)
        case ir.Binary() if type(e) in ir.MEANING and e.a.dtype.kind != "int" != e.b.dtype.kind:
            meaning: Any = ir.MEANING[type(e)]
            return np.asarray(meaning(_value(e.a, at), _value(e.b, at)))
    raise TypeError(f"{type(e).__name__} has no value here")
