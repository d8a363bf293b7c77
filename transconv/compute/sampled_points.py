"""Sampled points: what kernels stored there, compared with the f64 value of the computation.

Points are drawn along the axes that are not reduced; reduced axes are evaluated whole. Only the elements
that these points read are gathered, on the device of the tensors, so that no tensor is copied and the cost
does not grow with them. The allowed error follows from the rounding of each step (error_bounds.py).

    store dX[i, k] += g         with i = I[n]

A sum of what several points add to one place needs all of them. Where a coordinate is an axis alone
(``k``), it says the position along that axis; along the others (``n``) all positions are looked through
for those that lead to the place. So of a gradient of a gather one column of indices is read, and the terms
that it names.

Statistics are compared with those of the result as it is stored. One of a value that no store has, up to
rounding, is evaluated from what is read, at sampled places, if no other reduction is in it. Of others it
is only seen whether they are numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv import ir
from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.analysis.statistics import kept, value_of
from transconv.compute.compute import Compute
from transconv.compute.error_bounds import SUMMED, allowed, share_of
from transconv.compute.evaluation import StepEvaluator
from transconv.compute.steps import Axis, Read, Reduction, Value, Write, fresh, needed, used
from transconv.ir import f64, free_vars, substitute
from transconv.simplify import simplify

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


def _drawn(draw: np.random.Generator, size: int, count: int) -> ir.Array:
    """Random positions along an axis, including the first and the last."""
    made = draw.integers(0, size, count)
    made[:1], made[1:2] = size - 1, 0
    return np.asarray(made)


class Samples(StepEvaluator):
    """Evaluates the steps at the points, which are the first dimension of every array; the reduced axes
    are the others."""

    def __init__(
        self, compute: Compute, tensors: dict[str, Any], at: dict[str, ir.Array], points: int
    ) -> None:
        reduced = [x for x in compute.axes if x.name not in at]
        self.compute, self.tensors = compute, tensors
        self.share = share_of(compute)
        if compute.acc is f64:
            self.share *= 2.0**-29
        self.names = ["", *(x.name for x in reduced)]
        self.sizes = [points, *(x.size for x in reduced)]
        self.at = ir.Evaluator(ir.Memory({}), {}, len(self.names))
        for name, places in at.items():
            self.at.env[ir.Var(name)] = self.at.along(0, places)
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
                reason = (
                    f"{int(bad.sum())} of {bad.size} sampled elements of {step.view.tensor.name} are "
                    f"wrong, the first at {wrong[0]}: {got[bad][0]:g} instead of {want[bad][0]:g}"
                )
        return SampleOutcome(checked, telling, all(self.varied.values()), tuple(wrong), reason)

    def answer(self, step: Write) -> tuple[tuple[ir.Array, ...], ir.Array, ir.Array] | None:
        """Where a step stores, what should be there, and how far it may be off; None if that is not known
        yet."""
        return self.stored(step, self.sure)

    def stored(self, step: Write, wanted: ir.Array) -> tuple[tuple[ir.Array, ...], ir.Array, ir.Array]:
        """The same of the ``wanted`` points."""
        value = self.value(step.value)
        error = self.error(step.unrounded, value)
        coords, mask = self.place(step.view)
        shape = np.broadcast_shapes(*(x.shape for x in (value, mask, wanted, *coords)))
        keep = np.broadcast_to(mask, shape) & np.broadcast_to(wanted, shape)
        where = tuple(np.broadcast_to(c, shape)[keep] for c in coords)
        off = np.zeros(1) if error is None else np.broadcast_to(error, shape)[keep]
        return where, np.broadcast_to(value, shape)[keep], off

    def compared(
        self, tensor: ir.Tensor, where: tuple[ir.Array, ...], want: ir.Array, off: ir.Array
    ) -> tuple[ir.Array, ir.Array, ir.Array, ir.Array]:
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
        found = self.at.env[ir.Var(step.name, f64) if step.var.type.kind == "float" else step.var]
        if found.dtype.kind == "f":
            far = np.isfinite(found) & (np.abs(found) > LARGE)
            self.sure = self.sure & ~far.any(tuple(range(1, far.ndim)), keepdims=True)
        if isinstance(step, Read):
            seen = self.varied.get(step.view.tensor.name, False)
            self.varied[step.view.tensor.name] = (
                seen or found.size <= 1 or bool((found != found.flat[0]).any())
            )

    def elements(self, tensor: ir.Tensor, coords: tuple[ir.Array, ...]) -> ir.Array:
        """Elements of a tensor, gathered on its device."""
        import torch

        t = self.tensors[tensor.name]
        offset: ir.Array = np.zeros((), np.int64)
        for c, s in zip(coords, t.stride(), strict=True):
            offset = offset + c * s
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        flat = t.detach().as_strided((span,), (1,), t.storage_offset())
        found = flat[torch.from_numpy(np.ascontiguousarray(offset)).to(t.device)]
        wide = found.double() if found.dtype.is_floating_point else found.long()
        return np.asarray(wide.cpu().numpy()).reshape(offset.shape)


COLUMNS, EACH = 8, 4  # positions along the axes that coordinates tell, places for each

Points = dict[str, ir.Array]  # positions by axis, one for each point


def examine_sums(compute: Compute, tensors: dict[str, torch.Tensor], seed: int = 0) -> SampleOutcome:
    """Compare what was added, at places drawn by a seed; what else is stored, at the points that add to
    them. Not looked at: more than ``LONGEST`` points beside each other, and stores within a sweep."""
    nothing = SampleOutcome(0, 0, True, (), "")
    writes = [w for w in compute.writes if w.op]
    inside = {s for sweep in compute.sweeps.each for s in sweep.steps}
    seen = [_Told(compute, w) for w in writes]
    if (inside & {*writes} and compute.reduced) or any(prod(t.free_sizes) > LONGEST for t in seen):
        return nothing
    with np.errstate(all="ignore"):
        places = seen[0].places(tensors, np.random.default_rng(seed))
        points = _joined([found for t in seen for found in t.leading_to(places, tensors)]) or {
            x.name: np.zeros(0, np.int64) for x in compute.axes if x.name not in compute.reduced
        }
        count = len(next(iter(points.values()), (0,)))
        if count * prod(compute.size(a) for a in compute.reduced) > LONGEST:
            return nothing
        return _Sums(compute, tensors, points, count, places).found()


def _joined(found: list[Points]) -> Points:
    """All points, each once."""
    if not found:
        return {}
    names = [*found[0]]
    rows = np.concatenate([np.stack([p[n] for n in names], -1) for p in found])
    rows = np.unique(rows, axis=0)
    return {n: rows[:, i] for i, n in enumerate(names)}


class _Told:
    """Axes that follow from the coordinates of a store that adds."""

    def __init__(self, compute: Compute, write: Write) -> None:
        self.compute, self.write = compute, write
        axes = [x for x in compute.axes if x.name not in compute.reduced]
        self.pinned: dict[int, Axis] = {}  # by dimension
        for dim in range(len(write.view.dims)):
            for x in axes:
                if x not in self.pinned.values() and self.is_alone(x, dim):
                    self.pinned[dim] = x
        self.free = [x for x in axes if x not in self.pinned.values()]
        self.free_sizes = [x.size for x in self.free]
        self.steps = needed(
            compute.steps, (v for d in write.view.dims for e in (d.coord, d.mask) for v in free_vars(e))
        )

    def is_alone(self, axis: Axis, dim: int) -> bool:
        """Whether a coordinate is a position along one axis, and every position another one."""
        coord = self.write.view.dims[dim].coord
        if free_vars(coord) != {axis.var}:
            return False
        ahead = simplify(substitute(coord, {axis.var: axis.var + 1}) - coord)
        return isinstance(ahead, ir.Const) and ahead.value != 0

    def seen(self, points: Points, tensors: dict[str, Any]) -> tuple[list[ir.Array], ir.Array]:
        """Coordinates of the store at points, and whether anything is added there."""
        count = len(next(iter(points.values()), [0]))
        run = Samples(self.compute, tensors, points, count)
        for step in self.steps:
            run.evaluate(step)
        coords, mask = run.place(self.write.view)
        shape = (count,)
        return (
            [np.broadcast_to(c.reshape(c.shape[0], -1)[:, 0], shape) for c in coords],
            np.broadcast_to(mask.reshape(mask.shape[0], -1)[:, 0], shape),
        )

    def places(self, tensors: dict[str, Any], draw: np.random.Generator) -> ir.Array:
        """Places that something is added to, a row each, and some that may have nothing."""
        points = {x.name: np.repeat(draw.integers(0, x.size, COLUMNS), EACH) for x in self.pinned.values()}
        points |= {x.name: draw.integers(0, x.size, COLUMNS * EACH) for x in self.free}
        if not points:
            return np.zeros((1, len(self.write.view.dims)), np.int64)
        coords, mask = self.seen(points, tensors)
        found = np.stack(coords, -1)[mask]
        other = found[:COLUMNS].copy()
        for dim, size in enumerate(self.write.view.tensor.shape):
            if dim not in self.pinned and len(other):
                other[:, dim] = draw.integers(0, size, len(other))
        return np.unique(np.concatenate([found, other]), axis=0)

    def leading_to(self, places: ir.Array, tensors: dict[str, Any]) -> Iterator[Points]:
        """The points that add to places."""
        dims = [*self.pinned]
        count = prod(self.free_sizes)
        grid = np.unravel_index(np.arange(count), self.free_sizes) if self.free else ()
        for told in np.unique(places[:, dims], axis=0) if dims else [np.zeros(0, np.int64)]:
            at = [self.position(dim, int(c)) for dim, c in zip(dims, told, strict=True)]
            if any(p is None for p in at):
                continue
            points = {self.pinned[d].name: np.full(count, p) for d, p in zip(dims, at, strict=True)}
            points |= {x.name: g for x, g in zip(self.free, grid, strict=True)}
            coords, mask = self.seen(points, tensors)
            mine = places[(places[:, dims] == told).all(-1)] if dims else places
            hit = np.zeros(count, np.bool_)
            for place in mine:
                hit |= mask & np.logical_and.reduce([c == n for c, n in zip(coords, place, strict=True)])
            yield {n: p[hit] for n, p in points.items()}

    def position(self, dim: int, coord: int) -> int | None:
        """Where an axis leads to a coordinate."""
        axis = self.pinned[dim]
        found = simplify(substitute(self.write.view.dims[dim].coord, {axis.var: ir.Const(0)}))
        ahead = simplify(substitute(self.write.view.dims[dim].coord, {axis.var: ir.Const(1)}))
        assert isinstance(found, ir.Const) and isinstance(ahead, ir.Const)
        at, rest = divmod(coord - int(found.value), int(ahead.value) - int(found.value))
        return at if not rest and 0 <= at < axis.size else None


class _Sums(Samples):
    """The steps at all points that add to some places."""

    def __init__(
        self, compute: Compute, tensors: dict[str, Any], at: Points, points: int, places: ir.Array
    ) -> None:
        super().__init__(compute, tensors, at, points)
        self.places = places
        self.sums, self.off = np.zeros(len(places)), np.zeros(len(places))

    def answer(self, step: Write) -> tuple[tuple[ir.Array, ...], ir.Array, ir.Array] | None:
        """Sums are known behind the last store that adds to them."""
        if not step.op:
            return super().answer(step)
        where, value, error = self.stored(step, np.ones_like(self.sure))
        error = np.broadcast_to(error, value.shape) + np.where(self.surely(step), 0.0, np.inf)
        ranks = {tuple(p): i for i, p in enumerate(self.places.tolist())}
        at = np.array([ranks.get(p, -1) for p in zip(*(w.tolist() for w in where), strict=True)], np.int64)
        known = at >= 0
        np.add.at(self.sums, at[known], value[known])
        np.add.at(self.off, at[known], (self.share * np.abs(value) + error)[known])
        last = [w for w in self.compute.writes if w.op][-1]
        return (tuple(self.places.T), self.sums, self.off) if step is last else None

    def surely(self, step: Write) -> ir.Array:
        """Of the points of a store, whether f32 holds all that is on the way."""
        coords, mask = self.place(step.view)
        shape = np.broadcast_shapes(*(x.shape for x in (self.value(step.value), mask, self.sure, *coords)))
        return np.asarray(np.broadcast_to(self.sure, shape)[np.broadcast_to(mask, shape)])


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
                found = replace(
                    found,
                    checked=found.checked + own.checked,
                    wrong=own.wrong,
                    telling=found.telling + own.telling,
                    reason=own.reason,
                )
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
            reason = (
                f"{int(bad.sum())} of {bad.size} elements of {write.view.tensor.name} are wrong, "
                f"the first at {at}: {got[at]:g} instead of {want[at]:g}"
            )
        found = replace(
            found,
            checked=found.checked + want.size,
            reason=reason,
            telling=found.telling + int((np.abs(want) > most).sum()),
        )
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
    names = [d.coord.name for d in stored.view.dims if isinstance(d.coord, ir.Var)]
    points = [x.name for x in compute.axes if x.size > 1 and compute.kind(x.name) != "K"]
    return (
        _base(compute, stored.value) is _base(compute, write.value)
        and stored.view.mask() is ir.TRUE
        and len(names) == len(stored.view.dims) == len({*names})
        and {*names} >= {*points}
    )


def _alone(compute: Compute, write: Write) -> Compute | None:
    """A statistic as a computation of its own; None if other reductions are in its value, or if it is no
    reduction along whole axes."""
    by = kept(write) or {}
    if write.op == "squares" or any(n > 1 for n in by.values()):
        return None
    before = needed(compute.steps, used(write))
    if any(isinstance(s, Reduction) for s in before):
        return None
    over = tuple(x.name for x in compute.axes if x.name not in by)
    total = Reduction(fresh("whole", compute.names.all), write.op, value_of(write), over)
    steps = (*before, total, Write(write.view, total.var))
    return with_roles(replace(compute, steps=steps))


def _base(compute: Compute, value: ir.Expr) -> ir.Expr:
    """What a value is rounded from."""
    made: dict[ir.Expr, ir.Expr] = {s.var: s.value for s in compute.steps if isinstance(s, Value)}
    while isinstance(value, ir.Cast) or isinstance(made.get(value), ir.Cast | ir.Var):
        value = value.x if isinstance(value, ir.Cast) else made[value]
    return value


def _both(
    compute: Compute, write: Write, shown: Write, tensors: dict[str, torch.Tensor]
) -> tuple[ir.Array, ir.Array, ir.Array]:
    """The elements of a statistic, what they should be, and how far they may be off."""
    t = tensors[shown.view.tensor.name].detach()
    by = kept(write) or {}
    rows, over, at = [], [], 0
    for coord in (d.coord for d in shown.view.dims):
        assert isinstance(coord, ir.Var)
        each = by.get(coord.name, 0)
        if each > 1:
            t = t.reshape(*t.shape[:at], -1, each, *t.shape[at + 1 :])  # a view
        rows += [coord.name] if each else []
        over += [at + 1] if each > 1 else [] if each else [at]
        at += 2 if each > 1 else 1
    eps = 2.0**-shown.view.tensor.dtype.digits + max(SUMMED, share_of(compute))
    want, off = _reduced(write.op, t if t.dtype.is_floating_point else t.double(), tuple(over), eps)
    told = [a for d in write.view.dims for a in compute.roots(d.coord) if a in rows]
    want, off = (x.permute([rows.index(a) for a in told]) for x in (want, off))
    got = tensors[write.view.tensor.name].detach()
    for dim in reversed(range(got.dim())):
        if isinstance(coord := write.view.dims[dim].coord, ir.Const):
            got = got.select(dim, int(coord.value))
    got = got[tuple(slice(0, n) for n in want.shape)]
    one, two, three = (np.asarray(x.double().cpu().numpy()) for x in (got, want, off))
    return one, two, three


def _reduced(
    op: str, t: torch.Tensor, over: tuple[int, ...], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
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
