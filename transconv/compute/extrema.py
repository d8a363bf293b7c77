"""``argmax`` and ``argmin``: one row each. Each expands to two reductions.

    let i = argmax(x; k)        expands to        let i_top = max(x; k)
                                                  let i = min(where(x == i_top or x != x, k, 768); k)

Elements are numbered over the axes in the order in which they are named, the last one fastest. As in
torch, the first of equal elements counts, and NaN is greater and less than all other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from transconv.compute.steps import Reduction
from transconv.ir import Cast, Const, Expr, Select, Var, eq, i32, i64, ne

EXTREMA = {"argmax": "max", "argmin": "min"}


def is_extreme(x: Expr, top: Expr) -> Expr:
    """Whether an element equals the extreme ``top``; true for every NaN."""
    return eq(x, top) | ne(x, x)


def where_first(name: str, x: Expr, top: Var, axes: Sequence[str], sizes: Mapping[str, int]) -> Reduction:
    """The reduction that gives the number of the first element equal to ``top``, as i32 (i64 for more than
    2^31 elements)."""
    count = prod(sizes[a] for a in axes)
    whole = i32 if count <= i32.limits[1] else i64
    place: Expr = Var(axes[0])
    for a in axes[1:]:
        place = place * sizes[a] + Var(a)
    hit = Select(is_extreme(x, top), Cast(place, whole), Const(count, whole))
    return Reduction(name, "min", hit, tuple(axes))
