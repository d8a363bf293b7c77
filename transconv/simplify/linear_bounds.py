"""The greatest value of a sum where linear inequalities hold, with a certificate that is checked exactly.

A sum, the inequalities and what the atoms mean are linear in products of atoms, so the question is a
linear programme. Its dual gives each inequality ``L >= 0`` a multiplier ``y >= 0``, and for any of them

    p  <=  p + sum of y*L  <=  the greatest value of that sum by the ranges of its products

The dual simplex method in floats finds good multipliers; they are rounded to fractions, and the bound is
computed from these in integers. So rounding may make a bound loose, never wrong. Products of sizes
(``n*C*H*W`` for ``n <= N - 1``) get inequalities times factors that are not negative.

An offset into an array whose extents are sizes is a position of mixed radix, and is bounded a digit at a
time: divided by the strides, it leaves coordinates whose products with sizes are few (``is_inside``).

Source of the method: C. E. Lemke, The dual method of solving the linear programming problem (1954); that a
bound on linear inequalities always has such multipliers is Farkas' lemma."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from transconv import ir
from transconv.simplify.facts import Facts
from transconv.simplify.polynomial import Mono, Polynomial, ordered, rebuild
from transconv.simplify.ranges import INF, Range, between, range_of, range_of_product

ROWS = 160  # inequalities of one question
PIVOTS = 120  # of one question
ROUNDS = 4  # in which inequalities about products in inequalities are added
FAR = 1e9  # an end of a range that is farther away is left out
NEAR = 1e-7  # what is taken for 0 among multipliers
PARTS = 720720  # denominators of multipliers divide it: it is a multiple of 1 to 16

Floats = np.ndarray[Any, np.dtype[np.float64]]
Sum = dict[Mono, int]  # of products of atoms; () is the constant


def sum_of(p: Polynomial) -> Sum:
    """The terms of a polynomial."""
    return {**dict(p.terms), (): p.const} if p.const else dict(p.terms)


def linear_range(p: Polynomial, facts: Facts) -> Range:
    """The range of a sum, by the inequalities of the facts and what its atoms mean."""
    low, high = (greatest(q, facts) for q in (-p, p))
    return between(-low, high)


def greatest(p: Polynomial, facts: Facts, enough: float = -INF) -> float:
    """An upper bound of a sum, infinity if none is found; a bound that is ``enough`` is not improved."""
    asked = sum_of(p)
    system = System(facts, asked)
    best = system.greatest(asked)
    for _ in range(ROUNDS):
        if best <= enough or not system.widen():
            break
        best = min(best, system.greatest(asked))
    return best


def is_inside(p: Polynomial, extents: Sequence[Polynomial], facts: Facts) -> bool:
    """Whether an offset is one of an element of a dense array with these extents, the outermost first."""
    if _has_coordinates(p, extents, facts):
        return True
    spelled = _in_digits(p, facts)
    return spelled is not p and _has_coordinates(spelled, extents, facts)


def _has_coordinates(p: Polynomial, extents: Sequence[Polynomial], facts: Facts) -> bool:
    """Whether the quotients of an offset by the strides are from 0 to below the extents. Where one is not,
    it is seen with the next further out as one coordinate of as many positions as both have."""
    strides = [Polynomial.number(1)]
    for extent in extents[:0:-1]:
        strides.append(strides[-1] * extent)
    quotients: list[Polynomial] = []
    for stride in reversed(strides):
        quotient, p = p.divided(stride)
        quotients.append(quotient)
    none, one = Polynomial.number(0), Polynomial.number(1)
    at, count = none, one
    for quotient, extent in zip(reversed(quotients), reversed(extents), strict=True):
        at, count = quotient * count + at, extent * count
        if _is_below(at, count, facts):
            at, count = none, one
    return at.is_zero and count == one


def _is_below(p: Polynomial, end: Polynomial, facts: Facts) -> bool:
    """Whether ``0 <= p < end``."""
    if range_of(rebuild(p), facts).low < 0 and greatest(-p, facts, 0) > 0:
        return False
    return range_of(rebuild(end - p), facts).low > 0 or greatest(p - end, facts, -1) < 0


def _in_digits(p: Polynomial, facts: Facts) -> Polynomial:
    """The sum with ``x // c * c + x % c`` for each x in it of whose remainder something is known, the
    smallest first: x may be a quotient that this brings."""
    atoms = dict.fromkeys(a for limit in facts.limits for a in limit.atoms)
    for atom in sorted(atoms, key=lambda a: len([*ir.walk(a)])):
        match atom:
            case ir.Mod(x, c) | ir.Call("remainder", (x, c)) if facts.poly(x).terms and _is_positive(
                c, facts
            ):
                whole = ir.FloorDiv(x, c) if isinstance(atom, ir.Mod) else ir.Call("quotient", (x, c))
                times, rest = p.divided(facts.poly(x))
                if len(rest.terms) < len(p.terms):
                    digits = Polynomial.atom(whole) * facts.poly(c) + Polynomial.atom(atom)
                    p = times * digits + rest
    return p


class System:
    """The inequalities ``row >= 0`` that bear on a sum, and the ranges of the products in them."""

    def __init__(self, facts: Facts, about: Sum) -> None:
        self.facts = facts
        self.rows: dict[tuple[tuple[Mono, int], ...], Sum] = {}
        # A bound of an atom alone is part of its range.
        self.limits = [sum_of(p) for p in facts.limits if p.single is None]
        self.meant: set[ir.Expr] = set()
        self.ends: dict[ir.Expr, list[Sum]] = {}
        for limit in facts.limits:
            for atom in limit.atoms:
                self._learn(atom)
        self.boxes: dict[Mono, Range] = {}
        self.waiting: list[Mono] = []
        self._meet(about)

    def _learn(self, atom: ir.Expr) -> None:
        """Add what an atom is, and the ends of its range."""
        if atom not in self.meant:
            self.meant.add(atom)
            self.limits += meanings(atom, self.facts)
            self.ends[atom] = _ends(atom, self.facts)

    def _meet(self, p: Sum) -> None:
        """Note the products of a sum whose inequalities are not there yet."""
        for m in p:
            if m and m not in self.boxes:
                self.boxes[m] = range_of_product(m, self.facts)
                self.waiting.append(m)

    def widen(self) -> bool:
        """Add the inequalities about the products that have come last; whether there are any."""
        waiting, self.waiting, before = self.waiting, [], len(self.rows)
        for mono in waiting:
            for atom in mono:
                self._learn(atom)
        for mono in waiting:
            ends = [e for a in mono for e in self.ends[a]] if len(mono) > 1 else []
            for limit in (*self.limits, *ends):
                for times in self._factors(limit, mono):
                    row = _times(limit, times)
                    if len(self.rows) < ROWS:
                        self.rows[tuple(row.items())] = row
        for row in [*self.rows.values()][before:]:
            self._meet(row)
        return len(self.rows) > before

    def _factors(self, limit: Sum, mono: Mono) -> Iterator[Mono]:
        """What an inequality can be multiplied by so that it has this product."""
        for own in limit:
            if own and len(own) <= len(mono):
                rest = _without(mono, own)
                if rest is not None and all(range_of(a, self.facts).low >= 0 for a in rest):
                    yield rest

    def greatest(self, p: Sum) -> float:
        """An upper bound of a sum; infinity if none is found."""
        plain = self._top(p)
        rows = list(self.rows.values())
        if not rows or not any(p):
            return plain
        multipliers = _multipliers(p, rows, self.boxes)
        if not multipliers:
            return plain
        total = {m: Fraction(c) for m, c in p.items()}
        for row, y in zip(rows, multipliers, strict=True):
            if y:
                for m, c in row.items():
                    total[m] = total.get(m, Fraction()) + y * c
        return min(plain, self._top(total))

    def _top(self, p: dict[Mono, int] | dict[Mono, Fraction]) -> float:
        """The greatest value of a sum by the ranges of its products alone, rounded down."""
        top: Fraction | float = Fraction(p.get((), 0))
        for m, c in p.items():
            if m and c:
                end = self.boxes[m].hi if c > 0 else self.boxes[m].lo
                if end is None:
                    return INF
                top += c * end
        return math.floor(top)


def _ends(atom: ir.Expr, facts: Facts) -> list[Sum]:
    """The ends of an atom's range that its products do not have by their own, as sums that are not
    negative."""
    r = range_of(atom, facts)
    found: list[Sum] = []
    if r.lo is not None and r.lo > 0 and not isinstance(atom, ir.Var):
        found.append({(atom,): 1, (): -r.lo})
    if r.hi is not None and r.hi < FAR / 100:
        found.append({(atom,): -1, (): r.hi})
    return found


def meanings(atom: ir.Expr, facts: Facts) -> list[Sum]:
    """What an atom is, as sums that are not negative."""
    at = Polynomial.atom(atom)
    match atom:
        case ir.FloorDiv(x, c) | ir.Call("quotient", (x, c)) if _is_positive(c, facts):
            rest = facts.poly(x) - at * facts.poly(c)
            low = [sum_of(at)] if _is_natural(x, facts) else []
            return [sum_of(rest), sum_of(facts.poly(c) - rest - 1), *low, *_highest(x, c, at, facts)]
        case ir.Mod(x, c) | ir.Call("remainder", (x, c)) if _is_positive(c, facts):
            kind = ir.FloorDiv(x, c) if isinstance(atom, ir.Mod) else ir.Call("quotient", (x, c))
            zero = facts.poly(x) - Polynomial.atom(kind) * facts.poly(c) - at
            return [sum_of(zero), sum_of(-zero), sum_of(facts.poly(c) - at - 1), sum_of(at)]
        case ir.Min(a, b) if atom.dtype.kind == "index":
            return [sum_of(facts.poly(a) - at), sum_of(facts.poly(b) - at)]
        case ir.Max(a, b) if atom.dtype.kind == "index":
            return [sum_of(at - facts.poly(a)), sum_of(at - facts.poly(b))]
    return []


def _is_positive(c: ir.Expr, facts: Facts) -> bool:
    """Whether a divisor is positive, by its range or those of its factors."""
    if isinstance(c, ir.Const) or range_of(c, facts).low > 0:
        return range_of(c, facts).low > 0
    content, factors = facts.poly(c).factors()
    return content > 0 and all(range_of(rebuild(f), facts).low > 0 for f, _ in factors)


def _is_natural(x: ir.Expr, facts: Facts) -> bool:
    """Whether a position is not negative, by its range, by an inequality about it, or as its parts are."""
    p = facts.poly(x)
    if range_of(x, facts).low >= 0:
        return True
    if any(limit.whole == p.whole and limit.const <= p.const for limit in facts.limits):
        return True
    match x:
        case ir.FloorDiv(a, c) | ir.Call("quotient", (a, c)):
            return _is_natural(a, facts) and _is_positive(c, facts)
        case ir.Mod(_, c) | ir.Call("remainder", (_, c)):
            return _is_positive(c, facts)
    parts = [a for m, _ in p.terms for a in m if a is not x]
    return min([p.const, *(c for _, c in p.terms)]) >= 0 < len(parts) and all(
        _is_natural(a, facts) for a in parts
    )


def _highest(x: ir.Expr, c: ir.Expr, at: Polynomial, facts: Facts) -> list[Sum]:
    """``x // c <= n - 1`` for each known ``x <= n*c - 1``, where c and n are expressions of sizes."""
    p, by = facts.poly(x), facts.poly(c)
    found: list[Sum] = []
    known = [*facts.limits, *(Polynomial.of(_split(s)[0], _split(s)[1]) for s in meanings_of(x, facts))]
    for m, k in p.terms:
        if k < 0 and len(m) == 1 and (low := range_of(m[0], facts).lo) is not None:
            known.append(Polynomial.of([(m, -k)], k * low))
    for limit in known:
        if limit.terms != p.terms and any(limit.coefficient(m) == -k for m, k in p.terms):
            n, rest = (limit + p + 1).divided(by)
            if rest.is_zero:
                found.append(sum_of(n - 1 - at))
    return found


def meanings_of(x: ir.Expr, facts: Facts) -> list[Sum]:
    """The meaning of the atom that a position is; nothing for a sum."""
    alone = facts.poly(x).single
    return meanings(alone[0], facts) if alone and alone[1] == 1 else []


def _split(p: Sum) -> tuple[list[tuple[Mono, int]], int]:
    return [(m, c) for m, c in p.items() if m], p.get((), 0)


def _without(mono: Mono, part: Mono) -> Mono | None:
    """The product without some of its factors; None if it lacks one."""
    rest = [*mono]
    for factor in part:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


def _times(p: Sum, factor: Mono) -> Sum:
    return {ordered((*m, *factor)): c for m, c in p.items()} if factor else p


def _multipliers(p: Sum, rows: list[Sum], boxes: dict[Mono, Range]) -> list[Fraction]:
    """A multiplier for each row, from the programme that maximises a sum; nothing if there is no point."""
    unknowns = {m: i for i, m in enumerate(boxes)}
    size = len(unknowns)
    # Values are pairs: a multiple of a number beyond all others, for ranges without an end, and a number.
    low, high = np.zeros((size + len(rows), 2)), np.zeros((size + len(rows), 2))
    low[:size] = [(0, r.low) if r.low > -FAR else (-1, 0) for r in boxes.values()]
    high[:size] = [(0, r.high) if r.high < FAR else (1, 0) for r in boxes.values()]
    high[size:] = (2, 0)
    # Each row is a variable that is not negative, basic at first: its coefficients, and its constant.
    table = np.zeros((len(rows) + 1, size + 1))
    for i, row in enumerate([*rows, p]):
        for m, c in row.items():
            table[i, unknowns[m] if m else size] = c
    outside = np.arange(size)  # variables at an end of their range
    basic = np.arange(size, size + len(rows))
    at_high = table[-1, :size] > 0
    for _ in range(PIVOTS):
        values = table[:-1, :size] @ np.where(at_high[:, None], high[outside], low[outside])
        values[:, 1] += table[:-1, size]
        under, over = low[basic] - values, values - high[basic]
        wrong = _size(np.where((_size(under) > _size(over))[:, None], under, over))
        worst = int(wrong.argmax())
        if wrong[worst] <= 1e-6 * max(1.0, float(np.abs(values[worst, 1]))):
            break
        up = bool(_size(under)[worst] > _size(over)[worst])
        slope = table[worst, :size] if up else -table[worst, :size]
        free = (low[outside] != high[outside]).any(axis=1)
        helps = np.where(at_high, slope < -1e-9, slope > 1e-9) & free
        if not helps.any():
            break  # no point is inside; what was found is a bound
        costs = np.where(helps, np.abs(table[-1, :size]) / np.where(helps, np.abs(slope), 1), INF)
        enter = int(costs.argmin())
        _pivot(table, worst, enter)
        basic[worst], outside[enter] = outside[enter], basic[worst]
        at_high[enter] = not up
    found = [Fraction()] * len(rows)
    for j, v in enumerate(outside):
        if v >= size and table[-1, j] < -NEAR:
            y = -float(table[-1, j])
            found[v - size] = Fraction(round(y * PARTS), PARTS) if y < 1e9 else Fraction(round(y))
    return found


def _size(pairs: Floats) -> Floats:
    """Pairs as numbers by which they are ordered, where the first ones are not tiny."""
    first = np.where(np.abs(pairs[:, 0]) > NEAR, pairs[:, 0], 0)
    return np.asarray(first * 1e30 + pairs[:, 1])


def _pivot(table: Floats, row: int, enter: int) -> None:
    """Exchange the basic variable of a row and the variable of a column."""
    pivot = table[row, enter]
    own = -table[row] / pivot
    own[enter] = 1 / pivot
    column = table[:, enter].copy()
    table[:, enter] = 0
    table += np.outer(column, own)
    table[row] = own
