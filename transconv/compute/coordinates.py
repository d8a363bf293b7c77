"""Integer functions for coordinates, such as ``reflect`` and ``wrap``: one row each. Each expands to an
expression, which determines its meaning in NumPy, the range of its values and its text in a kernel.

    x[reflect(h - 1, 8)]    expands to    x[min(u, 14 - u)]  with  u = max(h - 1, 1 - h) % 14

The expressions are chosen so that the simplifier can prove their bounds, and a coordinate that is always
inside needs no mask. If a position is at most one period outside, no division is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transconv.ir import (
    Cast,
    Const,
    Expr,
    RowTable,
    as_expr,
    index,
    maximum,
    minimum,
    rewrite,
    select,
)

Whole = Expr | int


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A function of ``arity`` integers: a position and, unless ``arity`` is 1, the size of its dimension.
    ``says``: a description for the documentation."""

    name: str
    arity: int
    expression: Callable[..., Whole]
    says: str

    def __call__(self, *values: Expr) -> Expr:
        """The expression for these values; a constant if all are constants."""
        return as_expr(self.expression(*(int(v.value) if isinstance(v, Const) else v for v in values)))


def _abs(i: Whole) -> Expr:
    return maximum(i, -i)


def _reflect(i: Whole, n: Whole) -> Expr:
    """Reflection at the first and last position: the period is 2n - 2."""
    period = n * 2 - 2
    there = _abs(i) % (max(period, 1) if isinstance(period, int) else maximum(period, 1))
    return minimum(there, period - there)


def _symmetric(i: Whole, n: Whole) -> Expr:
    there = maximum(i, -1 - i) % (n * 2)
    return minimum(there, n * 2 - 1 - there)


def as_written(e: Expr) -> Expr:
    """A coordinate or condition without casts to index, which the text does not have."""
    return rewrite(e, lambda at: at.x if isinstance(at, Cast) and at.type is index else at)


COORDINATES: RowTable[Coordinate] = RowTable(
    Coordinate("clamp", 2, lambda i, n: minimum(maximum(i, 0), n - 1),
               "beyond an end: the element at that end (torch's padding mode replicate)"),
    Coordinate("reflect", 2, _reflect,
               "beyond an end: as far inside, the element at the end itself left out (reflect)"),
    Coordinate("symmetric", 2, _symmetric,
               "beyond an end: as far inside, beginning with the element at the end (NumPy's symmetric)"),
    Coordinate("wrap", 2, lambda i, n: i % n, "beyond an end: on from the other one (circular)"),
    Coordinate("from_end", 2, lambda i, n: select(i < 0, i + n, i),
               "a negative position counts from the end, as an index of torch does"),
    Coordinate("abs", 1, _abs, "the distance from 0"),
)
"""Functions of a position and a size that coordinates may use."""
