"""Counts of multiply-adds that are not on padding."""

from __future__ import annotations


def valid_taps(i: int, o: int, k: int, stride: int, dilation: int, pad: int) -> int:
    """The number of pairs (output point, tap) along one axis that read an input point."""
    return (_taps_below(i, o, k, stride, dilation, pad) - _taps_below(0, o, k, stride, dilation, pad))


def _taps_below(bound: int, o: int, k: int, stride: int, dilation: int, pad: int) -> int:
    """The number of pairs with ``at*stride + tap*dilation - pad < bound``. For each tap these are the
    first (start - tap*dilation) // stride output points, clipped to 0..o."""
    start = bound + pad + stride - 1
    whole = min(k, max(0, (start - o * stride) // dilation + 1))
    some = min(k, max(whole, (start - stride) // dilation + 1))
    least = start - dilation * (some - 1)
    return o * whole + _floor_sum(some - whole, stride, dilation, least)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of (a*t + b) // m for t from 0 to n - 1, in as many steps as Euclid's algorithm takes."""
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        last = a * n + b
        n, m, a, b = last // m, a, m, last % m
    return total
