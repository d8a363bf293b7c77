"""Values converted to the type of a result: rounded to nearest, ties to even, and kept in its range.

f32 -> i8     i8(nearest_small(min(max(x, -128.0), 127.0)))       a NaN is 0
f32 -> i8     i8(nearest_within(x, -128, 127))                    of integers, scaled and shifted
i32 -> u8     u8(min(max(x, 0), 255))
f32 -> f8e4m3 f8e4m3(min(max(x, -448.0), 448.0))       chips differ in what a cast makes of more
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from math import inf, isnan

from transconv.ir.dtype import DType, f32, f64, i32
from transconv.ir.expr import Add, Const, Div, Expr, Max, Min, Mul, Sub
from transconv.ir.functions.rounding import CHANCES
from transconv.ir.operations import Call, Cast, Select, maximum, minimum, select
from transconv.ir.visit import ExprMutator

MOST_SMALL = 1 << 21
"""The largest number that ``nearest_small`` takes."""


def saturated(x: Expr, to: DType, numbers: AbstractSet[Expr] = frozenset()) -> Expr:
    """``x`` as ``to``. A number beyond the range becomes the nearest one in it; wider floats are cast.
    Integers become 16-bit and 8-bit floats by way of f32. ``numbers``: variables that hold no NaN, so that
    what is made of them need not be looked at."""
    kind = x.dtype.kind, to.kind
    if kind == ("float", "int"):
        return _rounded(x, to, numbers)
    if kind == ("int", "int"):
        return _limited(x, to)
    if kind == ("int", "float") and to.bits < 32:
        x = Cast(x, f32)
    if to.largest < inf and x.dtype is not to:
        x = minimum(maximum(x, Const(-to.largest, x.dtype)), Const(to.largest, x.dtype))
    return Cast(x, to)


def at_random(x: Expr, to: DType, seed: Expr, element: Expr) -> Expr:
    """A number of f32 as ``to``, one of ``SHORT``: up or down at random (see
    functions/rounding.py). ``seed``: of i32; ``element``: the position that tells its word."""
    word = Call("random_bits", (seed, Cast(element, i32)))
    chance = Cast(word & Const((1 << CHANCES) - 1, i32), f32) * Const(2.0**-CHANCES, f32)
    return saturated(Call(f"stochastic_{to}", (x, chance)), to)


def _limited(x: Expr, to: DType) -> Expr:
    """An integer as another type of integers."""
    (low, high), (least, most) = to.limits, x.dtype.limits
    if least < low:
        x = maximum(x, Const(low, x.dtype))
    if most > high:
        x = minimum(x, Const(high, x.dtype))
    return Cast(x, to)


def _rounded(x: Expr, to: DType, numbers: AbstractSet[Expr]) -> Expr:
    """A float as an integer. If the largest integer is no float, what is beyond the float below it is
    replaced."""
    wide = x if x.dtype in (f32, f64) else Cast(x, f32)
    low, high = to.limits
    beyond = max(0, high.bit_length() - wide.dtype.digits)
    most = high if not beyond else high + 1 - 2**beyond
    is_small = wide.dtype is f32 and max(map(abs, to.limits)) <= MOST_SMALL
    if is_small and is_number(wide, numbers):
        chosen = _chosen(wide, to)
        within = Call("nearest_within", (wide, Const(low, i32), Const(high, i32)))
        return Cast(within, to) if chosen is None else chosen
    inside = minimum(maximum(wide, Const(float(low), wide.dtype)), Const(float(most), wide.dtype))
    made = Cast(Call("nearest_small" if is_small else "nearest", (inside,)), to)
    return select(wide > Const(float(most), wide.dtype), Const(high, to), made) if beyond else made


def is_number(x: Expr, numbers: AbstractSet[Expr]) -> bool:
    """Whether a float is made of integers, constants and ``numbers`` by operations that give numbers of
    numbers, unless they overflow."""
    if isinstance(x, Const):
        return not isnan(x.value)
    if x.dtype.is_integer or x in numbers:
        return True
    if isinstance(x, Select):
        return is_number(x.yes, numbers) and is_number(x.no, numbers)
    if isinstance(x, Cast):
        return is_number(x.x, numbers)
    return isinstance(x, Add | Sub | Mul | Min | Max) and all(is_number(e, numbers) for e in (x.a, x.b))


def _chosen(x: Expr, to: DType) -> Expr | None:
    """A float that is one of several constants as that constant, an integer: what compilers would make of
    ``nearest_within`` of it is a store of a float's lowest bits. None for other numbers."""
    if isinstance(x, Const):
        low, high = to.limits
        return Const(round(min(max(float(x.value), low), high)), to)
    if not isinstance(x, Select):
        return None
    yes, no = _chosen(x.yes, to), _chosen(x.no, to)
    return None if yes is None or no is None else select(x.cond, yes, no)


class _Divided(ExprMutator):
    def mutate_Div(self, at: Div) -> Expr:
        a, b = self.mutate(at.a), self.mutate(at.b)
        return Call("divided", (a, b)) if at.dtype is f32 else Div(a, b)


def divided(x: Expr) -> Expr:
    """``x`` with quotients in f32 that are rounded to the nearest number. Where x becomes an integer, an
    error in the last place of 1.5 would decide between 1 and 2."""
    made: Expr = _Divided().mutate(x)
    return made
