"""``argmax`` and ``argmin``: one row each. Each expands to two reductions.

    let i = argmax(x; k)        expands to        let i_top = max(x; k)
                                                  let i = min(where(x == i_top or x != x, k, 768); k)

Elements are numbered over the axes in the order in which they are named, the last one fastest. As in
torch, the first of equal elements counts, and NaN is greater and less than all other numbers. Sizes that
are arguments stay names: ``min(where(x == i_top or x != x, i32(k), i32(K)); k)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from transconv.compute.steps import Reduction
from transconv.ir import Cast, Const, Expr, Select, Var, as_expr, eq, i32, i64, ne
from transconv.simplify import Facts, range_of, simplify

EXTREMA = {"argmax": "max", "argmin": "min"}


def is_extreme(x: Expr, top: Expr) -> Expr:
    """Whether an element equals the extreme ``top``; true for every NaN."""
    return eq(x, top) | ne(x, x)


def where_first(name: str, x: Expr, top: Var, axes: Sequence[str], sizes: Mapping[str, Expr],
                facts: Facts) -> Reduction:
    """The reduction that gives the number of the first element equal to ``top``, as i32 (i64 where the
    facts do not tell that there are fewer than 2^31 elements)."""
    count = simplify(prod((sizes[a] for a in axes), start=as_expr(1)), facts)
    most = range_of(count, facts).hi
    whole = i32 if most is not None and most <= i32.limits[1] else i64
    place: Expr = Var(axes[0])
    for a in axes[1:]:
        place = place * sizes[a] + Var(a)
    none = Const(count.value, whole) if isinstance(count, Const) else Cast(count, whole)
    hit = Select(is_extreme(x, top), Cast(place, whole), none)
    return Reduction(name, "min", hit, tuple(axes))
