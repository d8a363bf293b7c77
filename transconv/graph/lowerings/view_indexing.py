"""Views as functions of coordinates: what torch's functions that move elements mean for a position.

An ``IndexLine`` is an integer that the position tells: (position*up + add) // down, between a least
and a most one. Indices of nearest and linear interpolation, ends of windows of unlike sizes, and parts,
flips and repeats of these are such numbers. What is found gives exactly the values at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from transconv.compute import COORDINATES
from transconv.graph.sizes import Index, Length, Move, SymbolicSize, Where, divides, like, same
from transconv.ir import ZERO, Expr, all_of, as_expr, maximum, minimum

Shape = Sequence[Length]


def expand(shape: Shape, into: Shape) -> Move:
    """From a position of the larger shape to one of the smaller."""
    lead = len(into) - len(shape)
    return lambda at: tuple(ZERO if n == 1 else at[lead + d] for d, n in enumerate(shape))


def repeat(shape: Shape, into: Shape) -> Move:
    """From a position of the shape repeated along its dims, and along new ones in front."""
    lead = len(into) - len(shape)
    again = {d: 0 for d, n in enumerate(shape) if n != 1 and not same((n,), (into[lead + d],))}
    one, wrap = expand(shape, into), bounded("wrap", shape, again)
    return lambda at: wrap(one(at))


def reshape(shape: Shape, into: Shape) -> Move:
    """From a position of ``into`` to that of the same element in ``shape``. Dims whose products meet
    are counted together, others are left alone."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(into):
        mine, theirs = [i] if i < len(shape) else [], [j] if j < len(into) else []
        a, b = prod(shape[d] for d in mine), prod(into[d] for d in theirs)
        i, j = i + len(mine), j + len(theirs)
        while a != b and (i < len(shape) or j < len(into)):
            if j == len(into) or (i < len(shape) and _less(a, b)):
                mine.append(i)
                a *= shape[i]
                i += 1
            else:
                theirs.append(j)
                b *= into[j]
                j += 1
        runs.append((mine, theirs))

    def move(at: Index) -> Index:
        found: list[Expr] = [ZERO] * len(shape)
        for mine, theirs in runs:
            wide = [d for d in mine if shape[d] != 1]
            flat = flattened([at[d] for d in theirs], [into[d] for d in theirs])
            for d, e in zip(wide, unflattened(flat, [shape[d] for d in wide]), strict=True):
                found[d] = e
        return tuple(found)

    return move


def _less(a: Length, b: Length) -> bool:
    """Whether to count on with the first of two numbers of elements: where names leave their order open,
    that of which the other one is a multiple."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return divides(a, b) or not divides(b, a)


def flattened(at: Sequence[Expr], shape: Shape) -> Expr:
    """The number of a position, the last dim fastest."""
    flat: Expr = ZERO
    for e, n in zip(at, shape, strict=True):
        if n != 1:
            flat = e if flat is ZERO else flat * n + e
    return flat


def unflattened(flat: Expr, shape: Shape) -> list[Expr]:
    """The position of a number."""
    found: list[Expr] = []
    if any(
        isinstance(n, SymbolicSize) for n in shape
    ):  # one division by a name at a time: each is proven alone
        for n in reversed(shape[1:]):
            found.append(flat % n if n != 1 else ZERO)
            flat = flat // n if n != 1 else flat
        return [*([flat] if len(shape) else []), *reversed(found)]
    for d, n in enumerate(shape):
        below = prod(shape[d + 1 :])
        e = flat // below if below != 1 else flat
        found.append(e % n if d else e)
    return found


def flip(shape: Shape, dims: Sequence[int]) -> Move:
    """From the ends of some dims. It is its own way back."""
    return lambda at: tuple(as_expr(shape[d] - 1) - e if d in dims else e for d, e in enumerate(at))


def sliced(dim: int, start: Length, step: int) -> Move:
    """Every ``step``-th position from ``start`` on."""

    def move(at: Index) -> Index:
        e = at[dim] * step if step != 1 else at[dim]
        return (*at[:dim], e + start if start != 0 else e, *at[dim + 1 :])

    return move


def shifted(before: Shape) -> Move:
    """A tensor that begins later."""
    return lambda at: tuple(e - n if n != 0 else e for e, n in zip(at, before, strict=True))


def inside(shape: Shape, move: Move, dims: Sequence[int]) -> Where:
    """Where a move stays in a shape, along some dims."""

    def where(at: Index) -> Expr:
        moved = move(at)
        return all_of([c for d in dims for c in (moved[d] >= 0, moved[d] < shape[d])])

    return where


def bounded(kind: str, shape: Shape, before: Mapping[int, Length]) -> Move:
    """Dims that begin earlier by so much; beyond an end what a row of ``COORDINATES`` says."""
    row = COORDINATES[kind]
    return lambda at: tuple(
        row(e - before[d] if before[d] else e, as_expr(shape[d])) if d in before else e
        for d, e in enumerate(at)
    )


def windows(dims: int, stride: Shape, padding: Shape, dilation: Shape) -> Move:
    """From (..., o, k) to o*stride - padding + k*dilation, for as many last dims of each."""

    def move(at: Index) -> Index:
        lead = len(at) - 2 * dims
        moved = [
            at[lead + d] * stride[d] + at[lead + dims + d] * dilation[d] - padding[d] for d in range(dims)
        ]
        return (*at[:lead], *moved)

    return move


def ratios(into: int, size: int, step: float) -> list[tuple[int, int]]:
    """Which i*up // down may be positions below a size, of as many as there are, some ``step`` apart."""
    least = [(1, round(1 / step))] if 0 < step <= 1 else [(max(1, round(step)), 1)]
    return [*least, (size, into)]


def scaled(sizes: Shape, into: Shape, steps: Sequence[float]) -> Move | None:
    """Nearest neighbours: the position times the step, rounded down; None where that is no division of
    integers for all positions, as torch computes it in f32."""
    found: list[tuple[int, int]] = []
    for n, m, step in zip(sizes, into, steps, strict=True):
        if isinstance(n, SymbolicSize) or isinstance(m, SymbolicSize):
            if (times := _times(n, m)) is None:
                return None
            found.append(times)
            continue
        at = np.minimum(np.floor(np.arange(m, dtype=np.float32) * np.float32(step)).astype(int), n - 1)
        for up, down in ratios(m, n, step):
            if np.array_equal(np.arange(m) * up // down, at):
                found.append((up, down))
                break
        else:
            return None

    def move(at: Index) -> Index:
        lead = len(at) - len(found)
        return (
            *at[:lead],
            *(
                (e * up if up > 1 else e) // down if down > 1 else e * up
                for e, (up, down) in zip(at[lead:], found, strict=True)
            ),
        )

    return move


def _times(n: Length, m: Length) -> tuple[int, int] | None:
    """The integer, as a fraction, by which one size is more than another one for all sizes: a power
    of 2, by which f32 divides exactly."""
    more, least = (m, n) if like(m) >= like(n) else (n, m)
    k = like(more) // like(least)
    if k & (k - 1) or more != least * k:
        return None
    return (1, k) if more is m else (k, 1)


Whole = npt.NDArray[np.int64]


class IndexLine(NamedTuple):
    """An integer that follows from the position. ``low`` and ``high``: None where no value is cut off
    there."""

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
                    found = IndexLine(
                        a,
                        add,
                        d,
                        low if cut and made.min() < low else None,
                        high if cut and made.max() > high else None,
                    )
                    if np.array_equal(np.clip(made, low, high) if cut else made, values):
                        return found
    return None


def told_by_place(values: torch.Tensor) -> Callable[[Index], Expr] | None:
    """Integers of a tensor that differ along one dim at most, as a function of the position."""
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
