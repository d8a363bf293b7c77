"""Stores the gradients of what a computation reads, from the flows of its reads (autodiff/reverse.py).

    a view that shows each element once       store dX[h, w] = flow         a permutation, a flip, a pad
    a view at indices from a tensor           store dX[i, k] += flow        a gather
    any other view                            by its inverse                windows, upsampling, slices

Where a reduction is in the way of an inverse, a tensor has the flows, and is read through the inverse
(autodiff/scatter_to_gather.py).

Gradients that need no matrix product are stored by one text, all others by one each.

Also here: the gradient of what a view shows several times, by the view's inverse, without a tensor
between.

    let   dx = sum(dy*w; n)               the flow of x = X[i*2 + k - 1], at every (i, k)
    ->
    read  dy = dY[n, (p - k + 1) // 2] where (p + k + 1) % 2 == 0
    let   dx = sum(dy*w; k n)             for every element p, over all points that show it
    store dX[p] = dx

The axes of the view's coordinates are replaced by what autodiff/scatter_to_gather.py solves them for. That
is possible where no reduction but the flow's own sum depends on them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.analysis.prologues import with_prologues
from transconv.compute.analysis.store_conflicts import covers
from transconv.compute.autodiff.affine_inverse import Solved
from transconv.compute.autodiff.reverse import Flows, alike, between
from transconv.compute.autodiff.scatter_to_gather import transposed
from transconv.compute.compute import Compute
from transconv.compute.kernel_split import kernels
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write, fresh, used
from transconv.compute.text.expressions import conditions, masked
from transconv.compute.text.format import parse
from transconv.ir import (
    TRUE,
    Cast,
    Const,
    Expr,
    Mul,
    Tensor,
    Var,
    View,
    ViewDim,
    all_of,
    conjuncts,
    free_vars,
    select,
    substitute,
)
from transconv.simplify import Facts, simplify
from transconv.support import ComputeError


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
        raise ComputeError(f"sizes that are arguments ({compute.named}) have no gradient; "
                           "expected numbers")
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
        reads: dict[Tensor, dict[View, list[Expr]]] = {}
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
        return Derivative(tuple(parse(str(replace(c, name=n))) for c, n in zip(texts, names, strict=True)),
                          {t.name: own.name for t, own in self.flows.results.items()}, self.of)

    def tensor(self, tensor: Tensor, views: dict[View, list[Expr]]) -> list[Compute]:
        """Store the gradient of a tensor, the sum of those through each of its views. Returns the texts
        that run behind the others."""
        into = alike(tensor, self.flows.fresh(f"d{tensor.name}"))
        self.of[tensor.name] = into.name
        if len(views) == 1:
            return [c for view, flows in views.items() for c in self.view(view, into, flows)]
        parts = [alike(tensor, self.flows.fresh(f"{into.name}_part"), self.flows.type) for _ in views]
        behind = [c for (view, flows), part in zip(views.items(), parts, strict=True)
                  for c in self.view(view, part, flows)]
        return [*behind, self.sum(into, parts)]

    def sum(self, into: Tensor, parts: list[Tensor]) -> Compute:
        """The computation that adds gradients of a tensor."""
        axes = tuple(Axis(f"i{d}", n, "") for d, n in enumerate(into.shape))
        at = tuple(ViewDim(x.var) for x in axes)
        reads = [Read(f"part{i}", View(t, at)) for i, t in enumerate(parts)]
        total: Expr = reads[0].var
        for r in reads[1:]:
            total = total + r.var
        return with_roles(replace(self.compute, axes=axes,
                                  steps=(*reads, Write(View(into, at), Cast(total, into.dtype)))))

    def view(self, view: View, into: Tensor, flows: list[Expr]) -> list[Compute]:
        """Store the gradient of what is seen through a view."""
        flow = flows[0]
        for other in flows[1:]:
            flow = flow + other
        view, flow = self.reduced(view, flow)
        told = self.compute.names.told(view)
        if told or covers(self.compute, view):
            self.store(Write(View(into, view.dims), Cast(flow, into.dtype), "add" if told else ""))
            return []
        if (made := pulled(self.flows, view, into, flow)) is not None:
            return [made]
        axes = frozenset(a for d in view.dims for a in self.compute.roots(d.coord))
        rows = tuple((x.name, x.size) for x in self.compute.axes if x.name in axes)
        flown = between(self.flows.fresh(f"{into.name}_flow"), rows, self.flows.type)
        self.store(Write(flown, flow))
        moved = replace(self.compute, axes=tuple(x for x in self.compute.axes if x.name in axes), steps=(
            Read("x", view), Write(flown, Cast(Var("x", view.tensor.dtype), flown.tensor.dtype))))
        return [transposed(with_roles(moved), view.tensor.name, into, flown.tensor)]

    def reduced(self, view: View, flow: Expr) -> tuple[View, Expr]:
        """The view without axes along which it shows the same element, and the flow summed over them. A
        condition on such an axis chooses what is summed."""
        facts = Facts()
        for x in self.compute.axes:
            facts = facts.with_range(x.var, 0, max(0, x.size - 1))
        coords = [simplify(d.coord, facts) for d in view.dims]
        axes = frozenset(a for c in coords for a in self.compute.roots(c))
        over = frozenset(a for d in view.dims for e in (d.coord, d.mask)
                         for a in self.compute.roots(e)) - axes
        if not over:
            return view, flow
        where = conditions(view)
        kept = select(all_of(where), flow, Const(0.0, self.flows.type)) if where else flow
        gone = prod(self.compute.size(a) for a in over - self.flows.roots(kept))
        total = self.flows.total("seen_sum", kept, over & self.flows.roots(kept))
        return masked(view.tensor, coords, TRUE, facts), (
            total if gone == 1 else total * Const(float(gone), self.flows.type))

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
        steps = [*self.flows.needed({v for w in writes for v in used(w)}), *writes]
        named = {v.name for s in steps for v in used(s)}.union(
            *(s.axes for s in steps if isinstance(s, Reduction)))
        axes = tuple(x for x in self.compute.axes if x.name in named) or self.compute.axes[:1]
        return with_roles(with_prologues(replace(self.compute, axes=axes, steps=tuple(steps))))


def pulled(flows: Flows, view: View, into: Tensor, flow: Expr) -> Compute | None:
    """The computation of ``into``, the gradient of the tensor of a view, from the flow of what it shows;
    None where the view has no inverse, or a reduction is in the way."""
    compute = flows.compute
    seen = frozenset(a for d in view.dims for a in compute.roots(d.coord))
    moved = replace(compute, axes=tuple(x for x in compute.axes if x.name in seen),
                    steps=(Read("x", view), Write(View(into, view.dims), Var("x", into.dtype))))
    solved = Solved(moved, view)
    if not solved.done or {x.name for x in (*solved.places, *solved.turns)} & (flows.taken - seen):
        return None
    steps = flows.needed(free_vars(flow))
    own = next((s for s in steps if isinstance(s, Reduction) and s.var is flow and s.op == "sum"), None)
    changed = {v.name for v in solved.values if isinstance(v, Var)}
    for s in steps:
        if isinstance(s, Reduction) and s is not own and changed & (flows.rooted[s.var] | {*s.axes}):
            return None
    return _Pulled(flows, solved, view, changed).computation(
        into, [s for s in steps if s is not own], own.value if own else flow, own.axes if own else ())


class _Pulled:
    def __init__(self, flows: Flows, solved: Solved, view: View, changed: set[str]) -> None:
        self.flows, self.solved, self.view, self.changed = flows, solved, view, changed
        self.facts = solved.facts()
        for x in flows.compute.axes:
            self.facts = self.facts.with_range(x.var, 0, max(0, x.size - 1))
        self.values: dict[Expr, Expr] = dict(solved.values)
        inside = [c for e, x in solved.positions for c in (e >= 0, e < x.size)]
        self.where = all_of([p for c in (*solved.conditions, *inside, *map(self.moved, conditions(view)))
                             for p in conjuncts(simplify(c, self.facts))])

    def computation(self, into: Tensor, before: list[Step], term: Expr, over: tuple[str, ...]) -> Compute:
        """The sum of a term over the turns and some axes, where the conditions hold."""
        flows, solved = self.flows, self.solved
        masks = None if self.where is TRUE else self.gradient_in(term)
        steps: list[Step] = [self.step(s, s.var is masks) for s in before if not isinstance(s, Write)]
        value = self.moved(term)
        if self.where is not TRUE and masks is None:
            value = select(self.where, value, Const(0.0, flows.type))
        axes = (*(x.name for x in solved.turns), *over)
        if axes:
            total = Reduction(fresh("total", flows.taken), "sum", value, axes)
            steps.append(total)
            value = total.var
        steps.append(Write(masked(into, [x.var for x in solved.places], TRUE, self.facts),
                           Cast(value, into.dtype)))
        named = {x.name: x for x in (*solved.places, *solved.turns)}
        rest = [x for x in flows.compute.axes if x.name not in named and x.name not in self.changed]
        mentioned = {a for s in steps if isinstance(s, Reduction) for a in s.axes} | {
            v.name for s in steps for v in used(s)}
        kept = tuple(Axis(x.name, x.size, "") for x in (*solved.places, *solved.turns, *rest)
                     if x.name in mentioned)
        return with_roles(with_prologues(replace(flows.compute, axes=kept, steps=tuple(steps))))

    def gradient_in(self, term: Expr) -> Var | None:
        """The gradient that is read in a term which is zero where it is: alone, or times another read."""
        factors = [f.x if isinstance(f, Cast) else f
                   for f in ((term.a, term.b) if isinstance(term, Mul) else (term,))]
        reads = {s.var for s in self.flows.steps if isinstance(s, Read)}
        return next((f for f in factors if isinstance(f, Var) and f in self.flows.stores), None) if (
            {*factors} <= reads) else None

    def moved(self, e: Expr) -> Expr:
        return substitute(e, self.values)

    def step(self, step: Read | Value | Reduction, masks: bool) -> Step:
        """A step at the positions that the axes are replaced by; ``masks``: under the conditions, too."""
        if not masks and not self.flows.rooted[step.var] & self.changed:
            return step
        if not isinstance(step, Read):
            return replace(step, value=self.moved(step.value))
        where = [simplify(self.moved(c), self.facts) for c in conditions(step.view)]
        same = [d.coord for d in step.view.dims] == [d.coord for d in self.view.dims]
        coords: list[Expr] = [x.var for x in self.solved.places]
        if not same:
            coords = [simplify(self.moved(d.coord), self.facts) for d in step.view.dims]
        return replace(step, view=masked(
            step.view.tensor, coords, all_of([*where, *([self.where] if masks else [])]), self.facts))
