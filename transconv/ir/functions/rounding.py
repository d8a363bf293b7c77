"""Numbers rounded to a type: in NumPy, and as the text of a function where the languages have no cast;
and ``x * y + z`` rounded once.

Rounding is to nearest, ties to even, unless the row of the type has a ``Rounding``. At random it is up or
down, so that the mean of many results is the number that was rounded:

    word    the first 32 bits of Philox-4x32-10 with the counter (element, 0, 0, 0) and the key (seed, 0)
    chance  the last 24 bits of the word, times 2**-24
    result  of the two neighbours of a number the one farther from 0, if the number lies farther above the
            other one than chance says, as a share of their distance

A word depends on the seed and on the place of an element alone, so results are the same in every kernel
and every interpreter. For seeds that are not negative it is Triton's ``tl.randint(seed, element)``."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from transconv.ir.dtype import DTYPES, Array, DType, f32

HELD = {"float16": (np.uint16, 11), "float32": (np.uint32, 24), "float64": (np.uint64, 53)}

MOST = {name: float(np.finfo(name).max) for name in HELD}


def wrapped(value: int, to: DType) -> int:
    """The number of which an integer type keeps the last bits; of other types the number itself."""
    if to.kind != "int":
        return value
    least, most = to.limits
    return (value - least) % (most - least + 1) + least


def held_constant(value: float, by: DType) -> float:
    """The number that a type has for a number of Python; of normal floats of 32 bits and more the number
    itself, which they do not round before it is used."""
    if by.kind == "float" and (by.bits < 32 or not 2.0**-126 <= abs(value) <= MOST[by.numpy]):
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
        return not isfinite(value) or (abs(value) <= by.largest and isfinite(_held(value, by)))
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
    small = np.abs(made) < place * 2.0 ** (to.digits - 1)  # subnormal numbers are evenly spaced
    if place > float(np.finfo(to.numpy).smallest_subnormal):
        near = np.where(small, np.rint(made / np.float64(place)) * place, near).astype(to.numpy)
    return near if to.largest == np.inf else np.clip(near, -to.largest, to.largest)


SHORT = tuple(t for t in DTYPES.values() if t.kind == "float" and t.result and t.bits < 32)
"""The types that numbers of f32 are rounded to at random."""
CHANCES = 24  # bits of a chance
ROUNDS, FACTORS, KEYS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def random_words(seed: Any, element: Any) -> Any:
    """The words of elements, in 0..2**32. ``element``: an int64 array of NumPy or torch; ``seed``: the
    same, or a number."""
    c0, c1, c2, c3 = element & LOW, 0, 0, 0
    k0, k1 = seed & LOW, 0
    for _ in range(ROUNDS):
        a, b = c0 * FACTORS[0], c2 * FACTORS[1]  # of 64 bits, of which the upper half may look negative
        c0, c1, c2, c3 = (b >> 32 & LOW) ^ c1 ^ k0, b & LOW, (a >> 32 & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + KEYS[0] & LOW, k1 + KEYS[1] & LOW
    return c0


def chances(seed: Any, element: Any) -> Any:
    """The chances of elements, f64."""
    return (random_words(seed, element) & (1 << CHANCES) - 1) / 2.0**CHANCES


def one_of_two(x: Any, chance: Any, to: DType, library: Any) -> Any:
    """Numbers of f64 as those of ``to``, whose range is not applied. ``library``: numpy or torch, whose
    arrays these are."""
    size = library.abs(x)
    _, exponent = library.frexp(size)
    least = int(np.log2(2 * to.tiny))
    place = library.ldexp(library.ones_like(size), (exponent - to.digits).clip(least))
    places = size / place
    below = library.floor(places)
    near = (below + (places - below > chance)) * place
    return library.copysign(near, x)


def in_numpy(to: DType) -> Any:
    """``one_of_two`` of NumPy's arrays."""

    def rounded(x: Any, chance: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return one_of_two(x.astype(np.float64), chance.astype(np.float64), to, np)

    return rounded


def numpy_bits(seed: Any, element: Any) -> Any:
    """The words as i32 has them."""
    return random_words(seed.astype(np.int64), element.astype(np.int64)).astype(np.uint32).view(np.int32)


# -- the same in the languages of kernels ----------------------------------------------------------

# Element by element: all rounds of a tile at once would keep four words of each element in registers.
RANDOM_BITS = f'''
@{{jit}}
def random_word(seed, element):
    """The first word of Philox-4x32-10."""
    c0 = element.to({{tl}}.uint32, bitcast=True)
    k0 = seed.to({{tl}}.uint32, bitcast=True)
    k1 = k0 * 0
    c1 = c0 * 0
    c2 = c1
    c3 = c1
    for _ in {{tl}}.static_range({ROUNDS}):
        high_0 = {{tl}}.umulhi(c0, {FACTORS[0]})
        high_2 = {{tl}}.umulhi(c2, {FACTORS[1]})
        low_0 = c0 * {FACTORS[0]}
        c0 = high_2 ^ c1 ^ k0
        c1 = c2 * {FACTORS[1]}
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + {KEYS[0]}
        k1 = k1 + {KEYS[1]}
    return c0.to({{tl}}.int32, bitcast=True)


@{{jit}}
def random_bits(seed, element):
    """The random words of elements; map_elementwise takes tensors alone."""
    if element.type.is_block():
        return {{tl}}.map_elementwise(random_word, seed, element)
    else:
        return random_word(seed, element)
'''

STOCHASTIC = '''
@{{jit}}
def stochastic_{name}(x, chance):
    """x as a number of {name}, up or down: up if its share of the distance of both is above chance."""
    size = {{tl}}.abs(x)
    bits = size.to({{tl}}.int32, bitcast=True)
    cut = bits & {cut}
    below = (bits - cut).to({{tl}}.float32, bitcast=True)
    above = (bits - cut + {step}).to({{tl}}.float32, bitcast=True)
    share = cut.to({{tl}}.float32) * {unit!r}{small}
    near = {{tl}}.where(share > chance, above, below)
    near = {{tl}}.where(size < float("inf"), near, size)
    return {{tl}}.where(x < 0, -near, near)
'''
# Numbers below the smallest one with all digits are evenly spaced.
SMALL = """
    places = size * {places!r}
    low = {{tl}}.floor(places)
    below = {{tl}}.where(size < {normal!r}, low * {least!r}, below)
    above = {{tl}}.where(size < {normal!r}, low * {least!r} + {least!r}, above)
    share = {{tl}}.where(size < {normal!r}, places - low, share)"""


def helper(to: DType) -> str:
    """The source of the function that rounds to a type."""
    bits, least = f32.digits - to.digits, 2 * to.tiny
    normal = least * 2.0 ** (to.digits - 1)
    small = SMALL.format(places=1 / least, least=least, normal=normal)
    has_own = normal > 2.0**-126  # the smallest of f32: bf16 has its exponents
    return STOCHASTIC.format(
        name=to.name, cut=(1 << bits) - 1, step=1 << bits, unit=2.0**-bits, small=small if has_own else ""
    )


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
        usual = np.isfinite(found) & np.isfinite(c) & (product != 0)
        return np.asarray(np.where(usual, found, plain))


def _halves(x: Array) -> tuple[Array, Array]:
    scaled = x * SPLIT
    high = scaled - (scaled - x)
    return high, x - high
