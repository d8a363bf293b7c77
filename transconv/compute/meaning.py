"""What a computation means: executed in NumPy, in f64, straight from its steps.

Every value is an array with one axis for each axis of the computation, of size 1 along those that it does
not depend on. A sum of products is one matrix product. Nothing of a schedule or a kernel is used here, so
that a kernel can be held against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from transconv.compute.compute import Compute
from transconv.compute.shapes import conditions
from transconv.compute.steps import Read, Reduction, Value
from transconv.ir import (
    REDUCERS,
    Array,
    Cast,
    Const,
    Evaluator,
    Expr,
    Memory,
    Var,
    View,
    all_of,
    contract,
    f64,
    free_vars,
    rewrite,
)

LARGEST = 1 << 24  # points that are held at once


@dataclass(frozen=True)
class Answer:
    """A stored tensor: its elements in f64, and for each the sum of the absolute terms that a reduction
    made it of (0 without a reduction), which rounding errors are proportional to."""

    value: Array
    weight: Array


def execute(compute: Compute, given: Mapping[str, Array]) -> dict[str, Answer]:
    """What is stored, by tensor; ``given`` holds what is read, in logical shapes. Elements that nothing
    stores are NaN."""
    wide = compute.writes
    made = {w.view.tensor.name: Answer(np.full(w.view.tensor.shape, np.nan),
                                       np.zeros(w.view.tensor.shape)) for w in wide}
    for part in _parts(compute):
        _Run(compute, given, part).into(made)
    return made


def outside(compute: Compute, given: Mapping[str, Array]) -> str | None:
    """What torch says of the first index that leaves its tensor, where no ``where`` excludes it; None if
    all are inside. ``given`` holds the tensors whose elements are indices."""
    run = _Run(compute, given, {x.name: range(x.size) for x in compute.axes})
    for step in compute.steps:
        if not isinstance(step, Read):
            continue
        tensor, told = step.view.tensor, compute.names.told(step.view)
        meant = run.at.compute(all_of(conditions(step.view))) if told else np.False_
        for i, (dim, size) in enumerate(zip(step.view.dims, tensor.shape, strict=True)):
            if told & free_vars(dim.coord):
                at = run.at.compute(dim.coord)
                if (bad := ((at < 0) | (at >= size)) & meant).any():
                    found = np.broadcast_to(at, bad.shape)[bad][0]
                    return (f"{tensor.name}: index {found} is out of bounds for dimension {i} with "
                            f"size {size}")
        if step.var in compute.names.indices:
            run.at.env[step.var] = run.read(step)
    return None


def _parts(compute: Compute) -> list[dict[str, range]]:
    """The axes in pieces of at most ``LARGEST`` points: one axis that is not reduced is cut."""
    whole = {x.name: range(x.size) for x in compute.axes}
    free = [x for x in compute.axes if compute.kind(x.name) != "K" and x.size > 1]
    points = prod(x.size for x in compute.axes)
    if compute.factors is not None:  # never held as a whole
        points = max(points // max(1, x.size) for x in compute.axes)
    if points <= LARGEST or not free:
        return [whole]
    cut = max(free, key=lambda x: x.size)
    step = max(1, cut.size * LARGEST // points)
    return [whole | {cut.name: range(i, min(i + step, cut.size))} for i in range(0, cut.size, step)]


class _Run:
    def __init__(self, compute: Compute, given: Mapping[str, Array], part: dict[str, range]) -> None:
        self.compute, self.given = compute, given
        self.names = [x.name for x in compute.axes]
        self.sizes = [len(part[n]) for n in self.names]
        self.at = Evaluator(Memory({}), {}, max(1, len(self.names)))
        for i, name in enumerate(self.names):
            self.at.env[Var(name)] = self.at.along(i, np.asarray(part[name], np.int64))
        self.weight: Array = np.zeros((1,) * self.at.rank)

    def into(self, made: dict[str, Answer]) -> None:
        with np.errstate(all="ignore"):
            for step in self.compute.steps:
                if isinstance(step, Read):
                    self.at.env[_wide(step.var)] = self.read(step)
                elif isinstance(step, Value):
                    self.at.env[_wide(step.var)] = self.value(step.value)
                elif isinstance(step, Reduction):
                    self.at.env[_wide(step.var)] = self.reduce(step)
                else:
                    self.store(step.view, self.value(step.value), made[step.view.tensor.name])

    def value(self, e: Expr) -> Array:
        return self.at.compute(_exact(e))

    def place(self, view: View) -> tuple[tuple[Array, ...], Array]:
        """Indices of a view's elements, 0 where its mask is false, and the mask."""
        mask = self.at.compute(view.mask()).astype(bool)
        coords = [np.where(mask, self.at.compute(d.coord), 0) for d in view.dims]
        return tuple(coords), mask

    def read(self, step: Read) -> Array:
        coords, mask = self.place(step.view)
        tensor = step.view.tensor
        held = np.int64 if tensor.dtype.kind == "int" else np.float64
        found = np.asarray(self.given[tensor.name], held)[coords]
        return np.where(mask, found, step.fill)

    def reduce(self, step: Reduction) -> Array:
        axes = [i for i, n in enumerate(self.names) if n in step.axes]
        if self.compute.factors is not None:
            a, b = (self.at.env[_wide(r.var)] for r in self.compute.factors)
            self.weight = contract(np.abs(a), np.abs(b), axes, np.dtype(np.float64))
            return contract(a, b, axes, np.dtype(np.float64))
        terms = self.value(step.value)
        shape = [self.sizes[i] if i in axes else n for i, n in enumerate(terms.shape)]
        terms = np.broadcast_to(terms, shape)
        self.weight = np.sum(np.where(np.isfinite(terms), np.abs(terms), 0), tuple(axes), keepdims=True)
        if 0 in shape:
            return np.full([1 if i in axes else n for i, n in enumerate(shape)],
                           REDUCERS[step.op].neutral)
        return np.asarray(REDUCERS[step.op].numpy(terms, axis=tuple(axes), keepdims=True))

    def store(self, view: View, value: Array, into: Answer) -> None:
        coords, mask = self.place(view)
        shape = np.broadcast_shapes(value.shape, mask.shape, *(c.shape for c in coords))
        keep = np.broadcast_to(mask, shape)
        where = tuple(np.broadcast_to(c, shape)[keep] for c in coords)
        into.value[where] = np.broadcast_to(value, shape)[keep]
        into.weight[where] = np.broadcast_to(self.weight, shape)[keep]


def _wide(var: Var) -> Var:
    return Var(var.name, f64) if var.type.kind == "float" else var


def _exact(e: Expr) -> Expr:
    """The expression with every float in f64."""
    def wider(at: Expr) -> Expr:
        if isinstance(at, Var):
            return _wide(at)
        if isinstance(at, Const) and at.type.kind == "float":
            return Const(at.value, f64)
        return Cast(at.x, f64) if isinstance(at, Cast) and at.type.kind == "float" else at

    return rewrite(e, wider)
