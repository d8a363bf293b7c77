"""Numbers rounded to a type: in NumPy, and as the text of a function where the languages have no cast.

Rounding is to nearest, ties to even, unless the row of the type has a ``Rounding``.
"""

from __future__ import annotations

from math import isfinite

import numpy as np

from transconv.ir.dtype import Array, DType

HELD = {"float16": (np.uint16, 11), "float32": (np.uint32, 24), "float64": (np.uint64, 53)}

MOST = {name: float(np.finfo(name).max) for name in HELD}


def wrapped(value: int, to: DType) -> int:
    """The number of which an integer type keeps the last bits; of other types the number itself."""
    if to.kind != "int":
        return value
    least, most = to.limits
    return (value - least) % (most - least + 1) + least


def held_constant(value: float, by: DType) -> float:
    """The number that a type of less than 32 bits has for a number of Python; of wider floats the number
    itself, which they do not round before it is used."""
    if by.kind == "float" and by.bits < 32:
        return _held(value, by)
    return value if isinstance(value, float) else wrapped(int(value), by)


def _held(value: float, by: DType) -> float:
    """The float of a type that is nearest."""
    with np.errstate(over="ignore"):
        return float(convert(np.asarray(value, np.float64), by).item())


def is_near(value: float, by: DType) -> bool:
    """Whether a type has a number of Python behind rounding alone: a whole one within an integer's limits,
    0 or 1 of a boolean, any of a float that becomes neither infinite nor another type's largest one."""
    if by.kind == "float":
        return not isfinite(value) or abs(value) <= by.largest and isfinite(_held(value, by))
    return isfinite(value) and value == int(value) and is_held(int(value), by)


def is_held(value: float, by: DType) -> bool:
    """Whether a number of Python is one of a type: an ``int`` within an integer's limits, 0 or 1 of a
    boolean, the number itself behind the rounding of a float of less than 32 bits. Digits beyond those of
    f32 are taken off where it is used."""
    if by.kind == "float":
        finite = value != value or abs(value) == np.inf or abs(value) <= min(by.largest, MOST[by.numpy])
        return finite and (by.bits >= 32 or value != value or held_constant(value, by) == value)
    if isinstance(value, float):
        return False
    return value in (0, 1) if by.kind == "bool" else wrapped(value, by) == value


def rounded(x: Array, to: DType) -> Array:
    """Floats rounded to the digits of a type, ties to even, in the NumPy type that holds it (float32 for
    bf16). The type's exponent range is not applied; ``convert`` does that."""
    integer, digits = HELD[to.numpy]
    bits, cut = np.ascontiguousarray(x, to.numpy).view(integer), integer(digits - to.digits)
    below = integer((1 << (digits - to.digits - 1)) - 1)
    near = bits + (below + ((bits >> cut) & integer(1)))
    out = (near >> cut << cut).view(to.numpy)
    return np.where(np.isnan(x), x, out)


def convert(x: Array, to: DType) -> Array:
    """The values as another type, in ``to.numpy``; a float is truncated to an integer, and NaN becomes 0,
    as on the chips."""
    if to.kind == "int" and x.dtype.kind == "f":
        x = np.where(np.isnan(x), 0, x)
    made = x.astype(to.numpy, copy=False)
    if to.rounding is not None:
        return to.rounding.numpy(made)
    if to.kind != "float" or to.digits == HELD[to.numpy][1]:
        return made
    near, place = rounded(made, to), 2 * to.tiny
    small = np.abs(made) < place * 2.0**(to.digits - 1)  # subnormal numbers are evenly spaced
    if place > float(np.finfo(to.numpy).smallest_subnormal):
        near = np.where(small, np.rint(made / np.float64(place)) * place, near).astype(to.numpy)
    return near if to.largest == np.inf else np.clip(near, -to.largest, to.largest)
