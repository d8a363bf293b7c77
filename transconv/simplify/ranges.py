"""The range and the known divisor of an integer expression, under facts.

Intervals of integers, possibly without a lower or an upper bound, and their arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from transconv import ir
from transconv.simplify.polynomial import Mono, Polynomial, is_polynomial

if TYPE_CHECKING:
    from transconv.simplify.facts import Facts


def range_of(e: ir.Expr, facts: Facts) -> Range:
    """The range of an integer or boolean expression, for all values that the facts allow.

    It is the intersection of the ranges by the tree, by the polynomial (so that ``x - x`` is 0), by the
    stated ranges and by the inequalities of the facts, from the first to the last number that has a known
    remainder: an x in 1..7 that 4 divides is 4."""
    found = facts.known_ranges.get(e)
    if found is None:
        found = _of_tree(e, facts) & facts.stated_range(e)
        if is_polynomial(e):
            found &= range_of_poly(facts.poly(e), facts)
        elif facts.limits and e.dtype.is_integer and not isinstance(e, ir.Const):
            found &= _limited(Polynomial.atom(e), facts)
        if facts.residues and e.dtype.kind == "index" and not isinstance(e, ir.Const):
            found = _with_remainders(found, facts.poly(e), facts)
        facts.known_ranges[e] = found
    return found


def range_of_poly(p: Polynomial, facts: Facts) -> Range:
    """The range of a polynomial."""
    return _interval(p, facts) & _limited(p, facts) if facts.limits else _interval(p, facts)


def _interval(p: Polynomial, facts: Facts) -> Range:
    lo: float = p.const
    hi: float = p.const
    for mono, c in p.terms:
        r = range_of_product(mono, facts)
        one, other = c * r.low, c * r.high
        lo += one if one < other else other
        hi += other if one < other else one
    return between(lo, hi)


def range_of_product(mono: Mono, facts: Facts) -> Range:
    """The range of a product of atoms."""
    if len(mono) == 1:
        return range_of(mono[0], facts)
    total = Range(1, 1)
    for factor in dict.fromkeys(mono):
        r, times = range_of(factor, facts), mono.count(factor)
        power = r
        for _ in range(times - 1):
            power *= r
        total *= power & Range(0, None) if times % 2 == 0 else power
    return total


def _limited(p: Polynomial, facts: Facts) -> Range:
    """The range of a polynomial by the known inequalities."""
    if not facts.limits or not p.terms:
        return ANY
    own, below = dict(p.terms), {mono: -c for mono, c in p.terms}
    return between(_at_least(own, p.const, facts), -_at_least(below, -p.const, facts))


def _at_least(own: dict[Mono, int], const: int, facts: Facts) -> float:
    """A lower bound of p = own + const from inequalities L >= 0: p = (p - k*L) + k*L >= p - k*L for k > 0.

    Multiples of several inequalities are subtracted, each if that improves the bound of the rest."""
    plain = facts.unlimited
    best = _low_end(own.items(), const, plain)
    for limit in facts.limits:
        for mono, c in limit.terms:
            if mono not in own:
                continue
            k, odd = divmod(own[mono], c)
            if k <= 0 or odd:
                continue
            before = [(m, own[m]) for m, _ in limit.terms if m in own]
            after = [(m, n) for m, d in limit.terms if (n := own.get(m, 0) - k * d)]
            less, more = _low_end(before, k * limit.const, plain), _low_end(after, 0, plain)
            bound = best[0] - less[0] + more[0], best[1] - less[1] + more[1]
            if bound > best:
                own = {m: n for m, n in own.items() if (m, n) not in before} | dict(after)
                best = bound
                break
    return best[1] if best[0] == 0 else -INF


def _low_end(terms: Iterable[tuple[Mono, int]], const: int, facts: Facts) -> tuple[int, float]:
    """Minus the number of terms without a lower bound, and the sum of the other bounds and ``const``."""
    total: float = const
    unbounded = 0
    for mono, c in terms:
        r = range_of_product(mono, facts)
        one, other = c * r.low, c * r.high
        end = one if one < other else other
        if end == -INF:
            unbounded += 1
        else:
            total += end
    return -unbounded, total


def _of_tree(e: ir.Expr, facts: Facts) -> Range:
    kind = e.dtype.kind
    if kind == "float":
        return ANY
    if isinstance(e, ir.Const) and isinstance(e.value, int):
        return Range(int(e.value), int(e.value))
    if isinstance(e, ir.Lane):
        return Range(0, e.extent - 1)
    if kind == "bool":
        return BIT
    rule = OF.get(type(e))
    found = rule(e, facts) if rule else None
    if kind != "int":
        return found or ANY
    narrow = Range(*e.dtype.limits)
    # If the range exceeds the width of the type, the value may have wrapped around to any number.
    return found & narrow if found and found | narrow == narrow else narrow


def _of_quotient(e: Any, facts: Facts) -> Range:
    return quotient(range_of(e.a, facts), range_of(e.b, facts))


def _of_call(e: Any, facts: Facts) -> Range | None:
    match e:
        case ir.Call("quotient", (a, b)):
            return quotient(range_of(a, facts), range_of(b, facts))
        case ir.Call("remainder", (a, b)):
            return _of_remainder(a, range_of(b, facts), facts)
    return None


def _of_min(e: Any, facts: Facts) -> Range:
    p, q = range_of(e.a, facts), range_of(e.b, facts)
    return between(min(p.low, q.low), min(p.high, q.high, _half(e.a, e.b, 0, facts).high))


def _of_max(e: Any, facts: Facts) -> Range:
    p, q = range_of(e.a, facts), range_of(e.b, facts)
    return between(max(p.low, q.low, _half(e.a, e.b, 1, facts).low), max(p.high, q.high))


def _of_shift(e: Any, facts: Facts) -> Range | None:
    match e:
        case ir.Shl(a, ir.Const(int(value))) if 0 <= value < 64:
            return range_of(a, facts) * Range(1 << value, 1 << value)
        case ir.Shr(a, ir.Const(int(value))) if value >= 0:
            return quotient(range_of(a, facts), Range(1 << value, 1 << value))
    return None


def _half(a: ir.Expr, b: ir.Expr, up: int, facts: Facts) -> Range:
    """The range of (a + b) / 2, rounded down (``up`` = 0) or up (1): at least min(a, b) and at most
    max(a, b). It shows that max(x, -x) is never negative."""
    return quotient(range_of_poly(facts.poly(a) + facts.poly(b) + up, facts), Range(2, 2))


def _of_remainder(a: ir.Expr, b: Range, facts: Facts) -> Range:
    if b.low < 1:
        return between(1 - b.magnitude, b.magnitude - 1)
    x = range_of(a, facts)
    if x.low >= 0 and x.high < b.low:
        return x
    if (c := b.value) is None:
        return between(0, min(b.high - 1, x.high if x.low >= 0 else INF))
    if x.cell(c) is not None and x.lo is not None and x.hi is not None:
        return Range(x.lo % c, x.hi % c)
    # a = step*y + rest, so a % c is one of rest, rest + step, ...
    p = facts.poly(a)
    step = math.gcd(c, multiple_of_poly(p.whole, facts))
    rest = p.const % step
    return between(rest, min(c - step + rest, x.high if x.low >= 0 else INF))


def _of_bits(e: ir.Expr, a: Range, b: Range) -> Range:
    if isinstance(e, ir.And) and (a.low >= 0 or b.low >= 0):
        return between(0, min(r.high for r in (a, b) if r.low >= 0))
    if a.low < 0 or b.low < 0 or a.hi is None or b.hi is None:
        return ANY
    return Range(0, (1 << max(a.hi, b.hi).bit_length()) - 1)


OF: dict[type[ir.Expr], Callable[[Any, Facts], Range | None]] = {
    ir.Add: lambda e, facts: range_of(e.a, facts) + range_of(e.b, facts),
    ir.Sub: lambda e, facts: range_of(e.a, facts) + -range_of(e.b, facts),
    ir.Mul: lambda e, facts: range_of(e.a, facts) * range_of(e.b, facts),
    ir.Neg: lambda e, facts: -range_of(e.x, facts),
    ir.FloorDiv: _of_quotient,
    ir.Mod: lambda e, facts: _of_remainder(e.a, range_of(e.b, facts), facts),
    ir.Call: _of_call,
    ir.Min: _of_min,
    ir.Max: _of_max,
    ir.Select: lambda e, facts: range_of(e.yes, facts) | range_of(e.no, facts),
    ir.Cast: lambda e, facts: None if e.x.dtype.kind == "float" else range_of(e.x, facts),
    ir.Shl: _of_shift,
    ir.Shr: _of_shift,
    **dict.fromkeys(
        (ir.And, ir.Or, ir.Xor), lambda e, facts: _of_bits(e, range_of(e.a, facts), range_of(e.b, facts))
    ),
}
"""What the range of a node follows from, by its class."""


def multiple_of(e: ir.Expr, facts: Facts) -> int:
    """The largest number known to divide the value; 0 if the value is known to be 0."""
    found = facts.known_multiples.get(e)
    if found is None:
        facts.known_multiples[e] = found = _multiple(e, facts)
    return found


def _multiple(e: ir.Expr, facts: Facts) -> int:
    if e.dtype.kind == "float" or (e.dtype.kind != "index" and not isinstance(e, ir.Const)):
        return 1
    stated = facts.stated_multiple(e)
    if (value := range_of(e, facts).value) is not None:
        return abs(value)
    match e:
        case _ if is_polynomial(e):
            found = multiple_of_poly(facts.poly(e), facts)
        case ir.FloorDiv(a, ir.Const(int(value))) if value > 0 and multiple_of(a, facts) % value == 0:
            found = multiple_of(a, facts) // value
        case ir.Mod(a, b) | ir.Min(a, b) | ir.Max(a, b) | ir.Select(_, a, b):
            found = math.gcd(multiple_of(a, facts), multiple_of(b, facts))
        case ir.Shl(a, ir.Const(int(value))) if 0 <= value < 64:
            found = multiple_of(a, facts) << value
        case ir.Cast(x):
            found = multiple_of(x, facts)
        case _:
            found = _congruent(Polynomial.atom(e), 1, facts)
    return math.lcm(found, stated)


def multiple_of_poly(p: Polynomial, facts: Facts) -> int:
    """The largest number known to divide a polynomial."""
    return _congruent(p, _divisor(p, facts), facts)


def _with_remainders(r: Range, p: Polynomial, facts: Facts) -> Range:
    """The range of a polynomial without the numbers at its ends whose remainder it does not have."""
    plain = facts.without_residues
    for q, n in facts.residues:
        for rest in (p - q, p + q):
            step = math.gcd(n, _divisor(rest.whole, plain))  # divides q and what is not constant of rest
            low = r.low if r.lo is None else r.lo + (rest.const - r.lo) % step
            high = r.high if r.hi is None else r.hi - (r.hi - rest.const) % step
            r = between(low, high)
    return r


def _divisor(p: Polynomial, facts: Facts) -> int:
    found = p.const
    for mono, c in p.terms:
        found = math.gcd(found, c * math.prod(multiple_of(a, facts) for a in mono))
    return found


def _congruent(p: Polynomial, found: int, facts: Facts) -> int:
    """``found``, improved by facts q % n == 0: a divisor of both n and p - q divides p."""
    if p.terms:
        plain = facts.without_residues
        for q, n in facts.residues:
            for sign in (1, -1):
                found = math.lcm(found, math.gcd(n, _divisor(p - q * sign, plain)))
    return found


INF = math.inf


class Range:
    """The integers from ``lo`` to ``hi``, both included; None is no bound. ``low`` and ``high``: the
    same, with infinities. Not changed once it is made."""

    __slots__ = ("hi", "high", "lo", "low")

    def __init__(self, lo: int | None = None, hi: int | None = None) -> None:
        self.lo = lo
        self.hi = hi
        self.low: float = -INF if lo is None else lo
        self.high: float = INF if hi is None else hi

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Range) and self.lo == other.lo and self.hi == other.hi

    def __hash__(self) -> int:
        return hash((self.lo, self.hi))

    def __repr__(self) -> str:
        return f"Range(lo={self.lo}, hi={self.hi})"

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high

    def __and__(self, other: Range) -> Range:
        if other is ANY or self is ANY:
            return self if other is ANY else other
        return between(max(self.low, other.low), min(self.high, other.high))

    def __or__(self, other: Range) -> Range:
        """The smallest range that holds both."""
        return between(min(self.low, other.low), max(self.high, other.high))

    def __add__(self, other: Range) -> Range:
        return between(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Range:
        return between(-self.high, -self.low)

    def __mul__(self, other: Range) -> Range:
        ends = [_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return between(min(ends), max(ends))

    @property
    def value(self) -> int | None:
        """The only member, or None if there are several."""
        return self.lo if self.lo == self.hi else None

    def cell(self, size: int) -> int | None:
        """The quotient ``x // size`` if it is the same for all members, else None."""
        if self.lo is None or self.hi is None or self.lo // size != self.hi // size:
            return None
        return self.lo // size

    @property
    def magnitude(self) -> float:
        """The largest absolute value, possibly infinity."""
        return max(abs(self.low), abs(self.high))


ANY = Range()
BIT = Range(0, 1)


def between(lo: float, hi: float) -> Range:
    """The range with these bounds, which may be infinite."""
    return Range(None if lo == -INF else int(lo), None if hi == INF else int(hi))


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def _floor(a: float, b: float) -> float:
    """``a // b`` for bounds that may be infinite; b > 0."""
    if math.isinf(a):
        return a
    if math.isinf(b):
        return 0 if a >= 0 else -1
    return int(a) // int(b)


def quotient(a: Range, b: Range) -> Range:
    """The range of ``x // y`` for x in ``a`` and y in ``b``, y not 0."""
    if b.high < 0:
        a, b = -a, -b
    if b.low < 1:
        return between(-a.magnitude, a.magnitude)
    lo = _floor(a.low, b.high if a.low >= 0 else b.low)
    hi = _floor(a.high, b.low if a.high >= 0 else b.high)
    return between(lo, hi)
