"""The gradient of a computation that only moves elements: the gradient of an element is the sum of the
gradients of all results that it was copied to. One rule covers every view.

    read  x = X[wrap(i - 2, 8)]          read  g = G[p + turn*8 - 6]
    store Y[i] = x                  ->   store dX[p] = sum(g; turn)

If the coordinates can be inverted (autodiff/view_inverse.py), each element of the operand reads the
results that it was copied to, as above. Otherwise, and for coordinates with elements of a tensor (a
gather), each result adds to its element:

    read  i = I[n]                       read  i = I[n]
    read  x = X[i, k]               ->   read  g = G[n, k]
    store Y[n, k] = x                    store dX[i, k] += g

A result may also choose among several operands (a concatenation), be a sum, and be a multiple by numbers
and by expressions of axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.autodiff.affine_inverse import Solved
from transconv.compute.compute import Compute
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write, used
from transconv.compute.text.expressions import conditions, masked
from transconv.ir import (
    TRUE,
    Add,
    Cast,
    Const,
    Div,
    Expr,
    Mul,
    Neg,
    Not,
    Select,
    Sub,
    Tensor,
    Var,
    View,
    all_of,
    conjuncts,
    f32,
    f64,
    free_vars,
    substitute,
)
from transconv.simplify import simplify
from transconv.support import ComputeError


def transposed(compute: Compute, of: str, into: Tensor, given: Tensor, adds: bool = False) -> Compute:
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

    factor: Expr
    condition: Expr


class _Back:
    def __init__(self, compute: Compute, read: Read, into: Tensor, given: Tensor) -> None:
        self.compute, self.read, self.into, self.given = compute, read, into, given
        self.acc = f64 if f64 in (into.dtype, given.dtype) else f32
        self.write = compute.writes[0]
        self.terms: dict[Var, _Term | None] = {read.var: _Term(Const(1.0, self.acc), TRUE)}
        for step in compute.steps:
            if isinstance(step, Value) or isinstance(step, Reduction) and step.op == "sum":
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
        return ComputeError(f"{self.compute.name} has no gradient of {self.read.view.tensor.name} by its "
                            f"views alone: {why}")

    def term(self, e: Expr) -> _Term | None:
        """The dependence of an expression on the operand; None if there is none. Raises ComputeError if it
        is not linear."""
        if not any(self.terms.get(v) for v in free_vars(e)):
            return None
        match e:
            case Var():
                return self.terms[e]
            case Cast(x):
                return self.term(x)
            case Neg(x) if (found := self.term(x)) is not None:
                return replace(found, factor=-found.factor)
            case Select(cond, yes, no):
                a, b = self.term(yes), self.term(no)
                self.told_by_axes(cond)
                if a is not None and b is None:
                    return replace(a, condition=all_of([a.condition, cond]))
                if b is not None and a is None:
                    return replace(b, condition=all_of([b.condition, Not(cond)]))
            case Mul(u, v) | Mul(v, u) if (found := self.term(u)) is not None and self.term(v) is None:
                self.told_by_axes(v)
                return replace(found, factor=found.factor * self.number(v))
            case Div(u, v) if (found := self.term(u)) is not None and self.term(v) is None:
                self.told_by_axes(v)
                return replace(found, factor=found.factor / self.number(v))
            case Add(u, v) | Sub(u, v) if (found := self.term(u)) is not None and self.term(v) is None:
                return found
            case Add(v, u) if (found := self.term(u)) is not None and self.term(v) is None:
                return found
            case Sub(v, u) if (found := self.term(u)) is not None and self.term(v) is None:
                return replace(found, factor=-found.factor)
        raise self.refused(f"{e} is no multiple of it")

    def number(self, e: Expr) -> Expr:
        return e if e.dtype is self.acc else Cast(e, self.acc)

    def told_by_axes(self, e: Expr) -> None:
        if not all(v.name in self.compute.sizes for v in free_vars(e)):
            raise self.refused(f"{e} is no number that axes tell")

    # -- each result adds to its element ---------------------------------------------------------

    def scattered(self) -> Compute:
        """The computation in which each result adds to the element that it was read from."""
        steps = self.indices()
        steps.append(Read("g", View(self.given, self.write.view.dims)))
        dims = self.read.view.dims
        if self.found.condition is not TRUE:
            dims = (replace(dims[0], mask=all_of([dims[0].mask, self.found.condition])), *dims[1:])
        value = self.scaled(Var("g", self.given.dtype), {})
        steps.append(Write(View(self.into, dims), Cast(value, self.into.dtype), "add"))
        return self.made(self.compute.axes, steps)

    def indices(self) -> list[Step]:
        """The steps whose values coordinates need."""
        needed = set(self.needed)
        steps: list[Step] = []
        for step in reversed(self.compute.steps):
            if not isinstance(step, Write) and step.var in needed:
                needed |= used(step)
                steps.append(step)
        return steps[::-1]

    def scaled(self, g: Var, values: dict[Expr, Expr]) -> Expr:
        """The gradient times the factor."""
        factor = self.found.factor
        value: Expr = Cast(g, self.acc)
        one = Const(1.0, self.acc)
        return value if factor is one else value * substitute(_without(factor, one), values)

    def made(self, axes: tuple[Axis, ...], steps: list[Step]) -> Compute:
        return with_roles(replace(self.compute, name=f"{self.compute.name}_gradient", axes=axes,
                                  steps=tuple(steps)))

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
        conditions_of = [substitute(c, values) for c in (
            *conditions(self.read.view), *conditions(self.write.view), self.found.condition)]
        inside = [c for e, x in solved.positions if not self.is_plain(x.name)
                  for c in (e >= 0, e < x.size)]
        facts = solved.facts()
        where = all_of([p for c in (*solved.conditions, *inside, *conditions_of)
                        for p in conjuncts(simplify(c, facts))])
        coords = [simplify(substitute(d.coord, values), facts) for d in self.write.view.dims]
        g = Read("g", masked(self.given, coords, where, facts))
        steps: list[Step] = [g]
        value = self.scaled(g.var, values)
        if not solved.turns and self.found.factor is Const(1.0, self.acc):
            value = g.var  # only moved, so it keeps its bits
        if solved.turns:
            total = Reduction("total", "sum", value, tuple(x.name for x in solved.turns))
            steps.append(total)
            value = total.var
        places = masked(self.into, [x.var for x in solved.places], TRUE, facts)
        same = value is g.var and g.var.dtype is self.into.dtype
        steps.append(Write(places, value if same else Cast(value, self.into.dtype)))
        return self.made((*solved.places, *solved.turns), steps)

    def is_plain(self, axis: str) -> bool:
        """Whether a coordinate of the result is this axis, so that the bounds of the result's gradient are
        those of the axis."""
        view = self.write.view
        return any(d.coord is Var(axis) and n == self.compute.sizes.get(axis)
                   for d, n in zip(view.dims, view.tensor.shape, strict=True))


def _without(factor: Expr, one: Const) -> Expr:
    """A product without its first factor, 1."""
    match factor:
        case Mul(a, b) if a is one:
            return b
        case Mul(a, b):
            return _without(a, one) * b
        case Div(a, b) if a is not one:
            return _without(a, one) / b
    return factor
