"""Bounds on the rounding errors of a kernel's values, computed along with the values.

    let s = sum(x; k)       error share * sum(|x|; k)
    let y = tanh(s)         error |tanh(s + error) - tanh(s)|, the slope of tanh where s is

A sum's own error is a fraction of the sum of its absolute terms. Later steps are evaluated at the value
plus and minus its error, so functions with steep slopes need no constants; semantics/rounding_errors.py
has the errors of their own operations.
"""

from __future__ import annotations

from math import prod

import numpy as np

from transconv.compute.compute import Compute
from transconv.compute.kernel_split import kernels
from transconv.ir import EXACT_TERMS, Array, DType, f32, tf32

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
    return max(1.0, (min(terms, EXACT_TERMS) if compute.math == "ieee" else terms) / 32)


def is_tf32(compute: Compute) -> bool:
    """Whether this is a product with an f32 operand and ``math`` tf32, or one of its kernels is."""
    return compute.math == "tf32" and any(c.factors is not None and any(
        t is f32 for t in (*(x.dtype for x in c.tensors), *(f.var.type for f in c.factors)))
        for c in _products(compute))


def allowed(value: Array, error: Array, dtype: DType) -> Array:
    """The allowed difference between stored elements of a type and ``value``, known to within
    ``error``."""
    place = 2.0 ** -dtype.digits
    return np.asarray(ROUNDINGS * (place + 2.0**-20) * np.maximum(1.0, np.abs(value)) + error)


def rounds_once(value: Array, error: Array, dtype: DType) -> Array:
    """Where a stored element of a type is certainly ``value`` rounded once: where all that is within
    ``error`` of it is rounded to one number. Close to the middle of two numbers, and where nearly equal
    ones are subtracted, it is not. The error of whole numbers is less than a half."""
    if dtype.kind != "float":
        return np.asarray(error < 0.5)
    with np.errstate(invalid="ignore"):
        return np.asarray(_nearest(value - error, dtype) == _nearest(value + error, dtype))


def _nearest(value: Array, dtype: DType) -> Array:
    """The numbers of a type without a largest one that are nearest to values."""
    place = np.ldexp(dtype.spacing, np.frexp(value)[1] - 1)
    place = np.maximum(place, 2 * dtype.tiny)
    return np.asarray(np.rint(value / place) * place)


def _underflow(factors: Array, axes: tuple[int, ...]) -> Array:
    """What products of absolute values lose where some of the factors alone may be too small for f32, in
    whichever order they are multiplied. A factor 0 gives 0 behind that as well."""
    least = np.prod(np.where(factors > 0, np.minimum(factors, 1.0), 1.0), axes, keepdims=True)
    lost = (least < SMALLEST) & np.all(factors > 0, axes, keepdims=True)
    return np.where(lost, SMALLEST * GROWN, 0.0)


def reduced(op: str, terms: Array, found: Array, error: Array | None, axes: tuple[int, ...],
            share: float) -> Array:
    """The error of a reduction, whose terms have the errors ``error``; ``share`` as in ``share_of``."""
    off = np.zeros((1,) * terms.ndim) if error is None else error
    sizes = np.where(np.isfinite(terms), np.abs(terms), 0.0)
    if op == "sum":
        return np.asarray(share * np.sum(sizes, axes, keepdims=True) + np.sum(
            np.broadcast_to(off, terms.shape), axes, keepdims=True))
    if op == "prod":
        each = np.where(sizes > 0, off / np.where(sizes > 0, sizes, 1.0), 0.0) + 2.0**-22
        each = np.sum(np.broadcast_to(each, terms.shape), axes, keepdims=True)
        return np.asarray(np.abs(found) * each + _underflow(sizes, axes))
    return np.asarray(np.max(np.broadcast_to(off, terms.shape), axes, keepdims=True))
