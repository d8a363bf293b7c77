"""Partial derivatives of an expression with respect to its parts, from the table of operations.

    x * sigmoid(x)        is silu(x): the derivative of its row
    a * b                 is mul(a, b)
    exp(x)                is exp(x)

A text writes operations out, so a row is found by its expression: ``row(part)`` is the expression itself,
because nodes are interned. The derivative is then torch's, also where a function has none (0 for relu at
0) and where the rule of each node would overflow (elu, softplus).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import isfinite

from transconv.compute.ops import OPS, Op
from transconv.ir import (
    Add,
    Call,
    Cast,
    Const,
    Div,
    DType,
    Expr,
    Max,
    Min,
    Mul,
    Neg,
    Select,
    Sub,
    Var,
    find,
)

NODES: dict[type[Expr], str] = {Add: "add", Sub: "sub", Mul: "mul", Div: "div", Max: "max", Min: "min",
                                Neg: "neg", Select: "where"}
"""The row of each node that is an operation by itself."""

Partials = tuple[tuple[Expr, Expr], ...]


def partials(e: Expr, dtype: DType) -> Partials | None:
    """The operands of an expression's outermost operation, each with the derivative with respect to it, of
    ``dtype``; constants, conditions and zeros are left out. None for an operation without a derivative."""
    if isinstance(e, Cast):
        return ((e.x, Const(1.0, dtype)),) if e.x.dtype.kind == "float" else ()
    if (found := _row_of(e)) is None:
        return None
    row, operands, numbers = found
    if row.derivative is None:
        return None
    values = [o if o.dtype in (dtype,) or o.dtype.kind != "float" else Cast(o, dtype) for o in operands]
    each = row.derivative(*values, *(Const(float(n.value), dtype) for n in numbers))
    return tuple((o, d) for o, d in zip(operands, each, strict=True)
                 if d is not None and not isinstance(o, Const) and not is_number(d, 0.0))


def is_number(e: Expr, number: float) -> bool:
    """Whether an expression is a constant of this value."""
    return isinstance(e, Const) and e.value == number


def parts_of(e: Expr) -> Iterator[Expr]:
    """The operands of an expression's nodes through which derivatives may flow: not its conditions."""
    match e:
        case Select(_, yes, no):
            yield from (yes, no)
        case Cast(x):
            yield from (x,) if x.dtype.kind == "float" else ()
        case _:
            yield from (c for c in e.children() if isinstance(c, Expr) and c.dtype.kind == "float")


def flows_from(e: Expr) -> set[Var]:
    """The float variables that an expression depends on other than by conditions and whole numbers."""
    found: set[Var] = set()
    seen: set[Expr] = set()
    left = [e] if e.dtype.kind == "float" else []
    while left:
        at = left.pop()
        if at in seen:
            continue
        seen.add(at)
        if isinstance(at, Var):
            found.add(at)
        left += parts_of(at)
    return found


def name_of(e: Expr) -> str:
    """The name of an expression's outermost operation, for messages."""
    if isinstance(e, Call):
        return e.name
    return NODES.get(type(e), type(e).__name__.lower())


def _row_of(e: Expr) -> tuple[Op, tuple[Expr, ...], tuple[Const, ...]] | None:
    """The row whose expression this is, with its operands and numbers."""
    if (found := _function_of(e)) is not None:
        return found
    if isinstance(e, Call):
        row = OPS.get(e.name)
        return (row, tuple(e.args), ()) if row is not None and row(*e.args) is e else None
    if type(e) not in NODES:
        return None
    return OPS[NODES[type(e)]], tuple(c for c in e.children() if isinstance(c, Expr)), ()


@lru_cache(maxsize=4096)
def _function_of(e: Expr) -> tuple[Op, tuple[Expr, ...], tuple[Const, ...]] | None:
    """The row of one operand that writes out to this expression."""
    inner = [p for p in find(e, Expr) if p is not e and p.dtype is e.dtype and flows_from(p)]
    constants = [c for c in find(e, Const) if c.type is e.dtype and isfinite(c.value)]
    for row in OPS.values():
        if row.arity == 1 and row.derivative is not None and type(e) in _roots(row, e.dtype):
            for numbers in _numbers(row, constants):
                for part in inner:
                    if row(part, *numbers) is e:
                        return row, (part,), numbers
    return None


def _numbers(row: Op, constants: list[Const]) -> Iterator[tuple[Const, ...]]:
    """The numbers that a row may have in an expression with these constants, first its own."""
    yield ()
    if row.numbers and constants:
        usual = [Const(n, constants[0].type) for n in row.defaults]
        yield from product([*dict.fromkeys([*constants, *usual])], repeat=len(row.numbers))


@lru_cache(maxsize=1024)
def _roots(row: Op, dtype: DType) -> frozenset[type[Expr]]:
    """The classes of a row's outermost node, whatever its numbers are."""
    some = [Const(n, dtype) for n in (-2.5, 1.0, 2.0, 2.3, *row.defaults)]
    choices = [(), *product(some, repeat=len(row.numbers))]
    return frozenset(type(row(Var("x", dtype), *numbers)) for numbers in choices)
