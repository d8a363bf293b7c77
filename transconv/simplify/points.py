"""The range of a sum where conditions hold, computed at all points of its variables.

Terms and conditions that have no variable in common are independent, so that each group of variables has
points of its own, and the ranges of the groups add up:

    (pid//2)*16 + (pid % 2)*9 + m*24        where m < 7 and pid < 5        pid in 0..7, m in 0..31
    8 points of pid and 32 of m, not 256 of both
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from transconv import ir
from transconv.simplify.facts import Facts
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
        if not all(bool(at_point(c, {})) for c in fixed):
            return Range(0, -1)
        low = p.const + sum(
            c * prod(int(at_point(a, {})) for a in mono) for own, mono, c in terms if not own
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
                    holds = holds & (at_point(c, at) != 0)
            for own, mono, times in terms:
                if own and own <= group:
                    total = total + times * prod((at_point(a, at) for a in mono), start=np.asarray(1))
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


def at_point(e: ir.Expr, at: Mapping[ir.Expr, Any]) -> Any:
    """The value where variables and lanes have the values ``at``, integers without bounds or arrays of
    them. Raises TypeError for a node that has none."""
    kind = type(e)
    if kind is ir.Var or kind is ir.Lane:
        return at[e]
    match e:
        case ir.Min(a, b) | ir.Max(a, b):
            a, b = at_point(a, at), at_point(b, at)
            if isinstance(a, int) and isinstance(b, int):
                return min(a, b) if kind is ir.Min else max(a, b)
            return np.minimum(a, b) if kind is ir.Min else np.maximum(a, b)
        case ir.Binary(a, b) if kind in ir.MEANING and a.dtype.kind != "int" != b.dtype.kind:
            return ir.MEANING[kind](at_point(a, at), at_point(b, at))
        case ir.Const(value) if e.dtype.kind != "float":
            return int(value)
        case ir.Neg(x):
            return -at_point(x, at)
        case ir.Not(x) if e.dtype.kind == "bool":
            return at_point(x, at) == 0
        case ir.Select(cond, yes, no):
            if isinstance(chosen := at_point(cond, at), np.ndarray):
                return np.where(chosen, at_point(yes, at), at_point(no, at))
            return at_point(yes if chosen else no, at)
        case ir.Call("quotient", (a, b)):
            return at_point(a, at) // at_point(b, at)
        case ir.Call("remainder", (a, b)):
            return at_point(a, at) % at_point(b, at)
        case ir.Cast(x) if e.dtype.kind == "index":
            return at_point(x, at)
    raise TypeError(f"{type(e).__name__} has no value here")


@lru_cache(maxsize=1 << 14)
def variables(e: ir.Expr) -> frozenset[ir.Expr]:
    """The variables and lanes of an expression."""
    return frozenset(n for n in ir.walk(e) if isinstance(n, (ir.Var, ir.Lane)))
