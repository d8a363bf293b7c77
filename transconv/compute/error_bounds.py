"""Bounds on the rounding errors of a kernel's values, computed along with the values.

    let s = sum(x; k)       error share * sum(|x|; k)
    let y = tanh(s)         error |tanh(s + error) - tanh(s)|, the slope of tanh where s is

A sum's own error is a fraction of the sum of its absolute terms. Later steps are evaluated at the value
plus and minus its error, so functions with steep slopes need no constants.

    x*0.5*(1 + erf(x*c))     1 + erf is off by half a unit in the last place of 1, also where it is 1e-6

Each operation of an expression rounds its own result. What becomes of that in the rest of the expression
is found by evaluating the rest with the result moved: cancellations count, and errors that an expression
is written to cancel do not (``log(u)/(u - 1)`` hardly changes with u).

    p - p,  p = x*x          fma(x, x, -p): one of both is not rounded, the difference is not 0

Compilers make one instruction of a product and the sum that it is added to. So where a product that is
used several times is added, its rounding there is none of the others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import prod

import numpy as np

from transconv import ir
from transconv.compute.compute import Compute
from transconv.compute.kernel_split import kernels
from transconv.ir import f32, tf32

SUMMED = 2.0**-18  # the error of a sum in f32, as a fraction of the sum of absolute terms
TF32 = tf32.spacing  # the same if both factors are rounded to tf32
# The error of 32 terms of 8-bit floats, as a fraction of the sum of absolute terms: on an H200 at most
# 2^-10.7 a step, for sums of one sign (0.14 after 8192 terms, 7.2e-4 where sums move to f32).
SHORT = 2.0**-10
"""How far sums of products of 8-bit floats may be off by each 32 of them, of the sum of absolute terms."""
ROUNDINGS = 4.0  # the same for a stored result
SMALLEST = 2.0**-126  # of normal numbers in f32; chips keep fewer digits of smaller ones, or none
# What a part of a product loses below that grows by the factors behind it: of random ones by more than
# this for about one row in a million.
GROWN = 2.0**10


def share_of(compute: Compute) -> float:
    """The error of a computation's sums, as a fraction of the sum of absolute terms: of several kernels
    that of the least exact one."""
    return max(_share_of_one(c) for c in _products(compute))


def _share_of_one(compute: Compute) -> float:
    if (chain := short_chain(compute)) is not None:
        return SHORT * chain
    if compute.sum is not None and compute.acc.kind == "float" and compute.acc.bits < 32:
        return compute.acc.spacing * prod(x.size for x in compute.axes_of("K"))  # each addition rounds
    return TF32 if is_tf32(compute) else SUMMED


def _products(compute: Compute) -> tuple[Compute, ...]:
    """The computations of kernels, one of which may be a product."""
    several = compute.factors is None and compute.sum is not None
    return kernels(compute) if several else (compute,)


def short_chain(compute: Compute) -> float | None:
    """The steps of 32 terms in a sum of products of 8-bit floats that a matrix unit may add with some 13
    bits (wgmma); None for other products. With math=ieee sums move to f32."""
    if compute.factors is None or not all(f.var.type.is_short for f in compute.factors):
        return None
    terms = prod(x.size for x in compute.axes_of("K"))
    return max(1.0, (min(terms, ir.EXACT_TERMS) if compute.math == "ieee" else terms) / 32)


def is_tf32(compute: Compute) -> bool:
    """Whether this is a product with an f32 operand and ``math`` tf32, or one of its kernels is."""
    return compute.math == "tf32" and any(
        c.factors is not None
        and any(t is f32 for t in (*(x.dtype for x in c.tensors), *(f.var.type for f in c.factors)))
        for c in _products(compute)
    )


def allowed(value: ir.Array, error: ir.Array, dtype: ir.DType) -> ir.Array:
    """The allowed difference between stored elements of a type and ``value``, known to within
    ``error``."""
    place = 2.0**-dtype.digits
    return np.asarray(ROUNDINGS * (place + 2.0**-20) * np.maximum(1.0, np.abs(value)) + error)


def rounds_once(value: ir.Array, error: ir.Array, dtype: ir.DType) -> ir.Array:
    """Where a stored element of a type is certainly ``value`` rounded once: where all that is within
    ``error`` of it is rounded to one number. Close to the middle of two numbers, and where nearly equal
    ones are subtracted, it is not. The error of integers is less than a half."""
    if dtype.kind != "float":
        return np.asarray(error < 0.5)
    with np.errstate(invalid="ignore"):
        return np.asarray(_nearest(value - error, dtype) == _nearest(value + error, dtype))


def _nearest(value: ir.Array, dtype: ir.DType) -> ir.Array:
    """The numbers of a type without a largest one that are nearest to values."""
    place = np.ldexp(dtype.spacing, np.frexp(value)[1] - 1)
    place = np.maximum(place, 2 * dtype.tiny)
    return np.asarray(np.rint(value / place) * place)


def _underflow(factors: ir.Array, axes: tuple[int, ...]) -> ir.Array:
    """What products of absolute values lose where some of the factors alone may be too small for f32, in
    whichever order they are multiplied. A factor 0 gives 0 behind that as well."""
    least = np.prod(np.where(factors > 0, np.minimum(factors, 1.0), 1.0), axes, keepdims=True)
    lost = (least < SMALLEST) & np.all(factors > 0, axes, keepdims=True)
    return np.where(lost, SMALLEST * GROWN, 0.0)


def reduced(
    op: str, terms: ir.Array, found: ir.Array, error: ir.Array | None, axes: tuple[int, ...], share: float
) -> ir.Array:
    """The error of a reduction, whose terms have the errors ``error``; ``share`` as in ``share_of``."""
    off = np.zeros((1,) * terms.ndim) if error is None else error
    sizes = np.where(np.isfinite(terms), np.abs(terms), 0.0)
    if op == "sum":
        return np.asarray(
            share * np.sum(sizes, axes, keepdims=True)
            + np.sum(np.broadcast_to(off, terms.shape), axes, keepdims=True)
        )
    if op == "prod":
        each = np.where(sizes > 0, off / np.where(sizes > 0, sizes, 1.0), 0.0) + 2.0**-22
        each = np.sum(np.broadcast_to(each, terms.shape), axes, keepdims=True)
        return np.asarray(np.abs(found) * each + _underflow(sizes, axes))
    return np.asarray(np.max(np.broadcast_to(off, terms.shape), axes, keepdims=True))


DIVISION = 4.0
"""Half units in the last place by which a quotient of f32 may be off: chips approximate it."""


def own(
    e: ir.Expr, exact: Callable[[ir.Expr], ir.Expr], at: ir.Evaluator, products: Collection[ir.Expr] = ()
) -> ir.Array:
    """The error of an expression from the roundings of its own operations; ``at`` has the values of its
    variables, ``exact`` gives an expression in f64. ``products``: the variables that are products."""
    rounds = {x: _half_units(x) for x in _parts(e) if x.dtype.kind == "float" and _is_off(x)}
    if not rounds:
        return np.zeros((1,) * at.rank)
    wide = {part: exact(part) for part in (e, *rounds)}
    whole = wide[e]
    values = at.parts(whole)
    moves: dict[ir.Expr, ir.Array] = {}
    shared = _used_again(e, products)
    for part, units in rounds.items():
        off = _rounding(part, wide[part], units, values, at)
        if isinstance(part, (ir.Add, ir.Sub)):
            for x in part.children():
                off = off + (part.dtype.spacing / 2 * _size(values[exact(x)]) if x in shared else 0.0)
        moves[wide[part]] = np.maximum(off, moves.get(wide[part], 0.0))
    total = np.zeros_like(values[whole], np.float64)
    for part, off in moves.items():
        total = total + (off if part is whole else moved(whole, part, off, values, at))
    return total


def _used_again(e: ir.Expr, products: Collection[ir.Expr]) -> set[ir.Expr]:
    """The products that an expression uses more than once."""
    uses = Counter(x for part in _parts(e) for x in part.children() if isinstance(x, ir.Expr))
    return {x for x, n in uses.items() if n > 1 and (isinstance(x, ir.Mul) or x in products)}


def _size(value: ir.Array) -> ir.Array:
    return np.where(np.isfinite(value), np.abs(value), 0.0)


def apart(one: ir.Array, other: ir.Array) -> ir.Array:
    """The distance of values: 0 for equal infinities and two NaN, infinity if only one is NaN or
    infinite, 1 for unlike truths."""
    if one.dtype.kind == "b":
        one, other = one.astype(np.float64), other.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    off = np.where(same, 0.0, np.abs(one - other))
    return np.asarray(np.where(np.isnan(off), np.inf, off))


def moved(
    whole: ir.Expr, part: ir.Expr, off: ir.Array, values: Mapping[ir.Expr, ir.Array], at: ir.Evaluator
) -> ir.Array:
    """How far an expression moves if a part of it is off; ``values``: those of its parts."""
    with_it = _above(whole, part)
    known = {x: v for x, v in values.items() if x not in with_it}
    sides = [
        apart(at.compute(whole, {**known, part: values[part] + way}), values[whole]) for way in (off, -off)
    ]
    return np.maximum(*sides)


def equalities(e: ir.Expr) -> list[ir.Eq | ir.Ne]:
    """The comparisons of floats by equality in an expression. Moving what is compared makes equal values
    unlike, but never hits the one number at which unlike values are equal."""
    return [x for x in _parts(e) if isinstance(x, (ir.Eq, ir.Ne)) and x.a.dtype.kind == "float"]


def turned(whole: ir.Expr, equality: ir.Eq | ir.Ne, off: ir.Array, at: ir.Evaluator) -> ir.Array:
    """How far an expression moves if values that are within ``off`` of one another, and compared by an
    ``equality`` in it, are equal once they are rounded."""
    values = at.parts(whole)
    near = np.abs(values[equality.a] - values[equality.b]) <= off
    truth = np.where(near, isinstance(equality, ir.Eq), values[equality])
    with_it = _above(whole, equality)
    known = {x: v for x, v in values.items() if x not in with_it}
    return apart(np.asarray(at.compute(whole, {**known, equality: truth})), values[whole])


def _rounding(
    part: ir.Expr, wide: ir.Expr, units: float, values: Mapping[ir.Expr, ir.Array], at: ir.Evaluator
) -> ir.Array:
    """How far the result of one operation may be off by its own rounding."""
    value, half = values[wide], part.dtype.spacing / 2
    off = units * (half * _size(value) + part.dtype.tiny)
    if isinstance(part, ir.Call) and isinstance(wide, ir.Call):
        callee, smallest = ir.CALLS[part.name], part.dtype.tiny / half
        off = off + smallest * (units > 0)  # functions give 0 for numbers with fewer digits
        size = np.abs(values[wide.args[0]])
        taken = callee.inside * half * size + np.where(callee.flushes & (size < smallest), size, 0.0)
        if taken.any():
            off = off + moved(wide, wide.args[0], taken, values, at)
    return np.asarray(off)


def _is_off(part: ir.Expr) -> bool:
    """Whether the result of an operation may be off by its own doing."""
    return _half_units(part) > 0 or (isinstance(part, ir.Call) and ir.CALLS[part.name].flushes)


def _half_units(part: ir.Expr) -> float:
    """By how many half units in the last place the result of an operation may be off."""
    match part:
        case ir.Const(value, type):
            return 0.0 if _holds(type, float(value)) else 1.0
        case ir.Mul(a, b):
            return 0.0 if _is_power_of_two(a) or _is_power_of_two(b) else 1.0
        case ir.Add() | ir.Sub():
            return 1.0
        case ir.Div():
            return DIVISION
        case ir.Cast(x, type):
            return 0.0 if x.dtype.kind == "float" and x.dtype.digits <= type.digits else 1.0
        case ir.Call(name):
            return ir.CALLS[name].off
    return 0.0


def _is_power_of_two(e: ir.Expr) -> bool:
    return isinstance(e, ir.Const) and abs(np.frexp(float(e.value))[0]) == 0.5


def _holds(type: ir.DType, value: float) -> bool:
    """Whether a type has a number."""
    return not np.isfinite(value) or float(np.frexp(value)[0] * 2.0**type.digits).is_integer()


def _parts(e: ir.Expr) -> list[ir.Expr]:
    """An expression and its parts, each once, operands first."""
    found: dict[ir.Expr, None] = {}
    todo = [(e, False)]
    while todo:
        part, seen = todo.pop()
        if seen:
            found[part] = None
        elif part not in found:
            todo.append((part, True))
            todo += [(x, False) for x in part.children() if isinstance(x, ir.Expr)]
    return [*found]


def _above(whole: ir.Expr, part: ir.Expr) -> set[ir.Expr]:
    """The parts of an expression that contain another, and that one."""
    found = {part}
    for x in _parts(whole):
        if any(y in found for y in x.children()):
            found.add(x)
    return found
