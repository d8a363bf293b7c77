"""Reductions that leave with a product's result, or with that of rows: the statistics of a kernel.

    let    y = f16(s)                       kernel 1: store Y[m, n] = y
    store  Y[m, n] = y              ->                store t_kept[n] sum= y
    let    t = sum(y; m)                              store v_kept[n] squares= y
    let    d = y - t / 64                   kernel 2: store V[n] = v_kept / 64
    let    v = sum(d*d; m)
    store  V[n] = v / 64

Only where nothing needs the result together with them: else it is read again anyway, by one kernel. Rows
are reduced along some axes, and what leaves with them keeps those: the gradient of a norm's weight is
summed over rows by the kernel that makes the gradient of its input.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.analysis.statistics import STATISTICS
from transconv.compute.compute import Compute
from transconv.compute.names import used
from transconv.compute.one_kernel import why_not_lowered
from transconv.compute.steps import Reduction, Step, Value, Write
from transconv.ir import TRUE, Cast, Const, Div, Expr, Mul, Sub, Var, View

if TYPE_CHECKING:
    from transconv.compute.kernel_split import Cut

# Elements of a row with which a program holds it and carries what leaves with it: longer ones leave no
# registers, and of shorter ones a tile has more rows than registers to add them up.
CARRIED = range(128, 8193)
Left = dict[Reduction, Write]
"""Reductions, each with the store that leaves it."""


def leaving(cut: Cut, taken: list[Step], left: list[Step]) -> Left:
    """The reductions that leave with the kernel that takes some steps of those that are left: behind a
    product those over the points of its result, behind sums of rows those over all elements."""
    heads = [s for s in taken if isinstance(s, Reduction)]
    results = [s for s in taken if isinstance(s, Write)]
    needed = {n for s in taken for n in cut.needs[s]}
    if not heads or not results or any(s.op for s in results) or not needed <= {*taken}:
        return {}
    if len(heads) == 1 and (found := _behind(cut, taken, left, cut.axes[heads[0]])):
        return found
    if prod(cut.sizes[a] for a in heads[0].axes) not in CARRIED:
        return {}
    return _behind(cut, taken, left, whole(cut, heads[0]))


def _behind(cut: Cut, taken: list[Step], left: list[Step], points: frozenset[str]) -> Left:
    """The reductions over these points that leave with a kernel; none if the kernel could not do that."""
    heads = {s for s in taken if isinstance(s, Reduction)}
    found: Left = {}
    for step in left:
        if isinstance(step, Reduction) and step not in heads and (
                whole(cut, step) == points and cut.needs[step] <= heads | {*found}):
            if (value := _statistic(cut, step, found)) is None:
                return {}
            found[step] = Write(_place(cut, step), *value)
    rest = [s for s in left if s not in taken and s not in found]
    again = any(whole(cut, s) - cut.axes[r] for s in rest for r in found if r in cut.needs[s])
    if not found or again:
        return {}
    made = with_statistics(cut, taken, found)
    return {} if why_not_lowered(made) else found


def with_statistics(cut: Cut, taken: list[Step], found: Left) -> Compute:
    """The computation of a kernel with what leaves with it."""
    needed: set[Step] = {*taken}
    left: list[Step] = [*taken, *found.values()]
    while left:
        for v in used(left.pop()):
            if v in cut.made and cut.made[v] not in needed:
                needed.add(step := cut.made[v])
                left.append(step)
    steps = (*(s for s in cut.steps if s in needed), *found.values())
    along = frozenset().union(*(whole(cut, s) for s in taken))
    axes = tuple(x for x in cut.compute.axes if x.name in along)
    return with_roles(replace(cut.compute, name=f"{cut.compute.name}_1", steps=steps, axes=axes))


def whole(cut: Cut, step: Step) -> frozenset[str]:
    """The axes over whose points a step is evaluated."""
    return cut.axes[step] | (frozenset(step.axes) if isinstance(step, Reduction) else frozenset())


def _statistic(cut: Cut, step: Reduction, found: Left) -> tuple[Expr, str] | None:
    """What a reduction reduces, and how; None if a statistic is not that."""
    if (deviating := _deviating(cut, step, found)) is not None:
        return deviating, "squares"
    if step.op not in STATISTICS or cut.needs[step] & {*found}:
        return None
    return step.value, step.op


def _deviating(cut: Cut, step: Reduction, found: Left) -> Expr | None:
    """The value whose squared deviations from its mean are added up; None for other terms."""
    match step.value:
        case Mul(Var() as off, other) if off is other and step.op == "sum":
            match _value(cut, off):
                case Sub(x, Var() as mean):
                    match _value(cut, mean):
                        case Div(Var() as total, Const(count)):
                            made = cut.made.get(total)
                            if isinstance(made, Reduction) and made in found and (
                                    (made.op, made.value) == ("sum", x)) and (
                                    {*made.axes} == {*step.axes}) and (
                                    count == prod(cut.sizes[a] for a in step.axes)):
                                return x
    return None


def _value(cut: Cut, v: Var) -> Expr | None:
    step = cut.made.get(v)
    return step.value if isinstance(step, Value) else None


def _place(cut: Cut, step: Reduction) -> View:
    """Where a reduction is kept: where it is stored itself, or between kernels."""
    own = next((w for w in cut.compute.writes if stores(cut, w, step)), None)
    return cut.between(step) if own is None else own.view


def stores(cut: Cut, write: Write, step: Reduction) -> bool:
    """Whether a store has a reduction, and nothing else, at places that its rows tell."""
    view, value = write.view, write.value
    value = value.x if isinstance(value, Cast) else value
    coords = [d.coord.name for d in view.dims if isinstance(d.coord, Var)]
    return (value is step.var and not write.op and view.tensor.dtype is step.var.type
            and view.mask() is TRUE and len(coords) == len(view.dims)
            and sorted(coords) == sorted(cut.axes[step]))
