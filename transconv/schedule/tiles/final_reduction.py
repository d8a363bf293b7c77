"""The kernels that combine the parts of statistics (tiles/partial_results.py), as computations.

    parts[n, h_part, w_part, o]     ->     M[n, o] = sum of parts over h_part w_part o_in

Statistics at the same coordinates share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from transconv.compute import Axis, Compute, Read, Reduction, Step, Value, Write, with_roles
from transconv.compute.analysis import statistics as stat
from transconv.ir import ZERO, Const, Expr, FloorDiv, Var, View, ViewDim
from transconv.schedule.tiles.partial_results import WorkspaceDim, along, counted, workspace

if TYPE_CHECKING:
    from transconv.schedule.schedule import Schedule


@lru_cache(maxsize=256)
def finishes(compute: Compute, schedule: Schedule) -> tuple[Compute, ...]:
    """The computations of the second kernels: one for statistics at the same coordinates."""
    return tuple(_finish(group, compute, schedule) for group in groups(compute))


@lru_cache(maxsize=64)
def groups(compute: Compute) -> tuple[list[Write], ...]:
    """The statistics, those at the same coordinates together."""
    alike: dict[tuple[Expr, ...], list[Write]] = {}
    for w in compute.statistics:
        alike.setdefault(tuple(d.coord for d in w.view.dims), []).append(w)
    return tuple(alike.values())


def _finish(group: list[Write], compute: Compute, schedule: Schedule) -> Compute:
    dims = along(group[0], compute, schedule)
    kept = stat.kept(group[0]) or {}
    axes = {x.name: x for d in dims for x in d.axes}
    summed = tuple(n for n in axes if n not in kept)
    total = prod(stat.points(compute).values())
    places = prod(axes[n].size for n in kept if n in axes)
    steps: list[Step] = []
    sums: dict[Write, tuple[Read, Var]] = {}
    for i, w in enumerate(group):
        at = tuple(ViewDim(d.at) for d in dims) or (ViewDim(ZERO),)
        read = Read(f"part_{i}", View(workspace(w, compute, schedule), at))
        steps.append(read)
        value: Expr = read.var
        if w.op == "squares":
            of, whole = sums[stat.sum_of(compute, w) or w]
            value = _between(i, steps, read, of, whole, dims, total // places)
        op = "sum" if w.op == "squares" else w.op
        made = Reduction(f"whole_{i}", op, value, summed) if summed else Value(f"whole_{i}", value)
        steps.append(made)
        sums[w] = (read, made.var)
        steps.append(Write(_finished(w, axes), made.var))
    order = [*(x for n, x in axes.items() if n in kept), *(axes[n] for n in summed)]
    shape = "x".join(str(d.size) for d in dims) or "1"
    names = "_".join(w.view.tensor.name for w in group)
    finish = with_roles(Compute(f"{compute.name}_{names}_of_{shape}",
                                tuple(order) or (Axis("one", 1, ""),), tuple(steps), compute.math))
    parts = {axes[n] for n in summed} or {*order}  # none is there before there are tiles
    return replace(finish, axes=tuple(
        replace(x, role="part") if replace(x, role="") in parts else x for x in finish.axes))


def _between(i: int, steps: list[Step], read: Read, of: Read, whole: Var, dims: tuple[WorkspaceDim, ...],
             values: int) -> Expr:
    """The squared deviations of a part from the mean of all: those from its own mean, and its mean's."""
    dtype = read.var.type
    number = counted((d.count(d.at) for d in dims), dtype)
    mean = Value(f"mean_{i}", whole / Const(float(values), dtype))
    off = Value(f"off_{i}", of.var / number - mean.var)
    steps += [mean, off]
    return read.var + number * (off.var * off.var)


def _finished(write: Write, axes: Mapping[str, Axis]) -> View:
    """The view of a statistic over the second kernel's axes, which has none of one position."""
    coords = [d.coord.a if isinstance(d.coord, FloorDiv) else d.coord for d in write.view.dims]
    return View(write.view.tensor, tuple(
        ViewDim(e if not isinstance(e, Var) or axes.get(e.name) else ZERO) for e in coords))
