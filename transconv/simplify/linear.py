"""Polynomial normal form of integer expressions, in which products are multiplied out.

An integer expression is a sum of monomials over *atoms*: nodes other than ``+ - *``, unary minus and
constants, which are opaque here. SymPy has such polynomials, too; its import would be most of the time
that the first kernel of a process takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import add

from transconv.ir import Add, Cast, Const, DType, Expr, Mul, Neg, Sub, index, index64

# The factors of a product of atoms, in a fixed order; a power repeats its atom.
Mono = tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Poly:
    """``sum(coefficient * product of atoms) + const``; terms in order of first appearance, without
    coefficients of 0."""

    terms: tuple[tuple[Mono, int], ...] = ()
    const: int = 0

    @staticmethod
    def of(atom: Expr) -> Poly:
        return Poly((((atom,), 1),))

    def plus(self, other: Poly, times: int = 1) -> Poly:
        """``self + times * other``."""
        total = dict(self.terms)
        for mono, c in other.terms:
            total[mono] = total.get(mono, 0) + times * c
        return Poly(_nonzero(total), self.const + times * other.const)

    def shifted(self, by: int) -> Poly:
        return Poly(self.terms, self.const + by)

    def scaled(self, by: int) -> Poly:
        if by == 0:
            return Poly()
        return Poly(tuple((m, c * by) for m, c in self.terms), self.const * by)

    def times(self, other: Poly) -> Poly:
        if not self.terms or not other.terms:
            return other.scaled(self.const) if not self.terms else self.scaled(other.const)
        return _multiply(self, other)

    def coefficient(self, mono: Mono) -> int:
        return next((c for m, c in self.terms if m == mono), 0)

    @property
    def content(self) -> int:
        """The greatest common divisor of the coefficients, without the constant; 0 if there are none."""
        return math.gcd(*(c for _, c in self.terms))

    @property
    def single(self) -> tuple[Expr, int] | None:
        """The atom and its coefficient if the only term is a multiple of one atom, else None."""
        if len(self.terms) == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0], self.terms[0][1]
        return None


def _nonzero(total: dict[Mono, int]) -> tuple[tuple[Mono, int], ...]:
    return tuple((m, c) for m, c in total.items() if c)


def is_polynomial(e: Expr) -> bool:
    """Whether the node is ``+ - *`` of positions. Other integers wrap around, so they are excluded."""
    return isinstance(e, (Add, Sub, Mul, Neg)) and e.dtype.kind == "index"


def atom(e: Expr) -> Poly:
    """The polynomial of an opaque node. Other integers are cast to positions, so that sums do not wrap."""
    return Poly.of(e if e.dtype.kind == "index" else Cast(e, index))


def expand(e: Expr, leaf: Callable[[Expr], Poly] = atom) -> Poly:
    """The polynomial of an integer expression; ``leaf`` gives the polynomial of an atom."""
    total: dict[Mono, int] = {}
    const = 0
    stack = [(e, 1)]
    while stack:
        at, k = stack.pop()
        part: Poly | None = None
        match at:
            case Const(value) if at.dtype.kind != "float":
                const += k * int(value)
            case _ if not is_polynomial(at):
                part = leaf(at)
            case Add(a, b):
                stack += [(b, k), (a, k)]
            case Sub(a, b):
                stack += [(b, -k), (a, k)]
            case Neg(x):
                stack.append((x, -k))
            case Mul(a, Const(value)) | Mul(Const(value), a):
                stack.append((a, k * int(value)))
            case Mul(a, b):
                part = expand(a, leaf).times(expand(b, leaf))
        if part is not None:
            const += k * part.const
            for mono, c in part.terms:
                total[mono] = total.get(mono, 0) + k * c
    return Poly(_nonzero(total), const)


def rebuild(p: Poly, dtype: DType = index) -> Expr:
    """The expression of a polynomial: a positive term first, coefficients on the right, the
    constant last; ``a + b*2 - 1``, ``5 - a``, ``-a - b``."""
    kind = index64 if dtype is index64 else index
    if not p.terms:
        return Const(p.const, dtype)
    rest, const = list(p.terms), p.const
    total: Expr
    lead = next((i for i, (_, c) in enumerate(rest) if c > 0), None)
    if lead is None and const > 0:
        total, const = Const(const, kind), 0
    else:
        total = _signed_term(*rest.pop(lead or 0), kind)
    for mono, c in rest:
        term = _signed_term(mono, abs(c), kind)
        total = Add(total, term) if c > 0 else Sub(total, term)
    if const:
        total = Add(total, Const(const, kind)) if const > 0 else Sub(total, Const(-const, kind))
    return total


def _signed_term(mono: Mono, c: int, kind: DType) -> Expr:
    product = mono[0]
    for factor in mono[1:]:
        product = Mul(product, factor)
    if c == 1:
        return product
    return Neg(product) if c == -1 else Mul(product, Const(c, kind))


def _multiply(p: Poly, q: Poly) -> Poly:
    """The product, expanded and collected; terms in the lexicographic order of their exponents."""
    atoms = list(dict.fromkeys(a for side in (p, q) for mono, _ in side.terms for a in mono))

    def exponents(side: Poly) -> list[tuple[tuple[int, ...], int]]:
        found = [(tuple(m.count(a) for a in atoms), c) for m, c in side.terms]
        return [*found, ((0,) * len(atoms), side.const)] if side.const else found

    product: dict[tuple[int, ...], int] = {}
    right = exponents(q)
    for a, c in exponents(p):
        for b, d in right:
            powers = tuple(map(add, a, b))
            product[powers] = product.get(powers, 0) + c * d
    total: dict[Mono, int] = {}
    const = 0
    for powers in sorted(product, reverse=True):
        factors = [a for a, n in zip(atoms, powers, strict=True) for _ in range(n)]
        if factors:
            total[tuple(sorted(factors, key=_name))] = product[powers]
        else:
            const = product[powers]
    return Poly(_nonzero(total), const)


def _name(e: Expr) -> tuple[str, str]:
    """A sort key that orders the factors of a product in the same way in every process."""
    return str(e), e.dtype.name
