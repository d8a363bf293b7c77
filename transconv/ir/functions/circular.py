"""Sine and cosine of 32 bits: the quarters of a circle are taken off, and a polynomial of the rest.

Up to 2**16 they are taken off in three parts of pi/2 (W. Cody and W. Waite, 1980), each by a fused
product: what is left is off by a unit in the last place at most. For larger numbers the digits of 2/pi
that make whole circles are left out before they are multiplied (M. Payne and R. Hanek, 1983), in integers.
Both are computed: the languages' own functions choose for each element, so that elements of a thread wait
for one another, and keep the digits of 2/pi in memory of each thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# 2/pi in words of 32 bits, as signed numbers, behind 32 bits before the point.
DIGITS = (0, -1560706194, 1313084713, -64530479, -181084736, -614296167, 1011060801, -28220501)


def _word(at: int) -> str:
    """The text of the word that is ``at`` behind the first one needed: ``first`` is 0 to 4."""
    made = str(DIGITS[at + 4])
    for n in range(3, -1, -1):
        made = f"{{tl}}.where(first == {n}, {DIGITS[at + n]}, {made})"
    return f"{{tl}}.cast({made}, {{tl}}.int32).to({{tl}}.uint32, bitcast=True)"


# A number is ``digits`` times a power of two, and its product with 2/pi is needed modulo 4: with the words
# of 2/pi from bit ``at`` on, a sum of 64 bits, in units of 2**-62 quarters.
CIRCULAR = f'''
@{{jit}}
def circular(x, quarters):
    """The sine of x and so many quarters of a circle."""
    whole = {{tl}}.fma(x, 0.6366197466850281, 12582912.0)
    turn = whole.to({{tl}}.int32, bitcast=True) - 1262485504
    whole = whole - 12582912.0
    left = {{tl}}.fma(whole, -1.5707963705062866, x)
    left = {{tl}}.fma(whole, 4.371138828673793e-08, left)
    left = {{tl}}.fma(whole, 1.7151245100058819e-15, left)
    bits = x.to({{tl}}.int32, bitcast=True)
    digits = {{tl}}.cast((bits & 8388607) | 8388608, {{tl}}.uint32)
    at = {{tl}}.maximum(((bits >> 23) & 255) - 120, 0)
    first = at >> 5
    by = {{tl}}.cast(at & 31, {{tl}}.uint32)
    a = {_word(0)}
    b = {_word(1)}
    c = {_word(2)}
    d = {_word(3)}
    a = (a << by) | ((b >> 1) >> (31 - by))
    b = (b << by) | ((c >> 1) >> (31 - by))
    c = (c << by) | ((d >> 1) >> (31 - by))
    low = {{tl}}.cast(b, {{tl}}.uint64) * digits + {{tl}}.umulhi(c, digits)
    found = (({{tl}}.cast(a * digits, {{tl}}.uint64) << 32) + low).to({{tl}}.int64, bitcast=True)
    circle = ((found >> 61) + 1) >> 1
    rest = {{tl}}.cast(found - (circle << 62), {{tl}}.float32)
    rest = {{tl}}.fma(rest, 3.4061216748705226e-19, rest * -9.478396428567739e-27)
    rest = {{tl}}.where({{tl}}.abs(x) < float("inf"), rest, float("nan"))
    circle = {{tl}}.cast(circle, {{tl}}.int32)
    far = {{tl}}.abs(x) > 65536.0
    turn = {{tl}}.where(far, {{tl}}.where(x < 0, -circle, circle), turn) + quarters
    left = {{tl}}.where(far, {{tl}}.where(x < 0, -rest, rest), left)
    s = left * left
    p = {{tl}}.fma(s, {{tl}}.fma(s, -1.9517233886290342e-4, 8.332177996635437e-3), -1.6666655242443085e-1)
    sine = {{tl}}.fma(left * s, p, left)
    p = {{tl}}.fma(s, {{tl}}.fma(s, 2.4438379114144482e-5, -1.3887366512790322e-3), 4.166664555668831e-2)
    cosine = {{tl}}.fma(s * s, p, {{tl}}.fma(s, -0.5, 1.0))
    made = {{tl}}.where((turn & 1) == 0, sine, cosine)
    return {{tl}}.where((turn & 2) == 0, made, -made)
'''

SIN = '''
@{jit}
def sin(x):
    """The sine."""
    return {tl}.sin(x) if x.dtype.primitive_bitwidth == 64 else circular(x, 0)
'''
COS = (SIN.replace("sin(", "cos(").replace("The sine", "The cosine")
       .replace("circular(x, 0)", "circular(x, 1)"))


def turned(x: Array, quarters: Array) -> Array:
    """The sine of x and so many quarters of a circle."""
    each = np.asarray(quarters) % 4
    found = np.where(each % 2 == 0, np.sin(x), np.cos(x))
    return np.where(each < 2, found, -found)
