"""The role of each axis of a computation, derived from its views alone.

Also here: the strides of a computation's views along its axes, for estimates and tile choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

from transconv.compute.compute import Compute
from transconv.compute.steps import Axis
from transconv.ir import Const, Expr, View, ViewDim, free_vars, substitute
from transconv.simplify import simplify


def with_roles(compute: Compute) -> Compute:
    """The computation with the role of every axis.

    A reduced axis that shares a coordinate with one that is not reduced is a window. In a product, M axes
    are positions, N axes and other K axes features, B axes batches. Without a product all axes are
    positions; but if nothing is reduced, the axis with the smallest stride in the result is a feature.
    """
    return replace(compute, axes=tuple(replace(x, role=_role(x, compute)) for x in compute.axes))


def _role(axis: Axis, compute: Compute) -> str:
    kind = compute.kind(axis.name)
    if kind == "K" and _slides(axis, compute):
        return "window"
    if compute.factors is not None:
        return {"B": "batch", "M": "position", "N": "feature", "K": "feature"}[kind]
    fastest = axis.name == _fastest(compute)
    return "feature" if compute.sum is None and fastest else "position"


def _slides(axis: Axis, compute: Compute) -> bool:
    return any(axis.name in seen and len(seen) > 1 and any(compute.kind(a) != "K" for a in seen)
               for r in compute.reads for d in r.view.dims for seen in [compute.roots(d.coord)])


def _fastest(compute: Compute) -> str:
    strides = axis_strides(compute.c, compute)
    wide = [x for x in compute.axes if x.size > 1] or list(compute.axes)
    return min(wide, key=lambda x: strides[x.name] or 1 << 62).name


FAR = 1 << 20  # factor on strides of gathers; a power of two, so that it keeps their alignment


@lru_cache(maxsize=512)
def axis_strides(view: View, compute: Compute) -> dict[str, int]:
    """The stride of a view along each axis, in elements; ``""``: the offset of the point where every axis
    is 0. Along axes on which indices from a tensor depend (a gather), the stride is ``FAR`` times that of
    consecutive indices."""
    zero: dict[Expr, Expr] = {x.var: Const(0) for x in compute.axes}
    offset = substitute(view.offset(), compute.stand_ins)
    first = _value(substitute(offset, zero))
    found = {x.name: _value(substitute(offset, zero | {x.var: Const(1)})) - first for x in compute.axes}
    gathered = {a for v in compute.names.told(view) for a in compute.names.rooted[v]}
    found |= {a: step * FAR for a, step in found.items() if a in gathered}
    return found | {"": first}


def _value(e: Expr) -> int:
    e = simplify(e)
    assert isinstance(e, Const), e
    return int(e.value)


@lru_cache(maxsize=2048)
def axis_steps(seen: ViewDim, compute: Compute) -> dict[str, int]:
    """The change of a coordinate per step of each axis that it mentions."""
    zero: dict[Expr, Expr] = {x.var: Const(0) for x in compute.axes}
    coord = substitute(seen.coord, compute.stand_ins)
    first = _value(substitute(coord, zero))
    own = {v.name for v in free_vars(coord)}
    return {x.name: _value(substitute(coord, zero | {x.var: Const(1)})) - first
            for x in compute.axes if x.name in own}


def places(view: View, compute: Compute, written: Iterable[tuple[str, int]]) -> int:
    """The number of different elements of a view that one lane reads for positions that are written out: 8
    positions of a row and a window of 7 have 56 products, of 14 elements. ``written``: axes and
    extents."""
    strides = axis_strides(view, compute)
    found = {(0, 0)}
    for axis, extent in written:
        if step := strides[axis]:
            # In the last block of a sum, positions beyond the end have masks of their own and share no
            # load.
            rest = -compute.size(axis) % extent if compute.kind(axis) == "K" else 0
            own = [i if i >= extent - rest else 0 for i in range(extent)]
            found = {(at + step * i, max(mask, own[i])) for (at, mask), i in product(found, range(extent))}
    return len(found)


@lru_cache(maxsize=2048)
def touched(view: View, compute: Compute) -> int:
    """Bytes of a tensor that the computation reads or writes, each counted once."""
    strides = axis_strides(view, compute)
    points = prod(x.size for x in compute.axes if strides[x.name])
    return min(points, prod(view.tensor.shape)) * view.tensor.dtype.bytes
