"""Checks that no two points of a computation store to the same element.

Programs run in any order: of two points that store to one place, either may be the last; what is added has
no order. Most stores are
seen to be apart from their coordinates alone; of the others the places are counted.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from transconv.compute.steps import Axis, Write
from transconv.ir import (
    Array,
    Const,
    Evaluator,
    Expr,
    Memory,
    Tensor,
    Var,
    bf16,
    f16,
    f32,
    f64,
    i32,
    i64,
    substitute,
)
from transconv.simplify import Facts, simplify

if TYPE_CHECKING:
    from transconv.compute.compute import Compute

MOST_COUNTED = 1 << 24  # points of a store that are counted one by one


def why_not_stored(compute: Compute) -> str | None:
    """None if all stores go to places of their own, in tensors that nothing reads, else the reason. Those
    that add share places, in one tensor of a type that is added in one step."""
    read = {r.view.tensor for r in compute.reads}
    for tensor, writes in _by_tensor(compute).items():
        if tensor in read:
            return f"{tensor.name} is read and stored; expected another tensor for the result"
        if any(w.op for w in writes):
            if reason := _why_not_added(compute, tensor, writes):
                return reason
            continue
        for w in writes:
            if told := compute.names.told(w.view):
                names = " ".join(sorted(v.name for v in told))
                return (f"places in {tensor.name} are told by the values of {names}, which may be equal; "
                        "expected a store to a place of its own from every point")
        if len(writes) == 1 and _is_apart(compute, writes[0]):
            continue
        points = sum(prod(x.size for x in axes_of(compute, w)) for w in writes)
        if points > MOST_COUNTED:
            return (f"it is not known whether the {points} points that are stored in {tensor.name} have "
                    "places of their own; expected one axis in each coordinate")
        found = np.concatenate([_places(compute, w) for w in writes])
        if len(np.unique(found)) < len(found):
            return (f"several points are stored in one place of {tensor.name}; expected a place of its "
                    "own for each")
    return None


def _why_not_added(compute: Compute, tensor: Tensor, writes: list[Write]) -> str | None:
    if not all(w.op for w in writes):
        return f"{tensor.name} is both stored and added to; expected one of the two"
    if len({v.tensor for v in compute.added}) > 1:
        return "several tensors are added to; expected one in each computation"
    for w in writes:
        coords = [simplify(d.coord, _ranges(compute)) for d in w.view.dims]
        moved = {a for c in coords for a in compute.roots(c)}
        if (still := [x for x in axes_of(compute, w) if x.size > 1 and x.name not in moved]):
            return (f"{tensor.name} has one place for all of {still[0].name}; expected a sum over "
                    f"{still[0].name}")
    if tensor.dtype not in (f16, bf16, f32, f64, i32, i64):  # those of 16 bits by way of f32
        return f"{tensor.name} is {tensor.dtype}; expected a float, i32 or i64, which are added in place"
    return None


def _ranges(compute: Compute) -> Facts:
    facts = Facts()
    for x in compute.axes:
        facts = facts.with_range(x.var, 0, max(0, x.size - 1))
    return facts


def _by_tensor(compute: Compute) -> dict[Tensor, list[Write]]:
    found: dict[Tensor, list[Write]] = {}
    for w in compute.writes:
        found.setdefault(w.view.tensor, []).append(w)
    return found


def axes_of(compute: Compute, write: Write) -> list[Axis]:
    """The axes whose points a store is done for."""
    inside = any(write in sweep.steps for sweep in compute.sweeps.each)
    return [x for x in compute.axes if inside or x.name not in compute.reduced]


def _is_apart(compute: Compute, write: Write) -> bool:
    """Whether every axis of more than one position is told by a coordinate."""
    told: set[str] = set()
    for dim in write.view.dims:
        told |= _told(compute, dim.coord)
    return told >= {x.name for x in axes_of(compute, write) if x.size > 1}


def _told(compute: Compute, coord: Expr) -> set[str]:
    """The axes whose positions a coordinate tells: all that it depends on, where the steps of each are
    longer than those of the ones before it together (``part*128 + within``); else none."""
    steps: dict[str, int] = {}
    for name in compute.roots(coord):
        axis = Var(name)
        ahead = simplify(substitute(coord, {axis: axis + 1}) - coord)
        if compute.size(name) > 1:
            steps[name] = abs(int(ahead.value)) if isinstance(ahead, Const) else 0
    reach = 0
    for name, step in sorted(steps.items(), key=lambda s: s[1]):
        if step <= reach:
            return set()
        reach += step * (compute.size(name) - 1)
    return set(steps)


def _places(compute: Compute, write: Write) -> Array:
    """Where the elements of a store lie."""
    axes = axes_of(compute, write)
    at = Evaluator(Memory({}), {}, max(1, len(axes)))
    for i, x in enumerate(axes):
        at.env[x.var] = at.along(i, np.arange(x.size, dtype=np.int64))
    offset, mask = at.compute(write.view.offset()), at.compute(write.view.mask()).astype(bool)
    shape = [x.size for x in axes] or [1]
    return np.asarray(np.broadcast_to(offset, shape)[np.broadcast_to(mask, shape)])
