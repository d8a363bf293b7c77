"""Sizes of a graph that are known when it runs: arithmetic on names, beside it the value of an example.

    Known       the names of a graph, their ranges and example, and what was assumed of them on the way
    Size        an expression of integers and names; numbers stay numbers
    Fraction    a broken number made of sizes, as a text has it

``==`` means proven for all sizes. An order of sizes that no fact decides is that of the example, and is
noted as an assumption: what is made is right for all sizes that meet the assumptions, and is made anew for
others. No arithmetic gives a number of the example: for estimates ``like`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from operator import add, floordiv, ge, gt, le, lt, mod, mul, sub, truediv
from typing import Any, Union

from transconv.ir import LARGEST_SIZE, Const, Expr, Mul, Var, as_expr, eq, readable, substitute, value_at
from transconv.simplify import Facts, prove, range_of, simplify

Length = Union[int, "SymbolicSize"]
"""The size of a dim."""
Operator = Callable[[Any, Any], Any]
SIGNS: dict[Operator, str] = {add: "+", sub: "-", mul: "*", truediv: "/"}


Index = tuple[Expr, ...]
Move = Callable[[Index], Index]
Where = Callable[[Index], Expr]


@dataclass(eq=False, slots=True)
class Known:
    """What is known of the names of a graph: the example ``like``, ``facts`` that hold at every call, and
    ``assumed``, conditions that the example meets. ``derived``: names of sums and quotients of others, so
    that each size is a number times some names."""

    like: dict[str, int] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    assumed: dict[Expr, None] = field(default_factory=dict)
    derived: dict[Expr, Expr] = field(default_factory=dict)  # of each such name, what it stands for
    named: dict[Expr, Expr] = field(default_factory=dict)
    simple: dict[Expr, Expr] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Those whose values a call tells."""
        return tuple(n for n in self.like if Var(n) not in self.derived)

    def name(self, like: int, least: int, most: int) -> Expr:
        """A new name with an example and range."""
        var = Var(f"S{len(self.like)}")
        self.like[var.name] = like
        self.facts = self.facts.with_range(var, least, min(most, LARGEST_SIZE))
        return var

    def fact(self, condition: Expr) -> None:
        """Enter what holds at every call."""
        self.facts = self.facts.assume(condition)

    def plain(self, e: Expr) -> Expr:
        """An expression of the names that a call tells."""
        return substitute(e, self.derived)

    def made(self, e: Expr) -> Length:
        """The size that an expression is."""
        found = self.simple.get(e)
        if found is None:
            found = self.simple[e] = self._made(e)
        return int(found.value) if isinstance(found, Const) else SymbolicSize(found, self)

    def _made(self, e: Expr) -> Expr:
        for form in (e, self.plain(e)):
            found = simplify(form, self.facts)
            if isinstance(found, Const) or _is_product(found):
                return found
        poly = self.facts.poly(found)
        common = gcd(poly.const, *(k for _, k in poly.terms))
        inner = simplify(found // common, self.facts)
        if inner not in self.named:
            reach, example = range_of(inner, self.facts), value_at(inner, self.like)
            var = self.name(
                example,
                min(example, 0) if reach.lo is None else reach.lo,
                LARGEST_SIZE if reach.hi is None else reach.hi,
            )
            self.named[inner], self.derived[var] = var, inner
        return simplify(self.named[inner] * common, self.facts)

    def proves(self, condition: Expr) -> bool:
        """Whether a condition holds for all sizes, by the facts."""
        return any(prove(form, self.facts) for form in (condition, self.plain(condition)))

    def assume(self, condition: Expr) -> bool:
        """Whether a condition holds: by the facts, or as it does for the example, which is noted."""
        if self.proves(condition):
            return True
        if self.proves(~condition):
            return False
        plain = self.plain(condition)
        held = bool(value_at(plain, self.like))
        self.assumed[plain if held else simplify(~plain, self.facts)] = None
        return held

    def value(self, n: Length, values: Mapping[str, int]) -> int:
        """A size for values of the names that a call tells."""
        return value_at(self.plain(n.expr), values) if isinstance(n, SymbolicSize) else n

    def said(self) -> str:
        """The names with their examples and ranges, and what is assumed of them; empty without names."""
        ranges = [
            f"{s}={self.like[s]} in {r.lo}..{r.hi}"
            for s in self.names
            for r in (self.facts.stated_range(Var(s)),)
        ]
        return ", ".join([*ranges, *map(readable, self.assumed)])

    def why_not(self, values: Mapping[str, int]) -> str:
        """The first assumption that sizes do not meet, in words; empty if they meet all."""
        return next((f"{c} does not hold" for c in self.assumed if not value_at(c, values)), "")


def _is_product(e: Expr) -> bool:
    """Whether an expression is a number times names."""
    if isinstance(e, Mul):
        return all(isinstance(x, Const) or _is_product(x) for x in (e.a, e.b))
    return isinstance(e, Var)


class SizeArithmetic:
    """Operators of a number, each of which is ``_made``."""

    __slots__ = ()

    @classmethod
    def _made(cls, op: Operator, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def __add__(self, other: Any) -> Any:
        return self._made(add, self, other)

    def __sub__(self, other: Any) -> Any:
        return self._made(sub, self, other)

    def __mul__(self, other: Any) -> Any:
        return self._made(mul, self, other)

    def __truediv__(self, other: Any) -> Any:
        return self._made(truediv, self, other)

    def __floordiv__(self, other: Any) -> Any:
        return self._made(floordiv, self, other)

    def __mod__(self, other: Any) -> Any:
        return self._made(mod, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._made(add, other, self)

    def __rsub__(self, other: Any) -> Any:
        return self._made(sub, other, self)

    def __rmul__(self, other: Any) -> Any:
        return self._made(mul, other, self)

    def __rtruediv__(self, other: Any) -> Any:
        return self._made(truediv, other, self)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._made(floordiv, other, self)

    def __rmod__(self, other: Any) -> Any:
        return self._made(mod, other, self)


class SymbolicSize(SizeArithmetic):
    """A size that is an expression of names."""

    __slots__ = ("expr", "known")

    def __init__(self, expr: Expr, known: Known) -> None:
        self.expr, self.known = expr, known

    @property
    def like(self) -> int:
        """The value for the example."""
        return value_at(self.expr, self.known.like)

    @classmethod
    def _made(cls, op: Operator, a: Any, b: Any) -> Any:
        if op is truediv:
            return Fraction.of(a) / Fraction.of(b)
        if any(isinstance(x, float) and x % 1 for x in (a, b)):
            return op(Fraction.of(a), Fraction.of(b))
        if not all(isinstance(x, (int, float, SymbolicSize)) for x in (a, b)):
            return NotImplemented
        known = next(x.known for x in (a, b) if isinstance(x, SymbolicSize))
        return known.made(
            op(*(x.expr if isinstance(x, SymbolicSize) else as_expr(int(x)) for x in (a, b)))
        )

    def __neg__(self) -> Any:
        return 0 - self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicSize) and other.expr is self.expr:
            return True
        if not isinstance(other, (int, SymbolicSize)):
            return NotImplemented
        apart = self - other
        return isinstance(apart, int) and apart == 0

    def __hash__(self) -> int:
        return hash(self.expr)

    def __lt__(self, other: Any) -> bool:
        return self._ordered(lt, other)

    def __le__(self, other: Any) -> bool:
        return self._ordered(le, other)

    def __gt__(self, other: Any) -> bool:
        return self._ordered(gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._ordered(ge, other)

    def _ordered(self, op: Operator, other: Any) -> bool:
        if isinstance(other, (int, SymbolicSize)):
            return self.known.assume(op(self.expr, as_expr(other)))
        raise TypeError(f"an order of a size and {other!r}; expected whole numbers")

    def __bool__(self) -> bool:
        return self > 0 or self < 0

    def __index__(self) -> int:
        """A number where only one will do: that of the example, which is assumed."""
        self.known.assume(eq(self.expr, self.like))
        return self.like

    def __str__(self) -> str:
        return readable(self.expr) if isinstance(self.expr, Var) else f"({readable(self.expr)})"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, repr=False)
class Fraction(SizeArithmetic):
    """A number made of sizes, as a text has it. It has no order: that would be one of the example."""

    text: str

    @classmethod
    def of(cls, n: Any) -> Fraction:
        """A number, a size or a fraction as one."""
        return (
            n
            if isinstance(n, Fraction)
            else cls(repr(float(n)) if isinstance(n, (int, float)) else (f"({n} * 1.0)"))
        )

    @classmethod
    def _made(cls, op: Operator, a: Any, b: Any) -> Any:
        return cls(f"({cls.of(a)} {SIGNS[op]} {cls.of(b)})") if op in SIGNS else NotImplemented

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def like(n: Any) -> Any:
    """A number as it is, a size as it is for the example."""
    return n.like if isinstance(n, SymbolicSize) else n


def same(a: Sequence[Length], b: Sequence[Length]) -> bool:
    """Whether two shapes are the same for all sizes."""
    return len(a) == len(b) and all(n is m or n == m for n, m in zip(a, b, strict=True))


def divides(a: Length, b: Length) -> bool:
    """Whether a size divides another one, for all sizes."""
    rest = b % a
    return rest == 0


def packed(shape: Sequence[Length], strides: Sequence[Length]) -> list[int] | None:
    """The dims of more than one element of a tensor that has no gaps for any size, the innermost first;
    None for one with gaps."""
    left = [d for d, n in enumerate(shape) if n != 1]
    found: list[int] = []
    step: Length = 1
    while left:
        inner = next((d for d in left if strides[d] == step), None)
        if inner is None:
            return None
        left.remove(inner)
        found.append(inner)
        step = step * shape[inner]
    return found


def dense_strides(shape: Sequence[Length]) -> tuple[Length, ...]:
    """The strides of a tensor without gaps, the last dim innermost."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


NOTHING = Facts()


def facts_of(sizes: Iterable[Length]) -> Facts:
    """What is known of the names in some sizes."""
    return next((n.known.facts for n in sizes if isinstance(n, SymbolicSize)), NOTHING)


def with_axis(facts: Facts, name: str, n: Length) -> Facts:
    """These facts and the range of an axis."""
    if isinstance(n, SymbolicSize):
        return facts.with_range(Var(name), 0, None).assume(Var(name) < n.expr)
    return facts.with_range(Var(name), 0, max(0, n - 1))
