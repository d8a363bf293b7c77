"""Gradients as computations that store them, from the flows of what a computation reads
(autodiff/reverse.py).

    a view that shows each element once       store dX[h, w] = flow         a permutation, a flip, a pad
    a view at indices from a tensor           store dX[i, k] += flow        a gather
    any other view                            by its inverse                windows, upsampling, slices

By the inverse of a view each element sums the flow over all points that show it. The axes of the view's
coordinates are replaced by what autodiff/affine_inverse.py solves them for:

    let   dx = sum(dy*w; n)               the flow of x = X[i*2 + k - 1], at every (i, k)
    ->
    read  dy = dY[n, (p - k + 1) // 2] where (p + k + 1) % 2 == 0
    let   dx = sum(dy*w; k n)             for every element p
    store dX[p] = dx

Where a reduction other than the flow's own sum depends on these axes, a tensor has the flows, and is read
as the gradient of a computation that only moves elements (``transposed``), for which one rule covers every
view. A result of it may also choose among several operands (a concatenation), be a sum, and be a multiple
by numbers and by expressions of axes:

    read  x = X[wrap(i - 2, 8)]          read  g = G[p + turn*8 - 6]
    store Y[i] = x                  ->   store dX[p] = sum(g; turn)

Gradients that need no matrix product are stored by one text, all others by one each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transconv import ir
from transconv.compute.analysis.axis_roles import with_prologues, with_roles
from transconv.compute.analysis.store_conflicts import covers
from transconv.compute.autodiff.affine_inverse import Solved
from transconv.compute.autodiff.reverse import Flows, alike, between
from transconv.compute.compute import Compute
from transconv.compute.expressions import facts_of_axes, masked
from transconv.compute.kernel_split import kernels
from transconv.compute.parser import axis_facts, parse
from transconv.compute.steps import (
    Axis,
    Read,
    Reduction,
    Step,
    Value,
    Write,
    conditions,
    fresh,
    needed,
    uncast,
    used,
)
from transconv.ir import all_of, conjuncts, f32, f64, free_vars, select, substitute
from transconv.simplify import simplify
from transconv.support import ComputeError


def transposed(
    compute: Compute, of: str, into: ir.Tensor, given: ir.Tensor, adds: bool = False
) -> Compute:
    """The computation of ``into``, the gradient of the tensor ``of``, from ``given``, the gradient of the
    first result. ``adds``: use ``+=`` also if the coordinates can be inverted. Raises ComputeError if the
    result is not a linear function of the tensor, and for sizes that are arguments: positions are
    enumerated."""
    if compute.named is not None:
        raise ComputeError(f"{compute.name}: sizes that are arguments ({compute.named}); expected numbers")
    reads = [r for r in compute.reads if r.view.tensor.name == of]
    if len(reads) != 1:
        raise ComputeError(f"{of} is read {len(reads)} times in {compute.name}; expected once")
    back = _Back(compute, reads[0], into, given)
    return (None if adds else back.gathered()) or back.scattered()


@dataclass(frozen=True, slots=True)
class _Term:
    """The dependence of a value on the operand: ``factor`` times it, if ``condition`` holds."""

    factor: ir.Expr
    condition: ir.Expr


class _Back:
    def __init__(self, compute: Compute, read: Read, into: ir.Tensor, given: ir.Tensor) -> None:
        self.compute, self.read, self.into, self.given = compute, read, into, given
        self.acc = f64 if f64 in (into.dtype, given.dtype) else f32
        self.write = compute.writes[0]
        self.terms: dict[ir.Var, _Term | None] = {read.var: _Term(ir.Const(1.0, self.acc), ir.TRUE)}
        for step in compute.steps:
            if isinstance(step, Value) or (isinstance(step, Reduction) and step.op == "sum"):
                self.terms[step.var] = self.term(step.value)
            elif step is not read and not isinstance(step, Write):
                if isinstance(step, Reduction) and any(self.terms.get(v) for v in used(step)):
                    raise self.refused(f"{step.op}(...)")
                self.terms[step.var] = None
        found = self.term(self.write.value)
        if found is None:
            raise self.refused("it does not reach the result")
        self.found = found
        # The values in coordinates. A kernel that adds runs over the reduced axes as well.
        self.needed = set(compute.names.told(read.view)) | set(compute.names.told(self.write.view))

    def refused(self, why: str) -> ComputeError:
        return ComputeError(
            f"{self.compute.name} has no gradient of {self.read.view.tensor.name} by its "
            f"views alone: {why}"
        )

    def term(self, e: ir.Expr) -> _Term | None:
        """The dependence of an expression on the operand; None if there is none. Raises ComputeError if it
        is not linear."""
        if not any(self.terms.get(v) for v in free_vars(e)):
            return None
        match e:
            case ir.Var():
                return self.terms[e]
            case ir.Cast(x):
                return self.term(x)
            case ir.Neg(x) if (found := self.term(x)) is not None:
                return replace(found, factor=-found.factor)
            case ir.Select(cond, yes, no):
                a, b = self.term(yes), self.term(no)
                self.told_by_axes(cond)
                if a is not None and b is None:
                    return replace(a, condition=all_of([a.condition, cond]))
                if b is not None and a is None:
                    return replace(b, condition=all_of([b.condition, ir.Not(cond)]))
            case ir.Mul(u, v) if found := self.alone(u, v) or self.alone(v, u):
                v = v if self.term(v) is None else u
                self.told_by_axes(v)
                return replace(found, factor=found.factor * self.number(v))
            case ir.Div(u, v) if found := self.alone(u, v):
                self.told_by_axes(v)
                return replace(found, factor=found.factor / self.number(v))
            case ir.Add(u, v) | ir.Sub(u, v) if found := self.alone(u, v):
                return found
            case ir.Add(v, u) if found := self.alone(u, v):
                return found
            case ir.Sub(v, u) if found := self.alone(u, v):
                return replace(found, factor=-found.factor)
        raise self.refused(f"{e} is no multiple of it")

    def alone(self, e: ir.Expr, other: ir.Expr) -> _Term | None:
        """The dependence of an expression, if another one has none."""
        return self.term(e) if self.term(other) is None else None

    def number(self, e: ir.Expr) -> ir.Expr:
        return e if e.dtype is self.acc else ir.Cast(e, self.acc)

    def told_by_axes(self, e: ir.Expr) -> None:
        if not all(v.name in self.compute.sizes for v in free_vars(e)):
            raise self.refused(f"{e} is no number that axes tell")

    # -- each result adds to its element ---------------------------------------------------------

    def scattered(self) -> Compute:
        """The computation in which each result adds to the element that it was read from."""
        steps: list[Step] = [
            *needed(self.compute.steps, self.needed),
            Read("g", ir.View(self.given, self.write.view.dims)),
        ]
        dims = self.read.view.dims
        if self.found.condition is not ir.TRUE:
            dims = (replace(dims[0], mask=all_of([dims[0].mask, self.found.condition])), *dims[1:])
        value = self.scaled(ir.Var("g", self.given.dtype), {})
        steps.append(Write(ir.View(self.into, dims), ir.Cast(value, self.into.dtype), "add"))
        return self.made(self.compute.axes, steps)

    def scaled(self, g: ir.Var, values: dict[ir.Expr, ir.Expr]) -> ir.Expr:
        """The gradient times the factor."""
        factor = self.found.factor
        value: ir.Expr = ir.Cast(g, self.acc)
        one = ir.Const(1.0, self.acc)
        return value if factor is one else value * substitute(_without(factor, one), values)

    def made(self, axes: tuple[Axis, ...], steps: list[Step]) -> Compute:
        return with_roles(
            replace(self.compute, name=f"{self.compute.name}_gradient", axes=axes, steps=tuple(steps))
        )

    # -- each element of the operand reads results -----------------------------------------------

    def gathered(self) -> Compute | None:
        """The computation in which each element reads the results that it was copied to; None if the
        coordinates cannot be inverted."""
        if self.needed:
            return None
        solved = Solved(self.compute, self.read.view)
        if not solved.done:
            return None
        values = solved.values
        conditions_of = [
            substitute(c, values)
            for c in (*conditions(self.read.view), *conditions(self.write.view), self.found.condition)
        ]
        inside = [
            c for e, x in solved.positions if not self.is_plain(x.name) for c in (e >= 0, e < x.size)
        ]
        facts = solved.facts()
        where = all_of(
            [
                p
                for c in (*solved.conditions, *inside, *conditions_of)
                for p in conjuncts(simplify(c, facts))
            ]
        )
        coords = [simplify(substitute(d.coord, values), facts) for d in self.write.view.dims]
        g = Read("g", masked(self.given, coords, where, facts))
        steps: list[Step] = [g]
        value = self.scaled(g.var, values)
        if not solved.turns and self.found.factor is ir.Const(1.0, self.acc):
            value = g.var  # only moved, so it keeps its bits
        if solved.turns:
            total = Reduction("total", "sum", value, tuple(x.name for x in solved.turns))
            steps.append(total)
            value = total.var
        places = masked(self.into, [x.var for x in solved.places], ir.TRUE, facts)
        same = value is g.var and g.var.dtype is self.into.dtype
        steps.append(Write(places, value if same else ir.Cast(value, self.into.dtype)))
        return self.made((*solved.places, *solved.turns), steps)

    def is_plain(self, axis: str) -> bool:
        """Whether a coordinate of the result is this axis, so that the bounds of the result's gradient are
        those of the axis."""
        view = self.write.view
        return any(
            d.coord is ir.Var(axis) and n == self.compute.sizes.get(axis)
            for d, n in zip(view.dims, view.tensor.shape, strict=True)
        )


def _without(factor: ir.Expr, one: ir.Const) -> ir.Expr:
    """A product without its first factor, 1."""
    match factor:
        case ir.Mul(a, b) if a is one:
            return b
        case ir.Mul(a, b):
            return _without(a, one) * b
        case ir.Div(a, b) if a is not one:
            return _without(a, one) / b
    return factor


@dataclass(frozen=True, slots=True)
class Derivative:
    """Gradients of a computation. ``computes``: in the order in which they run; each reads tensors of the
    computation, its results, gradients of results, and what those before it store. ``given``: the name of
    the gradient of each result; ``of``: that of each tensor that has one."""

    computes: tuple[Compute, ...]
    given: dict[str, str]
    of: dict[str, str]


@lru_cache(maxsize=1024)
def differentiate(compute: Compute, of: tuple[str, ...] = (), given: tuple[str, ...] = ()) -> Derivative:
    """The gradients of the float tensors ``of`` (default: all that are read) from those of the results
    ``given`` (default: all). A tensor that no result depends on has none. Raises ComputeError for an
    operation without a derivative, which names the operation and its line, and for unknown tensors."""
    read = [t.name for t in dict.fromkeys(r.view.tensor for r in compute.reads) if t.dtype.kind == "float"]
    stored = [t.name for t in dict.fromkeys(w.view.tensor for w in compute.writes)]
    for names, known in ((of, read), (given, stored)):
        if wrong := [n for n in names if n not in known]:
            raise ComputeError(f"{compute.name} has no gradient of {wrong[0]}; expected {' '.join(known)}")
    if compute.named is not None:
        raise ComputeError(
            f"sizes that are arguments ({compute.named}) have no gradient; expected numbers"
        )
    return _Returned(compute, of or tuple(read), given or tuple(stored)).made()


class _Returned:
    def __init__(self, compute: Compute, of: Collection[str], given: Collection[str]) -> None:
        self.compute = compute
        self.flows = Flows(compute, of, given)
        self.computes: list[Compute] = []
        self.of: dict[str, str] = {}
        self.together: list[Write] = []

    def made(self) -> Derivative:
        for write in self.flows.kept:
            self.computes.append(self.text([write]))
        reads: dict[ir.Tensor, dict[ir.View, list[ir.Expr]]] = {}
        for read, flow in self.flows.reads.items():
            reads.setdefault(read.view.tensor, {}).setdefault(read.view, []).append(flow)
        behind: list[Compute] = []
        for tensor in dict.fromkeys(r.view.tensor for r in self.compute.reads):
            if views := reads.get(tensor):
                behind += self.tensor(tensor, views)
        if self.together:
            self.computes.append(self.text(self.together))
        texts = [*self.computes, *behind]
        name = f"{self.compute.name}_gradient"
        names = [f"{name}_{i + 1}" for i in range(len(texts))] if len(texts) != 1 else [name]
        return Derivative(
            tuple(parse(str(replace(c, name=n))) for c, n in zip(texts, names, strict=True)),
            {t.name: own.name for t, own in self.flows.results.items()},
            self.of,
        )

    def tensor(self, tensor: ir.Tensor, views: dict[ir.View, list[ir.Expr]]) -> list[Compute]:
        """Store the gradient of a tensor, the sum of those through each of its views. Returns the texts
        that run behind the others."""
        into = alike(tensor, self.flows.fresh(f"d{tensor.name}"))
        self.of[tensor.name] = into.name
        if len(views) == 1:
            return [c for view, flows in views.items() for c in self.view(view, into, flows)]
        parts = [alike(tensor, self.flows.fresh(f"{into.name}_part"), self.flows.type) for _ in views]
        behind = [
            c
            for (view, flows), part in zip(views.items(), parts, strict=True)
            for c in self.view(view, part, flows)
        ]
        return [*behind, self.sum(into, parts)]

    def sum(self, into: ir.Tensor, parts: list[ir.Tensor]) -> Compute:
        """The computation that adds gradients of a tensor."""
        axes = tuple(Axis(f"i{d}", n, "") for d, n in enumerate(into.shape))
        at = tuple(ir.ViewDim(x.var) for x in axes)
        reads = [Read(f"part{i}", ir.View(t, at)) for i, t in enumerate(parts)]
        total: ir.Expr = reads[0].var
        for r in reads[1:]:
            total = total + r.var
        return with_roles(
            replace(
                self.compute,
                axes=axes,
                steps=(*reads, Write(ir.View(into, at), ir.Cast(total, into.dtype))),
            )
        )

    def view(self, view: ir.View, into: ir.Tensor, flows: list[ir.Expr]) -> list[Compute]:
        """Store the gradient of what is seen through a view."""
        flow = flows[0]
        for other in flows[1:]:
            flow = flow + other
        view, flow = self.reduced(view, flow)
        told = self.compute.names.told(view)
        if told or covers(self.compute, view):
            self.store(Write(ir.View(into, view.dims), ir.Cast(flow, into.dtype), "add" if told else ""))
            return []
        if (made := pulled(self.flows, view, into, flow)) is not None:
            return [made]
        axes = frozenset(a for d in view.dims for a in self.compute.roots(d.coord))
        rows = tuple((x.name, x.size) for x in self.compute.axes if x.name in axes)
        flown = between(self.flows.fresh(f"{into.name}_flow"), rows, self.flows.type)
        self.store(Write(flown, flow))
        moved = replace(
            self.compute,
            axes=tuple(x for x in self.compute.axes if x.name in axes),
            steps=(
                Read("x", view),
                Write(flown, ir.Cast(ir.Var("x", view.tensor.dtype), flown.tensor.dtype)),
            ),
        )
        return [transposed(with_roles(moved), view.tensor.name, into, flown.tensor)]

    def reduced(self, view: ir.View, flow: ir.Expr) -> tuple[ir.View, ir.Expr]:
        """The view without axes along which it shows the same element, and the flow summed over them. A
        condition on such an axis chooses what is summed."""
        facts = axis_facts(self.compute)
        coords = [simplify(d.coord, facts) for d in view.dims]
        axes = frozenset(a for c in coords for a in self.compute.roots(c))
        over = (
            frozenset(a for d in view.dims for e in (d.coord, d.mask) for a in self.compute.roots(e))
            - axes
        )
        if not over:
            return view, flow
        where = conditions(view)
        kept = select(all_of(where), flow, ir.Const(0.0, self.flows.type)) if where else flow
        gone = prod(self.compute.size(a) for a in over - self.flows.roots(kept))
        total = self.flows.total("seen_sum", kept, over & self.flows.roots(kept))
        return masked(view.tensor, coords, ir.TRUE, facts), (
            total if gone == 1 else total * ir.Const(float(gone), self.flows.type)
        )

    def store(self, write: Write) -> None:
        """Store by a text of its own, if that has a product of matrices or adds in place; else together
        with others."""
        own = self.text([write])
        if write.op or any(c.factors and c.axes_of("M") and c.axes_of("N") for c in kernels(own)):
            self.computes.append(own)
        else:
            self.together.append(write)

    def text(self, writes: list[Write]) -> Compute:
        """The computation of some stores, of the steps that they need."""
        steps = [*needed(self.flows.steps, {v for w in writes for v in used(w)}), *writes]
        named = {v.name for s in steps for v in used(s)}.union(
            *(s.axes for s in steps if isinstance(s, Reduction))
        )
        axes = tuple(x for x in self.compute.axes if x.name in named) or self.compute.axes[:1]
        return with_roles(with_prologues(replace(self.compute, axes=axes, steps=tuple(steps))))


def pulled(flows: Flows, view: ir.View, into: ir.Tensor, flow: ir.Expr) -> Compute | None:
    """The computation of ``into``, the gradient of the tensor of a view, from the flow of what it shows;
    None where the view has no inverse, or a reduction is in the way."""
    compute = flows.compute
    seen = frozenset(a for d in view.dims for a in compute.roots(d.coord))
    moved = replace(
        compute,
        axes=tuple(x for x in compute.axes if x.name in seen),
        steps=(Read("x", view), Write(ir.View(into, view.dims), ir.Var("x", into.dtype))),
    )
    solved = Solved(moved, view)
    if not solved.done or {x.name for x in (*solved.places, *solved.turns)} & (flows.taken - seen):
        return None
    steps = needed(flows.steps, free_vars(flow))
    own = next((s for s in steps if isinstance(s, Reduction) and s.var is flow and s.op == "sum"), None)
    changed = {v.name for v in solved.values if isinstance(v, ir.Var)}
    for s in steps:
        if isinstance(s, Reduction) and s is not own and changed & (flows.rooted[s.var] | {*s.axes}):
            return None
    return _Pulled(flows, solved, view, changed).computation(
        into, [s for s in steps if s is not own], own.value if own else flow, own.axes if own else ()
    )


class _Pulled:
    def __init__(self, flows: Flows, solved: Solved, view: ir.View, changed: set[str]) -> None:
        self.flows, self.solved, self.view, self.changed = flows, solved, view, changed
        self.facts = facts_of_axes({x.name: x.size for x in flows.compute.axes}, solved.facts())
        self.values: dict[ir.Expr, ir.Expr] = dict(solved.values)
        inside = [c for e, x in solved.positions for c in (e >= 0, e < x.size)]
        self.where = all_of(
            [
                p
                for c in (*solved.conditions, *inside, *map(self.moved, conditions(view)))
                for p in conjuncts(simplify(c, self.facts))
            ]
        )

    def computation(
        self, into: ir.Tensor, before: list[Step], term: ir.Expr, over: tuple[str, ...]
    ) -> Compute:
        """The sum of a term over the turns and some axes, where the conditions hold."""
        flows, solved = self.flows, self.solved
        masks = None if self.where is ir.TRUE else self.gradient_in(term)
        steps: list[Step] = [self.step(s, s.var is masks) for s in before if not isinstance(s, Write)]
        value = self.moved(term)
        if self.where is not ir.TRUE and masks is None:
            value = select(self.where, value, ir.Const(0.0, flows.type))
        axes = (*(x.name for x in solved.turns), *over)
        if axes:
            total = Reduction(fresh("total", flows.taken), "sum", value, axes)
            steps.append(total)
            value = total.var
        steps.append(
            Write(
                masked(into, [x.var for x in solved.places], ir.TRUE, self.facts),
                ir.Cast(value, into.dtype),
            )
        )
        named = {x.name: x for x in (*solved.places, *solved.turns)}
        rest = [x for x in flows.compute.axes if x.name not in named and x.name not in self.changed]
        mentioned = {a for s in steps if isinstance(s, Reduction) for a in s.axes} | {
            v.name for s in steps for v in used(s)
        }
        kept = tuple(
            Axis(x.name, x.size, "") for x in (*solved.places, *solved.turns, *rest) if x.name in mentioned
        )
        return with_roles(with_prologues(replace(flows.compute, axes=kept, steps=tuple(steps))))

    def gradient_in(self, term: ir.Expr) -> ir.Var | None:
        """The gradient that is read in a term which is zero where it is: alone, or times another read."""
        factors = [uncast(f) for f in ((term.a, term.b) if isinstance(term, ir.Mul) else (term,))]
        reads = {s.var for s in self.flows.steps if isinstance(s, Read)}
        return (
            next((f for f in factors if isinstance(f, ir.Var) and f in self.flows.stores), None)
            if ({*factors} <= reads)
            else None
        )

    def moved(self, e: ir.Expr) -> ir.Expr:
        return substitute(e, self.values)

    def step(self, step: Read | Value | Reduction, masks: bool) -> Step:
        """A step at the positions that the axes are replaced by; ``masks``: under the conditions, too."""
        if not masks and not self.flows.rooted[step.var] & self.changed:
            return step
        if not isinstance(step, Read):
            return replace(step, value=self.moved(step.value))
        where = [simplify(self.moved(c), self.facts) for c in conditions(step.view)]
        same = [d.coord for d in step.view.dims] == [d.coord for d in self.view.dims]
        coords: list[ir.Expr] = [x.var for x in self.solved.places]
        if not same:
            coords = [simplify(self.moved(d.coord), self.facts) for d in step.view.dims]
        return replace(
            step,
            view=masked(
                step.view.tensor, coords, all_of([*where, *([self.where] if masks else [])]), self.facts
            ),
        )
