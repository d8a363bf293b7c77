"""Values converted to the type of a result: rounded to nearest, ties to even, and kept in its range.

    f32 -> i8     i8(nearest_small(min(max(x, -128.0), 127.0)))
    i32 -> u8     u8(min(max(x, 0), 255))
    f32 -> f8e4m3 f8e4m3(min(max(x, -448.0), 448.0))       chips differ in what a cast makes of more
"""

from __future__ import annotations

from math import inf

from transconv.ir.dtype import DType, f32, f64, i32
from transconv.ir.expr import Const, Div, Expr
from transconv.ir.operations import Call, Cast
from transconv.ir.stochastic import CHANCES
from transconv.ir.terms import maximum, minimum, select
from transconv.ir.visit import ExprMutator

MOST_SMALL = 1 << 21
"""The largest number that ``nearest_small`` takes."""


def saturated(x: Expr, to: DType) -> Expr:
    """``x`` as ``to``. A number beyond the range becomes the nearest one in it; wider floats are cast.
    Integers become 16-bit and 8-bit floats by way of f32."""
    kind = x.dtype.kind, to.kind
    if kind == ("float", "int"):
        return _rounded(x, to)
    if kind == ("int", "int"):
        return _limited(x, to)
    if kind == ("int", "float") and to.bits < 32:
        x = Cast(x, f32)
    if to.largest < inf and x.dtype is not to:
        x = minimum(maximum(x, Const(-to.largest, x.dtype)), Const(to.largest, x.dtype))
    return Cast(x, to)


def at_random(x: Expr, to: DType, seed: Expr, element: Expr) -> Expr:
    """A number of f32 as ``to``, one of ``SHORT``: up or down at random (see stochastic.py). ``seed``: of
    i32; ``element``: the position that tells its word."""
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


def _rounded(x: Expr, to: DType) -> Expr:
    """A float as an integer. If the largest integer is no float, what is beyond the float below it is
    replaced."""
    wide = x if x.dtype in (f32, f64) else Cast(x, f32)
    low, high = to.limits
    beyond = max(0, high.bit_length() - wide.dtype.digits)
    most = high if not beyond else high + 1 - 2**beyond
    inside = minimum(maximum(wide, Const(float(low), wide.dtype)), Const(float(most), wide.dtype))
    is_small = wide.dtype is f32 and max(map(abs, to.limits)) <= MOST_SMALL
    made = Cast(Call("nearest_small" if is_small else "nearest", (inside,)), to)
    return select(wide > Const(float(most), wide.dtype), Const(high, to), made) if beyond else made


class _Divided(ExprMutator):
    def mutate_Div(self, at: Div) -> Expr:
        a, b = self.mutate(at.a), self.mutate(at.b)
        return Call("divided", (a, b)) if at.dtype is f32 else Div(a, b)


def divided(x: Expr) -> Expr:
    """``x`` with quotients in f32 that are rounded to the nearest number. Where x becomes an integer, an
    error in the last place of 1.5 would decide between 1 and 2."""
    made: Expr = _Divided().mutate(x)
    return made
