"""Rules for ``//`` and ``%``, which round down, and for sums that hold both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import combinations

from transconv.ir import ZERO, Const, Expr, FloorDiv, Mod, Neg, walk
from transconv.simplify.facts import Facts
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
    whole, rest = _split_exact(p, c, facts)
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
    sum.
    """
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


def _split_exact(p: Polynomial, c: int, facts: Facts) -> tuple[Polynomial, Polynomial]:
    """(q, r) with p = c*q + r. q has the terms whose coefficients and known divisors make them multiples
    of c."""
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
            rest += Polynomial.of([(mono, k)])
    return whole, rest


def _split_factor(p: Polynomial, y: Polynomial) -> tuple[Polynomial, Polynomial]:
    """(q, r) with p = y*q + r. By a sum, SymPy divides; what has no fewer terms then stays whole."""
    whole, rest = Polynomial.number(0), Polynomial.number(p.const)
    if len(y.terms) != 1 or y.const:
        q, r = p.divided(y)
        return (q, r) if len(r.terms) < len(p.terms) else (Polynomial.number(0), p)
    (factors, c), = y.terms
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
    (y // a % b)*a + y % a -> y % (a*b)
    """
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
