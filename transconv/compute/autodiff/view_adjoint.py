"""The gradient of what a view shows several times, by the view's inverse, without a tensor between.

    let   dx = sum(dy*w; n)               the flow of x = X[i*2 + k - 1], at every (i, k)
    ->
    read  dy = dY[n, (p - k + 1) // 2] where (p + k + 1) % 2 == 0
    let   dx = sum(dy*w; k n)             for every element p, over all points that show it
    store dX[p] = dx

The axes of the view's coordinates are replaced by what autodiff/scatter_to_gather.py solves them for. That
is possible where no reduction but the flow's own sum depends on them.
"""

from __future__ import annotations

from dataclasses import replace

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.analysis.prologues import with_prologues
from transconv.compute.autodiff.affine_inverse import Solved
from transconv.compute.autodiff.reverse import Flows
from transconv.compute.compute import Compute
from transconv.compute.names import fresh, used
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write
from transconv.compute.text.views import conditions, masked
from transconv.ir import (
    TRUE,
    Cast,
    Const,
    Expr,
    Mul,
    Tensor,
    Var,
    View,
    all_of,
    conjuncts,
    free_vars,
    select,
    substitute,
)
from transconv.simplify import simplify


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
