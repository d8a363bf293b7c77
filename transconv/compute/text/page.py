"""The page that describes a computation: axes with kinds, views with coordinates, masks and proofs.

    compute strided_1_1
        M  rows     n=32  qh=28  qw=28
        N  columns  f=64
        K  summed   th=2  tw=2  c=128
        A = X[n, c, oh = qh - th + 1, ow = qw - tw + 1]
            always true: (qh*2 + 2 - th*2) % 2 == 0    qh*2 - th*2 + 2 is a multiple of 2
            always true: 0 <= oh                qh - th + 1 in 0..28 by qh in 0..27, th in 0..1
            kept:        oh < 28                qh - th + 1 in 0..28 by qh in 0..27, th in 0..1
        ...
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from transconv.compute.coordinates import as_written
from transconv.compute.text.expressions import facts_of_axes
from transconv.ir import Cast, Const, Expr, Mod, Var, View, conjuncts, find, readable, substitute
from transconv.simplify import Facts, prove, reason, simplify

if TYPE_CHECKING:
    from transconv.compute.compute import Compute

KINDS = (("B", "groups"), ("M", "rows"), ("N", "columns"), ("K", "summed"))
WIDTH = 30  # characters of a condition, so that reasons are aligned


@lru_cache(maxsize=64)
def axis_facts(compute: Compute) -> Facts:
    """The ranges of the axes: 0 to size - 1, for all values of sizes that are arguments."""
    extents = {x.name: x.extent for x in compute.axes if x.extent is not None}
    return facts_of_axes({x.name: x.size for x in compute.axes}, extents, compute.named)


def describe(compute: Compute) -> str:
    """The description of a computation as text. Masks that the ranges of the axes prove are marked, with
    the reason."""
    facts = axis_facts(compute)
    lines = [f"compute {compute.name}"]
    for kind, meaning in KINDS:
        if axes := compute.axes_of(kind):
            sizes = "  ".join(f"{x.name}={x.size}" for x in axes)
            lines.append(f"    {kind}  {meaning:<8} {sizes}")
    if any(x.size == 0 for x in compute.axes_of("K")):
        return "\n".join([*lines, "    the sum is empty: acc = 0",
                          *_view("C", compute.c, facts),
                          f"    C = {compute.behind or 'acc'}"])
    others = [(r.name, r.view) for r in compute.reads if r.view not in (compute.a, compute.b)
              and (r.var in compute.names.indices or r in compute.names.chosen_from)]
    for role, view in (("A", compute.a), ("B", compute.b), *others, ("C", compute.c)):
        if view is not None:
            lines += _view(role, view, facts)
    if compute.b is None and not compute.axes_of("K"):
        return "\n".join([*lines, "    C = A"])
    summed = ", ".join(x.name for x in compute.axes_of("K"))
    factors = "A" if compute.b is None else "A * B"
    lines.append(f"    acc = sum of {factors} over {summed}, in {compute.acc}")
    lines.append(f"    C = {compute.behind or 'acc'}")
    return "\n".join(lines)


def _view(role: str, view: View, facts: Facts) -> list[str]:
    """A line with the coordinates of a view, and a line for each of its conditions."""
    coords, conditions = [], []
    for name, dim in zip(view.tensor.dims, view.dims, strict=True):
        short = dim.coord if isinstance(dim.coord, Var) else simplify(dim.coord, facts)
        coords.append(name if short is Var(name) else f"{name} = {readable(as_written(short))}")
        conditions += [_condition(part, name, dim.coord, facts) for part in conjuncts(dim.mask)
                       if not isinstance(part, Const)]
    return [f"    {role} = {view.tensor.name}[{', '.join(coords)}]", *conditions]


def _condition(part: Expr, name: str, coord: Expr, facts: Facts) -> str:
    """One condition of a mask: whether it is kept or always true, and the reason."""
    named = readable(as_written(substitute(part, {coord: Var(name)})))
    if prove(part, facts):
        verdict, why = "always true:", reason(part, facts)
    else:
        verdict, why = "kept:", "" if find(part, Mod) else reason(part, facts)
        if read := [readable(as_written(e)) for e in find(part, Cast)]:
            why = f"{' '.join(read)} may be any number"
    return f"        {verdict:<12} {named:<{WIDTH}}  {why}".rstrip()
