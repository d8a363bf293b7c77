"""The tables of OCP's Microscaling Formats (MX) Specification 1.0, section 5.3, in f64 of NumPy.

They are written from the standard, without casts of torch or of the package: a float of 8 bits is
(-1)**s * 2**(e - 7) * (1 + m/8).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_SMALL = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
F4E2M1 = np.concatenate([_SMALL, -_SMALL])


def _f8e4m3(code: int) -> float:
    sign, e, m = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if (e, m) == (15, 7):
        return float("nan")
    return float(sign * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)))


F8E4M3 = np.array([_f8e4m3(code) for code in range(256)])
F8E8M0 = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan])


def halves(held: Array) -> Array:
    """The codes of 4 bits of bytes, along the last axis, the lower half first."""
    return np.stack([held & 15, held >> 4], -1).reshape(*held.shape[:-1], -1)
