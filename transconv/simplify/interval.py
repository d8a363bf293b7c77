"""Intervals of integers, possibly without a lower or an upper bound, and their arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

INF = math.inf


@dataclass(frozen=True, slots=True)
class Range:
    """The integers from ``lo`` to ``hi``, both included; None is no bound."""

    lo: int | None = None
    hi: int | None = None

    @property
    def low(self) -> float:
        """The lower bound: an int, or minus infinity."""
        return -INF if self.lo is None else self.lo

    @property
    def high(self) -> float:
        """The upper bound: an int, or infinity."""
        return INF if self.hi is None else self.hi

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high

    def __and__(self, other: Range) -> Range:
        if other is ANY or self is ANY:
            return self if other is ANY else other
        return between(max(self.low, other.low), min(self.high, other.high))

    def __or__(self, other: Range) -> Range:
        """The smallest range that holds both."""
        return between(min(self.low, other.low), max(self.high, other.high))

    def __add__(self, other: Range) -> Range:
        return between(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Range:
        return between(-self.high, -self.low)

    def __mul__(self, other: Range) -> Range:
        ends = [_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return between(min(ends), max(ends))

    @property
    def value(self) -> int | None:
        """The only member, or None if there are several."""
        return self.lo if self.lo == self.hi else None

    def cell(self, size: int) -> int | None:
        """The quotient ``x // size`` if it is the same for all members, else None."""
        if self.lo is None or self.hi is None or self.lo // size != self.hi // size:
            return None
        return self.lo // size

    @property
    def magnitude(self) -> float:
        """The largest absolute value, possibly infinity."""
        return max(abs(self.low), abs(self.high))


ANY = Range()
BIT = Range(0, 1)


def between(lo: float, hi: float) -> Range:
    """The range with these bounds, which may be infinite."""
    return Range(None if lo == -INF else int(lo), None if hi == INF else int(hi))


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def _floor(a: float, b: float) -> float:
    """``a // b`` for bounds that may be infinite; b > 0."""
    if math.isinf(a):
        return a
    if math.isinf(b):
        return 0 if a >= 0 else -1
    return int(a) // int(b)


def quotient(a: Range, b: Range) -> Range:
    """The range of ``x // y`` for x in ``a`` and y in ``b``, y not 0."""
    if b.high < 0:
        a, b = -a, -b
    if b.low < 1:
        return between(-a.magnitude, a.magnitude)
    lo = _floor(a.low, b.high if a.low >= 0 else b.low)
    hi = _floor(a.high, b.low if a.high >= 0 else b.high)
    return between(lo, hi)
