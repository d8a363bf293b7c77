"""Splitting of a reduced axis into parts: the same computation with two axes, the parts and within a part.

    let  s = sum(x; k)                      let  s_of = sum(x; k)
                                    ->      let  s = sum(s_of; k_part)

A few long rows become many short ones, and the computation becomes several kernels (kernel_split.py). A
sum of squared deviations from the mean is computed from those of the parts, so that it needs no sweep of
its own (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
1979). A part is swept once: its first element, x0, is subtracted from all of its elements. That loses at
most a factor n of precision in a part of n elements, because (x0 - mean)**2 is one of the n squares in the
sum:

    let  d = x - mean                       let  s_apart = sum(x - x0; k)
    let  v = sum(d*d; k)            ->      let  s_of = s_apart + n*x0
                                            let  v_squares = sum((x - x0)**2; k)
                                            let  v_of = v_squares - s_apart*s_apart/n
                                            let  v = sum(v_of + n*(s_of/n - mean)**2; k_part)

Exponentials relative to the largest element of the row are computed relative to that of the part, or to
LOWEST if all elements of the part are -inf:

    let  e = exp(x - top)                   let  top_near = max(top_of, LOWEST)
    let  s = sum(e; k)              ->      let  s_of = sum(exp(x - top_near); k)
                                            let  s = sum(s_of * exp(top_near - top); k_part)

For the index of an extreme, each part finds its own, and the first part that has the extreme wins:

    let  i = argmax(x; k)                   let  i_of = argmax(x; k)
                                    ->      let  i = min(where(top_of == top, i_of, n); k_part)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.compute import Compute
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write, fresh, is_extreme
from transconv.ir import ZERO, Call, Const, Div, Expr, Mul, Select, Sub, Var, find, substitute

LOWEST = -3e38  # finite, so that exp(-inf - LOWEST) is 0 and not NaN


def parted(compute: Compute, axis: str, within: int, late: tuple[str, ...] = ()) -> Compute:
    """The computation with a reduced axis in parts of ``within`` positions, which must divide its size;
    ``late``: reduced axes that only the second stage reduces. Raises ValueError for other axes or
    sizes."""
    if any(compute.axis(a).extent is not None for a in compute.reduced):  # counts would be the example's
        raise ValueError(
            f"sizes that are arguments ({compute.named}); expected numbers of what is reduced"
        )
    size = compute.size(axis)
    if axis not in compute.reduced or size % within:
        raise ValueError(f"{axis}={size} has no parts of {within}; expected a reduced axis, and a divisor")
    part = fresh(f"{axis}_part", compute.names.all)
    made = _Parted(compute, axis, within, part, (part, *late))
    axes: list[Axis] = []
    for x in compute.axes:
        axes += [Axis(part, size // within, ""), Axis(axis, within, "")] if x.name == axis else [x]
    return with_roles(replace(compute, axes=tuple(axes), steps=tuple(made.steps)))


def factors(e: Expr) -> Iterator[Expr]:
    """The factors of a product; the expression itself if it is none."""
    if isinstance(e, Mul):
        yield from factors(e.a)
        yield from factors(e.b)
    else:
        yield e


def _at_least(e: Expr, least: float) -> Expr:
    bound = Const(least, e.dtype)
    return Select(e > bound, e, bound)


class _Parted:
    def __init__(self, compute: Compute, axis: str, within: int, part: str, late: tuple[str, ...]) -> None:
        self.compute, self.late = compute, late
        self.first = tuple(a for a in compute.reduced if a not in late)
        self.count = Const(
            float(prod(within if a == axis else compute.size(a) for a in self.first)), compute.acc
        )
        self.values = {s.var: s.value for s in compute.steps if isinstance(s, Value)}
        self.sums = {s.var: s for s in compute.steps if isinstance(s, Reduction)}
        self.reads = {s.var: s for s in compute.reads}
        self.steps: list[Step] = []
        begin = Var(part) * within if within > 1 else Var(part)
        self.place: dict[Expr, Expr] = {Var(axis): begin + Var(axis)}
        self.begin: dict[Expr, Expr] = {Var(a): begin if a == axis else ZERO for a in self.first}
        shifted = {found[1] for s in self.sums.values() if (found := self.deviations(s))}
        for step in compute.steps:
            if isinstance(step, Reduction):
                self.steps += self.shifted(step) if step.var in shifted else self.reduction(step)
                continue
            if isinstance(step, (Read, Write)):
                step = replace(step, view=substitute(step.view, self.place))
            self.steps.append(
                step if isinstance(step, Read) else replace(step, value=substitute(step.value, self.place))
            )

    def reduction(self, step: Reduction) -> list[Step]:
        """The two stages of a reduction."""
        if (extreme := self.extreme(step)) is not None:
            return self.place_of(step, extreme)
        if (power := self.power(step)) is not None:
            return self.powers(step, *power)
        if (found := self.deviations(step)) is not None:
            return self.squares(step, *found)
        inner = self.named(step.var, "of")
        return [
            Reduction(inner.name, step.op, substitute(step.value, self.place), self.first),
            replace(step, value=inner, axes=self.late),
        ]

    def place_of(self, step: Reduction, extreme: Reduction) -> list[Step]:
        """The two stages of an argmax or argmin."""
        inner, own = self.named(step.var, "of"), self.named(extreme.var, "of")
        within = substitute(substitute(step.value, {extreme.var: own}), self.place)
        size = step.value.no  # type: ignore[attr-defined]
        later = Select(is_extreme(own, extreme.var), inner, size)
        return [
            Reduction(inner.name, step.op, within, self.first),
            replace(step, value=later, axes=self.late),
        ]

    def powers(self, step: Reduction, value: Expr, top: Var) -> list[Step]:
        """The two stages of a sum of exponentials."""
        inner = self.named(step.var, "of")
        near = Value(self.named(top, "near").name, _at_least(self.named(top, "of"), LOWEST))
        within = substitute(substitute(value, {top: near.var}), self.place)
        return [
            *([near] if near not in self.steps else []),
            Reduction(inner.name, "sum", within, self.first),
            replace(step, value=inner * Call("exp", (near.var - top,)), axes=self.late),
        ]

    def squares(self, step: Reduction, x: Expr, total: Var, mean: Expr) -> list[Step]:
        """The two stages of a sum of squared deviations from a mean."""
        inner, apart = self.named(step.var, "of"), self.named(total, "apart")
        squares = self.named(step.var, "squares")
        d = substitute(x, self.place) - self.at_begin(x)
        between = self.named(total, "of") / self.count - mean
        return [
            Reduction(squares.name, "sum", d * d, self.first),
            Value(inner.name, squares - apart * apart / self.count),
            replace(step, value=inner + self.count * (between * between), axes=self.late),
        ]

    def shifted(self, step: Reduction) -> list[Step]:
        """The two stages of the sum behind a mean whose squared deviations are summed as well."""
        inner, apart = self.named(step.var, "of"), self.named(step.var, "apart")
        x0 = self.at_begin(step.value)
        firsts = [
            Read(v.name, substitute(self.reads[r].view, self.begin), self.reads[r].fill)
            for r, v in self.firsts(step.value).items()
        ]
        return [
            *(r for r in firsts if r not in self.steps),
            Reduction(apart.name, "sum", substitute(step.value, self.place) - x0, self.first),
            Value(inner.name, apart + self.count * x0),
            replace(step, value=inner, axes=self.late),
        ]

    def at_begin(self, x: Expr) -> Expr:
        """The value of an expression at the first element of a part."""
        return substitute(substitute(self.written_out(x), {**self.firsts(x)}), self.begin)

    def firsts(self, x: Expr) -> dict[Var, Var]:
        """For each read in an expression, the variable of the read at the first element of the part."""
        return {v: self.named(v, "first") for v in find(self.written_out(x), Var) if v in self.reads}

    def written_out(self, x: Expr) -> Expr:
        """The expression with values expanded, down to reads, axes and reductions."""
        while names := {v: self.values[v] for v in find(x, Var) if v in self.values}:
            x = substitute(x, names)
        return x

    def named(self, whole: Var, part: str) -> Var:
        """A variable for a part's share of a value, such as ``s_of``."""
        return Var(fresh(f"{whole.name}_{part}", self.compute.names.all), whole.type)

    def extreme(self, step: Reduction) -> Reduction | None:
        """The extreme whose index a reduction finds; None for other reductions."""
        if not isinstance(step.value, Select):
            return None
        return next((s for s in self.sums.values() if step.value.cond is is_extreme(s.value, s.var)), None)

    def power(self, step: Reduction) -> tuple[Expr, Var] | None:
        """For a sum of exponentials, its expanded term and the maximum that is subtracted; else None."""
        value = self.written_out(step.value)
        for factor in factors(value) if step.op == "sum" else ():
            match factor:
                case Call("exp", (Sub(_, Var() as top),)) if top in self.sums:
                    once = [v for v in find(value, Var) if v in self.sums] == [top]
                    return (value, top) if once and self.sums[top].op == "max" else None
        return None

    def deviations(self, step: Reduction) -> tuple[Expr, Var, Expr] | None:
        """For a sum of squared deviations of x from a mean: x, the sum of x, and the mean; else None."""
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
