"""The role of each axis of a computation, derived from its views alone."""

from __future__ import annotations

from dataclasses import replace

from transconv.compute.analysis.view_strides import axis_strides
from transconv.compute.compute import Compute
from transconv.compute.steps import Axis


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
