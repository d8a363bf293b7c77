"""Rules for ``//`` and ``%``, which round down, for sums that hold both, and for ``< <= == !=`` and ``~``:
a comparison of integers is written as a polynomial against 0, divided by what its terms have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import combinations

from transconv import ir
from transconv.ir import ZERO, Const, Expr, FloorDiv, Mod, Neg, walk
from transconv.simplify.facts import Facts, both_integers
from transconv.simplify.polynomial import Polynomial, ordered, rebuild
from transconv.simplify.ranges import multiple_of, range_of, range_of_poly

Again = Callable[[Expr], Expr]


def divide(e: Expr, facts: Facts, again: Again) -> Expr:
    """``x // y`` of positions."""
    match e:
        case _ if not _of_positions(e):
            return e
        case FloorDiv(x, Const(1)):
            return x
        case FloorDiv(Const(0) as zero, _):
            return zero
        case FloorDiv(x, Const(int(c))) if c < 0:
            return FloorDiv(Neg(x), Const(-c, e.b.dtype))
        case FloorDiv(x, Const(int(c))) if c > 0:
            return _divide_by(e, facts.poly(x), c, facts)
        case FloorDiv(x, y) if not isinstance(y, Const):
            whole, rest = _split_factor(facts.poly(x), facts.poly(y))
            if _in_first_cell(rest, facts.poly(y), facts):
                return rebuild(whole, e.dtype)
            if not whole.is_zero:
                return rebuild(whole, e.dtype) + FloorDiv(rebuild(rest, x.dtype), y)
    return e


def _of_positions(e: Expr) -> bool:
    """Whether the node is arithmetic of positions, which never wraps around."""
    return e.dtype.kind == "index"


def _divide_by(e: Expr, p: Polynomial, c: int, facts: Facts) -> Expr:
    """p // c for a constant c > 1."""
    dtype = e.dtype
    if (k := range_of_poly(p, facts).cell(c)) is not None:
        return Const(k, dtype)
    # (c*q + r) // c = q + r // c
    whole, rest = _split_multiples(p, c, facts)
    if (k := range_of_poly(rest, facts).cell(c)) is not None:
        return rebuild(whole + k, dtype)
    if not whole.is_zero:
        return rebuild(whole, dtype) + FloorDiv(rebuild(rest, dtype), Const(c))
    # (g*x + d) // (g*n) = (x + d//g) // n, where d//g is the same number for every d
    if (found := common_factor(p, c, facts)) is not None:
        g, inner, _ = found
        return FloorDiv(rebuild(inner, dtype), Const(c // g))
    match p.single:
        case FloorDiv(y, Const(int(a))), 1 if a > 0:
            return FloorDiv(rebuild(facts.poly(y) + p.const * a, dtype), Const(a * c))
        case Mod(y, Const(int(n))), 1 if p.const == 0 and n > 0 and n % c == 0:
            return Mod(FloorDiv(y, Const(c)), Const(n // c))
    return e


def remainder(e: Expr, facts: Facts, again: Again) -> Expr:
    """``x % y`` of positions."""
    match e:
        case _ if not _of_positions(e):
            return e
        case Mod(_, Const(1 | -1)) | Mod(Const(0), _):
            return ZERO
        case Mod(x, Const(int(c))) if c < 0:
            return Neg(Mod(Neg(x), Const(-c, e.b.dtype)))
        case Mod(x, Const(int(c))) if c > 0:
            return _remainder_by(e, facts.poly(x), c, facts)
        case Mod(x, y) if not isinstance(y, Const):
            _, rest = _split_factor(facts.poly(x), facts.poly(y))
            if _in_first_cell(rest, facts.poly(y), facts):
                return rebuild(rest, e.dtype)
            if rest != facts.poly(x):
                return Mod(rebuild(rest, x.dtype), y)
    return e


def _remainder_by(e: Expr, p: Polynomial, c: int, facts: Facts) -> Expr:
    """p % c for a constant c > 1."""
    if (k := range_of_poly(p, facts).cell(c)) is not None:
        return rebuild(p - k * c, e.dtype)
    for q, n in facts.residues:  # n divides q; if c divides n, p and p - q have one remainder by c
        for sign in (1, -1):
            rest = p - q * sign
            if n % c == 0 and _all_divisible(rest, c, facts):
                return Const(rest.const % c, e.dtype)
    least = _reduced(p, c, facts)
    if (k := range_of_poly(least, facts).cell(c)) is not None:
        return rebuild(least - k * c, e.dtype)
    if least != p:
        return Mod(rebuild(least, e.dtype), Const(c))
    # (g*x + d) % (g*n) = (x + d//g) % n * g + d % g, where d//g is the same number for every d
    if (found := common_factor(p, c, facts)) is not None:
        g, inner, rest = found
        return Mod(rebuild(inner, e.dtype), Const(c // g)) * g + rebuild(rest, e.dtype)
    return e


def _reduced(p: Polynomial, c: int, facts: Facts) -> Polynomial:
    """A polynomial equal to p modulo c: without multiples of c and without inner ``% (n*c)``.

    Only coefficients that are 1 modulo c become 1. Others stay, because ``x // c`` often uses the same
    sum."""
    total = Polynomial.number(p.const % c)
    for mono, k in p.terms:
        if k * math.prod(multiple_of(a, facts) for a in mono) % c == 0:
            continue
        term = Polynomial.of([(mono, 1 if k % c == 1 else k)])
        match mono:
            case (Mod(y, Const(int(n))),) if n > 0 and k * n % c == 0:
                term = facts.poly(y) * k
        total += term
    return total.whole + total.const % c


def _all_divisible(p: Polynomial, c: int, facts: Facts) -> bool:
    return all(k * math.prod(multiple_of(a, facts) for a in m) % c == 0 for m, k in p.terms)


def _split_multiples(p: Polynomial, c: int, facts: Facts) -> tuple[Polynomial, Polynomial]:
    """(q, r) with p = c*q + r. q has the terms whose coefficients and known divisors make them multiples
    of c. Where a term is a quotient or a remainder, q has the multiples of c in all coefficients, because
    ``(x // 2) * 3 // 2`` hides ``x // 4``."""
    is_nested = any(isinstance(a, (FloorDiv, Mod)) for mono, _ in p.terms for a in mono)
    whole, rest = Polynomial.number(p.const // c), Polynomial.number(p.const % c)
    for mono, k in p.terms:
        need = c // math.gcd(k, c)
        exact = next((i for i, a in enumerate(mono) if multiple_of(a, facts) % need == 0), None)
        if need == 1:
            whole += Polynomial.of([(mono, k // c)])
        elif exact is not None:
            part = FloorDiv(mono[exact], Const(need))
            factors = ordered((part, *(a for i, a in enumerate(mono) if i != exact)))
            whole += Polynomial.of([(factors, k * need // c)])
        else:
            least = k % c if is_nested and abs(k) >= c else k
            whole += Polynomial.of([(mono, (k - least) // c)] if k != least else [])
            rest += Polynomial.of([(mono, least)])
    return whole, rest


def _split_factor(p: Polynomial, y: Polynomial) -> tuple[Polynomial, Polynomial]:
    """(q, r) with p = y*q + r. By a sum, SymPy divides; what has no fewer terms then stays whole."""
    whole, rest = Polynomial.number(0), Polynomial.number(p.const)
    if len(y.terms) != 1 or y.const:
        q, r = p.divided(y)
        return (q, r) if len(r.terms) < len(p.terms) else (Polynomial.number(0), p)
    ((factors, c),) = y.terms
    for mono, k in p.terms:
        left = list(mono)
        for f in factors:
            if f in left:
                left.remove(f)
        if k % c == 0 and len(left) == len(mono) - len(factors):
            whole += Polynomial.of([(tuple(left), k // c)]) if left else k // c
        else:
            rest += Polynomial.of([(mono, k)])
    return whole, rest


def _in_first_cell(p: Polynomial, y: Polynomial, facts: Facts) -> bool:
    """Whether 0 <= p < y."""
    above = y - p - 1
    return range_of_poly(p, facts).low >= 0 and range_of_poly(above, facts).low >= 0


def common_factor(p: Polynomial, c: int, facts: Facts) -> tuple[int, Polynomial, Polynomial] | None:
    """The largest g > 1 that divides c and some coefficients, such that the sum d of the other terms has
    one quotient d // g for all values. Returns g, (p - d) / g + d // g, and d - d // g * g; None if there
    is no such g."""
    ks = [k for _, k in p.terms]
    pairs = (math.gcd(a, b, c) for a, b in combinations(ks, 2))
    for g in sorted({*pairs, *(math.gcd(k, c) for k in ks)} - {1}, reverse=True):
        inner = Polynomial.of((m, k // g) for m, k in p.terms if k % g == 0)
        rest = Polynomial.of(((m, k) for m, k in p.terms if k % g != 0), p.const)
        if (q := range_of_poly(rest, facts).cell(g)) is not None:
            return g, inner + q, rest - q * g
    return None


def collect(p: Polynomial, facts: Facts, again: Again) -> Polynomial:
    """Apply identities between ``//`` and ``%`` to a sum, while they make it cheaper.

    k*b*(y // b) + k*(y % b) -> k*y        y - (y // b)*b -> y % b        y - y % b -> (y // b)*b
    (y // a % b)*a + y % a -> y % (a*b)"""
    lighter = True
    while lighter:
        lighter = False
        for zero in _identities(p, facts, again):
            other = min((p + zero * k for k in _cancelling(p, zero)), key=_weight, default=p)
            if _weight(other) < _weight(p):
                p, lighter = other, True
                break
    return p


def _identities(p: Polynomial, facts: Facts, again: Again) -> Iterable[Polynomial]:
    """Polynomials equal to 0, each with a ``//`` or ``%`` of the sum in it."""

    def poly(e: Expr) -> Polynomial:
        return facts.poly(again(e))

    for y, b in _divisions(p):
        quotient, rest = poly(FloorDiv(y, Const(b))), poly(Mod(y, Const(b)))
        yield facts.poly(y) - quotient * b - rest
    yield from _of_sizes(p, facts, poly)
    for mono, _ in p.terms:
        match mono:
            case (Mod(FloorDiv(y, Const(int(a))), Const(int(b))) as upper,) if a > 0 and b > 0:
                lower, both = poly(Mod(y, Const(a))), poly(Mod(y, Const(a * b)))
                yield Polynomial.atom(upper) * a + lower - both


def _of_sizes(p: Polynomial, facts: Facts, poly: Callable[[Expr], Polynomial]) -> Iterable[Polynomial]:
    """``_identities`` for divisors that are expressions known to be positive."""
    atoms = dict.fromkeys(a for mono, _ in p.terms for a in mono)
    for at in atoms:
        match at:
            case Mod(y, b) if not isinstance(b, Const) and range_of(b, facts).low >= 1:
                by, rest = facts.poly(b), poly(at)
                yield facts.poly(y) - poly(FloorDiv(y, b)) * by - rest
                for upper in atoms:
                    match upper:
                        case Mod(FloorDiv(x, a), n) if x is y and a is b and range_of(n, facts).low >= 1:
                            both = poly(Mod(y, b * n))
                            yield Polynomial.atom(upper) * by + rest - both


def _divisions(p: Polynomial) -> Iterable[tuple[Expr, int]]:
    """The (y, b) of each ``y // b`` and ``y % b`` in a sum. ``x // a`` and ``x // (a*n)`` give
    ``(x // a, n)`` as well."""
    atoms = [mono[0] for mono, _ in p.terms if len(mono) == 1]
    found: dict[tuple[Expr, int], None] = {}
    quotients: dict[Expr, list[int]] = {}
    for at in atoms:
        match at:
            case FloorDiv(y, Const(int(b))) if b > 0:
                found[y, b] = None
                quotients.setdefault(y, []).append(b)
            case Mod(y, Const(int(b))) if b > 0:
                found[y, b] = None
    for y, bs in quotients.items():
        for a, n in combinations(sorted(bs), 2):
            if n % a == 0:
                found[FloorDiv(y, Const(a)), n // a] = None
    return list(found)


def _cancelling(p: Polynomial, zero: Polynomial) -> Iterable[int]:
    """The multiples of an identity that remove a ``//`` or ``%`` from the sum."""
    for mono, c in zero.terms:
        k, odd = divmod(-p.coefficient(mono), c)
        if k and not odd and isinstance(mono[0], (FloorDiv, Mod)):
            yield k


def _weight(p: Polynomial) -> int:
    """The cost of a sum: 10 for each division, 2 or 3 for each term, 1 for a constant."""
    divisions = sum(_divisions_in(a) for m, _ in p.terms for a in m)
    return 10 * divisions + sum(2 + (k not in (1, -1)) for _, k in p.terms) + (p.const != 0)


@lru_cache(maxsize=1 << 14)
def _divisions_in(e: Expr) -> int:
    return sum(isinstance(n, (FloorDiv, Mod)) for n in walk(e))


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
