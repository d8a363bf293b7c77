"""Sine and cosine of 32 bits: the quarters of a circle are taken off, and a polynomial of the rest.

Up to 2**16 they are taken off in three parts of pi/2 (W. Cody and W. Waite, 1980), each by a fused
product: what is left is off by a unit in the last place at most. The languages' own functions choose for
each element how to do so, by which the elements of a thread wait for one another, and keep digits of 2/pi
in memory of each thread. A program calls them if one of its elements is beyond 2**16.
"""

from __future__ import annotations

SIN = '''
@{jit}
def sin(x):
    """The sine."""
    if x.dtype.primitive_bitwidth == 64:
        made = {tl}.sin(x)
    elif {tl}.max({tl}.abs(x)) > 65536.0:
        made = {tl}.sin(x)
    else:
        whole = {tl}.fma(x, 0.6366197466850281, 12582912.0)
        turn = whole.to({tl}.int32, bitcast=True) - 1262485504
        whole = whole - 12582912.0
        left = {tl}.fma(whole, -1.5707963705062866, x)
        left = {tl}.fma(whole, 4.371138828673793e-08, left)
        left = {tl}.fma(whole, 1.7151245100058819e-15, left)
        s = left * left
        p = {tl}.fma(s, {tl}.fma(s, -1.9517233886290342e-4, 8.332177996635437e-3), -1.6666655242443085e-1)
        sine = {tl}.fma(left * s, p, left)
        p = {tl}.fma(s, {tl}.fma(s, 2.4438379114144482e-5, -1.3887366512790322e-3), 4.166664555668831e-2)
        cosine = {tl}.fma(s * s, p, {tl}.fma(s, -0.5, 1.0))
        made = {tl}.where((turn & 1) == 0, sine, cosine)
        made = {tl}.where((turn & 2) == 0, made, -made)
    return made
'''
# One quarter more.
COS = (SIN.replace("sin(", "cos(").replace("The sine", "The cosine")
       .replace("- 1262485504", "- 1262485503"))
