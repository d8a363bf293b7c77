"""Compares what kernels stored with the f64 value of the computation at sampled points.

Points are drawn along the axes that are not reduced; reduced axes are evaluated whole. Only the elements
that these points read are gathered, on the device of the tensors, so that no tensor is copied and the cost
does not grow with them. The allowed error follows from the rounding of each step
(semantics/error_bounds.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv.compute.compute import Compute
from transconv.compute.semantics.error_bounds import allowed, share_of
from transconv.compute.semantics.evaluation import StepEvaluator
from transconv.compute.steps import Read, Reduction, Value, Write
from transconv.ir import Array, Evaluator, Memory, Tensor, Var, f64

if TYPE_CHECKING:
    import torch

POINTS = 512  # the most points
TERMS = 1 << 18  # the most elements of rows that are evaluated together
LONGEST = 1 << 23  # elements; longer rows are not checked, because even one takes too long
LARGE = 1e38  # intermediate values beyond this may overflow in f32, and such points are not compared


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """The outcome of a check. ``checked``: the number of elements that were compared; ``telling``: those
    that 0 would not pass for; ``varied``: whether each operand has more than one value; ``wrong``: the
    coordinates of wrong elements; ``reason``: a sentence about them, empty if there are none."""

    checked: int
    telling: int
    varied: bool
    wrong: tuple[tuple[int, ...], ...]
    reason: str

    @property
    def weak(self) -> bool:
        """Whether a wrong kernel could have passed: constant operands, mostly elements that are 0 within
        the allowed error, or fewer than 16 elements."""
        return not self.varied or self.telling * 8 < self.checked or self.checked < 16


def row_size(compute: Compute) -> int:
    """The elements of a row: all positions along the reduced axes."""
    reduced = {*compute.reduced}
    return prod(x.size for x in compute.axes if x.name in reduced)


def examine_points(compute: Compute, tensors: dict[str, torch.Tensor], seed: int = 0) -> SampleOutcome:
    """Compare stored tensors, by name like those that are read, at points drawn by a seed."""
    reduced, row = {*compute.reduced}, row_size(compute)
    points = max(1, min(POINTS, TERMS // row))
    draw = np.random.default_rng(seed)
    at = {x.name: _drawn(draw, x.size, points) for x in compute.axes if x.name not in reduced}
    run = Samples(compute, tensors, at, points if at else 1)
    with np.errstate(all="ignore"):
        return run.found()


def _drawn(draw: np.random.Generator, size: int, count: int) -> Array:
    """Random positions along an axis, including the first and the last."""
    made = draw.integers(0, size, count)
    made[:1], made[1:2] = size - 1, 0
    return np.asarray(made)


class Samples(StepEvaluator):
    """Evaluates the steps at the points, which are the first dimension of every array; the reduced axes
    are the others."""

    def __init__(self, compute: Compute, tensors: dict[str, Any], at: dict[str, Array],
                 points: int) -> None:
        reduced = [x for x in compute.axes if x.name not in at]
        self.compute, self.tensors = compute, tensors
        self.share = share_of(compute)
        if compute.acc is f64:
            self.share *= 2.0**-29
        self.names = ["", *(x.name for x in reduced)]
        self.sizes = [points, *(x.size for x in reduced)]
        self.at = Evaluator(Memory({}), {}, len(self.names))
        for name, places in at.items():
            self.at.env[Var(name)] = self.at.along(0, places)
        for i, x in enumerate(reduced, 1):
            self.at.env[x.var] = self.at.along(i, np.arange(x.size))
        self.errors, self.products = {}, set()
        self.sure = np.ones((points,) + (1,) * len(reduced), np.bool_)
        self.varied: dict[str, bool] = {}

    def found(self) -> SampleOutcome:
        """Compare the stored elements of these points."""
        checked = telling = 0
        wrong: list[tuple[int, ...]] = []
        reason = ""
        for step in self.compute.steps:
            if not isinstance(step, Write):
                self.evaluate(step)
                continue
            if (answer := self.answer(step)) is None:
                continue
            where, want, off = answer
            sure, bad, got, tells = self.compared(step.view.tensor, where, want, off)
            checked, telling = checked + int(sure.sum()), telling + int((sure & tells).sum())
            if bad.any() and not reason:
                places = np.stack([w[bad] for w in where], -1)
                wrong = [tuple(int(i) for i in p) for p in places[:POINTS]]
                reason = (f"{int(bad.sum())} of {bad.size} sampled elements of {step.view.tensor.name} "
                          f"are wrong, the first at {wrong[0]}: {got[bad][0]:g} instead of "
                          f"{want[bad][0]:g}")
        return SampleOutcome(checked, telling, all(self.varied.values()), tuple(wrong), reason)

    def answer(self, step: Write) -> tuple[tuple[Array, ...], Array, Array] | None:
        """Where a step stores, what should be there, and how far it may be off; None if that is not known
        yet."""
        return self.stored(step, self.sure)

    def stored(self, step: Write, wanted: Array) -> tuple[tuple[Array, ...], Array, Array]:
        """The same of the ``wanted`` points."""
        value = self.value(step.value)
        error = self.error(step.unrounded, value)
        coords, mask = self.place(step.view)
        shape = np.broadcast_shapes(*(x.shape for x in (value, mask, wanted, *coords)))
        keep = np.broadcast_to(mask, shape) & np.broadcast_to(wanted, shape)
        where = tuple(np.broadcast_to(c, shape)[keep] for c in coords)
        off = np.zeros(1) if error is None else np.broadcast_to(error, shape)[keep]
        return where, np.broadcast_to(value, shape)[keep], off

    def compared(self, tensor: Tensor, where: tuple[Array, ...], want: Array,
                 off: Array) -> tuple[Array, Array, Array, Array]:
        """For stored elements: whether each can be compared, whether it is wrong, its value, and whether 0
        would be wrong."""
        import torch

        got = self.elements(tensor, where).astype(np.float64)
        dtype = self.tensors[tensor.name].dtype
        near = torch.from_numpy(np.ascontiguousarray(want)).to(dtype).double().numpy()
        bound = allowed(want, off, tensor.dtype) if dtype.is_floating_point else off
        most = float(torch.finfo(dtype).max) if dtype.is_floating_point else np.inf
        sure = np.isnan(want) | (np.abs(want) + bound < min(most, LARGE))
        same = (got == near) | (np.isnan(got) & np.isnan(near))
        return sure, sure & ~same & ~(np.abs(got - near) <= bound), got, ~(np.abs(near) <= bound)

    def evaluate(self, step: Read | Value | Reduction) -> None:
        super().evaluate(step)
        found = self.at.env[Var(step.name, f64) if step.var.type.kind == "float" else step.var]
        if found.dtype.kind == "f":
            far = np.isfinite(found) & (np.abs(found) > LARGE)
            self.sure = self.sure & ~far.any(tuple(range(1, far.ndim)), keepdims=True)
        if isinstance(step, Read):
            seen = self.varied.get(step.view.tensor.name, False)
            self.varied[step.view.tensor.name] = seen or found.size <= 1 or bool(
                (found != found.flat[0]).any())

    def elements(self, tensor: Tensor, coords: tuple[Array, ...]) -> Array:
        """Elements of a tensor, gathered on its device."""
        import torch

        t = self.tensors[tensor.name]
        offset: Array = np.zeros((), np.int64)
        for c, s in zip(coords, t.stride(), strict=True):
            offset = offset + c * s
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        flat = t.detach().as_strided((span,), (1,), t.storage_offset())
        found = flat[torch.from_numpy(np.ascontiguousarray(offset)).to(t.device)]
        wide = found.double() if found.dtype.is_floating_point else found.long()
        return np.asarray(wide.cpu().numpy()).reshape(offset.shape)
