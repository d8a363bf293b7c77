"""``argmax`` and ``argmin``: one row each. Each expands to two reductions.

    let i = argmax(x; k)        expands to        let i_top = max(x; k)
                                                  let i = min(where(x == i_top or x != x, k, 768); k)

A place is counted over the axes in the order in which they are named, the last one fastest. Of equal
elements the first is meant, and NaN is greater and less than all others: the rules of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from transconv.compute.steps import Reduction
from transconv.ir import Cast, Const, Expr, Select, Var, eq, i32, i64, ne

EXTREMA = {"argmax": "max", "argmin": "min"}


def is_extreme(x: Expr, top: Expr) -> Expr:
    """Whether an element is the extreme ``top`` of all; of several NaN each is."""
    return eq(x, top) | ne(x, x)


def where_first(name: str, x: Expr, top: Var, axes: Sequence[str], sizes: Mapping[str, int]) -> Reduction:
    """The reduction that finds the first place of an extreme."""
    count = prod(sizes[a] for a in axes)
    whole = i32 if count <= i32.limits[1] else i64
    place: Expr = Var(axes[0])
    for a in axes[1:]:
        place = place * sizes[a] + Var(a)
    hit = Select(is_extreme(x, top), Cast(place, whole), Const(count, whole))
    return Reduction(name, "min", hit, tuple(axes))
