"""``x * y + z`` with one rounding, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def multiply_add(x: Array, y: Array, z: Array) -> Array:
    """``x * y + z`` of float32 arrays, rounded once; arrays of other types as NumPy computes it.

    The product of two float32 numbers is exact in float64. The sum is rounded to odd there, so that
    rounding it again, to float32, gives the nearest number (Boldo and Melquiond 2008)."""
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
