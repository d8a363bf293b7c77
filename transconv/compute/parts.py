"""Rows as rows of parts: the same computation with one reduced axis in two, the parts and what is within.

    let  s = sum(x; k)                      let  s_of = sum(x; k)
                                    ->      let  s = sum(s_of; k_part)

A few long rows become many short ones, which are kernels one after another (kernels.py). A sum of squared
deviations from the mean is put together from those of the parts, so that it takes no sweep of its own
(Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979):

    let  d = x - mean                       let  s_mean = s_of / n
    let  v = sum(d*d; k)            ->      let  v_of = sum((x - s_mean)**2; k)
                                            let  v = sum(v_of + n*(s_mean - mean)**2; k_part)
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from transconv.compute.compute import Compute
from transconv.compute.names import fresh
from transconv.compute.roles import with_roles
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write
from transconv.ir import Const, Div, Expr, Mul, Sub, Var, substitute


def parted(compute: Compute, axis: str, within: int, late: tuple[str, ...] = ()) -> Compute:
    """The computation with an axis in parts of ``within`` positions, which must divide it; ``late``:
    reduced axes that are left to the second stage. Raises ValueError."""
    size = compute.size(axis)
    if axis not in compute.reduced or size % within:
        raise ValueError(f"{axis}={size} has no parts of {within}; expected a reduced axis, and a divisor")
    part = fresh(f"{axis}_part", compute.names.all)
    made = _Parted(compute, axis, within, part, (part, *late))
    axes: list[Axis] = []
    for x in compute.axes:
        axes += [Axis(part, size // within, ""), Axis(axis, within, "")] if x.name == axis else [x]
    return with_roles(replace(compute, axes=tuple(axes), steps=tuple(made.steps)))


class _Parted:
    def __init__(self, compute: Compute, axis: str, within: int, part: str, late: tuple[str, ...]) -> None:
        self.compute, self.late = compute, late
        self.first = tuple(a for a in compute.reduced if a not in late)
        self.count = prod(within if a == axis else compute.size(a) for a in self.first)
        self.values = {s.var: s.value for s in compute.steps if isinstance(s, Value)}
        self.sums = {s.var: s for s in compute.steps if isinstance(s, Reduction)}
        self.steps: list[Step] = []
        begin = Var(part) * within if within > 1 else Var(part)
        place: dict[Expr, Expr] = {Var(axis): begin + Var(axis)}
        for step in compute.steps:
            if isinstance(step, Reduction):
                self.steps += self.reduction(step, place)
                continue
            if isinstance(step, (Read, Write)):
                step = replace(step, view=substitute(step.view, place))
            self.steps.append(step if isinstance(step, Read) else
                              replace(step, value=substitute(step.value, place)))

    def reduction(self, step: Reduction, place: dict[Expr, Expr]) -> list[Step]:
        """The two stages of a reduction."""
        inner = self.of(step.var)
        if (found := self.deviations(step)) is None:
            return [Reduction(inner.name, step.op, substitute(step.value, place), self.first),
                    replace(step, value=inner, axes=self.late)]
        x, total, mean = found
        count = Const(float(self.count), total.type)
        own = Value(fresh(f"{total.name}_mean", self.compute.names.all), Div(self.of(total), count))
        apart, between = substitute(x, place) - own.var, own.var - mean
        before = [own] if own not in self.steps else []
        return [*before, Reduction(inner.name, "sum", apart * apart, self.first),
                replace(step, value=inner + count * (between * between),
                        axes=self.late)]

    def of(self, total: Var) -> Var:
        """The name of what a part has of a reduction."""
        return Var(fresh(f"{total.name}_of", self.compute.names.all), total.type)

    def deviations(self, step: Reduction) -> tuple[Expr, Var, Expr] | None:
        """What has a mean, its sum, and the mean, where squared deviations from it are added up."""
        match step.value:
            case Mul(a, b) if step.op == "sum" and a is b:
                match self.values.get(a, a) if isinstance(a, Var) else a:
                    case Sub(x, Var() as mean):
                        return self.mean_of(x, mean)
        return None

    def mean_of(self, x: Expr, mean: Var) -> tuple[Expr, Var, Expr] | None:
        whole = prod(self.compute.size(a) for a in self.compute.reduced)
        match self.values.get(mean):
            case Div(Var() as total, Const(count)) if count == whole and total in self.sums:
                found = self.sums[total]
                return (x, total, mean) if found.op == "sum" and found.value is x else None
        return None
