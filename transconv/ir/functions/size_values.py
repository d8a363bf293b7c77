"""The value of an expression of sizes, such as the extent of a tensor or a requirement.

Where calls must take the host little time, functions are written out as Python's text: what would be a
loop over tensors, or a look at a switch, is then a line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transconv.ir import expr as ex
from transconv.ir.operations import Cast, Select
from transconv.support import defined

Values = Mapping[str, int]
"""Sizes by name."""

MEANING: dict[type, Callable[[int, int], int]] = {
    ex.Add: operator.add,
    ex.Sub: operator.sub,
    ex.Mul: operator.mul,
    ex.FloorDiv: operator.floordiv,
    ex.Mod: operator.mod,
    ex.Min: min,
    ex.Max: max,
    ex.Lt: operator.lt,
    ex.Le: operator.le,
    ex.Eq: operator.eq,
    ex.Ne: operator.ne,
    ex.And: operator.and_,
    ex.Or: operator.or_,
}
"""What operations of two make of integers."""


def value_at(e: ex.Expr, values: Values) -> int:
    """The value of an expression of sizes; 0 or 1 for a condition. KeyError for a name without a size,
    TypeError for a node that is no arithmetic of sizes."""
    match e:
        case ex.Const(value):
            return int(value)
        case ex.Var(name):
            return values[name]
        case ex.Neg(x):
            return -value_at(x, values)
        case ex.Not(x):
            return not value_at(x, values)
        case Cast(x):
            return value_at(x, values)
        case Select(cond, yes, no):
            return value_at(yes if value_at(cond, values) else no, values)
        case ex.Binary():
            return MEANING[type(e)](value_at(e.a, values), value_at(e.b, values))
    raise TypeError(f"{e} is no expression of sizes")


SPELLING = ex.INFIX | {ex.And: "and", ex.Or: "or"}


def values_of(expressions: Sequence[ex.Expr], names: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """A function of sizes, in the order of their names, that computes expressions as ``value_at`` does, as
    fast as Python can: what occurs more than once is computed once. Any number divided by 0 is itself: a
    size that a condition excludes must not stop the others. KeyError for a name without a size."""
    return function_of(expressions, names, lambda texts: ([], f"({''.join(f'{t}, ' for t in texts)})"))


def function_of(
    expressions: Sequence[ex.Expr],
    names: Sequence[str],
    result: Callable[[list[str]], tuple[Sequence[tuple[str, str]], str]],
) -> Callable[..., Any]:
    """A function of sizes, as ``values_of`` makes it, to what Python's text says that ``result`` makes of
    the texts of the expressions' values; before it come texts with names, which may use those of before
    them. Names that begin with ``_`` or ``t`` are taken."""
    spelled = _PythonFormatter(expressions, {name: f"_{at}" for at, name in enumerate(names)})
    named, last = result([spelled.of(e) for e in expressions])
    lines = "".join(f"    {name} = {text}\n" for name, text in (*spelled.first, *named))
    made: Callable[..., Any] = defined(
        f"def made({', '.join(spelled.given.values())}):\n{lines}    return {last}",
        "made",
        {"__builtins__": {}},
    )
    return made


def python_of(e: ex.Expr, names: Sequence[str]) -> str:
    """The text of an expression of sizes in Python, for programs that are read; any number divided by 0 is
    itself. KeyError for a name without a size."""
    return _PythonFormatter((), {name: name for name in names}).of(e)


class _PythonFormatter:
    """Python's texts of expressions; ``first``: of what occurs more than once, each with its name."""

    def __init__(self, expressions: Sequence[ex.Expr], given: Mapping[str, str]) -> None:
        self.given, self.uses, self.named = given, dict[ex.Expr, int](), dict[ex.Expr, str]()
        self.short: dict[ex.Expr, ex.Expr] = {}
        for e in expressions:
            self.count(self.folded(e))
        self.first = [(self.name(e), self.spelled(e)) for e, n in self.uses.items() if n > 1]

    def folded(self, e: ex.Expr) -> ex.Expr:
        """An expression without operations whose result is a number or one of their operands."""
        found = self.short.get(e)
        if found is None:
            found = self.short[e] = self.fold(e)
        return found

    def fold(self, e: ex.Expr) -> ex.Expr:
        match e:
            case Cast(x):
                return self.folded(x)
            case ex.Neg(x) | ex.Not(x):
                return type(e)(self.folded(x))
            case Select(cond, yes, no):
                return Select(self.folded(cond), self.folded(yes), self.folded(no))
            case ex.Binary():
                return _operation(type(e), self.folded(e.a), self.folded(e.b))
        return e

    def count(self, e: ex.Expr) -> None:
        """Note how often an expression is used, and before that how often its parts are. The two sides of
        a choice are left out: one of them may have no value."""
        if isinstance(e, (ex.Const, ex.Var)):
            return
        if e not in self.uses:
            for part in (e.cond,) if isinstance(e, Select) else e.children():
                for _ in range(1 + isinstance(e, (ex.Min, ex.Max))):  # which are spelled as choices
                    if isinstance(part, ex.Expr):
                        self.count(part)
        self.uses[e] = self.uses.get(e, 0) + 1

    def name(self, e: ex.Expr) -> str:
        return self.named.setdefault(e, f"t{len(self.named)}")

    def of(self, e: ex.Expr) -> str:
        """The text of an expression, or the name of its value."""
        e = self.folded(e)
        return self.named.get(e) or self.spelled(e)

    def spelled(self, e: ex.Expr) -> str:
        """The text of an expression whose parts may have names."""
        match e:
            case ex.Const(value):
                return str(int(value)) if value >= 0 else f"({int(value)})"
            case ex.Var(name):
                return self.given[name]
            case ex.Neg(x):
                return f"(-{self.of(x)})"
            case ex.Not(x):
                return f"(not {self.of(x)})"
            case Select(cond, yes, no):
                return f"({self.of(yes)} if {self.of(cond)} else {self.of(no)})"
            case ex.Min() | ex.Max():
                a, b = self.of(e.a), self.of(e.b)
                return f"({a} if {a} {'<' if isinstance(e, ex.Min) else '>'} {b} else {b})"
            case ex.FloorDiv() | ex.Mod() if not isinstance(e.b, ex.Const):
                return f"({self.of(e.a)} {SPELLING[type(e)]} ({self.of(e.b)} or 1))"
            case ex.Binary():
                return f"({self.of(e.a)} {SPELLING[type(e)]} {self.of(e.b)})"
        raise TypeError(f"{e} is no expression of sizes")


def _operation(kind: type[ex.Binary], a: ex.Expr, b: ex.Expr) -> ex.Expr:
    """An operation, the number that it makes of two numbers, or its operand where it leaves that."""
    match a, b:
        case ex.Const(x), ex.Const(y) if kind in MEANING and (y or kind not in (ex.FloorDiv, ex.Mod)):
            return ex.Const(int(MEANING[kind](int(x), int(y))))
        case (ex.Const(0), left) | (left, ex.Const(0)) if kind is ex.Add:
            return left
        case (ex.Const(1), left) | (left, ex.Const(1)) if kind is ex.Mul:
            return left
        case left, ex.Const(1) if kind is ex.FloorDiv:
            return left
    return kind(a, b)
