"""How far each function of one value may be off, over all exponents, and what it is compared with.

``BOUNDS`` has a row for each operation of the table and for each derivative (``tanh'``); ``bound_of`` has
what is asked of a type.
A result is allowed ``units`` units in its last place, and ``inside`` half units of what it is computed
from, which is first rounded: 2**(x log2(e)) of a large x. The references are of 64 digits (80-bit
floats), or of 40 decimal digits where NumPy has no such function, and written without differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mpmath
import numpy as np
import torch

from transconv import ir
from transconv.backend_triton.emitters import triton
from transconv.backend_triton.launch.interpreter import prepare_interpreter
from transconv.backend_triton.launch.jit_module import load
from transconv.compute import OPS
from transconv.kernel.functions import FUNCTIONS

L = np.longdouble
PI = L("3.14159265358979323846264338327950288")
Array = np.ndarray[Any, Any]
LANES = 4096


@dataclass(frozen=True)
class Bound:
    """``units`` and ``inside`` as above; ``of``: the reference; ``positive``: only of such numbers;
    ``most``: the largest absolute value that is asked for."""

    of: Callable[[Array], Array]
    units: float = 1.0
    inside: float = 0.0
    positive: bool = False
    most: float = np.inf


def precise(function: Callable[[Any], Any]) -> Callable[[Array], Array]:
    """A function of mpmath's numbers as one of arrays of 80-bit floats."""

    def each(x: Array) -> Array:
        with mpmath.workdps(40):
            return np.array([L(mpmath.nstr(function(_exact(v)), 25)) for v in x], L)

    return each


def _exact(v: Any) -> Any:
    mantissa, exponent = np.frexp(v)
    high = np.float64(mantissa)
    return (mpmath.mpf(float(high)) + mpmath.mpf(float(mantissa - high))) * mpmath.mpf(2) ** int(exponent)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def sigmoid_slope(x: Array) -> Array:
    t = np.exp(-np.abs(x))
    return t / (1 + t) ** 2


def tanh_softplus(x: Array) -> Array:
    return np.tanh(np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0))


def mish_rest(x: Array) -> Array:
    """1 - tanh(softplus(x))**2."""
    t = np.exp(-np.abs(x))
    n, s = np.where(x > 0, 1 + 2 * t, t * (t + 2)), np.where(x > 0, 2 * t * t, 2)
    return s * (2 * n + s) / (n + s) ** 2


def inner(x: Array) -> Array:
    return (x + x**3 * L("0.044715")) * 2 * np.sqrt(2 / PI)


def gelu_tanh_slope(x: Array) -> Array:
    near = np.clip(x, -100, 100)
    grows = (1 + 3 * L("0.044715") * near**2) * 2 * np.sqrt(2 / PI)
    return sigmoid(inner(x)) + near * sigmoid_slope(inner(near)) * grows


def density(x: Array) -> Array:
    return np.exp(-x * x / 2) / np.sqrt(2 * PI)


def where(
    test: Callable[[Array], Array], yes: Callable[[Array], Array], no: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    return lambda x: np.where(test(x), yes(x), no(x))


def constant(n: float) -> Callable[[Array], Array]:
    return lambda x: np.full(x.shape, L(n))


@cache
def _ndtr_of(values: tuple[Any, ...]) -> Array:
    return precise(lambda v: mpmath.erfc(-v / mpmath.sqrt(2)) / 2)(np.array(values, L))


def ndtr(x: Array) -> Array:
    return _ndtr_of(tuple(np.clip(x, -200, 200)))


def is_above(x: Array) -> Array:
    return x > 0


ZERO, ONE = constant(0.0), constant(1.0)
erf = precise(mpmath.erf)
BOUNDS = {
    "relu": Bound(lambda x: np.maximum(x, 0), 0),
    "relu'": Bound(where(is_above, ONE, ZERO), 0),
    "relu6": Bound(lambda x: np.clip(x, 0, 6), 0),
    "relu6'": Bound(where(lambda x: (x > 0) & (x < 6), ONE, ZERO), 0),
    "sigmoid": Bound(sigmoid, 3, 2),
    "sigmoid'": Bound(sigmoid_slope, 4, 2),
    "silu": Bound(lambda x: x * sigmoid(x), 4, 2),
    "silu'": Bound(lambda x: sigmoid(x) + x * sigmoid_slope(x), 5, 6),
    "tanh": Bound(np.tanh, 3),
    "tanh'": Bound(lambda x: 1 / np.cosh(x) ** 2, 5, 2),
    "gelu": Bound(lambda x: x * ndtr(x), 6, 3),
    "gelu'": Bound(lambda x: ndtr(x) + x * density(x), 8, 8),
    "gelu_tanh": Bound(lambda x: x * sigmoid(inner(x)), 5, 6),
    "gelu_tanh'": Bound(gelu_tanh_slope, 8, 12),
    "hardswish": Bound(lambda x: x * (np.clip(x + 3, 0, 6) / 6), 2, 2),
    "hardswish'": Bound(lambda x: np.where(x <= -3, 0, np.where(x >= 3, 1, x / 3 + L(0.5))), 2, 2),
    "softplus": Bound(
        where(
            lambda x: x > 20,
            lambda x: x,  # as in torch
            lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
        ),
        4,
        2,
    ),
    "softplus'": Bound(where(lambda x: x > 20, ONE, sigmoid), 3, 2),
    "elu": Bound(lambda x: np.where(x > 0, x, np.expm1(x)), 3),
    "elu'": Bound(lambda x: np.where(x > 0, 1, np.exp(x)), 3, 2),
    "leaky_relu": Bound(lambda x: np.where(x > 0, x, x * L("0.01")), 1),
    "leaky_relu'": Bound(where(is_above, ONE, constant(0.01)), 1),
    "clamp": Bound(lambda x: x, 0),
    "clamp'": Bound(ONE, 0),
    "mish": Bound(lambda x: x * tanh_softplus(x), 5, 2),
    "mish'": Bound(lambda x: tanh_softplus(x) + x * mish_rest(x) * sigmoid(x), 8, 8),
    "pow": Bound(lambda x: x * x, 1),
    "pow'": Bound(lambda x: 2 * x, 0),
    "abs": Bound(np.abs, 0),
    "abs'": Bound(np.sign, 0),
    "exp": Bound(np.exp, 2, 2),
    "exp'": Bound(np.exp, 2, 2),
    "exp2": Bound(np.exp2, 2),
    "exp2'": Bound(lambda x: np.exp2(x) * np.log(L(2)), 3),
    "expm1": Bound(np.expm1, 3, 2),
    "expm1'": Bound(np.exp, 2, 2),
    "log": Bound(np.log, 2, positive=True),
    "log'": Bound(lambda x: 1 / x, 2, positive=True),
    "log2": Bound(np.log2, 2, positive=True),
    "log2'": Bound(lambda x: 1 / np.log(L(2)) / x, 2, positive=True),
    "sqrt": Bound(np.sqrt, 2, positive=True),
    "sqrt'": Bound(lambda x: L(0.5) / np.sqrt(x), 3, positive=True),
    "rsqrt": Bound(lambda x: 1 / np.sqrt(x), 2, positive=True),
    # A cube of a quotient by a root: three factors are rounded twice and two products once. That is 8
    # times half a unit of a significand of 1, which is a whole one of a significand near 2.
    "rsqrt'": Bound(lambda x: L(-0.5) / np.sqrt(x) / x, 8, positive=True),
    "sin": Bound(precise(mpmath.sin), 1.5),
    "sin'": Bound(precise(mpmath.cos), 1.5),
    "cos": Bound(precise(mpmath.cos), 1.5),
    "cos'": Bound(precise(lambda v: -mpmath.sin(v)), 1.5),
    "erf": Bound(erf, 2),
    "erf'": Bound(lambda x: 2 * np.exp(-x * x) / np.sqrt(PI), 4, 4),
    "floor": Bound(np.floor, 0),
    "floor'": Bound(ZERO, 0),
    "ceil": Bound(np.ceil, 0),
    "ceil'": Bound(ZERO, 0),
    "round": Bound(np.rint, 0),
    "round'": Bound(ZERO, 0),
    "ndtr": Bound(ndtr, 6, 3),
    "ndtr'": Bound(density, 4, 4),
    "neg": Bound(lambda x: -x, 0),
    "neg'": Bound(constant(-1.0), 0),
}
"""Of each operation of one value, and of its derivative."""
WIDE = {"ndtr": (3.0, 0.0), "gelu": (4.0, 0.0), "erf": (1.5, 0.0)}
"""``units`` and ``inside`` in f64 where they are smaller."""


def bound_of(name: str, dtype: ir.DType) -> Bound:
    """The bound of an operation or of its derivative in a type."""
    units, inside = WIDE.get(name, (0.0, 0.0)) if dtype is ir.f64 else (0.0, 0.0)
    return replace(BOUNDS[name], units=units, inside=inside) if units else BOUNDS[name]


def points(bound: Bound, dtype: ir.DType) -> Array:
    """Numbers of every exponent, of both signs, and many of those between -20 and 20."""
    few = {16: 24, 32: 4, 64: 1}[dtype.bits]
    info = np.finfo(np.float32 if dtype is ir.bf16 else dtype.numpy)
    exponents = np.arange(info.minexp, info.maxexp - (dtype.bits == 16))
    random = np.random.default_rng(5)
    digits = 1 + random.random((few if dtype is not ir.bf16 else 4, len(exponents)))
    far = np.ldexp(digits, exponents).ravel()
    near = np.concatenate([np.linspace(-20, 20, 301), np.linspace(-1, 1, 101), -np.geomspace(1, 200, 60)])
    signed = [-far] if dtype.bits < 64 else []
    far = far if signed or bound.positive else far * (-1) ** np.arange(len(far))
    x = np.concatenate([far, near] if bound.positive else [far, *signed, near])
    x = x[x > 0] if bound.positive else x
    held = ir.convert(x[np.abs(x) <= bound.most], dtype)
    held = held[(np.abs(held) >= info.tiny) | (held == 0)]
    assert len(held) <= LANES
    return np.asarray(np.resize(held[np.isfinite(held)], LANES))


def excess(bound: Bound, x: Array, got: Array, dtype: ir.DType) -> Array:
    """By which factor each result is off more than it may be; infinite where a number is missing."""
    exact = np.unique(x).astype(L)
    with np.errstate(all="ignore"):
        want, moved = bound.of(exact), bound.of(exact * (1 + L(2) ** -30))
        steep = np.abs(moved - want) * L(2) ** 30
        at = np.searchsorted(exact, x.astype(L))
        want, steep = want[at], steep[at]
        most = L(np.finfo(np.float32 if dtype is ir.bf16 else dtype.numpy).max)
        smallest = L(np.finfo(np.float32 if dtype is ir.bf16 else dtype.numpy).tiny)
        size = np.clip(np.abs(want), smallest, most)
        unit = L(2) ** (np.floor(np.log2(size)) + 1 - dtype.digits)
        allowed = bound.units * unit + bound.inside * np.minimum(steep, most) * L(2) ** -dtype.digits
        allowed += smallest * np.maximum(1, np.abs(x.astype(L))) * (bound.units > 0)
        off = np.abs(got.astype(L) - want)
        over = np.abs(want) >= most * (1 - L(2) ** -14)
        off = np.where(over & (np.sign(got) == np.sign(want)) & (np.abs(got) >= most / 2), 0, off)
        found = np.where(off > 0, off / np.where(allowed > 0, allowed, L(2) ** -16000), 0)
    return np.asarray(np.where(np.isnan(off), np.inf, found))


def kernel(value: Callable[[ir.Expr], ir.Expr], dtype: ir.DType) -> ir.Kernel:
    """y[i] = value(x[i]) of a type, whose 16-bit numbers are computed in f32."""
    x, y = (ir.Tensor(n, ("x",), (LANES,), ir.Layout.dense(dtype, (LANES,))) for n in "xy")
    held, program = ir.Var("v", dtype), ir.Var("pid")
    at = program * LANES + ir.Lane("i", LANES, 1)
    made = ir.Cast(value(ir.Cast(held, ir.f32)), dtype) if dtype.bits == 16 else value(held)
    body = ir.seq(ir.Let(held, ir.Load(x, at, ir.TRUE)), ir.Store(y, at, made, ir.TRUE))
    return ir.Kernel("each", (x, y), ir.For(program, 1, body, kind="grid"))


def interpreted(value: Callable[[ir.Expr], ir.Expr], x: Array, dtype: ir.DType) -> Array:
    """The results of the IR's interpreter."""
    buffers = {"x": x, "y": np.zeros(LANES, x.dtype)}
    with np.errstate(all="ignore"):
        ir.run(kernel(value, dtype), ir.Memory(buffers))
    return buffers["y"]


def emitted(value: Callable[[ir.Expr], ir.Expr], x: Array, dtype: ir.DType, device: str = "cpu") -> Array:
    """The results of the emitted kernel, on a CPU in Triton's interpreter."""
    made = kernel(value, dtype)
    ir.verify(made)
    function = load(triton.emit(made), "each")
    if device == "cpu":
        prepare_interpreter()
    held = torch.bfloat16 if dtype is ir.bf16 else None
    given = torch.from_numpy(x).to(device, held)
    out = torch.zeros_like(given)
    with np.errstate(all="ignore"):
        function[(1,)](given, out)
    return out.cpu().to(torch.float64 if dtype.bits == 64 else torch.float32).numpy()


EXPONENTS = (0.0, 1.0, 2.0, 3.0, 12.0, 33.0, -1.0, -8.0, 0.5, -0.25, 2.7, -3.3, 40.5, 1e-3)


def power_excess(x: Array, exponent: float, got: Array, dtype: ir.DType) -> Array:
    """By which factor powers are off more than they may be. Of |x|**b, which is 2**(b log2|x|), a
    logarithm may be off by two units and its product with b is rounded once: each half unit of the product
    is as many of the result as the product is long, times log(2). Two units more are those of exp2."""
    of = np.float32 if dtype is ir.f32 else np.float64
    b = L(of(exponent))
    with np.errstate(all="ignore"):
        want = np.power(np.abs(x.astype(L)), b)
        whole, odd = float(b).is_integer(), float(b) % 2 == 1
        want = want if b == 0 else np.where(x < 0, (-want if odd else want) if whole else np.nan, want)
        most, smallest = L(np.finfo(of).max), L(np.finfo(of).tiny)
        size = np.clip(np.abs(want), smallest, most)
        unit = L(2) ** (np.floor(np.log2(size)) + 1 - dtype.digits)
        turns = np.abs(np.log2(np.abs(x.astype(L))) * b)
        half = np.log(L(2)) * L(2) ** -dtype.digits
        allowed = 2 * unit + size * np.minimum(turns, 2048) * 5 * half + smallest
        off = np.abs(got.astype(L) - want)
    alike = (np.isnan(got) & np.isnan(want)) | (got == want.astype(of))
    over = (np.abs(want) >= most * (1 - L(2) ** -12)) & (np.abs(got) >= most / 2)
    found = np.where(alike | over & (np.sign(got) == np.sign(want)), 0, off / allowed)
    return np.asarray(np.where(np.isnan(found), np.inf, found))


def powers(exponent: float, dtype: ir.DType, device: str = "cpu") -> tuple[Array, Array, Array]:
    """Numbers of every exponent and of both signs; their powers by the kernels' function, as emitted; and
    by which factor each is off more than it may be."""
    x = points(BOUNDS["exp2"], dtype)
    row = FUNCTIONS["power"].expression
    got = emitted(lambda v: row(v, ir.Const(exponent, dtype)), x, dtype, device)
    return x, got, power_excess(x, exponent, got, dtype)


EDGES = (0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3.0, -3.0, 0.3, -0.3, 1e30, -1e30)
# Torch multiplies an infinite factor by 0 there; the limits are 1 and 0.
LIMITS = {"gelu_tanh'": {np.inf: 1.0, -np.inf: 0.0, 1e30: 1.0, -1e30: 0.0}}
# The greater of -0 and 0 may be either; so may be the 0 that a derivative ends in.
OF_ANY_SIGN = {"relu", "relu6"}


def wrong_edges(
    name: str, value: Callable[[ir.Expr], ir.Expr], dtype: ir.DType, device: str = ""
) -> list[str]:
    """Where an operation of the table, or its derivative (``tanh'``), is not what torch computes in f64 of
    zeros, infinities, NaN and numbers around, signs of zeros among them. ``device``: that of the emitted
    kernel; empty for the IR's interpreter."""
    x = np.resize(np.array(EDGES, dtype.numpy), LANES)
    t = torch.tensor(x.astype(np.float64), requires_grad=name.endswith("'"))  # of few torch's differ
    made = OPS[name.rstrip("'")].function()(t)
    want = (torch.autograd.grad(made.sum(), t)[0] if name.endswith("'") else made).numpy()
    got = (emitted(value, x, dtype, device) if device else interpreted(value, x, dtype)).astype(np.float64)
    with np.errstate(over="ignore"):
        held = want.astype(dtype.numpy).astype(np.float64)
    found = []
    for of, a, b in zip(EDGES, got, held, strict=False):
        b = LIMITS.get(name, {}).get(of, b)
        same = a == b or (np.isnan(a) and np.isnan(b)) or abs(a - b) <= 1e-5 * abs(b)
        if same and a == 0 == b and not name.endswith("'") and name not in OF_ANY_SIGN:
            same = np.signbit(a) == np.signbit(b)
        found += [] if same else [f"{name}({of}) is {a} instead of {b}"]
    return found
