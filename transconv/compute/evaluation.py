"""The reference semantics of a computation: it is executed in NumPy, step by step, floats in f64 and
integers in i64, which wraps as theirs does.

Every value is an array with one axis for each axis of the computation, of size 1 along those that it does
not depend on. A sum of products is one matrix product. This module uses nothing of schedules or kernels,
so that kernels can be compared with it.

It also computes the error that a correct kernel may have (``error``): the rounding errors of sums and
values are propagated by evaluating each later step with every name moved by its error.

Stores that share places leave there what ``Gathered`` reduces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from transconv import ir
from transconv.compute import error_bounds
from transconv.compute.compute import Compute
from transconv.compute.steps import Read, Reduction, Step, Value, Write, conditions, used
from transconv.ir import all_of, contract, f64, free_vars, held_constant, rewrite

LARGEST = 1 << 24  # the most points that are evaluated at once


@dataclass(frozen=True)
class Answer:
    """A stored tensor: its elements in f64 (i64 in i64), and the allowed error of each before it is
    rounded to the tensor's type. Both have the tensor's logical shape."""

    value: ir.Array
    error: ir.Array


def execute(
    compute: Compute,
    given: Mapping[str, ir.Array],
    share: float = 0.0,
    before: Mapping[str, ir.Array] | None = None,
) -> dict[str, Answer]:
    """The stored tensors, by name; ``given``: the tensors that are read, in logical shapes. Elements that
    no step stores are as ``before``, in logical shapes, or NaN (of i64 the least number). ``share``: the
    error of a sum as a fraction of the sum of its absolute terms; with 0 all errors are 0."""
    made = {}
    for t in dict.fromkeys(w.view.tensor for w in compute.writes):
        start = _nothing(t.dtype) if before is None else before[t.name]
        made[t.name] = Answer(
            np.array(np.broadcast_to(start, t.shape), held_in(t.dtype)), np.zeros(t.shape)
        )
    shared = {t: Gathered(w.op, t.shape, t.dtype) for w in compute.writes if w.op for t in [w.view.tensor]}
    for part in _parts(compute):
        StepEvaluator(compute, given, part, share).into(made, shared)
    for tensor, found in shared.items():
        made[tensor.name] = Answer(found.value(), found.error(share))
    return made


def held_in(dtype: ir.DType) -> type[np.generic]:
    """The type of NumPy in which stored elements are known exactly."""
    return np.int64 if dtype is ir.i64 else np.float64


def _nothing(dtype: ir.DType) -> np.generic:
    """What stands where nothing is stored."""
    return np.int64(dtype.limits[0]) if dtype is ir.i64 else np.float64(np.nan)


def outside(compute: Compute, given: Mapping[str, ir.Array]) -> str | None:
    """torch's error message for the first index that is out of bounds and that no ``where`` excludes, of
    the read itself or of what takes its element; None if there is none. ``given``: the tensors whose
    elements are indices, or what these are made of."""
    run = StepEvaluator(compute, given, {x.name: range(x.size) for x in compute.axes})
    with np.errstate(all="ignore"):
        for made in compute.names.placing:
            run.evaluate(made)
    for step in compute.steps:
        if not isinstance(step, Read):
            continue
        tensor, told = step.view.tensor, compute.names.told(step.view)
        meant = run.at.compute(all_of(conditions(step.view))) if told else np.False_
        for i, (dim, size) in enumerate(zip(step.view.dims, tensor.shape, strict=True)):
            if told & free_vars(dim.coord):
                at = run.at.compute(dim.coord)
                bad = ((at < 0) | (at >= size)) & meant
                if bad.any() and (bad := bad & _Takers(run).of(step.var)).any():
                    found = np.broadcast_to(at, bad.shape)[bad][0]
                    return (
                        f"{tensor.name}: index {found} is out of bounds for dimension {i} with size {size}"
                    )
    return None


class _Takers:
    """At which points something takes the value of a name, as far as axes and indices tell: a choice by
    them takes one of its branches."""

    def __init__(self, run: StepEvaluator) -> None:
        self.run = run
        self.known: dict[ir.Var, ir.Array] = {}

    def of(self, v: ir.Var) -> ir.Array:
        """Whether the value is taken at each point."""
        if v not in self.known:
            taken = [self.by(step, v) for step in self.run.compute.steps if v in used(step)]
            wide = np.broadcast_arrays(np.zeros(1, bool), *taken)
            self.known[v] = np.asarray(np.logical_or.reduce(wide))
        return self.known[v]

    def by(self, step: Step, v: ir.Var) -> ir.Array:
        """Whether a step that mentions the value takes it."""
        if isinstance(step, Read):
            return np.ones(1, bool)  # a coordinate
        if isinstance(step, Write):
            inside = self.told(step.view.mask())
            told = v in {x for d in step.view.dims for x in free_vars(d.coord)}
            own = np.ones(1, bool) if told else self.within(step.value, v)
            return own if inside is None else own & inside
        later = self.of(step.var)
        if isinstance(step, Reduction) and later.ndim == len(self.run.names):
            over = tuple(i for i, name in enumerate(self.run.names) if name in step.axes)
            later = np.asarray(later.any(axis=over, keepdims=True))
        return self.within(step.value, v) & later

    def within(self, e: ir.Expr, v: ir.Var) -> ir.Array:
        """Whether an expression takes it."""
        if v not in free_vars(e):
            return np.zeros(1, bool)
        if isinstance(e, ir.Select) and (first := self.told(e.cond)) is not None:
            return np.asarray((first & self.within(e.yes, v)) | (~first & self.within(e.no, v)))
        parts = [self.within(x, v) for x in e.children() if isinstance(x, ir.Expr)]
        return np.asarray(np.logical_or.reduce(np.broadcast_arrays(*parts))) if parts else np.ones(1, bool)

    def told(self, e: ir.Expr) -> ir.Array | None:
        """A condition of axes and indices; None for one of other values."""
        known = free_vars(e) <= self.run.at.env.keys()
        return np.asarray(self.run.at.compute(e)).astype(bool) if known else None


def _parts(compute: Compute) -> list[dict[str, range]]:
    """The axes in pieces of at most ``LARGEST`` points: the largest axis that is not reduced is cut."""
    whole = {x.name: range(x.size) for x in compute.axes}
    free = [x for x in compute.axes if compute.kind(x.name) != "K" and x.size > 1]
    points = prod(x.size for x in compute.axes)
    if compute.factors is not None:  # a matrix product has no array over all axes
        points = max(points // max(1, x.size) for x in compute.axes)
    if points <= LARGEST or not free:
        return [whole]
    cut = max(free, key=lambda x: x.size)
    step = max(1, cut.size * LARGEST // points)
    return [whole | {cut.name: range(i, min(i + step, cut.size))} for i in range(0, cut.size, step)]


class StepEvaluator:
    """Evaluates the steps at the points of a part of the axes. ``errors``: the error of each name's
    value."""

    def __init__(
        self,
        compute: Compute,
        given: Mapping[str, ir.Array],
        part: Mapping[str, Sequence[int]],
        share: float = 0.0,
    ) -> None:
        self.compute, self.given, self.share = compute, given, share
        self.names = [x.name for x in compute.axes]
        self.sizes = [len(part[n]) for n in self.names]
        self.at = ir.Evaluator(ir.Memory({}), {}, max(1, len(self.names)))
        for i, name in enumerate(self.names):
            self.at.env[ir.Var(name)] = self.at.along(i, np.asarray(part[name], np.int64))
        self.errors: dict[ir.Var, ir.Array] = {}
        self.products: set[ir.Var] = set()  # names of products, which a sum may take unrounded

    def into(self, made: Mapping[str, Answer], shared: Mapping[ir.Tensor, Gathered]) -> None:
        with np.errstate(all="ignore"):
            for step in self.compute.steps:
                if isinstance(step, Write):
                    self.store(step, made[step.view.tensor.name], shared.get(step.view.tensor))
                else:
                    self.evaluate(step)

    def evaluate(self, step: Read | Value | Reduction) -> None:
        """Bind a step's name to its value and its error."""
        var = _wide(step.var)
        if isinstance(step, Read):
            self.at.env[var] = self.read(step)
        elif isinstance(step, Reduction):
            self.at.env[var], error = self.reduce(step)
            self.know(var, error)
        else:
            self.at.env[var] = found = self.value(step.value)
            self.know(var, self.error(step.value, found))
            if isinstance(step.value, ir.Mul):
                self.products.add(step.var)

    def know(self, var: ir.Var, error: ir.Array | None) -> None:
        if error is not None:
            self.errors[var] = error

    def value(self, e: ir.Expr) -> ir.Array:
        return self.at.compute(_exact(e))

    def error(self, e: ir.Expr, found: ir.Array) -> ir.Array | None:
        """The error of an expression whose value is ``found``: from the error of each name, and from its
        own rounding; 1 for a truth that the errors of what is compared turn over. None if errors are not
        computed."""
        if not self.share or e.dtype.kind not in ("float", "int", "bool"):
            return None
        exact = _exact(e)
        total = error_bounds.own(e, _exact, self.at, self.products)
        for v in free_vars(exact) & self.errors.keys():
            known = {exact: found, v: self.at.env[v]}
            total = total + error_bounds.moved(exact, v, self.errors[v], known, self.at)
        for equality in error_bounds.equalities(e):
            off = sum((self._known(x) for x in (equality.a, equality.b)), np.zeros(1))
            wide = replace(equality, a=_exact(equality.a), b=_exact(equality.b))
            total = total + error_bounds.turned(exact, wide, off, self.at)
        return total

    def _known(self, e: ir.Expr) -> ir.Array:
        """The error of a part of an expression."""
        error = self.error(e, self.value(e))
        return np.zeros(1) if error is None else error

    def place(self, view: ir.View) -> tuple[tuple[ir.Array, ...], ir.Array]:
        """The coordinates of a view's elements, 0 where its mask is false, and the mask."""
        mask = self.at.compute(view.mask()).astype(bool)
        coords = [np.where(mask, self.at.compute(d.coord), 0) for d in view.dims]
        return tuple(coords), mask

    def read(self, step: Read) -> ir.Array:
        coords, mask = self.place(step.view)
        found = self.elements(step.view.tensor, coords)
        return np.where(mask, found, found.dtype.type(held_constant(step.fill, step.view.tensor.dtype)))

    def elements(self, tensor: ir.Tensor, coords: tuple[ir.Array, ...]) -> ir.Array:
        """Elements of a given tensor, as f64 or int64."""
        held = np.int64 if tensor.dtype.kind == "int" else np.float64
        return np.asarray(self.given[tensor.name], held)[coords]

    def reduce(self, step: Reduction) -> tuple[ir.Array, ir.Array | None]:
        """The value of a reduction, and its error or None."""
        axes = tuple(i for i, n in enumerate(self.names) if n in step.axes)
        if self.compute.factors is not None:
            a, b = (self.at.env[_wide(r.var)] for r in self.compute.factors)
            times = prod(self.sizes[i] for i in axes if a.shape[i] == b.shape[i] == 1)
            found = contract(a, b, list(axes), np.result_type(a, b))
            found = found * times if times else np.zeros(found.shape)  # neither factor has these axes
            return found, self.product(a, b, list(axes)) * times if self.share else None
        terms = self.value(step.value)
        shape = [self.sizes[i] if i in axes else n for i, n in enumerate(terms.shape)]
        terms = np.broadcast_to(terms, shape)
        if 0 in shape:
            return np.full(
                [1 if i in axes else n for i, n in enumerate(shape)], ir.REDUCERS[step.op].neutral
            ), None
        found = np.asarray(ir.REDUCERS[step.op].numpy.reduce(terms, axis=axes, keepdims=True))
        if not self.share:
            return found, None
        off = self.error(step.value, terms)
        return found, error_bounds.reduced(step.op, terms, found, off, axes, self.share)

    def product(self, a: ir.Array, b: ir.Array, axes: list[int]) -> ir.Array:
        """The error of a sum of products."""
        double = np.dtype(np.float64)
        total = self.share * contract(np.abs(a), np.abs(b), axes, double)
        first, second = (self.errors.get(_wide(f.var)) for f in self.compute.factors or ())
        if first is not None:
            total = total + contract(np.broadcast_to(first, a.shape), np.abs(b), axes, double)
        if second is not None:
            total = total + contract(np.abs(a), np.broadcast_to(second, b.shape), axes, double)
        return np.asarray(total)

    def points(self, step: Write) -> tuple[int, ...]:
        """The number of points along each axis for which a store that adds is done: along those that its
        value and its place depend on."""
        own = self.compute.roots(step.value).union(
            *(self.compute.roots(e) for d in step.view.dims for e in (d.coord, d.mask))
        )
        return tuple(n if a in own else 1 for a, n in zip(self.names, self.sizes, strict=True))

    def store(self, step: Write, into: Answer, shared: Gathered | None) -> None:
        value = self.value(step.value)
        error = self.error(step.unrounded, value)
        coords, mask = self.place(step.view)
        sizes = self.points(step) if shared else ()
        shape = np.broadcast_shapes(value.shape, mask.shape, *(c.shape for c in coords), sizes)
        keep = np.broadcast_to(mask, shape)
        where = tuple(np.broadcast_to(c, shape)[keep] for c in coords)
        if shared is not None:
            off = np.zeros(1) if error is None else np.broadcast_to(error, shape)[keep]
            shared.add(where, np.broadcast_to(value, shape)[keep], off)
            return
        into.value[where] = np.broadcast_to(value, shape)[keep]
        into.error[where] = 0.0 if error is None else np.broadcast_to(error, shape)[keep]


def _wide(var: ir.Var) -> ir.Var:
    return ir.Var(var.name, f64) if var.type.kind == "float" else var


def _exact(e: ir.Expr) -> ir.Expr:
    """The expression with every float in f64."""

    def wider(at: ir.Expr) -> ir.Expr:
        if isinstance(at, ir.Var):
            return _wide(at)
        if isinstance(at, ir.Const) and at.type.kind == "float":
            return ir.Const(at.value, f64)
        return ir.Cast(at.x, f64) if isinstance(at, ir.Cast) and at.type.kind == "float" else at

    return rewrite(e, wider)


NEEDS = {
    "add": ("sum", "size", "off"),
    "sum": ("count", "sum", "size", "off"),
    "max": ("count", "off_most"),
    "min": ("count", "off_most"),
    "squares": ("count", "sum", "size", "squares", "off_squares"),
}
TERMS: dict[str, Callable[[ir.Array, ir.Array], ir.Array]] = {  # of a value and its error
    "count": lambda x, off: np.ones_like(off),
    "sum": lambda x, off: x,
    "squares": lambda x, off: x * x,
    "size": lambda x, off: np.where(np.isfinite(x), np.abs(x), 0.0),
    "off": lambda x, off: off,
    "off_squares": lambda x, off: off * off,
    "off_most": lambda x, off: off,
}


class Gathered:
    """What points leave in the places of a tensor by an operation. Points come in pieces; of each place
    there are as far as needed the ``count`` of points, ``sum``, sum of ``squares``, ``extreme`` and
    ``size``, the sum of absolute values, and of the values' errors the sum, sum of squares and maximum."""

    def __init__(self, op: str, shape: tuple[int, ...], dtype: ir.DType) -> None:
        self.op, self.nothing = op, _nothing(dtype)
        # With one dim more: of a tensor without dims each point would otherwise be every point's place.
        held = {"sum": held_in(dtype)}
        self.every = {name: np.zeros((1, *shape), held.get(name, np.float64)) for name in NEEDS[op]}
        ends = dtype.limits if dtype is ir.i64 else (-np.inf, np.inf)
        self.most = np.full((1, *shape), ends[op != "max"], held_in(dtype))

    def add(self, where: tuple[ir.Array, ...], value: ir.Array, error: ir.Array) -> None:
        """Add points, each to its place."""
        error = np.broadcast_to(error, value.shape)
        where = (np.zeros(value.shape, np.int64), *where)
        if self.op in ("max", "min"):
            (np.maximum if self.op == "max" else np.minimum).at(self.most, where, value)
        for name, into in self.every.items():
            (np.maximum if name == "off_most" else np.add).at(into, where, TERMS[name](value, error))

    @property
    def held(self) -> dict[str, ir.Array]:
        """What is known of each place."""
        return {name: found[0] for name, found in self.every.items()}

    def value(self) -> ir.Array:
        """The reduction of each place; where there are no points nothing, of what is added 0."""
        if self.op == "add":
            return self.held["sum"]
        count = self.held["count"]
        found = self.held["sum"] if self.op == "sum" else self.most[0]
        if self.op == "squares":
            found = self.held["squares"] - self.held["sum"] ** 2 / np.maximum(count, 1.0)
        return np.where(count > 0, found, self.nothing)

    def error(self, share: float) -> ir.Array:
        """The error of each place; ``share``: that of a sum, as a fraction of its absolute terms."""
        if self.op in ("max", "min"):
            return self.held["off_most"]
        if self.op != "squares":
            return share * self.held["size"] + self.held["off"]
        count = np.maximum(self.held["count"], 1.0)
        mean = share * self.held["size"] / count  # its error; a deviation has this and its value's
        apart = 2 * (self.held["off_squares"] + count * mean * mean)
        found = np.maximum(np.nan_to_num(self.value()), 0.0)
        return np.asarray(2 * np.sqrt(found * apart) + apart + share * found)
