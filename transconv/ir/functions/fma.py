"""``x * y + z`` with one rounding, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

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
