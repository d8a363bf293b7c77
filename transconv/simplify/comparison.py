"""Rules for ``< <= == !=`` and ``~``: a comparison of integers is written as a polynomial against 0."""

from __future__ import annotations

import math

from transconv import ir
from transconv.simplify.division import Again, common_factor
from transconv.simplify.facts import Facts, both_integers
from transconv.simplify.polynomial import Polynomial, rebuild
from transconv.simplify.ranges import multiple_of, range_of_poly


def negate(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``~x``: the opposite comparison, or the constant."""
    match e:
        case ir.Not(ir.Const(value, _)):
            return ir.FALSE if value else ir.TRUE
        case ir.Not(ir.Not(x)):
            return x
        case ir.Not(ir.Eq(a, b)):
            return ir.Ne(a, b)
        case ir.Not(ir.Ne(a, b)):
            return ir.Eq(a, b)
        # Integers only: for a NaN, a < b and b <= a are both false.
        case ir.Not(ir.Lt(a, b)) if both_integers(a, b):
            return ir.Le(b, a)
        case ir.Not(ir.Le(a, b)) if both_integers(a, b):
            return ir.Lt(b, a)
    return e


def compare(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``a < b`` and ``a <= b``: transformed as L >= 0, returned as ``c <= x`` or ``x < c``."""
    limit = _limit(e, facts)
    if limit is None or not isinstance(e, (ir.Lt, ir.Le)):
        return e
    r = range_of_poly(limit, facts)
    if r.low >= 0 or r.high < 0:
        return ir.TRUE if r.low >= 0 else ir.FALSE
    # g*x + d >= 0 if and only if x + d//g >= 0, where d//g is the same number for every d
    while (found := common_factor(limit, 0, facts)) is not None:
        limit = found[1]
    match limit.single:
        case ir.FloorDiv(x, ir.Const(int(c))), 1 if c > 0:
            limit = facts.poly(x) + limit.const * c
        case ir.FloorDiv(x, ir.Const(int(c))), -1 if c > 0:
            limit = -facts.poly(x) + (limit.const * c + c - 1)
    return _bound(limit, _width(e.a, e.b))


def _limit(e: ir.Expr, facts: Facts) -> Polynomial | None:
    """L such that a comparison of integers holds if and only if L >= 0; None for others."""
    match e:
        case ir.Lt(a, b) | ir.Le(a, b) if both_integers(a, b):
            return facts.poly(b) - facts.poly(a) - int(isinstance(e, ir.Lt))
    return None


def both_bounds(low: ir.Expr, high: ir.Expr, facts: Facts) -> ir.Expr | None:
    """``x == c`` for two bounds equivalent to ``c <= x`` and ``x < c + 1``; None for others."""
    p, q = _limit(low, facts), _limit(high, facts)
    if p is None or q is None or not (p + q).is_zero:
        return None
    assert isinstance(low, (ir.Lt, ir.Le))
    return ir.Eq(low.b, low.a if isinstance(low, ir.Le) else low.a + 1)


def _width(a: ir.Expr, b: ir.Expr) -> ir.DType:
    return ir.index64 if ir.index64 in (a.dtype, b.dtype) else ir.index


def _bound(limit: Polynomial, dtype: ir.DType) -> ir.Expr:
    """``limit >= 0`` with the constant on one side, or ``x < y`` and ``x <= y`` for a difference of two
    terms, or of one term and several that are subtracted, as in ``i*64 + col < n``."""
    if not limit.terms:
        return ir.TRUE if limit.const >= 0 else ir.FALSE
    if sorted(k for _, k in limit.terms) == [-1, 1] and limit.const in (0, -1):
        less, more = sorted(limit.terms, key=lambda term: term[1])
        a, b = rebuild(Polynomial.of([(less[0], 1)]), dtype), rebuild(Polynomial.of([more]), dtype)
        return ir.Le(a, b) if limit.const == 0 else ir.Lt(a, b)
    over = tuple(term for term in limit.terms if term[1] > 0)
    if len(over) == 1 and len(limit.terms) > 2 and limit.const == -1:
        under = -Polynomial.of(term for term in limit.terms if term[1] < 0)
        return ir.Lt(rebuild(under, dtype), rebuild(Polynomial.of(over), dtype))
    x = limit.whole
    if x.terms[0][1] > 0:
        return ir.Le(ir.Const(-limit.const), rebuild(x, dtype))
    return ir.Lt(rebuild(-x, dtype), ir.Const(limit.const + 1))


def equate(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``a == b`` and ``a != b``: variables to the left, the constant to the right."""
    match e:
        case ir.Eq(a, b) if a.dtype.kind == "bool" and b.dtype.kind == "bool":
            return _same_truth(e, a, b)
        case ir.Eq(a, b) if both_integers(a, b):
            return _equal(facts.poly(a) - facts.poly(b), facts, _width(a, b))
        case ir.Ne(a, b) if a.dtype.kind == b.dtype.kind != "float":
            same = again(ir.Eq(a, b))
            if isinstance(same, ir.Eq):
                return ir.Ne(same.a, same.b)
            return negate(ir.Not(same), facts, again)
    return e


def _same_truth(e: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    if a is b:
        return ir.TRUE
    for x, y in ((a, b), (b, a)):
        if isinstance(y, ir.Const):
            return x if y.value else ir.Not(x)
    return e


def _equal(p: Polynomial, facts: Facts, dtype: ir.DType) -> ir.Expr:
    """The comparison p == 0."""
    r = range_of_poly(p, facts)
    if 0 not in r or r.value == 0:
        return ir.TRUE if r.value == 0 else ir.FALSE
    divisor = math.gcd(*(k * math.prod(multiple_of(a, facts) for a in m) for m, k in p.terms))
    if divisor and p.const % divisor:
        return ir.FALSE
    g = p.content if p.terms[0][1] > 0 else -p.content
    p = Polynomial.of(((m, k // g) for m, k in p.terms), p.const // g)
    match p.single:
        case ir.FloorDiv(x, ir.Const(int(c))), 1 if c > 0:
            first = -p.const * c  # x // c == n: first <= x < first + c
            low = facts.poly(x) - first
            if multiple_of(x, facts) % c == 0:
                return ir.Eq(x, ir.Const(first))
            if range_of_poly(low, facts).low >= 0:
                return ir.Lt(x, ir.Const(first + c))
            if range_of_poly(low, facts).high < c:
                return ir.Le(ir.Const(first), x)
    if [k for _, k in p.terms] == [1, -1] and p.const == 0:
        a, b = (rebuild(Polynomial.of([(m, 1)]), dtype) for m, _ in p.terms)
        return ir.Eq(a, b)
    return ir.Eq(rebuild(p.whole, dtype), ir.Const(-p.const))
