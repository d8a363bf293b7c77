"""Facts about the variables of an expression: ranges, divisors, conditions that hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from transconv import ir
from transconv.simplify.polynomial import Polynomial, atom, expand, is_polynomial
from transconv.simplify.ranges import ANY, Range, between, range_of_poly

if TYPE_CHECKING:
    from transconv.simplify.presburger import Verdict


class Facts:
    """An immutable set of facts; ``with_range``, ``assume`` and ``with_multiple`` return larger sets.

    The range ``0 .. extent - 1`` of a lane need not be stated. Analyses cache their results here, in
    dicts keyed by node."""

    __slots__ = (
        "_false",
        "_multiples",
        "_ranges",
        "_true",
        "_unlimited",
        "_without_residues",
        "known_multiples",
        "known_ranges",
        "limits",
        "residues",
        "simple",
        "verdicts",
    )

    def __init__(
        self,
        ranges: Mapping[ir.Expr, Range] | None = None,
        true: Iterable[ir.Expr] = (),
        multiples: Mapping[ir.Expr, int] | None = None,
    ) -> None:
        self._ranges: dict[ir.Expr, Range] = {}
        self._multiples: dict[ir.Expr, int] = dict(multiples or {})
        self._true: dict[ir.Expr, None] = {}
        self._false: dict[ir.Expr, None] = {}
        self.limits: tuple[Polynomial, ...] = ()  # each is >= 0
        self.residues: tuple[tuple[Polynomial, int], ...] = ()  # (p, n): p % n == 0
        self._unlimited: Facts | None = None
        self._without_residues: Facts | None = None
        self._forget()
        for e, r in (ranges or {}).items():
            self._learn_range(e, r)
        for cond in true:
            self._learn(self._simplified(cond))

    @property
    def ranges(self) -> Mapping[ir.Expr, Range]:
        """The known ranges of expressions."""
        return MappingProxyType(self._ranges)

    @property
    def multiples(self) -> Mapping[ir.Expr, int]:
        """The known divisors of expressions."""
        return MappingProxyType(self._multiples)

    @property
    def true(self) -> tuple[ir.Expr, ...]:
        """The conditions that hold, simplified, one entry for each conjunct."""
        return tuple(self._true)

    def with_range(self, var: ir.Expr, lo: int | None, hi: int | None) -> Facts:
        """These facts and ``lo <= var <= hi`` (None: no bound). ``var`` may be any integer expression."""
        return _with_range(self, var, lo, hi)

    def with_multiple(self, var: ir.Expr, n: int) -> Facts:
        """These facts and that ``n`` divides ``var``."""
        more = self._copy()
        more._multiples[var] = math.lcm(n, more._multiples.get(var, 1))
        return more

    def assume(self, cond: ir.Expr) -> Facts:
        """These facts and that a condition holds, for example inside a mask or an ``if``."""
        return self.knowing([self._simplified(cond)])

    def knowing(self, parts: Iterable[ir.Expr]) -> Facts:
        """``assume`` for conditions that are already simplified."""
        return _knowing(self, tuple(parts))

    def stated_range(self, e: ir.Expr) -> Range:
        """The range given for exactly this expression."""
        return self._ranges.get(e, ANY)

    def stated_multiple(self, e: ir.Expr) -> int:
        """The divisor given for exactly this expression; 1 if there is none."""
        return self._multiples.get(e, 1)

    def truth(self, cond: ir.Expr) -> bool | None:
        """Whether exactly this condition is known to hold (True) or not to hold (False), else None."""
        return True if cond in self._true else False if cond in self._false else None

    def poly(self, e: ir.Expr) -> Polynomial:
        """The polynomial of an expression over its atoms, which are not simplified."""
        return _polynomial(e)

    @property
    def unlimited(self) -> Facts:
        """These facts without the inequalities. The analyses of inequalities use it, which keeps them
        from infinite recursion."""
        if not self.limits:
            return self
        if self._unlimited is None:
            twin = self._copy()
            twin.limits = ()
            self._unlimited = twin
        return self._unlimited

    @property
    def without_residues(self) -> Facts:
        """These facts without those about remainders."""
        if not self.residues:
            return self
        if self._without_residues is None:
            twin = self._copy()
            twin.residues = ()
            self._without_residues = twin
        return self._without_residues

    def forget_if_large(self, entries: int) -> None:
        """Clear the caches if they have more entries: ``NO_FACTS`` lives as long as the process."""
        if len(self.simple) > entries:
            self._forget()

    def _forget(self) -> None:
        self.known_ranges: dict[ir.Expr, Range] = {}
        self.known_multiples: dict[ir.Expr, int] = {}
        self.simple: dict[ir.Expr, ir.Expr] = {}
        self.verdicts: dict[tuple[ir.Expr, int], Verdict | None] = {}  # by condition and budget
        self._unlimited = self._without_residues = None

    def _inherit(self, known: Facts) -> None:
        """Keep the results of smaller facts, which do not depend on what was added."""
        self.known_ranges, self.known_multiples = dict(known.known_ranges), dict(known.known_multiples)
        self.simple, self.verdicts = dict(known.simple), dict(known.verdicts)
        if known._unlimited is not None:
            self.unlimited._inherit(known._unlimited)

    def _has_asked(self, var: ir.Var) -> bool:
        """Whether a result may depend on what is known of a variable."""
        twins = [twin for twin in (self._unlimited, self._without_residues) if twin is not None]
        return (
            any(var in known for known in (self.simple, self.known_ranges, self.known_multiples))
            or any(var in ir.free_vars(condition) for condition in self._true)
            or any(twin._has_asked(var) for twin in twins)
        )

    def _copy(self) -> Facts:
        twin = Facts()
        twin._ranges = dict(self._ranges)
        twin._multiples = dict(self._multiples)
        twin._true = dict(self._true)
        twin._false = dict(self._false)
        twin.limits, twin.residues = self.limits, self.residues
        return twin

    def _simplified(self, e: ir.Expr) -> ir.Expr:
        from transconv.simplify.fixpoint import simplify  # it needs Facts

        return simplify(e, self)

    def _learn_range(self, e: ir.Expr, r: Range) -> None:
        if r == ANY:
            return
        self._ranges[e] = r & self._ranges.get(e, ANY)
        if is_polynomial(e) and r != ANY:
            p = expand(self._simplified(e))
            self._learn_limits([p - r.lo] if r.lo is not None else [])
            self._learn_limits([-p + r.hi] if r.hi is not None else [])
        self._forget()

    def _learn(self, cond: ir.Expr) -> None:
        """Add a simplified condition to the facts."""
        if cond is ir.TRUE:
            return
        if isinstance(cond, ir.And):
            for part in ir.conjuncts(cond):
                self._learn(part)
            return
        self._true[cond] = None
        match cond:
            case ir.Not(x):
                self._false[x] = None
            case ir.Ne(a, b):
                self._false[ir.Eq(a, b)] = None
                if both_integers(a, b):
                    self._learn_unequal(self.poly(a) - self.poly(b))
            case ir.Lt(a, b) if both_integers(a, b):
                self._learn_limits([self.poly(b) - self.poly(a) - 1])
            case ir.Le(a, b) if both_integers(a, b):
                self._learn_limits([self.poly(b) - self.poly(a)])
            case ir.Eq(a, b) if both_integers(a, b):
                difference = self.poly(a) - self.poly(b)
                self._learn_limits([difference, -difference])
                self._learn_residue(cond)
        self._forget()

    def _learn_unequal(self, p: Polynomial) -> None:
        """Add that a polynomial is not 0, which says more if it is known not to be negative, or not to be
        positive."""
        r = range_of_poly(p, self)
        if r.lo == 0:
            self._learn_limits([p - 1])
        elif r.hi == 0:
            self._learn_limits([-p - 1])

    def _learn_residue(self, cond: ir.Eq) -> None:
        match cond:
            case ir.Eq(ir.Mod(x, ir.Const(int(n))), ir.Const(int(r))) if n > 0:
                p = self.poly(x) - r
                self.residues += ((p, n),)

    def _learn_limits(self, limits: list[Polynomial]) -> None:
        """Add that each is >= 0, and the bounds that follow for its atoms."""
        self.limits += tuple(p for p in limits if p.terms)
        self._forget()
        for p in limits:
            for mono, c in p.terms:
                if len(mono) != 1:
                    continue
                rest = range_of_poly(p - Polynomial.of([(mono, c)]), self.unlimited)
                if rest.hi is None:
                    continue
                e = _unwidened(mono[0])
                bound = between(-(rest.hi // c), math.inf) if c > 0 else between(-math.inf, rest.hi // -c)
                before = self._ranges.get(e, ANY)
                if (after := bound & before) != before:
                    self._ranges[e] = after
                    self._forget()
        self._forget()

    def __repr__(self) -> str:
        ranges = ", ".join(f"{r.lo}<={e}<={r.hi}" for e, r in self._ranges.items())
        return f"Facts({ranges}; {', '.join(map(str, self._true))}; {self._multiples})"


MOST_INHERITED = 1 << 11  # results


@functools.lru_cache(maxsize=256)  # passes of a kernel ask for the same facts, one after another
def _with_range(known: Facts, e: ir.Expr, lo: int | None, hi: int | None) -> Facts:
    more = known._copy()
    more._learn_range(e, Range(lo, hi))
    if isinstance(e, ir.Var) and len(known.simple) <= MOST_INHERITED and not known._has_asked(e):
        more._inherit(known)
    return more


@functools.lru_cache(maxsize=256)
def _knowing(known: Facts, parts: tuple[ir.Expr, ...]) -> Facts:
    more = known._copy()
    for part in parts:
        more._learn(part)
    return more


@functools.lru_cache(maxsize=1 << 15)
def _polynomial(e: ir.Expr) -> Polynomial:
    """``Facts.poly``, the same whatever is known."""
    return expand(e) if isinstance(e, ir.Const) or is_polynomial(e) else atom(e)


def both_integers(a: ir.Expr, b: ir.Expr) -> bool:
    """Whether two expressions are of integers."""
    return a.dtype.is_integer and b.dtype.is_integer


def _unwidened(e: ir.Expr) -> ir.Expr:
    """The operand of the cast that ``atom`` puts around nodes that are no positions."""
    return e.x if isinstance(e, ir.Cast) and e.x.dtype.kind in ("int", "bool") else e


def facts_of(sizes: ir.Sizes | None) -> Facts:
    """The requirements of sizes that are arguments, as facts; no facts for None."""
    return _required(sizes.requirements if sizes else ())


@functools.lru_cache(maxsize=64)
def _required(conditions: tuple[ir.Expr, ...]) -> Facts:
    """Most passes ask for the facts of their kernel's sizes."""
    return Facts(true=conditions)


NO_FACTS = Facts()


def forget_simplified() -> None:
    """What was simplified for all of this process, which other rules may simplify otherwise."""
    NO_FACTS.forget_if_large(-1)
    for kept in (_required, _with_range, _knowing, _polynomial):
        kept.cache_clear()
