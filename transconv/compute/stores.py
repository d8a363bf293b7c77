"""Whether every point of a computation stores to a place of its own.

Programs run in any order: of two points that store to one place, either may be the last. Most stores are
seen to be apart from their coordinates alone; of the others the places are counted.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from transconv.compute.steps import Axis, Write
from transconv.ir import Array, Const, Evaluator, Expr, Memory, Tensor, Var, substitute
from transconv.simplify import simplify

if TYPE_CHECKING:
    from transconv.compute.compute import Compute

MOST_COUNTED = 1 << 24  # points of a store that are counted one by one


def why_not_stored(compute: Compute) -> str | None:
    """None if all stores go to places of their own, in tensors that nothing reads, else the reason."""
    read = {r.view.tensor for r in compute.reads}
    for tensor, writes in _by_tensor(compute).items():
        if tensor in read:
            return f"{tensor.name} is read and stored; expected another tensor for the result"
        for w in writes:
            if told := compute.names.told(w.view):
                names = " ".join(sorted(v.name for v in told))
                return (f"places in {tensor.name} are told by the values of {names}, which may be equal; "
                        "expected a store to a place of its own from every point")
        if len(writes) == 1 and _is_apart(compute, writes[0]):
            continue
        points = sum(prod(x.size for x in _axes(compute, w)) for w in writes)
        if points > MOST_COUNTED:
            return (f"it cannot be told whether the {points} points that are stored in {tensor.name} have "
                    "places of their own; expected one axis in each coordinate")
        found = np.concatenate([_places(compute, w) for w in writes])
        if len(np.unique(found)) < len(found):
            return (f"several points are stored in one place of {tensor.name}; expected a place of its "
                    "own for each")
    return None


def _by_tensor(compute: Compute) -> dict[Tensor, list[Write]]:
    found: dict[Tensor, list[Write]] = {}
    for w in compute.writes:
        found.setdefault(w.view.tensor, []).append(w)
    return found


def _axes(compute: Compute, write: Write) -> list[Axis]:
    """The axes whose points a store is done for."""
    inside = any(write in sweep.steps for sweep in compute.sweeps.each)
    return [x for x in compute.axes if inside or x.name not in compute.reduced]


def _is_apart(compute: Compute, write: Write) -> bool:
    """Whether every axis of more than one position is told by a coordinate."""
    told: set[str] = set()
    for dim in write.view.dims:
        told |= _told(compute, dim.coord)
    return told >= {x.name for x in _axes(compute, write) if x.size > 1}


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
    axes = _axes(compute, write)
    at = Evaluator(Memory({}), {}, max(1, len(axes)))
    for i, x in enumerate(axes):
        at.env[x.var] = at.along(i, np.arange(x.size, dtype=np.int64))
    offset, mask = at.compute(write.view.offset()), at.compute(write.view.mask()).astype(bool)
    shape = [x.size for x in axes] or [1]
    return np.asarray(np.broadcast_to(offset, shape)[np.broadcast_to(mask, shape)])
