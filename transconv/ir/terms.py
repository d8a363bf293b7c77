"""Expressions without a Python operator: equality, extrema, choices; masks as lists of conditions, sums as
lists of addends."""

from __future__ import annotations

from transconv.ir.expr import TRUE, ZERO, Add, And, Eq, Expr, Like, Max, Min, Ne, as_expr
from transconv.ir.operations import Select


def eq(a: Like, b: Like) -> Expr:
    """The expression ``a == b``; Python's ``==`` compares nodes by identity."""
    return Eq(as_expr(a), as_expr(b))


def ne(a: Like, b: Like) -> Expr:
    """The expression ``a != b``."""
    return Ne(as_expr(a), as_expr(b))


def minimum(a: Like, b: Like) -> Expr:
    """The lesser operand; NaN if one is."""
    return Min(as_expr(a), as_expr(b))


def maximum(a: Like, b: Like) -> Expr:
    """The greater operand; NaN if one is."""
    return Max(as_expr(a), as_expr(b))


def select(cond: Like, yes: Like, no: Like) -> Expr:
    """``yes`` where ``cond`` holds, else ``no``."""
    return Select(as_expr(cond), as_expr(yes), as_expr(no))


def conjuncts(mask: Expr) -> list[Expr]:
    """The parts of ``a & b & ...``; none for a mask that is always true."""
    if isinstance(mask, And):
        return conjuncts(mask.a) + conjuncts(mask.b)
    return [] if mask is TRUE else [mask]


def all_of(parts: list[Expr] | tuple[Expr, ...]) -> Expr:
    """``a & b & ...`` of the parts, without repeats; TRUE if there are none."""
    joined: Expr = TRUE
    for part in dict.fromkeys(p for p in parts if p is not TRUE):
        joined = part if joined is TRUE else And(joined, part)
    return joined


def addends(e: Expr) -> list[Expr]:
    """The terms of a sum, from left to right."""
    return addends(e.a) + addends(e.b) if isinstance(e, Add) else [e]


def sum_of(terms: list[Expr]) -> Expr:
    """``a + b + ...``; ZERO if there are no terms."""
    if not terms:
        return ZERO
    total = terms[0]
    for t in terms[1:]:
        total = Add(total, t)
    return total
