"""Whole numbers that the position tells: (position*up + add) // down, between a least and a most one.

Indices of nearest and linear interpolation, ends of windows of unlike sizes, and parts, flips and repeats
of these are such numbers. What is found gives exactly the values at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from transconv.graph.fusion.index_ir import Index
from transconv.ir import Expr, as_expr, maximum, minimum

Whole = npt.NDArray[np.int64]


class IndexLine(NamedTuple):
    """``low`` and ``high``: None where no value is cut off there."""

    up: int
    add: int
    down: int
    low: int | None = None
    high: int | None = None

    def __call__(self, at: Expr) -> Expr:
        """The number at a position."""
        if not self.up:
            return as_expr(self.add)
        found = at * self.up if self.up != 1 else at
        found = found + self.add if self.add else found
        found = found // self.down if self.down != 1 else found
        found = found if self.low is None else maximum(found, as_expr(self.low))
        return found if self.high is None else minimum(found, as_expr(self.high))


def fitted(values: Whole) -> IndexLine | None:
    """The line of some values at positions 0, 1, ...; None where there is none."""
    n, low, high = len(values), int(values.min()), int(values.max())
    if low == high:
        return IndexLine(0, low, 1)
    places = np.arange(n)
    free = (values > low) & (values < high)
    for slope in _slopes(values, free):
        up, down = slope.numerator, slope.denominator
        for times in (1, 2):  # twice: halves are added, as by centres of elements
            a, d = up * times, down * times
            least, most = d * values - a * places, d * (values + 1) - a * places - 1
            below = int(least[values > low].max()), int(most[values < high].min())
            exact = max(below[0], int(least.max())), min(below[1], int(most.min()))
            for (first, last), cut in ((exact, False), (below, True)):
                if first <= last:
                    add = 0 if first <= 0 <= last else first if first > 0 else last
                    made = (places * a + add) // d
                    found = IndexLine(a, add, d, low if cut and made.min() < low else None,
                                 high if cut and made.max() > high else None)
                    if np.array_equal(np.clip(made, low, high) if cut else made, values):
                        return found
    return None


def told_by_place(values: torch.Tensor) -> Callable[[Index], Expr] | None:
    """Whole numbers of a tensor that differ along one dim at most, as a function of the position."""
    wide = [d for d, n in enumerate(values.shape) if n > 1]
    if values.dtype not in (torch.int32, torch.int64) or len(wide) > 1 or not values.numel():
        return None
    line = fitted(values.flatten().numpy().astype(np.int64))
    if line is None:
        return None
    if not wide:
        return lambda at: as_expr(line.add)
    return lambda at: line(at[wide[0]])


def _slopes(values: Whole, free: npt.NDArray[np.bool_]) -> Iterator[Fraction]:
    """What a position may add, the likeliest first."""
    n, rise = len(values), int(values[-1] - values[0])
    seen: set[Fraction] = set()
    inner = np.flatnonzero(free)
    wide = inner if len(inner) > 1 else np.flatnonzero(values == values)
    over, gone = int(values[wide[-1]] - values[wide[0]]), int(wide[-1] - wide[0])
    named = [(1, round(gone / over)), (round(over / gone), 1)] if over and gone else []
    sign = 1 if over >= 0 else -1
    whole = round(rise * n / max(1, n - 1))  # of as many that are so far apart
    named += [(rise + k * sign, n + j) for j in (0, -1) for k in (1, 0, 2)]
    named += [(whole + k, n) for k in (0, 1, -1, 2, -2)]
    named += [(over + k * sign, gone + j) for j in (0, 1, -1) for k in (0, 1, -1)]
    for up, down in named:
        if down and (slope := Fraction(up, down)) not in seen:
            seen.add(slope)
            yield slope
    for most in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        slope = Fraction(over, max(1, gone)).limit_denominator(most)
        if slope not in seen:
            seen.add(slope)
            yield slope
