"""Compares statistics in f64: with those of the result as it is stored, or with those of what is read.

The result itself is compared at sampled points. A statistic of a value that no store has, up to rounding,
is evaluated from what is read, at sampled places, if no other reduction is in it. Of others it is only
seen whether they are numbers.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.analysis.statistics import kept, value_of
from transconv.compute.compute import Compute
from transconv.compute.semantics.error_bounds import SUMMED, allowed, share_of
from transconv.compute.semantics.sampled_points import (
    LONGEST,
    SampleOutcome,
    examine_points,
    examine_sums,
    row_size,
)
from transconv.compute.steps import Reduction, Step, Value, Write, fresh, used
from transconv.ir import TRUE, Array, Cast, Const, Expr, Var

if TYPE_CHECKING:
    import torch


def examine(compute: Compute, tensors: dict[str, torch.Tensor], seed: int = 0) -> SampleOutcome:
    """Compare stored tensors, by name like those that are read, at points drawn by a seed; of what
    several points add to one place, the sums; then statistics. Rows of more than ``LONGEST`` elements are
    not looked at."""
    if row_size(compute) > LONGEST or not all(x.size for x in compute.axes):
        return SampleOutcome(0, 0, True, (), "")
    if compute.added:
        return examine_sums(compute, tensors, seed)
    return (examine_statistics if compute.statistics else examine_points)(compute, tensors, seed)


def examine_statistics(compute: Compute, tensors: dict[str, torch.Tensor], seed: int = 0) -> SampleOutcome:
    """Compare what a product stores, then its statistics with what is stored."""
    plain = tuple(s for s in compute.steps if s not in compute.statistics)
    found = examine(replace(compute, steps=plain), tensors, seed)
    for write in compute.statistics:
        shown = next((w for w in compute.writes if not w.op and _shows(compute, w, write)), None)
        if found.reason:
            break
        if shown is None:
            if (alone := _alone(compute, write)) is not None:
                own = examine(alone, tensors, seed)
                found = replace(found, checked=found.checked + own.checked, wrong=own.wrong,
                                telling=found.telling + own.telling, reason=own.reason)
            elif missing := _missing(compute, write, tensors):
                found = replace(found, reason=missing)
            continue
        got, want, off = _both(compute, write, shown, tensors)
        apart = np.abs(got - want)
        most = allowed(want, off, write.view.tensor.dtype)
        bad = ~(apart <= most) & np.isfinite(want)
        reason = ""
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            reason = (f"{int(bad.sum())} of {bad.size} elements of {write.view.tensor.name} are wrong, "
                      f"the first at {at}: {got[at]:g} instead of {want[at]:g}")
        found = replace(found, checked=found.checked + want.size, reason=reason,
                        telling=found.telling + int((np.abs(want) > most).sum()))
    return found


def _missing(compute: Compute, write: Write, tensors: dict[str, torch.Tensor]) -> str:
    """A sentence if elements of a statistic are NaN, as memory is that no kernel stores to, and nothing
    else that is stored is."""
    got = tensors[write.view.tensor.name]
    if not got.dtype.is_floating_point or not (count := int(got.isnan().sum())):
        return ""
    others = {w.view.tensor.name for w in compute.writes if w not in compute.statistics}
    if any(t.is_floating_point() and bool(t.isnan().any()) for t in map(tensors.__getitem__, others)):
        return ""
    return f"{count} of {got.numel()} elements of {write.view.tensor.name} are NaN, or are not stored"


def _shows(compute: Compute, stored: Write, write: Write) -> bool:
    """Whether a store has the value of a statistic, perhaps rounded, at a place for each point."""
    names = [d.coord.name for d in stored.view.dims if isinstance(d.coord, Var)]
    points = [x.name for x in compute.axes if x.size > 1 and compute.kind(x.name) != "K"]
    return (_base(compute, stored.value) is _base(compute, write.value) and stored.view.mask() is TRUE
            and len(names) == len(stored.view.dims) == len({*names}) and {*names} >= {*points})


def _alone(compute: Compute, write: Write) -> Compute | None:
    """A statistic as a computation of its own; None if other reductions are in its value, or if it is no
    reduction along whole axes."""
    by = kept(write) or {}
    if write.op == "squares" or any(n > 1 for n in by.values()):
        return None
    made = {s.var: s for s in compute.steps if not isinstance(s, Write)}
    needed: set[Step] = set()
    left: list[Step] = [write]
    while left:
        for v in used(left.pop()):
            step = made.get(v)
            if isinstance(step, Reduction):
                return None
            if step is not None and step not in needed:
                needed.add(step)
                left.append(step)
    over = tuple(x.name for x in compute.axes if x.name not in by)
    total = Reduction(fresh("whole", compute.names.all), write.op, value_of(write), over)
    steps = (*(s for s in compute.steps if s in needed), total, Write(write.view, total.var))
    return with_roles(replace(compute, steps=steps))


def _base(compute: Compute, value: Expr) -> Expr:
    """What a value is rounded from."""
    made: dict[Expr, Expr] = {s.var: s.value for s in compute.steps if isinstance(s, Value)}
    while isinstance(value, Cast) or isinstance(made.get(value), Cast | Var):
        value = value.x if isinstance(value, Cast) else made[value]
    return value


def _both(compute: Compute, write: Write, shown: Write,
          tensors: dict[str, torch.Tensor]) -> tuple[Array, Array, Array]:
    """The elements of a statistic, what they should be, and how far they may be off."""
    t = tensors[shown.view.tensor.name].detach()
    by = kept(write) or {}
    rows, over, at = [], [], 0
    for coord in (d.coord for d in shown.view.dims):
        assert isinstance(coord, Var)
        each = by.get(coord.name, 0)
        if each > 1:
            t = t.reshape(*t.shape[:at], -1, each, *t.shape[at + 1:])  # a view
        rows += [coord.name] if each else []
        over += [at + 1] if each > 1 else [] if each else [at]
        at += 2 if each > 1 else 1
    eps = 2.0 ** -shown.view.tensor.dtype.digits + max(SUMMED, share_of(compute))
    want, off = _reduced(write.op, t if t.dtype.is_floating_point else t.double(), tuple(over), eps)
    told = [a for d in write.view.dims for a in compute.roots(d.coord) if a in rows]
    want, off = (x.permute([rows.index(a) for a in told]) for x in (want, off))
    got = tensors[write.view.tensor.name].detach()
    for dim in reversed(range(got.dim())):
        if isinstance(coord := write.view.dims[dim].coord, Const):
            got = got.select(dim, int(coord.value))
    got = got[tuple(slice(0, n) for n in want.shape)]
    one, two, three = (np.asarray(x.double().cpu().numpy()) for x in (got, want, off))
    return one, two, three


def _reduced(op: str, t: torch.Tensor, over: tuple[int, ...],
             eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The reduction over some dims in f64, and how far it may be off where elements are, by ``eps``."""
    import torch

    if not over:
        t, over = t.unsqueeze(-1), (t.dim(),)
    if op in ("max", "min"):
        found = (t.amax(over) if op == "max" else t.amin(over)).double()
        return found, eps * found.abs()
    size, square = (torch.linalg.vector_norm(t, p, over, dtype=torch.float64) for p in (1, 2))
    total = t.sum(over, dtype=torch.float64)
    if op == "sum":
        return total, eps * size
    found = square**2 - total**2 / prod(t.shape[d] for d in over)
    far = 4 * eps**2 * square**2
    return found, 2 * (found.clamp(min=0) * far).sqrt() + far + eps * found.abs()
