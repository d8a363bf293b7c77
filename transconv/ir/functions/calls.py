"""Functions and reductions that kernels call: one row each, with its meaning in NumPy and its spellings.

The interpreter computes a row's ``numpy``, the verifier checks arity and types, and the emitters write
``triton`` or ``gluon``. For what these languages lack the row has its source text. All reductions
propagate NaN, as in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from transconv.ir.dtype import Array, DType, f32, i32
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
    """A reduction. ``neutral``: its initial value; ``numpy``: of two values; ``helper``: the source of a
    function that combines two values, where the languages have no reduction of this name that propagates
    NaN."""

    neutral: float
    numpy: np.ufunc
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
    "sum": Reducer(0.0, np.add, Add),
    "prod": Reducer(1.0, np.multiply, Mul, _helper("prod", "The product of two values.", "a * b")),
    "max": Reducer(
        float("-inf"),
        np.maximum,
        Max,
        _helper(
            "max",
            "The greater of two values, NaN if one is.",
            "{tl}.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
        ),
    ),
    "min": Reducer(
        float("inf"),
        np.minimum,
        Min,
        _helper(
            "min",
            "The lesser of two values, NaN if one is.",
            "{tl}.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)",
        ),
    ),
}
"""The reductions, by name."""


def reducer_of(node: type[Expr]) -> str:
    """The name of the reduction that combines values by this node class; StopIteration if none does."""
    return next(name for name, row in REDUCERS.items() if row.node is node)


@dataclass(frozen=True, slots=True)
class Callee:
    """A pure function. ``numpy`` gets arrays of one type and returns that type or a wider one.

    A spelling is a name of the language (``exp``: ``tl.exp(x)``), or, with braces, an expression of the
    precedence of a division, whose operands have that of calls (``1.0 / gl.sqrt({})``).
    ``helper``: the source of a function of this name, put at the top of modules that call it; ``{jit}`` is
    the decorator and ``{tl}`` the language. ``floats``: the widths in bits of floats that it takes;
    ``ints``: whether it takes integers. ``off``: by how many half units in the last place a chip's result
    may be off; ``inside``: by how many its argument, which it rounds first. ``exp`` is 2**(x log2(e)):
    of a large x, a half unit of the product is many of the result. ``flushes``: whether chips take an
    operand below the smallest normal number as 0 (NVIDIA's libdevice does as Triton links it, for floor
    as well: ``cvt.rmi.ftz``). ``result``: the type of the result, if not that of the operands.
    ``takes``: the type of each operand, where these are not of one type. ``needs``: the rows that the
    helper calls. ``slots``: of issue that a number of f32 takes on sm_90, counted in the machine code
    (tests/backend_triton/test_slots.py): its instructions, at least the eight clocks in which the unit of
    special functions takes a warp; those of a second one pass beside other instructions. ``branches``: the
    helper has a branch that all elements of a program take alike."""

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
    slots: float = 6.0
    branches: bool = False

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


# In f32 the reciprocal of w, which is 1 at least, is rsqrt(w * w), of two instructions: a quotient takes
# eight, to scale numbers near the ends of the range. What is added to 1 may be 0 where it is below the
# smallest normal number, as exp2 is.
SIGMOID = '''
@{jit}
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    if x.dtype.primitive_bitwidth == 64:
        found = 1.0 / ({tl}.exp(-x) + 1.0)
    else:
        t = {tl}.exp2({tl}.abs(x) * -1.4426950408889634)
        w = t + 1.0
        u = {tl}.rsqrt(w * w)
        found = {tl}.where(x < 0, t * u, u)
    return found
'''

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
    if x.dtype.primitive_bitwidth == 64:
        t = {tl}.exp({tl}.abs(x) * -2.0)
        far = (1.0 - t) / (1.0 + t)
    else:
        t = {tl}.exp2({tl}.abs(x) * -2.885390081777927)
        w = t + 1.0
        far = (1.0 - t) * {tl}.rsqrt(w * w)
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
    w = t * 0.4 + 1.0
    u = {tl}.rsqrt(w * w)
    v = u * 2.0 - 1.0
    p = ((v * 1.070092994060072e-3 - 2.3990859009041937e-3) * v - 2.986804527723396e-3) * v
    p = ((p + 1.378384219011157e-2) * v + 3.2380162921481076e-3) * v - 7.303842700284986e-2
    p = ((p * v - 2.2358351851077094e-3) * v + 8.854151230839468e-1) * v - 1.8228467983879364
    far = {tl}.exp2(p - t * t * 7.213475204444817e-1) * u
    return {tl}.where(x < 0, far, 1.0 - far)
'''
# Up to 1.15 it is 1/2 + x P(x**2), whose sum is rounded once; the first coefficient, (2 pi)**-0.5, has two
# parts. Beyond, below zero, exp(-t**2/2) u P(u) with t = |x| and u = 1 / (1 + t/2), in the manner of
# M. Shepherd and J. Laframboise (Math. Comp. 36, 1981), who fit (1 + 2x) exp(x**2) erfc(x) by a polynomial
# of a fraction of x: one for all x up to where the result is 0. What rounding takes from t**2, from
# 1 + t/2 and from u is found exactly and given back at the end by one fused operation; u P(u) grows by
# about 1 + u times what u does. Above zero it is what is left of 1.
NDTR_WIDE = '''
@{jit}
def ndtr_wide(x):
    """The share of the standard normal distribution below x, of 64 bits."""
    t = {tl}.abs(x)
    t = {tl}.where(t > 64.0, 64.0, t)
    z = t * t
    p = ((z * -1.606683024853927e-13 + 4.957718864943954e-12) * z - 1.1274245367641715e-10) * z
    p = ((p + 2.2732358877622423e-9) * z - 4.122646698522417e-8) * z + 6.659692575979375e-7
    p = ((p * z - 9.444656232847827e-6) * z + 1.1543468761174224e-4) * z - 1.1873282154800794e-3
    p = ((p * z + 9.973557010035805e-3) * z - 6.649038006690544e-2) * z - 2.49232720227773e-17
    near = {tl}.fma(x, p + 3.989422804014327e-1, 0.5)
    d = t * 0.5 + 1.0
    u = 1.0 / d
    v = u * 3.40625 - 1.1640625
    p = ((v * -1.522676895219917e-11 + 8.104148631241194e-12) * v + 1.4113852262559256e-10) * v
    p = ((p - 2.0663459933445232e-10) * v - 3.992783622052754e-10) * v + 1.519190729818353e-9
    p = ((p * v - 1.410246389999631e-9) * v - 3.727492047902781e-9) * v + 1.6554138856559876e-8
    p = ((p * v - 1.969780816349747e-8) * v - 5.029041288665708e-8) * v + 2.3701220138857175e-7
    p = ((p * v - 2.1303919941443772e-7) * v - 1.1198703777881253e-6) * v + 3.829348828695634e-6
    p = ((p * v + 8.727848984780134e-7) * v - 3.23918791990658e-5) * v + 4.504435149081569e-5
    p = ((p * v + 2.515373363155618e-4) * v - 7.457272692769339e-4) * v - 2.8929319980948343e-3
    p = ((p * v + 1.0520428830451121e-2) * v + 8.882669334232744e-2) * v + 2.8576773817064166e-1
    whole = d - 1.0
    of_d = (1.0 - (d - whole)) + (t * 0.5 - whole)
    of_u = {tl}.fma(-d, u, 1.0) - u * of_d
    made = {tl}.exp(z * -0.5) * (p * u)
    far = {tl}.fma(made, of_u * (u + 1.0) - {tl}.fma(t, t, -z) * 0.5, made)
    far = {tl}.where(x < 0, far, 1.0 - far)
    return {tl}.where(t < 1.15, near, far)
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

# Up to 2**16 half circles are taken off in parts of pi (W. Cody and W. Waite, 1980), each by a fused
# product: what is left is off by a unit in the last place at most, and has one polynomial. The languages'
# own functions choose for each element how to do so, by which the elements of a thread wait for one
# another, and keep digits of 2/pi in memory of each thread. A program calls them if one of its elements is
# larger. The lowest bit of an integer in a float is the sign; the sine of -0 is -0.
CIRCULAR = '''
@{jit}
def NAME(x):
    """The NAMEine."""
    if x.dtype.primitive_bitwidth == 64:
        made = {tl}.NAME(x)
    elif ({tl}.max({tl}.abs(x)) if x.type.is_block() else {tl}.abs(x)) > 65536.0:
        made = {tl}.NAME(x)
    else:
WHOLE
        left = {tl}.fma(whole, -3.1415927410125732, size)
        left = {tl}.fma(whole, 8.742277657347586e-8, left)
        left = {tl}.fma(whole, 3.4302490200117637e-15, left)
        s = left * left
        p = {tl}.fma(s, 2.6057630293507827e-6, -1.9809661898761988e-4)
        p = {tl}.fma(s, {tl}.fma(s, p, 8.33306834101677e-3), -1.6666659712791443e-1)
        made = {tl}.fma(left * s, p, left).to({tl}.int32, bitcast=True) ^ sign
        made = made.to({tl}.float32, bitcast=True)
    return made
'''
SIN = (
    CIRCULAR.replace("NAMEine", "sine")
    .replace("NAME", "sin")
    .replace(
        "WHOLE",
        """\
        size = {tl}.abs(x)
        whole = {tl}.fma(size, 0.31830987334251404, 12582912.0)
        sign = (whole.to({tl}.int32, bitcast=True) << 31) ^ (x.to({tl}.int32, bitcast=True) & -2147483648)
        whole = whole - 12582912.0""",
    )
)
COS = CIRCULAR.replace("NAME", "cos").replace(
    "WHOLE",
    """\
        size = x
        whole = {tl}.fma(x, 0.31830987334251404, -0.5) + 12582913.0
        sign = whole.to({tl}.int32, bitcast=True) << 31
        whole = whole - 12582913.0 + 0.5""",
)

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
REST_WIDE = (
    REST.replace("rest(", "rest_wide(")
    .replace("float32", "float64")
    .replace("range(12)", "range(42)")
    .replace("step < 6", "step < 21")
    .replace("8.507059173023462e37", "4.49423283715579e307")
    .replace("{tl}.div_rn(left, by)", "left / by")
)

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


def _same(
    name: str,
    function: Callable[..., Array],
    slots: float,
    arity: int = 1,
    off: float = 4.0,
    inside: float = 0.0,
) -> Callee:
    """A function that has this name in both Triton and Gluon. Those of one operand are the library's."""
    return Callee(arity, function, name, name, off=off, inside=inside, flushes=arity == 1, slots=slots)


def _below(x: Array) -> Array:
    """The share of the standard normal distribution below each x: erfc(y) / 2 with y = -x / sqrt(2). What
    rounding takes from a large y, d here, is many units of the result, which has the slope -exp(-y**2)."""
    x = np.asarray(x, np.float64)
    root = np.full_like(x, -(0.5**0.5))
    with np.errstate(all="ignore"):
        y = x * root
        d = rounding.multiply_add(x, root, -y) + x * 4.833646656726457e-17
        taken = np.where(np.abs(y) < 30, d * np.exp(-y * y) * math.pi**-0.5, 0.0)
        return np.asarray(0.5 * _erfc(y) - taken)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])

CALLS: dict[str, Callee] = {
    "exp": _same("exp", np.exp, 8.0, inside=2.0),
    "exp2": _same("exp2", np.exp2, 8.0),
    "log": _same("log", np.log, 25.0),
    "log2": _same("log2", np.log2, 27.0),
    "sqrt": _same("sqrt", np.sqrt, 8.0),
    "rsqrt": _same("rsqrt", lambda x: 1 / np.sqrt(x), 8.0),
    "sin": Callee(1, np.sin, "sin", "sin", helper=SIN, off=5.0, flushes=True, slots=16.0, branches=True),
    "cos": Callee(1, np.cos, "cos", "cos", helper=COS, off=5.0, flushes=True, slots=17.0, branches=True),
    "tanh": Callee(1, np.tanh, "tanh", "tanh", helper=TANH, off=9.0, inside=2.0, slots=17.0),
    "expm1": Callee(
        1, np.expm1, "expm1", "expm1", helper=EXPM1, off=6.0, inside=2.0, flushes=True, slots=14.0
    ),
    "ndtr": Callee(1, _below, "ndtr", "ndtr", helper=NDTR, floats=(32,), off=12.0, inside=2.0, slots=18.0),
    "ndtr_wide": Callee(
        1, _below, "ndtr_wide", "ndtr_wide", helper=NDTR_WIDE, floats=(64,), off=7.0, slots=75.0
    ),
    "erf": Callee(
        1, np.vectorize(math.erf, otypes=[np.float64]), "erf", "erf", helper=ERF, flushes=True, slots=19.0
    ),
    "sigmoid": Callee(
        1,
        lambda x: 1 / (1 + np.exp(-x)),
        "sigmoid",
        "sigmoid",
        helper=SIGMOID,
        off=9.0,
        inside=2.0,
        slots=8.0,
    ),
    "rest": Callee(2, np.fmod, "rest", "rest", helper=REST, floats=(32,), off=0.0, slots=150.0),
    "rest_wide": Callee(
        2, np.fmod, "rest_wide", "rest_wide", helper=REST_WIDE, floats=(64,), off=0.0, slots=400.0
    ),
    "abs": Callee(1, np.abs, "abs", "abs", floats=(16, 32, 64), ints=True, off=0.0, slots=1.0),
    "floor": _same("floor", np.floor, 1.0, off=0.0),
    "ceil": _same("ceil", np.ceil, 1.0, off=0.0),
    "nearest": Callee(1, np.rint, "nearest", "nearest", helper=NEAREST, off=0.0),
    "nearest_small": Callee(
        1,
        lambda x: np.rint(np.where(np.isnan(x), 0, x)),
        "nearest_small",
        "nearest_small",
        helper=NEAREST_SMALL,
        floats=(32,),
        off=0.0,
        result=i32,
        slots=4.0,
    ),
    "nearest_within": Callee(
        3,
        lambda x, low, high: np.rint(np.fmin(np.fmax(x, low), high)),
        "nearest_within",
        "nearest_within",
        helper=NEAREST_WITHIN,
        off=0.0,
        result=i32,
        takes=(f32, i32, i32),
        slots=4.0,
    ),
    "exponent": Callee(
        1,
        packed_bytes.exponent_in_numpy,
        "exponent",
        "exponent",
        helper=packed_bytes.EXPONENT,
        floats=(32,),
        off=0.0,
        result=i32,
        slots=2.0,
    ),
    # The languages' own division is off by up to two units in the last place in f32.
    "divided": Callee(
        2, np.divide, "divided", "divided", helper=DIVIDED, floats=(32,), off=1.0, slots=8.0
    ),
    "random_bits": Callee(
        2,
        rounding.numpy_bits,
        "random_bits",
        "random_bits",
        helper=rounding.RANDOM_BITS,
        floats=(),
        ints=True,
        off=0.0,
    ),
    **{
        f"stochastic_{t}": Callee(
            2,
            rounding.in_numpy(t),
            f"stochastic_{t}",
            f"stochastic_{t}",
            helper=rounding.helper(t),
            floats=(32,),
            off=2.0 ** (25 - t.digits),
            slots=17.0,
        )
        for t in rounding.SHORT
    },
    "quotient": Callee(
        2, np.floor_divide, "quotient", "quotient", helper=QUOTIENT, floats=(), ints=True, off=0.0
    ),
    "remainder": Callee(
        2, np.remainder, "remainder", "remainder", helper=REMAINDER, floats=(), ints=True, off=0.0
    ),
    "fma": _same("fma", rounding.multiply_add, 1.0, 3, off=1.0),
}
"""Functions of values, by the name in a ``Call``."""


def _of_codes(
    name: str,
    arity: int,
    numpy: Callable[..., Array],
    helper: str,
    result: DType = i32,
    typed: bool = True,
) -> Callee:
    """A function of integers, which are i32 where ``typed``, without rounding on any chip."""
    takes = (i32,) * arity * typed
    return Callee(
        arity, numpy, name, name, helper=helper, floats=(), ints=True, off=0.0, result=result, takes=takes
    )


CALLS |= {
    name: _of_codes(name, n, packed_bytes.bytes_in_numpy, packed_bytes.bytes_helper(n), typed=False)
    for n, name in packed_bytes.BYTES.items()
}
CALLS |= {
    name: _of_codes(name, 2, packed_bytes.shifted_in_numpy(n), packed_bytes.shifted_helper(n))
    for n, name in packed_bytes.SHIFTED.items()
}
CALLS |= {
    name: _of_codes(name, 3, packed_bytes.products_in_numpy(*types), packed_bytes.products_helper(*types))
    for types, name in packed_bytes.PRODUCTS.items()
}
CALLS |= {name: _of_codes(name, 1, *row, result=f32) for name, row in packed_bytes.CODES.items()}


def helpers(
    names: set[str], types: set[DType], reductions: set[str], jit: str, language: str
) -> list[str]:
    """The source lines of the helpers that a module needs for these functions, for casts to these types
    and for these reductions, with empty lines between them."""
    known = {n for n in names if n in CALLS}
    while more := {m for n in known for m in CALLS[n].needs} - known:
        known |= more
    texts = [CALLS[n].helper for n in sorted(known)]
    texts += [t.rounding.helper for t in sorted(types, key=str) if t.rounding is not None]
    texts += [REDUCERS[n].helper for n in sorted(reductions)]
    return [
        line for text in texts if text for line in (*text.format(jit=jit, tl=language).splitlines(), "")
    ]
