"""Bounds on the rounding errors of a kernel's values, computed along with the values.

    let s = sum(x; k)       error share * sum(|x|; k)
    let y = tanh(s)         error |tanh(s + error) - tanh(s)|, the slope of tanh where s is

A sum's own error is a share of its absolute terms; behind it an error grows or shrinks as the steps do,
over as far as it reaches: there are no constants for steep functions.
"""

from __future__ import annotations

import numpy as np

from transconv.compute.compute import Compute
from transconv.ir import Array, Cast, DType, Expr, Var, f32, find, tf32

SUMMED = 2.0**-18  # of the sum of absolute terms, in f32
TF32 = tf32.spacing  # of it where both factors are rounded to tf32
LEAST = {"f16": 2.0**-24, "bf16": 2.0**-133, "f32": 2.0**-149}  # above 0, of a type
OPERATIONS = 4.0  # roundings of a value between two names
ROUNDINGS = 4.0  # of a result: its own, and those of what an operation is computed by


def share_of(compute: Compute) -> float:
    """Of the absolute terms of a computation's sums, how far rounding may move them."""
    return TF32 if is_tf32(compute) else SUMMED


def is_tf32(compute: Compute) -> bool:
    """Whether operands of a product are rounded to tf32."""
    return compute.math == "tf32" and compute.factors is not None and any(
        t is f32 for t in (*(x.dtype for x in compute.tensors), *(f.var.type for f in compute.factors)))


def allowed(value: Array, error: Array, dtype: DType) -> Array:
    """How far an element of a result may be from its value."""
    place = 2.0 ** -dtype.digits
    return np.asarray(ROUNDINGS * (place + 2.0**-20) * np.maximum(1.0, np.abs(value)) + error)


def own(e: Expr, found: Array) -> Array:
    """What rounding adds to an expression that is computed. A name or a number is none."""
    if isinstance(e, Cast) and isinstance(e.x, Var) or not e.children() or e.dtype.kind != "float":
        return np.zeros((1,) * found.ndim)
    near = min((e.dtype, *(c.type for c in find(e, Cast) if c.type.kind == "float")),
               key=lambda t: t.digits)
    least = LEAST.get(near.name, 0.0)  # below it there is nothing
    size = np.where(np.isfinite(found), np.abs(found), 0.0)
    return np.asarray(OPERATIONS * (2.0**-near.digits * size + least))


def apart(one: Array, other: Array) -> Array:
    """How far two values are from each other: 0 for like infinities, infinitely for unlike ones."""
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    off = np.where(same, 0.0, np.abs(one - other))
    return np.asarray(np.where(np.isnan(off), np.inf, off))


def reduced(op: str, terms: Array, found: Array, error: Array | None, axes: tuple[int, ...],
            share: float) -> Array:
    """How far a reduction may be off, of terms with these errors."""
    off = np.zeros((1,) * terms.ndim) if error is None else error
    sizes = np.where(np.isfinite(terms), np.abs(terms), 0.0)
    if op == "sum":
        return np.asarray(share * np.sum(sizes, axes, keepdims=True) + np.sum(
            np.broadcast_to(off, terms.shape), axes, keepdims=True))
    if op == "prod":
        each = np.where(sizes > 0, off / np.where(sizes > 0, sizes, 1.0), 0.0) + 2.0**-22
        return np.asarray(np.abs(found) * np.sum(np.broadcast_to(each, terms.shape), axes, keepdims=True))
    return np.asarray(np.max(np.broadcast_to(off, terms.shape), axes, keepdims=True))
