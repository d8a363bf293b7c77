"""The product of a computation: its factors, the reads behind them, and the kind of each axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.compute.steps import Read, Value
from transconv.ir import Cast, Mul, Var, View

if TYPE_CHECKING:
    from transconv.compute.compute import Compute

Factors = tuple[Read | Value, Read | Value]


def factors_of(compute: Compute) -> Factors | None:
    """The two factors of the product that is summed (see ``Compute.factors``), or None."""
    total, names = compute.sum, compute.names
    if total is None or total.op != "sum" or compute.again:
        return None
    if (named := total.factors) is None:
        return None
    a, b = named
    moved = all(v in names.chosen for v in named) and isinstance(total.value, Mul) and all(
        isinstance(e, Cast) for e in (total.value.a, total.value.b))
    if not moved and not _contracted(compute, a, b):
        return None
    first, second = (next(s for s in compute.steps if isinstance(s, (Read, Value)) and s.var is v)
                     for v in named)
    return first, second


def _contracted(compute: Compute, a: Var, b: Var) -> bool:
    """Whether two computed values of one type are factors of a matrix product: each varies along an
    axis of the result that the other lacks, both along a summed one, and each has a read that varies
    along all axes of the value."""
    if a.type is not b.type or any(compute.names.main(v) is None for v in (a, b)):
        return False
    in_a, in_b, in_c = compute.roots(a), compute.roots(b), compute.seen_by(compute.c)
    return bool((in_a - in_b) & in_c and (in_b - in_a) & in_c and in_a & in_b - in_c)


def operands_of(compute: Compute) -> tuple[Read, ...]:
    """The main read of each factor of a product; without a product, the first read."""
    factors = compute.factors
    if factors is None:
        return compute.reads[:1]
    chosen = compute.names.chosen
    found = [chosen[f.var][0] if f.var in chosen else compute.names.main(f.var) for f in factors]
    return tuple(r for r in found if r is not None)


def kinds_of(compute: Compute) -> dict[str, str]:
    """The kind of every axis, by name (see ``Compute.kind``)."""
    if compute.factors is None:
        return {x.name: "K" if x.name in compute.reduced else "M" for x in compute.axes}
    in_a, in_b = (compute.roots(f.var) for f in compute.factors)
    in_c = compute.seen_by(compute.c)
    return {x.name: "K" if x.name not in in_c else
            "M" if x.name not in in_b else "B" if x.name in in_a else "N" for x in compute.axes}


def why_not_plain(compute: Compute, view: View | None) -> str | None:
    """None if an operand or result is exactly the elements of its view; else why not."""
    if view is None:
        return None
    if view in compute.added:
        return f"several points add to one place in {view.tensor.name}"
    if told := compute.names.told(view):
        return (f"places in {view.tensor.name} are told by the values of "
                f"{' '.join(sorted(v.name for v in told))}")
    for factor in compute.factors or ():
        if factor in compute.prologue and any(r.view is view for r in compute.names.made_of[factor.var]):
            return f"{factor.name} is computed from it before it is multiplied"
        chosen = compute.names.chosen.get(factor.var, ())
        if isinstance(factor, Value) and any(r.view is view for r in chosen):
            return f"{factor.name} is chosen from several tensors"
    return None
