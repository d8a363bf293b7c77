"""Polynomial normal form of integer expressions: elements of SymPy's polynomial rings over the integers.

An integer expression is a sum of monomials over *atoms*: nodes other than ``+ - *``, unary minus and
constants, which are opaque here. SymPy is imported when the first polynomial is made: a process that finds
its kernels on the disk makes none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from transconv.ir import Add, Cast, Const, DType, Expr, Mul, Neg, Sub, index, index64

if TYPE_CHECKING:
    from sympy.polys.rings import PolyElement, PolyRing

# The factors of a product of atoms, in a fixed order; a power repeats its atom.
Mono = tuple[Expr, ...]
Terms = tuple[tuple[Mono, int], ...]
Exponents = tuple[int, ...]


@functools.cache
def ring_of(atoms: int) -> PolyRing:
    """SymPy's ring of polynomials with so many generators, in lexicographic order. There are as many rings
    as the longest sum has atoms."""
    from sympy.polys.domains import ZZ
    from sympy.polys.orderings import lex
    from sympy.polys.rings import PolyRing

    return PolyRing([f"x{i}" for i in range(atoms)], ZZ, lex)


class Polynomial:
    """``element`` of SymPy's ring whose generators stand for ``atoms``.

    Terms keep the order in which they were added, as SymPy's do, so that a sum is written as it was read.
    Sums are formed of the terms; products, quotients and factors in the ring of the atoms of both."""

    __slots__ = ("_const", "_element", "_terms", "atoms")

    def __init__(
        self, atoms: Mono, element: PolyElement | None, terms: Terms | None = None, const: int = 0
    ) -> None:
        self.atoms = atoms
        self._element = element  # None: not made yet, there are terms
        self._terms = terms  # None: not read yet, nor the constant
        self._const = const

    @staticmethod
    def of(terms: Iterable[tuple[Mono, int]], const: int = 0) -> Polynomial:
        """``sum(coefficient * product of atoms) + const``; products are ``ordered``, each once."""
        kept = tuple((mono, c) for mono, c in terms if c)
        return Polynomial(tuple(dict.fromkeys(a for mono, _ in kept for a in mono)), None, kept, const)

    @staticmethod
    def number(const: int) -> Polynomial:
        """The constant polynomial."""
        return Polynomial((), None, (), const)

    @staticmethod
    def atom(e: Expr) -> Polynomial:
        """The polynomial that is one atom."""
        atoms = (e,)
        return Polynomial(atoms, None, ((atoms, 1),))

    @property
    def element(self) -> PolyElement:
        """The element of SymPy's ring; many sums are only read, and need none."""
        if self._element is None:
            self._element = ring_of(len(self.atoms)).dtype(
                {tuple(map(m.count, self.atoms)): c for m, c in (*self.terms, ((), self._const)) if c}
            )
        return self._element

    @property
    def terms(self) -> Terms:
        """The monomials and their coefficients, which are not 0, without the constant."""
        return self._read() if self._terms is None else self._terms

    @property
    def const(self) -> int:
        """The constant term."""
        if self._terms is None:
            self._read()
        return self._const

    def _read(self) -> Terms:
        atoms = self.atoms
        terms: list[tuple[Mono, int]] = []
        for powers, c in self.element.items():
            degree = sum(powers)
            if degree == 1:
                terms.append(((atoms[powers.index(1)],), int(c)))
            elif degree:
                factors = (a for a, n in zip(atoms, powers, strict=True) for _ in range(n))
                terms.append((ordered(factors), int(c)))
            else:
                self._const = int(c)
        self._terms = tuple(terms)
        return self._terms

    @property
    def whole(self) -> Polynomial:
        """The polynomial without its constant."""
        return Polynomial(self.atoms, None, self.terms) if self.const else self

    @property
    def is_zero(self) -> bool:
        return not self.terms and not self.const

    def __add__(self, other: Polynomial | int) -> Polynomial:
        if isinstance(other, int):
            return Polynomial(self.atoms, None, self.terms, self.const + other) if other else self
        return self._plus(other, 1)

    def __sub__(self, other: Polynomial | int) -> Polynomial:
        return self + -other if isinstance(other, int) else self._plus(other, -1)

    def _plus(self, other: Polynomial, k: int) -> Polynomial:
        """``self + other*k`` for k of 1 or -1, over the atoms of ``self`` and then those of ``other``."""
        total = dict(self.terms)
        for mono, c in other.terms:
            if c := total.get(mono, 0) + k * c:
                total[mono] = c
            else:
                del total[mono]
        atoms = tuple(dict.fromkeys(self.atoms + other.atoms))
        return Polynomial(atoms, None, tuple(total.items()), self.const + k * other.const)

    def __neg__(self) -> Polynomial:
        return self * -1

    def __mul__(self, other: Polynomial | int) -> Polynomial:
        """The product, expanded and collected; that of two sums has its terms in SymPy's order."""
        if isinstance(other, int):
            terms = tuple((mono, c * other) for mono, c in self.terms) if other else ()
            return self if other == 1 else Polynomial(self.atoms, None, terms, self.const * other)
        if not self.terms or not other.terms:
            return other * self.const if not self.terms else self * other.const
        if len(self.terms) == len(other.terms) == 1 and not self.const and not other.const:
            ((left, c),), ((right, d),) = self.terms, other.terms
            return Polynomial(tuple(dict.fromkeys(left + right)), None, ((ordered(left + right), c * d),))
        one, two = (Polynomial.of(x.terms, x.const) for x in (self, other))  # over their atoms
        p, q, atoms = one._both(two)
        product = p * q
        return Polynomial(atoms, product.ring.from_terms(product.terms()))

    def __eq__(self, other: object) -> bool:
        """Whether the difference is 0."""
        if not isinstance(other, Polynomial):
            return NotImplemented
        return self.const == other.const and dict(self.terms) == dict(other.terms)

    __hash__ = None  # type: ignore[assignment]

    def _both(self, other: Polynomial) -> tuple[PolyElement, PolyElement, Mono]:
        """Both as elements of one ring, and its atoms: those of ``self`` first."""
        if self.atoms == other.atoms:
            return self.element, other.element, self.atoms
        places = {a: i for i, a in enumerate(self.atoms)}
        to = [places.setdefault(a, len(places)) for a in other.atoms]
        atoms = tuple(places)
        ring, size = ring_of(len(atoms)), len(atoms)
        p = self.element
        if more := (0,) * (size - len(self.atoms)):
            p = ring.dtype({powers + more: c for powers, c in p.items()})
        moved: dict[Exponents, int] = {}
        for powers, c in other.element.items():
            key = [0] * size
            for i, n in zip(to, powers, strict=True):
                key[i] = n
            moved[tuple(key)] = c
        return p, ring.dtype(moved), atoms

    def coefficient(self, mono: Mono) -> int:
        """The coefficient of a product of atoms; 0 if there is none."""
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

    def divided(self, divisor: Polynomial) -> tuple[Polynomial, Polynomial]:
        """(q, r) with ``self = divisor*q + r``, by SymPy's division of polynomials: no term of r is a
        multiple of the divisor's first one."""
        p, d, atoms = self._both(divisor)
        q, r = p.div(d)
        return Polynomial(atoms, q), Polynomial(atoms, r)

    def factors(self) -> tuple[int, list[tuple[Polynomial, int]]]:
        """The content and the factors with their powers, by SymPy's factoring."""
        content, found = self.element.factor_list()
        return int(content), [(Polynomial(self.atoms, f), int(n)) for f, n in found]

    def __repr__(self) -> str:
        return f"Polynomial({rebuild(self)})"


def ordered(factors: Iterable[Expr]) -> Mono:
    """The factors of a product in their fixed order."""
    return tuple(sorted(factors, key=_name))


def is_polynomial(e: Expr) -> bool:
    """Whether the node is ``+ - *`` of positions. Other integers wrap around, so they are excluded."""
    return type(e) in SUMS and e.dtype.kind == "index"


SUMS = frozenset((Add, Sub, Mul, Neg))


def atom(e: Expr) -> Polynomial:
    """The polynomial of an opaque node. Other integers are cast to positions, so that sums do not wrap."""
    return Polynomial.atom(e if e.dtype.kind == "index" else Cast(e, index))


def expand(e: Expr, leaf: Callable[[Expr], Polynomial] = atom) -> Polynomial:
    """The polynomial of an integer expression; ``leaf`` gives the polynomial of an atom."""
    total: dict[Mono, int] = {}
    const = 0
    stack = [(e, 1)]
    while stack:
        at, k = stack.pop()
        part: Polynomial | None = None
        if isinstance(at, Const) and at.dtype.kind != "float":
            const += k * int(at.value)
        elif not is_polynomial(at):
            part = leaf(at)
        elif isinstance(at, (Add, Sub)):
            stack += [(at.b, k if isinstance(at, Add) else -k), (at.a, k)]
        elif isinstance(at, Neg):
            stack.append((at.x, -k))
        elif isinstance(at, Mul):
            if isinstance(at.b, Const):
                stack.append((at.a, k * int(at.b.value)))
            elif isinstance(at.a, Const):
                stack.append((at.b, k * int(at.a.value)))
            else:
                part = expand(at.a, leaf) * expand(at.b, leaf)
        if part is not None:
            const += k * part.const
            for mono, c in part.terms:
                total[mono] = total.get(mono, 0) + k * c
    return Polynomial.of(total.items(), const)


def rebuild(p: Polynomial, dtype: DType = index) -> Expr:
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


@functools.lru_cache(maxsize=1 << 14)
def _name(e: Expr) -> tuple[str, str]:
    """A sort key that orders the factors of a product in the same way in every process."""
    return str(e), e.dtype.name
