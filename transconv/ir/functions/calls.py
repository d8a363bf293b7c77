"""What a ``Call`` or a ``Reduce`` computes: one row each, with its meaning in NumPy and its spellings.

The interpreter computes a row's ``numpy``, the verifier checks arity and types, and the emitters write
``triton`` or ``gluon``. For what these languages lack the row has its source text. All reductions
propagate NaN, as in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transconv.ir.dtype import DType, f32, i32
from transconv.ir.expr import Add, Const, Expr, Max, Min, Mul
from transconv.ir.functions import packed_bytes, rounding

_HELPER = '''
@{{jit}}
def {name}_of(a, b):
    """{says}"""
    return {body}
'''


@dataclass(frozen=True, slots=True)
class Reducer:
    """A reduction. ``neutral``: its initial value; ``helper``: the source of a function that combines
    two values, where the languages have no reduction of this name that propagates NaN."""

    neutral: float
    numpy: Callable[..., Any]
    node: Callable[[Expr, Expr], Expr]  # the class of a node
    helper: str = ""

    def identity(self, dtype: DType) -> Const:
        """The neutral element as a constant of a type; integers have their limits for infinities."""
        if dtype.kind == "float":
            return Const(self.neutral, dtype)
        least, most = dtype.limits
        return Const(int(min(max(self.neutral, least), most)), dtype)


def _helper(name: str, says: str, body: str) -> str:
    return _HELPER.format(name=name, says=says, body=body)


REDUCERS = {
    "sum": Reducer(0.0, np.sum, Add),
    "prod": Reducer(1.0, np.prod, Mul, _helper("prod", "The product of two values.", "a * b")),
    "max": Reducer(float("-inf"), np.max, Max, _helper(
        "max", "The greater of two values, NaN if one is.",
        "{tl}.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)")),
    "min": Reducer(float("inf"), np.min, Min, _helper(
        "min", "The lesser of two values, NaN if one is.",
        "{tl}.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)")),
}
"""The reductions, by name."""


def reducer_of(node: type[Expr]) -> str:
    """The name of the reduction that combines values by this node class; StopIteration if none does."""
    return next(name for name, row in REDUCERS.items() if row.node is node)


Array = np.ndarray[Any, np.dtype[Any]]


def multiply_add(x: Array, y: Array, z: Array) -> Array:
    """``x * y + z`` of float32 and float64 arrays, rounded once; of other types as NumPy computes it.

    The product of two float32 numbers is exact in float64. The sum is rounded to odd there, so that
    rounding it again, to float32, gives the nearest number (Boldo and Melquiond 2008)."""
    if x.dtype == y.dtype == z.dtype == np.float64:
        return _in_two_parts(x, y, z)
    if not x.dtype == y.dtype == z.dtype == np.float32:
        return np.asarray(x * y + z)
    with np.errstate(all="ignore"):
        product, addend = x.astype(np.float64) * y, z.astype(np.float64)
        total = np.asarray(product + addend)
        back = total - product  # what is lost of the sum, exactly (Knuth's two-sum)
        lost = (product - (total - back)) + (addend - back)
        even = total.view(np.int64) & 1 == 0
        inexact = np.isfinite(total) & (lost != 0) & even
        odd = np.where(inexact, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
        return np.asarray(odd.astype(np.float32))


SPLIT = 2.0**27 + 1


def _in_two_parts(x: Array, y: Array, z: Array) -> Array:
    """Of float64: the product with what it loses (Dekker 1971), and both added to ``z``. What is a number
    of the type is found exactly; others may be rounded twice close to the middle of two numbers."""
    with np.errstate(all="ignore"):
        (a, first), (b, second) = np.frexp(x), np.frexp(y)
        power = first.astype(np.int64) + second
        c = np.ldexp(z, -power)
        product = a * b
        (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
        lost = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
        total = product + c
        back = total - product
        left = (product - (total - back)) + (c - back)
        found = np.ldexp(total + (left + lost), power)
        plain = x * y + z
        usual = np.isfinite(found) & np.isfinite(c) & np.isfinite(plain) & (product != 0)
        return np.asarray(np.where(usual, found, plain))


def _halves(x: Array) -> tuple[Array, Array]:
    scaled = x * SPLIT
    high = scaled - (scaled - x)
    return high, x - high


@dataclass(frozen=True, slots=True)
class Callee:
    """A pure function. ``numpy`` gets arrays of one type and returns that type or a wider one.

    A spelling is a name of the language (``exp``: ``tl.exp(x)``), or, with braces, an expression of the
    precedence of a division, whose operands have that of calls (``1.0 / (1.0 + gl.exp(-{}))``).
    ``helper``: the source of a function of this name, put at the top of modules that call it; ``{jit}`` is
    the decorator and ``{tl}`` the language. ``floats``: the widths in bits of floats that it takes;
    ``ints``: whether it takes integers. ``off``: by how many half units in the last place a chip's result
    may be off; ``inside``: by how many its argument, which it rounds first. ``exp`` is 2**(x log2(e)):
    of a large x, a half unit of the product is many of the result. ``flushes``: whether chips take an
    operand below the smallest normal number as 0 (NVIDIA's libdevice does as Triton links it, for floor
    as well: ``cvt.rmi.ftz``). ``result``: the type of the result, if not that of the operands.
    ``takes``: the type of each operand, where these are not of one type. ``needs``: the rows that the
    helper calls. ``instructions``: of a chip, about."""

    arity: int
    numpy: Callable[..., Array]
    triton: str
    gluon: str
    helper: str = ""
    floats: tuple[int, ...] = (32, 64)
    ints: bool = False
    off: float = 4.0
    inside: float = 0.0
    flushes: bool = False
    result: DType | None = None
    takes: tuple[DType, ...] = ()
    needs: tuple[str, ...] = ()
    instructions: float = 6.0

    def why_not_of(self, types: Sequence[DType]) -> str:
        """Why operands cannot be of these types, where the row says each; empty if they can."""
        if not self.takes or tuple(types) == self.takes:
            return ""
        return f"takes {' '.join(map(str, self.takes))}, not {' '.join(map(str, types))}"

    def why_not(self, dtype: DType) -> str:
        """Why operands cannot be of this type; empty if they can."""
        if (dtype.kind == "float" and dtype.bits in self.floats) or (dtype.is_integer and self.ints):
            return ""
        taken = " or ".join([*(f"{n}-bit floats" for n in self.floats), *["integers"] * self.ints])
        return f"takes {taken}, not {dtype}"


# In f64 the rational approximation of the Cephes library's tanh.c (S. Moshier), in f32 a polynomial of
# tanh(x)/x - 1, both with errors of a few ulp. For large |x| the exponential underflows to 0, so nothing
# overflows.
TANH = '''
@{jit}
def tanh(x):
    """The hyperbolic tangent. Near zero, where 1 - t would cancel, x + x**3 P(x**2)."""
    z = x * x
    if x.dtype.primitive_bitwidth == 64:
        p = (z * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
        q = ((z + 1.12811678491631932402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
        p = p / q
    else:
        p = ((z * -5.7216504831597e-3 + 2.0655239605354935e-2) * z - 5.374515207326248e-2) * z
        p = (p + 1.3331515275607771e-1) * z - 3.3333285079544797e-1
    t = {tl}.exp({tl}.abs(x) * -2.0)
    far = (1.0 - t) / (1.0 + t)
    return {tl}.where(z < 0.390625, x * (1.0 + z * p), {tl}.where(x < 0, -far, far))
'''

# Near zero a polynomial of (exp(x) - 1 - x) / x**2 in f32; in f64 the digits that 1 takes from exp(x) are
# given back by the same in its logarithm (W. Kahan; D. Goldberg 1991, theorem 4).
EXPM1 = '''
@{jit}
def expm1(x):
    """exp(x) - 1, also near zero, where the difference would cancel."""
    whole = {tl}.exp(x)
    if x.dtype.primitive_bitwidth == 64:
        near = {tl}.where(whole == 1.0, x, (whole - 1.0) * (x / {tl}.log(whole)))
    else:
        p = ((x * 1.9993132876608085e-4 + 1.3997392242244664e-3) * x + 8.333072144920186e-3) * x
        p = ((p + 4.166531770724501e-2) * x + 1.6666668020570097e-1) * x + 5.000000415124607e-1
        near = x * (1.0 + x * p)
    return {tl}.where({tl}.abs(x) < 0.5, near, whole - 1.0)
'''

# Below zero u 2**(P(v) - x**2 log2(e)/2) with u = 1 / (1 + a |x|) and v = 2 u - 1, where P is fitted to
# the logarithm: a sum with erf(x / sqrt(2)) would cancel. Above it is what is left of 1.
NDTR = '''
@{jit}
def ndtr(x):
    """The share of the standard normal distribution below x."""
    t = {tl}.abs(x)
    u = 1.0 / (t * 0.4 + 1.0)
    v = u * 2.0 - 1.0
    p = ((v * 1.070092994060072e-3 - 2.3990859009041937e-3) * v - 2.986804527723396e-3) * v
    p = ((p + 1.378384219011157e-2) * v + 3.2380162921481076e-3) * v - 7.303842700284986e-2
    p = ((p * v - 2.2358351851077094e-3) * v + 8.854151230839468e-1) * v - 1.8228467983879364
    far = {tl}.exp2(p - t * t * 7.213475204444817e-1) * u
    return {tl}.where(x < 0, far, 1.0 - far)
'''
NDTR_WIDE = '''
@{jit}
def ndtr_wide(x):
    """The share of the standard normal distribution below x, of 64 bits."""
    t = {tl}.abs(x)
    u = 1.0 / (t * 0.35 + 1.0)
    v = u * 2.0 - 1.0
    p = ((v * -1.7109354366594825e-8 + 4.528039524930071e-8) * v + 8.418216278335085e-8) * v
    p = ((p - 4.042906994909915e-7) * v + 9.947828320182011e-8) * v + 1.6209332817630936e-6
    p = ((p * v - 2.444075699364922e-6) * v - 3.0399432487105286e-6) * v + 1.2613322038049513e-5
    p = ((p * v - 3.7851119146880565e-6) * v - 4.015247164139002e-5) * v + 5.448361972347992e-5
    p = ((p * v + 8.542482954492375e-5) * v - 2.625411969808508e-4) * v - 7.686769443524789e-5
    p = ((p * v + 9.654587126075573e-4) * v - 3.730816173038987e-4) * v - 3.2889595344574103e-3
    p = ((p * v + 2.9723725214821977e-3) * v + 1.2346901798527756e-2) * v - 1.557752419573229e-2
    p = ((p * v - 6.663488642835161e-2) * v + 7.423733533640349e-2) * v + 9.769857249428525e-1
    far = {tl}.exp2(p * v - 1.9813984612874838 - t * t * 7.213475204444817e-1) * u
    return {tl}.where(x < 0, far, 1.0 - far)
'''

# Polynomials fitted to erf(x)/x - 1 below 0.9 and to log2(1 - erf(x)) above, whose leading coefficient is
# negative: 1 - 2**q ends at 1. Off by 1.3 units in the last place at most. The languages' own function
# chooses among coefficients, which takes twice the instructions.
ERF = '''
@{jit}
def erf(x):
    """The error function."""
    if x.dtype.primitive_bitwidth == 64:
        found = {tl}.erf(x)
    else:
        t = {tl}.abs(x)
        z = x * x
        p = (((z * -5.862213438376784e-4 + 4.9675400368869305e-3) * z - 2.6748893782496452e-2) * z
             + 1.1281321942806244e-1) * z - 3.7612447142601013e-1
        p = p * z + 1.2837913632392883e-1
        q = (((t * -1.382792106596753e-5 + 4.4217222603037953e-4) * t - 5.160310305655003e-3) * t
             + 3.408358618617058e-2) * t - 1.5304064750671387e-1
        q = ((q * t - 9.164649248123169e-1) * t - 1.6282627582550049) * t
        far = 1.0 - {tl}.exp2(q)
        found = {tl}.where(t < 0.9, p * x + x, {tl}.where(x < 0, -far, far))
    return found
'''

# Up to 2**16 quarters of a circle are taken off in parts of pi/2 (W. Cody and W. Waite, 1980), each by
# a fused product: what is left is off by a unit in the last place at most. The languages' own functions
# choose for each element how to do so, by which the elements of a thread wait for one another, and keep
# digits of 2/pi in memory of each thread. A program calls them if one of its elements is larger. Parts of
# pi/2 are taken off, never added, and the last operation is a product: the sine of -0 is -0.
SIN = '''
@{jit}
def sin(x):
    """The sine."""
    if x.dtype.primitive_bitwidth == 64:
        made = {tl}.sin(x)
    elif ({tl}.max({tl}.abs(x)) if x.type.is_block() else {tl}.abs(x)) > 65536.0:
        made = {tl}.sin(x)
    else:
        whole = {tl}.fma(x, 0.6366197466850281, 12582912.0)
        turn = whole.to({tl}.int32, bitcast=True) - 1262485504
        whole = whole - 12582912.0
        left = {tl}.fma(whole, -1.570796251296997, x)
        left = {tl}.fma(whole, -7.549789415861596e-08, left)
        left = {tl}.fma(whole, -5.390302953474238e-15, left)
        s = left * left
        p = {tl}.fma(s, {tl}.fma(s, -1.9517233886290342e-4, 8.332177996635437e-3), -1.6666655242443085e-1)
        sine = {tl}.fma(s, p, 1.0) * left
        p = {tl}.fma(s, {tl}.fma(s, 2.4438379114144482e-5, -1.3887366512790322e-3), 4.166664555668831e-2)
        cosine = {tl}.fma(s * s, p, {tl}.fma(s, -0.5, 1.0))
        made = {tl}.where((turn & 1) == 0, sine, cosine)
        made = {tl}.where((turn & 2) == 0, made, -made)
    return made
'''
# One quarter more.
COS = (SIN.replace("sin(", "cos(").replace("The sine", "The cosine")
       .replace("- 1262485504", "- 1262485503"))

# A quotient has the digits of one number: what it leaves of the dividend is exact, and smaller by as many
# digits. A quotient of 2**254 takes twelve such steps; the first half of them by a larger divisor, of
# which no quotient is infinite. In f64 a quotient of 2**2046 takes 42.
REST = '''
@{jit}
def rest(a, b):
    """a - b q, exactly, with the whole number q towards 0 from a / b: the sign is that of a."""
    a, b = {tl}.cast(a, {tl}.float32), {tl}.abs({tl}.cast(b, {tl}.float32))
    far = {tl}.where(b < 1.0, b * 8.507059173023462e37, b)
    left = {tl}.abs(a)
    for step in range(12):
        by = {tl}.where(step < 6, far, b)
        left = {tl}.fma(-{tl}.floor({tl}.div_rn(left, by)), by, left)
    left = {tl}.where(left < 0, left + b, left)
    left = {tl}.where(left >= b, left - b, left)
    left = {tl}.where(({tl}.abs(a) < b) & (b == float("inf")), {tl}.abs(a), left)
    return {tl}.where(a < 0, -left, left)
'''
REST_WIDE = (REST.replace("rest(", "rest_wide(").replace("float32", "float64")
             .replace("range(12)", "range(42)").replace("step < 6", "step < 21")
             .replace("8.507059173023462e37", "4.49423283715579e307")
             .replace("{tl}.div_rn(left, by)", "left / by"))

# From 2**23 on (2**52 in f64) floats are whole; below, a sum with that number is rounded to a whole one.
# It has the sign of x, also where it is 0.
NEAREST = '''
@{jit}
def nearest(x):
    """x rounded to the nearest whole number, halves to the even one."""
    size = {tl}.abs(x)
    if x.dtype.primitive_bitwidth == 64:
        whole = 4503599627370496.0
        sign = x.to({tl}.int64, bitcast=True) & -9223372036854775808
        near = ((size + whole) - whole).to({tl}.int64, bitcast=True) | sign
    else:
        whole = 8388608.0
        sign = x.to({tl}.int32, bitcast=True) & -2147483648
        near = ((size + whole) - whole).to({tl}.int32, bitcast=True) | sign
    return {tl}.where(size < whole, near.to(x.dtype, bitcast=True), x)
'''

# The bits of 1.5 * 2**23 + n are those of 1.5 * 2**23, and n. Conversions take longer than additions. With
# 128 more the lowest byte is not yet that of n: what is stored of 8 bits is made by an operation of
# integers. ptxas converts what an operation of floats has made (see
# backend_triton/miscompiles.py).
NEAREST_SMALL = '''
@{jit}
def nearest_small(x):
    """x, of up to 2**21, as the nearest whole number, halves as the even one; NaN as 0."""
    near = {tl}.where(x == x, x, 0.0) + 12583040.0
    return near.to({tl}.int32, bitcast=True) - 1262485632
'''

# The same of what is a number, in half as many operations: the first limit is one of floats, so that a
# product and the sum here are not made one operation, which would round once; the last one of integers.
NEAREST_WITHIN = '''
@{jit}
def nearest_within(x, low, high):
    """The nearest whole number from low to high, up to 2**21, halves as the even one; of NaN low."""
    near = {tl}.maximum(x, low) + 12582912.0
    return {tl}.minimum(near.to({tl}.int32, bitcast=True), high + 1262485504) - 1262485504
'''

# A quotient by the divisor's reciprocal, which is one number where the divisor is one, and twice what it
# leaves of the dividend (P. Markstein, 1990). The languages' own division has a branch for each element.
# Factors keep the reciprocal a normal number: a dividend that they make infinite has an infinite quotient,
# one that they make 0 has the quotient 0. What is left of the dividend is exact where the quotient is at
# least 2**-39, which is then rounded once; smaller ones may be off by a unit in the last place. What is
# left is no number where the quotient is not finite.
DIVIDED = '''
@{jit}
def divided(a, b):
    """a / b, rounded to the nearest number where it is 2**-39 or more."""
    b = {tl}.cast(b, {tl}.float32)
    size = {tl}.abs(b)
    factor = {tl}.where(size < 5.421010862427522e-20, 1.8446744073709552e19,
                        {tl}.where(size > 1.8446744073709552e19, 5.421010862427522e-20, 1.0))
    a, b = a * factor, b * factor
    by = {tl}.div_rn({tl}.cast(1.0, {tl}.float32), b)
    first = a * by
    near = {tl}.fma({tl}.fma(-first, b, a), by, first)
    rest = {tl}.fma(-near, b, a)
    return {tl}.where(rest == rest, {tl}.fma(rest, by, near), first)
'''

# A signed division by a number that is not known takes about twice the instructions of an unsigned one.
QUOTIENT = '''
@{jit}
def quotient(a, b):
    """a // b of numbers of 32 bits, a not negative and b positive."""
    return {tl}.cast({tl}.cast(a, {tl}.uint32) // {tl}.cast(b, {tl}.uint32), {tl}.int32)
'''
REMAINDER = QUOTIENT.replace("quotient", "remainder").replace("//", "%")


def _same(name: str, function: Callable[..., Array], arity: int = 1, off: float = 4.0,
          inside: float = 0.0) -> Callee:
    """A function that has this name in both Triton and Gluon. Those of one operand are the library's."""
    return Callee(arity, function, name, name, off=off, inside=inside, flushes=arity == 1)


def _below(x: Array) -> Array:
    """The share of the standard normal distribution below each x."""
    return np.asarray(0.5 * _erfc(np.asarray(x, np.float64) * -(0.5**0.5)))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])

CALLS: dict[str, Callee] = {
    "exp": _same("exp", np.exp, inside=2.0),
    "exp2": _same("exp2", np.exp2),
    "log": _same("log", np.log),
    "log2": _same("log2", np.log2),
    "sqrt": _same("sqrt", np.sqrt),
    "rsqrt": _same("rsqrt", lambda x: 1 / np.sqrt(x)),
    "sin": Callee(1, np.sin, "sin", "sin", helper=SIN, off=5.0, flushes=True, instructions=24.0),
    "cos": Callee(1, np.cos, "cos", "cos", helper=COS, off=5.0, flushes=True, instructions=24.0),
    "tanh": Callee(1, np.tanh, "tanh", "tanh", helper=TANH, off=9.0, inside=2.0,
                   instructions=26.0),
    "expm1": Callee(1, np.expm1, "expm1", "expm1", helper=EXPM1, off=6.0, inside=2.0, flushes=True,
                    instructions=14.0),
    "ndtr": Callee(1, _below, "ndtr", "ndtr", helper=NDTR, floats=(32,), off=12.0, inside=2.0,
                   instructions=24.0),
    "ndtr_wide": Callee(1, _below, "ndtr_wide", "ndtr_wide", helper=NDTR_WIDE, floats=(64,), off=12.0,
                        inside=2.0, instructions=60.0),
    "erf": Callee(1, np.vectorize(math.erf, otypes=[np.float64]), "erf", "erf", helper=ERF,
                  flushes=True, instructions=22.0),
    "sigmoid": Callee(1, lambda x: 1 / (1 + np.exp(-x)), "sigmoid", "1.0 / (1.0 + gl.exp(-{}))",
                      off=9.0, inside=2.0, instructions=8.0),
    "rest": Callee(2, np.fmod, "rest", "rest", helper=REST, floats=(32,), off=0.0, instructions=150.0),
    "rest_wide": Callee(2, np.fmod, "rest_wide", "rest_wide", helper=REST_WIDE, floats=(64,), off=0.0,
                        instructions=400.0),
    "abs": Callee(1, np.abs, "abs", "abs", floats=(16, 32, 64), ints=True, off=0.0),
    "floor": _same("floor", np.floor, off=0.0),
    "ceil": _same("ceil", np.ceil, off=0.0),
    "nearest": Callee(1, np.rint, "nearest", "nearest", helper=NEAREST, off=0.0),
    "nearest_small": Callee(1, lambda x: np.rint(np.where(np.isnan(x), 0, x)), "nearest_small",
                            "nearest_small", helper=NEAREST_SMALL, floats=(32,), off=0.0, result=i32),
    "nearest_within": Callee(3, lambda x, low, high: np.rint(np.fmin(np.fmax(x, low), high)),
                             "nearest_within", "nearest_within", helper=NEAREST_WITHIN, off=0.0,
                             result=i32, takes=(f32, i32, i32)),
    # The languages' own division is off by up to two units in the last place in f32.
    "divided": Callee(2, np.divide, "divided", "divided", helper=DIVIDED, floats=(32,), off=1.0,
                      instructions=9.0),
    "random_bits": Callee(2, rounding.numpy_bits, "random_bits", "random_bits",
                          helper=rounding.RANDOM_BITS, floats=(),
                          ints=True, off=0.0),
    **{f"stochastic_{t}": Callee(2, rounding.in_numpy(t), f"stochastic_{t}", f"stochastic_{t}",
                                 helper=rounding.helper(t), floats=(32,),
                                 off=2.0**(25 - t.digits)) for t in rounding.SHORT},
    "quotient": Callee(2, np.floor_divide, "quotient", "quotient", helper=QUOTIENT, floats=(), ints=True,
                       off=0.0),
    "remainder": Callee(2, np.remainder, "remainder", "remainder", helper=REMAINDER, floats=(), ints=True,
                        off=0.0),
    "fma": _same("fma", multiply_add, 3, off=1.0),
}
"""Functions of values, by the name in a ``Call``."""


CALLS |= {name: Callee(n, packed_bytes.bytes_in_numpy, name, name, helper=packed_bytes.bytes_helper(n),
                       floats=(), ints=True, off=0.0, result=i32)
          for n, name in packed_bytes.BYTES.items()}
CALLS |= {name: Callee(2, packed_bytes.shifted_in_numpy(n), name, name,
                       helper=packed_bytes.shifted_helper(n), floats=(), ints=True, off=0.0, result=i32,
                       takes=(i32, i32)) for n, name in packed_bytes.SHIFTED.items()}
CALLS |= {name: Callee(3, packed_bytes.products_in_numpy(*types), name, name,
                       helper=packed_bytes.products_helper(*types), floats=(),
                       ints=True, off=0.0, result=i32, takes=(i32, i32, i32))
          for types, name in packed_bytes.PRODUCTS.items()}


def helpers(names: set[str], types: set[DType], reductions: set[str], jit: str,
            language: str) -> list[str]:
    """The source lines of the helpers that a module needs for these functions, for casts to these types
    and for these reductions, with empty lines between them."""
    known = {n for n in names if n in CALLS}
    while more := {m for n in known for m in CALLS[n].needs} - known:
        known |= more
    texts = [CALLS[n].helper for n in sorted(known)]
    texts += [t.rounding.helper for t in sorted(types, key=str) if t.rounding is not None]
    texts += [REDUCERS[n].helper for n in sorted(reductions)]
    return [line for text in texts if text
            for line in (*text.format(jit=jit, tl=language).splitlines(), "")]
