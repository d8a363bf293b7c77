"""Merging of groups: the same sums with several adjacent groups treated as one.

The matrix unit multiplies at least 16 features at a time, and the copy engine is fastest for rows of 128
bytes; groups of 4 features use little of either. 16 such groups merged are one group of 64 features, in
which B is block diagonal:

    merge=16    g=32 k=4 n=4                 ->  g=2 k=64 n=64
                A[m, g*4 + k]                    A[m, g*64 + k]
                B[g*4 + n, k]                    B[g*64 + n, k % 4]  where k//4 == n//4
                C[m, g*4 + n]                    C[m, g*64 + n]

Merging is a substitution, g -> g*16 + n//4 and n -> n % 4 (k likewise), in views and in what is computed
in the epilogue from a place, such as its random word. And it is a mask: B is zero off the
diagonal, and results that have B's dimensions (sums over positions) are stored on the diagonal only. There
are 16 times as many products, of the same bytes. Zeros of B are multiplied by the values of other groups,
so an infinity or NaN in one group gives NaN in the groups merged with it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from transconv.compute import Axis, Compute, Read, Step
from transconv.ir import Expr, Var, View, ViewDim, all_of, eq, free_vars, substitute
from transconv.simplify import Facts, simplify


def why_not_merged(compute: Compute, merge: int) -> str | None:
    """None if ``merge`` adjacent groups can be merged into one, else the reason."""
    group = _group(compute)
    if merge < 1:
        return f"merge={merge}: at least one group is seen as one"
    if merge in (1, compute.merge):
        return None
    if compute.merge > 1:
        return f"merge={merge}, but {compute.name} has {compute.merge} groups merged already"
    if group is None:
        return f"merge={merge}, but {compute.name} has no groups"
    if group.size % merge:
        return f"merge={merge} does not divide the {group.size} groups"
    if reason := next(filter(None, map(compute.why_not_plain, compute.views())), None) or _apart(
        compute, group
    ):
        return f"merge={merge}, but {reason}"
    across = _across(compute.c, compute)
    if across is not None and across.size == 1:
        return (
            f"merge={merge}: groups have one {across.name}, so that the places of all products of "
            f"a row are the same in {compute.c.tensor.name}"
        )
    return None


def _apart(compute: Compute, group: Axis) -> str | None:
    """Why the groups of a computation cannot be merged; None if in each tensor that differs between groups
    or features one dimension holds both."""
    features = {x.var for x in compute.axes if x.role == "feature"}
    if len(features) != 2:
        return f"{compute.name} has {len(features)} axes of features, not two"
    for view in compute.views():
        if _varies(view, {group.var, *features}) and not any(
            group.var in seen and seen & features for d in view.dims for seen in [free_vars(d.coord)]
        ):
            return f"{view.tensor.name} has no dimension of groups and features"
    if any(read.fill for read in compute.reads):
        return "what is read beyond an end is not 0"
    for step in compute.steps:
        if (
            not isinstance(step, Read)
            and step not in compute.after
            and free_vars(step.value) & {group.var, *features}
        ):
            return "what is summed is computed from the numbers of groups or features"
    return None


def merged(compute: Compute, merge: int) -> Compute:
    """The computation with ``merge`` adjacent groups merged into one. It is returned unchanged if it is
    merged already, or if that is not legal (``why_not_merged``)."""
    return compute if merge in (1, compute.merge) else _made(compute, merge)


@lru_cache(maxsize=512)
def _made(compute: Compute, merge: int) -> Compute:
    group = _group(compute)
    if group is None or why_not_merged(compute, merge):
        return compute
    axes = tuple(
        replace(x, size=x.size // merge)
        if x is group
        else replace(x, size=x.size * merge)
        if x.role == "feature"
        else x
        for x in compute.axes
    )
    seen = compute.over(lambda view: _merged(view, compute, group, merge))
    values, facts = _originals(compute.c, compute, group, merge), _facts(compute, merge)
    steps = tuple(_of_originals(s, values, facts) if s in seen.after else s for s in seen.steps)
    return replace(seen, steps=steps, axes=axes, merge=merge)


def _of_originals(step: Step, values: dict[Expr, Expr], facts: Facts) -> Step:
    """A step whose value, if it is computed from the numbers of a group and of features, is that of the
    original ones."""
    if isinstance(step, Read) or not any(e in values for e in free_vars(step.value)):
        return step
    return replace(step, value=simplify(substitute(step.value, values), facts))


def _merged(view: View, compute: Compute, group: Axis, merge: int) -> View:
    """A view through merged groups. The feature that shares a coordinate with the group determines the
    original group; a mask requires that another feature is of the same group."""
    features = [x for x in compute.axes if x.role == "feature"]
    if not _varies(view, {group.var, *(x.var for x in features)}):  # a scale of all groups
        return view
    facts, first = _facts(compute, merge), _with_group(view, compute, group)
    values = _originals(view, compute, group, merge)
    dims = []
    for dim in view.dims:
        coord, mask = (substitute(e, values) for e in (dim.coord, dim.mask))
        for x in features:
            if x is not first and x.var in free_vars(dim.coord):
                mask = all_of([mask, eq(x.var // x.size, first.var // first.size)])
        changed = coord is not dim.coord
        dims.append(ViewDim(simplify(coord, facts), mask) if changed else dim)
    return View(view.tensor, tuple(dims))


def _facts(compute: Compute, merge: int) -> Facts:
    """The ranges of features of merged groups."""
    facts = Facts()
    for x in compute.axes:
        if x.role == "feature":
            facts = facts.with_range(x.var, 0, max(0, x.size * merge - 1))
    return facts


def _with_group(view: View, compute: Compute, group: Axis) -> Axis:
    """The feature that shares a coordinate of a view with the group."""
    shared = {v for d in view.dims if group.var in (seen := free_vars(d.coord)) for v in seen}
    return next(x for x in compute.axes if x.role == "feature" and x.var in shared)


def _originals(view: View, compute: Compute, group: Axis, merge: int) -> dict[Expr, Expr]:
    """The original group and features at a point of a view through merged groups."""
    values: dict[Expr, Expr] = {x.var: x.var % x.size for x in compute.axes if x.role == "feature"}
    first = _with_group(view, compute, group)
    return values | {group.var: group.var * merge + first.var // first.size}


def _varies(view: View, names: set[Var]) -> bool:
    """Whether a view's elements depend on any of these variables."""
    return any(free_vars(e) & names for d in view.dims for e in (d.coord, d.mask))


def _group(compute: Compute) -> Axis | None:
    return next((x for x in compute.axes if x.role == "batch"), None)


def inner_feature(view: View, compute: Compute) -> Axis | None:
    """The feature axis of a view's second dimension, across the diagonal. None if the view is not block
    diagonal, or if it is of a copy that stores the zeros as well."""
    across = _across(view, compute) if compute.merge > 1 else None
    return None if across is None or view.dims[1].coord is across.var else across


@lru_cache(maxsize=512)
def _across(view: View, compute: Compute) -> Axis | None:
    """The one of two feature axes that does not share a coordinate with the groups."""
    seen = {v for d in view.dims for e in (d.coord, d.mask) for v in free_vars(e)}
    features = [x for x in compute.axes if x.role == "feature" and x.var in seen]
    across = [x for x in features if x.var not in free_vars(view.dims[0].coord)]
    return across[0] if len(features) > 1 else None
