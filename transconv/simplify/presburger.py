"""Second tier of proofs: conditions over integers that the rules leave undecided.

A condition is refuted by a system of inequalities ``p >= 0`` over the integers, in SymPy's polynomials:
the condition or its opposite, the known inequalities and residues, and what ``//``, ``%``, ``min`` and
``max`` mean. Each step is exact, and steps are counted: by a budget of time texts would differ.

==============  ==========================================================================
rule            a system has no solution, because
==============  ==========================================================================
``bounds``      the bounds of its unknowns, rounded to integers, exclude one another
``combined``    sums of two inequalities, divided by their content, do
``equations``   its equations have no solution in integers (Smith's normal form)
``factors``     an inequality's factors have signs that exclude it
``cases``       none for any remainder of a variable by a small period
==============  ==========================================================================

Where all points can be tried, ``range_at_points`` gives the range of a sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from transconv import ir
from transconv.simplify.facts import Facts, both_integers
from transconv.simplify.polynomial import Mono, Polynomial, rebuild
from transconv.simplify.ranges import INF, Range, between, range_of, range_of_poly, range_of_product

STEPS = 1200  # of one question: an inequality read, or two of them combined
ROWS = 100  # inequalities of one system
SUMS = 24  # combinations of two
FACTORED = 8  # terms of a sum that SymPy factors
EQUATIONS = 8  # of one system
PERIOD = 12  # the largest period for cases, and the most cases
CASES = 36


@dataclass(frozen=True)
class Verdict:
    """Whether a condition holds for all values that the facts allow (True), or for none (False), and the
    rule that decided."""

    truth: bool
    rule: str


class _Spent(Exception):
    """The steps of a question are used up."""


class _Steps:
    def __init__(self, left: int) -> None:
        self.left = left

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Spent


def decide(condition: ir.Expr, facts: Facts, steps: int = STEPS) -> Verdict | None:
    """The verdict on a simplified condition; None if it holds for some values only, or the steps do not
    suffice."""
    from transconv.simplify.fixpoint import tell  # it asks here

    if (condition, steps) in facts.verdicts:
        return facts.verdicts[condition, steps]
    found = facts.verdicts[condition, steps] = _decide(condition, facts, steps)
    if found is not None:
        tell(found.rule, condition, ir.TRUE if found.truth else ir.FALSE, facts)
    return found


def _decide(condition: ir.Expr, facts: Facts, steps: int) -> Verdict | None:
    if isinstance(condition, ir.Const):
        return Verdict(bool(condition.value), "simplify")
    if isinstance(condition, (ir.And, ir.Or)):
        return _of_parts(condition, facts, steps)
    if not isinstance(condition, (ir.Lt, ir.Le, ir.Eq, ir.Ne)) or not both_integers(
        condition.a, condition.b
    ):
        return None
    seen = truths_at_points(condition, facts)
    if len(seen) == 2:
        return None
    for truth in (True, False):
        if seen == {not truth}:
            continue
        rule = _refuted(condition, not truth, facts, steps)
        if rule:
            return Verdict(truth, rule)
    return None


def _of_parts(condition: ir.And | ir.Or, facts: Facts, steps: int) -> Verdict | None:
    """A conjunction is true if both parts are, false if one is; a disjunction is the dual."""
    one = isinstance(condition, ir.Or)
    a, b = (decide(part, facts, steps) for part in (condition.a, condition.b))
    for verdict in (a, b):
        if verdict is not None and verdict.truth is one:
            return verdict
    return None if a is None or b is None else Verdict(not one, a.rule)


def _refuted(condition: ir.Expr, truth: bool, facts: Facts, steps: int) -> str:
    """The rule by which a comparison cannot have a truth; empty if none says so."""
    budget, rule = _Steps(steps), ""
    try:
        for goals in _alternatives(condition, truth, facts):
            rule = _System(goals, facts, budget).contradiction()
            if not rule:
                return _by_cases(condition, truth, facts)
    except _Spent:
        return ""
    return rule


def _alternatives(condition: ir.Expr, truth: bool, facts: Facts) -> list[list[Polynomial]]:
    """Systems of p >= 0, of which one holds if and only if the comparison has that truth."""
    assert isinstance(condition, (ir.Lt, ir.Le, ir.Eq, ir.Ne))
    p = facts.poly(condition.b) - facts.poly(condition.a)
    if isinstance(condition, (ir.Eq, ir.Ne)):
        return [[p, -p]] if isinstance(condition, ir.Eq) is truth else [[p - 1], [-p - 1]]
    least = int(isinstance(condition, ir.Lt))
    return [[p - least]] if truth else [[-p + least - 1]]


class _System:
    """Inequalities ``p >= 0``, and the bounds of the monomials in them."""

    def __init__(self, goals: list[Polynomial], facts: Facts, steps: _Steps) -> None:
        self.facts, self.steps = facts, steps
        self.goals = goals
        self.bounds: dict[Mono, Range] = {}
        self.rows: list[Polynomial] = []
        for p in goals:
            self.add(p)
        self._add_known()

    def add(self, p: Polynomial) -> None:
        """Add p >= 0, divided by its content, what its atoms mean, and their bounds."""
        if len(self.rows) >= ROWS:
            return
        content = p.content
        if content > 1:
            p = Polynomial.of(((m, k // content) for m, k in p.terms), p.const // content)
        self.rows.append(p)
        for mono, _ in p.terms:
            if mono not in self.bounds:
                self.bounds[mono] = range_of_product(mono, self.facts)
                for e in mono:
                    for meant in _meaning(e, self.facts):
                        self.add(meant)

    def _add_known(self) -> None:
        """Add the inequalities and residues of the facts that are about the variables of the system, first
        those about its goals'."""
        waiting = [(p, _variables(p)) for p in (*self.facts.limits, *_residues(self.facts))]
        reached = frozenset[ir.Expr]().union(*map(_variables, self.goals))
        while near := [(p, own) for p, own in waiting if own & reached]:
            waiting = [(p, own) for p, own in waiting if not own & reached]
            for p, own in near:
                self.add(p)
                reached |= own

    def contradiction(self) -> str:
        """The rule by which the system has no solution; empty if none says so."""
        if self._exclude():
            return "bounds"
        if self._signs_exclude():
            return "factors"
        for p in self._sums():
            self.rows.append(p)
        if self._exclude():
            return "combined"
        return "equations" if self._unsolvable() else ""

    def _exclude(self) -> bool:
        """Narrow the bounds until they exclude one another, or nothing changes."""
        changed = True
        while changed:
            changed = False
            for p in self.rows:
                self.steps.take()
                highs = [_high(k, self.bounds[m]) for m, k in p.terms]
                top = p.const + sum(highs)
                if top < 0:
                    return True
                for (mono, k), high in zip(p.terms, highs, strict=True):
                    rest = (
                        top - high
                        if top < INF
                        else p.const
                        + sum(h for (m, _), h in zip(p.terms, highs, strict=True) if m is not mono)
                    )
                    if rest == INF:
                        continue
                    # k * x >= -rest
                    bound = between(-(rest // k), INF) if k > 0 else between(-INF, rest // -k)
                    old = self.bounds[mono]
                    new = old & bound
                    if new != old:
                        self.bounds[mono], changed = new, True
                        if new.low > new.high:
                            return True
        return False

    def _sums(self) -> Iterator[Polynomial]:
        """Sums of a goal, or of a sum, and another inequality without an unknown that both have."""
        waiting = [(p, q) for p in self.goals for q in self.rows if q is not p]
        for _ in range(SUMS):
            if not waiting:
                return
            p, q = waiting.pop(0)
            for mono, k in p.terms:
                other = q.coefficient(mono)
                if k * other >= 0:
                    continue
                self.steps.take()
                g = math.gcd(k, other)
                made = p * (abs(other) // g) + q * (abs(k) // g)
                if len(made.terms) > max(len(p.terms), len(q.terms)):
                    continue
                content = made.content
                if content > 1:
                    made = Polynomial.of(((m, c // content) for m, c in made.terms), made.const // content)
                if all(m in self.bounds for m, _ in made.terms):
                    yield made
                    waiting += [(made, r) for r in self.rows if r is not q and r is not p]
                break

    def _signs_exclude(self) -> bool:
        """Whether the factors of a goal p that is no sum of atoms make p, or p + 1, too small."""
        products = [
            p for p in self.goals if len(p.terms) <= FACTORED and any(len(m) > 1 for m, _ in p.terms)
        ]
        return any(_sign_of(p, self.facts) < 0 or _sign_of(p + 1, self.facts) <= 0 for p in products)

    def _unsolvable(self) -> bool:
        """Whether the equations among the rows have no solution in integers."""
        opposites = {(frozenset((m, -k) for m, k in p.terms), -p.const) for p in self.rows}
        equations = [p for p in self.rows if p.terms and (frozenset(p.terms), p.const) in opposites]
        return 2 < len(equations) <= 2 * EQUATIONS and not _has_integer_solution(equations)


def _variables(p: Polynomial) -> frozenset[ir.Expr]:
    return frozenset[ir.Expr]().union(*(variables(e) for e in p.atoms))


def _high(k: int, r: Range) -> float:
    """The largest value of k*x for x in a range."""
    end = r.high if k > 0 else r.low
    return 0 if k == 0 else k * end


def _meaning(e: ir.Expr, facts: Facts) -> list[Polynomial]:
    """Polynomials >= 0 that say what an atom is: ``c*(x // c) <= x < c*(x // c) + c``,
    ``x % c == x - c*(x // c)``, ``min(a, b) <= a``."""
    at = Polynomial.atom(e)
    match e:
        case ir.FloorDiv(x, ir.Const(int(c))) if c > 0:
            rest = facts.poly(x) - at * c
            return [rest, -rest + (c - 1)]
        case ir.Mod(x, ir.Const(int(c))) if c > 0:
            zero = facts.poly(x) - Polynomial.atom(ir.FloorDiv(x, ir.Const(c))) * c - at
            return [zero, -zero]
        case ir.Min(a, b) if e.dtype.kind == "index":
            return [facts.poly(a) - at, facts.poly(b) - at]
        case ir.Max(a, b) if e.dtype.kind == "index":
            return [at - facts.poly(a), at - facts.poly(b)]
    return []


def _residues(facts: Facts) -> Iterator[Polynomial]:
    """``p % n == 0`` as p == n*t, with ``t = p // n``."""
    for p, n in facts.residues:
        zero = p - Polynomial.atom(ir.FloorDiv(rebuild(p), ir.Const(n))) * n
        yield zero
        yield -zero


def _sign_of(p: Polynomial, facts: Facts) -> int:
    """The largest sign of p by those of its factors, of which an even power is no less than 0."""
    content, factors = p.factors()
    low = high = _sign(content)
    for factor, power in factors:
        r = range_of_poly(factor, facts)
        if power % 2 == 0:
            r = Range(0 if 0 in r else 1, None)
        else:
            r = Range(_sign(r.low), _sign(r.high))
        ends = [a * b for a in (low, high) for b in (_sign(r.low), _sign(r.high))]
        low, high = min(ends), max(ends)
    return high


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _has_integer_solution(equations: list[Polynomial]) -> bool:
    """Whether linear equations p == 0 have a solution in integers: their matrix has the same invariant
    factors with and without the constants."""
    from sympy.polys.domains import ZZ
    from sympy.polys.matrices import DomainMatrix
    from sympy.polys.matrices.normalforms import invariant_factors

    unknowns = list(dict.fromkeys(m for p in equations for m, _ in p.terms))
    rows = [[ZZ(p.coefficient(m)) for m in unknowns] for p in equations]
    wide = [[*row, ZZ(p.const)] for row, p in zip(rows, equations, strict=True)]
    found = [
        [abs(int(f)) for f in invariant_factors(DomainMatrix(a, (len(a), len(a[0])), ZZ)) if f]
        for a in (rows, wide)
    ]
    return len(found[0]) == len(found[1]) and math.prod(found[0]) == math.prod(found[1])


def _by_cases(condition: ir.Expr, truth: bool, facts: Facts) -> str:
    """``cases`` if the comparison has the opposite truth for every remainder of its variables by their
    period, which is that of the divisors around them; else empty."""
    from transconv.simplify.fixpoint import simplify  # it asks here

    wanted: Mapping[ir.Expr, int] = _periods(condition)
    if not wanted or math.prod(wanted.values()) > CASES:
        return ""
    for rests in product(*(range(n) for n in wanted.values())):
        given, values = facts, dict[ir.Expr, ir.Expr]()
        for (v, n), rest in zip(wanted.items(), rests, strict=True):
            r = range_of(v, facts)
            part = ir.Var(f"{v.name}/{n}")  # type: ignore[attr-defined]
            given = given.with_range(part, *_quotients(r, rest, n))
            values[v] = part * n + rest
        found = simplify(ir.substitute(condition, values), given)
        if not isinstance(found, ir.Const) or bool(found.value) is truth:
            return ""
    return "cases"


def _quotients(r: Range, rest: int, n: int) -> tuple[int | None, int | None]:
    """The range of t with ``n*t + rest`` in a range."""
    return (None if r.lo is None else -((rest - r.lo) // n), None if r.hi is None else (r.hi - rest) // n)


def _periods(condition: ir.Expr) -> dict[ir.Expr, int]:
    """The period of each variable: the divisor of all ``%`` around it. Empty if there is no ``%``, or one
    of another form."""
    found: dict[ir.Expr, int] = {}
    for e in ir.walk(condition):
        if isinstance(e, ir.Mod):
            if not isinstance(e.b, ir.Const) or not 1 < int(e.b.value) <= PERIOD:
                return {}
            for v in ir.walk(e.a):
                if isinstance(v, ir.Lane):
                    return {}
                if isinstance(v, ir.Var) and v.dtype is ir.index:
                    found[v] = math.lcm(found.get(v, 1), int(e.b.value))
    return found


MOST = 24  # points
FAR = 97  # the length of a range without an end


def truths_at_points(condition: ir.Expr, facts: Facts, given: Iterable[ir.Expr] = ()) -> set[bool]:
    """The truths of a condition at points where the facts and ``given`` hold, the same in every process;
    it ends once there are two. Empty if the condition has other operations, or no point is found."""
    own = variables(condition)
    given = [c for c in (*facts.true, *given) if variables(c) & own]
    everything = dict.fromkeys(
        v for e in (condition, *given) for v in ir.walk(e) if isinstance(v, (ir.Var, ir.Lane))
    )
    seen: set[bool] = set()
    try:
        for at in _points(list(everything), facts):
            if seen and bool(at_point(condition, at)) in seen:
                continue
            if all(at_point(c, at) for c in given):
                seen.add(bool(at_point(condition, at)))
                if len(seen) == 2:
                    break
    except (TypeError, ZeroDivisionError):
        return set()
    return seen


def _points(leaves: list[ir.Expr], facts: Facts) -> Iterator[dict[ir.Expr, int]]:
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


POINTS = 1 << 21  # of one group of variables

Values = np.ndarray[Any, np.dtype[Any]]


def range_at_points(e: ir.Expr, conditions: Iterable[ir.Expr], facts: Facts) -> Range | None:
    """The range of an index where conditions and the facts hold: 0..-1 if they do at no point. None if
    there are too many points, or an operation has no value here.

    Terms and conditions that have no variable in common are independent, so that each group of variables
    has points of its own, and the ranges of the groups add up:

        (pid//2)*16 + (pid % 2)*9 + m*24        where m < 7 and pid < 5        pid in 0..7, m in 0..31
        8 points of pid and 32 of m, not 256 of both
    """
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
        at = _group_points(group, facts)
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


def _group_points(group: frozenset[ir.Expr], facts: Facts) -> dict[ir.Expr, Values] | None:
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
