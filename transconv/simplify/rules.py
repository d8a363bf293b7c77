"""Rewrite rules of the simplifier, one function for each kind of node.

A rule takes a node whose children are simplified. It returns an equal expression, which the caller
simplifies again, or the node itself if no case applies. ``again`` simplifies an expression that a rule
builds to decide. Division and comparison have their own files.
"""

from __future__ import annotations

from collections.abc import Callable

from transconv.ir import (
    And,
    Cast,
    Const,
    DType,
    Eq,
    Expr,
    FloorDiv,
    Le,
    Lt,
    Max,
    Min,
    Mod,
    Mul,
    Ne,
    Not,
    Or,
    Select,
    Shl,
    Shr,
    Xor,
    wrapped,
)
from transconv.simplify.comparison import compare, equate, negate
from transconv.simplify.division import Again, divide, remainder
from transconv.simplify.facts import Facts
from transconv.simplify.ranges import range_of_poly

Rule = Callable[[Expr, Facts, Again], Expr]


def extreme(e: Expr, facts: Facts, again: Again) -> Expr:
    """``min`` and ``max`` of integers."""
    if not isinstance(e, (Min, Max)) or not e.dtype.is_integer:
        return e
    kind, fold = (Min, min) if isinstance(e, Min) else (Max, max)
    difference = range_of_poly(facts.poly(e.a) - facts.poly(e.b), facts)
    if difference.high <= 0:
        return e.a if kind is Min else e.b
    if difference.low >= 0:
        return e.b if kind is Min else e.a
    match e:
        case Min(Const(), b) | Max(Const(), b) if not isinstance(b, Const):
            return kind(b, e.a)
        case Min(Min(x, Const(int(c))), Const(int(d))) | Max(Max(x, Const(int(c))), Const(int(d))):
            return kind(x, Const(fold(c, d), e.b.dtype))
        case Min(Min(x, y), z) | Max(Max(x, y), z) if z is x or z is y:
            return e.a
    return e


def choose(e: Expr, facts: Facts, again: Again) -> Expr:
    """Selects with a known condition, equal values or boolean constants."""
    match e:
        case Select(Const(cond), yes, no):
            return yes if cond else no
        case Select(_, yes, no) if yes is no:
            return yes
        case Select(cond, Const(True, _), Const(False, _)) if e.dtype.kind == "bool":
            return cond
        case Select(cond, Const(False, _), Const(True, _)) if e.dtype.kind == "bool":
            return Not(cond)
        case Select(Not(cond), yes, no):
            return Select(cond, no, yes)
    return e


def convert(e: Expr, facts: Facts, again: Again) -> Expr:
    """Casts that keep the type, of constants, and of casts that lose nothing."""
    match e:
        case Cast(x, to) if to is x.dtype:
            return x
        case Cast(Const(int(value)), to) if e.x.dtype.kind != "float" and to.is_integer:
            return Const(wrapped(int(value), to), to)
        case Cast(Const(int(value)), to) if e.x.dtype.is_integer and to.kind == "float":
            # Integers up to 256 are exact in f16 and bf16; 8-bit floats have fewer digits.
            return Const(float(value), to) if abs(value) <= min(256, 2**to.digits) else e
        case Cast(Cast(x, through), to) if _keeps(x.dtype, through) and to.is_integer:
            return Cast(x, to)
    return e


def _keeps(inner: DType, outer: DType) -> bool:
    """Whether every value of ``inner`` is a value of the integer type ``outer``."""
    both = inner.kind != "float" and outer.is_integer
    return both and _holds(outer, *inner.limits)


def _holds(dtype: DType, low: int, high: int) -> bool:
    least, most = dtype.limits
    return least <= low and high <= most


def shift(e: Expr, facts: Facts, again: Again) -> Expr:
    """``<<`` and ``>>`` by 0 and of constants."""
    match e:
        case Shl(x, Const(0)) | Shr(x, Const(0)):
            return x
        case Shl(Const(int(a)), Const(int(n))) if 0 <= n < 64 and e.dtype.kind == "index":
            return Const(a << n, e.dtype)
        case Shr(Const(int(a)), Const(int(n))) if n >= 0 and e.dtype.kind == "index":
            return Const(a >> n, e.dtype)
    return e


def exclusive(e: Expr, facts: Facts, again: Again) -> Expr:
    """``^`` of integers and booleans."""
    match e:
        case Xor(Const(int(a)), Const(int(b))):
            return Const(a ^ b, e.dtype)
        case Xor(a, b) if a is b:
            return Const(False if e.dtype.kind == "bool" else 0, e.dtype)
        case Xor(x, Const(0)) | Xor(Const(0), x):
            return x
        case Xor(x, Const(True, _)) | Xor(Const(True, _), x) if e.dtype.kind == "bool":
            return Not(x)
    return e


def bits(e: Expr, facts: Facts, again: Again) -> Expr:
    """``&`` and ``|`` of integers."""
    match e:
        case And(Const(int(a)), Const(int(b))):
            return Const(a & b, e.dtype)
        case Or(Const(int(a)), Const(int(b))):
            return Const(a | b, e.dtype)
        case And(a, b) | Or(a, b) if a is b:
            return a
        case And(_, Const(0)) | And(Const(0), _):
            return Const(0, e.dtype)
        case Or(x, Const(0)) | Or(Const(0), x):
            return x
    return e


def multiply(e: Expr, facts: Facts, again: Again) -> Expr:
    """``x * 1`` of integers that are no positions. Other products of them, which wrap around, and products
    of floats are not rewritten."""
    match e:
        case Mul(x, Const(1)) | Mul(Const(1), x) if e.dtype.kind == "int" and x.dtype is e.dtype:
            return x
    return e


RULES: dict[type[Expr], Rule] = {
    FloorDiv: divide, Mod: remainder, Min: extreme, Max: extreme, Select: choose, Cast: convert,
    Not: negate, Lt: compare, Le: compare, Eq: equate, Ne: equate, Shl: shift, Shr: shift,
    Xor: exclusive, And: bits, Or: bits, Mul: multiply,
}
