"""Kernel splitting: a computation becomes the computations of single kernels.

    read  x = X[n, k]                       kernel 1: s_kept[n] = sum(x; k)
    let   s = sum(x; k)                     kernel 2: Y[0] = max(s_kept[n]; n)
    store Y[0] = max(s; n)

One kernel reduces over one set of axes. Reductions that a later kernel needs are stored in a tensor
between them; reads and values are evaluated again. A kernel takes as many reductions and stores as it can:
those over the same rows whose inputs are known. A value computed from several reductions is stored in
their place, and so is one computed from a reduction and an element of its row, unless that is a product:
reading that element again would cost as much as its whole cache line. Additions to a 16-bit tensor are
made in f32, and a last kernel rounds them. Reductions of what a product stores, or a kernel of rows, may
leave with it:

    let    y = f16(s)                       kernel 1: store Y[m, n] = y
    store  Y[m, n] = y              ->                store t_kept[n] sum= y
    let    t = sum(y; m)                              store v_kept[n] squares= y
    let    d = y - t / 64                   kernel 2: store V[n] = v_kept / 64
    let    v = sum(d*d; m)
    store  V[n] = v / 64

Only where nothing needs the result together with them: else it is read again anyway, by one kernel. Rows
are reduced along some axes, and what leaves with them keeps those: the gradient of a norm's weight is
summed over rows by the kernel that makes the gradient of its input.

``why_not_lowered`` tells whether one kernel can compute a computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod

from transconv import ir
from transconv.compute.analysis.axis_roles import with_roles
from transconv.compute.analysis.statistics import STATISTICS, why_not_reduced
from transconv.compute.analysis.store_conflicts import why_not_stored
from transconv.compute.compute import Compute
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write, fresh, needed, uncast, used
from transconv.ir import f32


@lru_cache(maxsize=1024)
def why_not_lowered(compute: Compute) -> str | None:
    """None if one kernel can compute this, else the reason."""
    for step in compute.steps:
        if isinstance(step, Reduction) and {*step.axes} != {*compute.reduced}:
            other = next(a for a in compute.reduced if a not in step.axes)
            return (
                f"{step.name} is reduced over {' '.join(step.axes)}, another one over {other}; one "
                "kernel reduces over the same axes"
            )
    inside = {s for sweep in compute.sweeps.each for s in sweep.steps}
    for x in compute.axes:
        if x.size == 1 and x.extent is None:
            continue  # one position, whatever the coordinates say
        for write in compute.writes:
            if (x.name in compute.reduced and write not in inside) or write in compute.statistics:
                continue
            if not any(x.name in compute.roots(d.coord) for d in write.view.dims):
                reduced = x.name in compute.reduced
                said = "has one value for each" if reduced else "is not reduced"
                return (
                    f"{write.view.tensor.name} has one place for all of {x.name}, which {said}; expected "
                    f"{x.name} in its coordinates{'' if reduced else f', or a sum(..; {x.name})'}"
                )
    return why_not_stored(compute) or why_not_reduced(compute)


Axes = frozenset[str]
Kept = Reduction | Value


@lru_cache(maxsize=256)
def kernels(compute: Compute) -> tuple[Compute, ...]:
    """The computations of the kernels, in the order in which they run; the computation itself if one
    kernel is enough."""
    if (narrow := next((v.tensor for v in compute.added if v.tensor.dtype.bits < 32), None)) is not None:
        return (*kernels(_wide(compute, narrow)), _rounded(compute, narrow))
    cut = Cut(compute)
    found: list[list[Step]] = []
    while left := cut.left():
        found.append(cut.kernel(left))
    reductions = {s for s in compute.steps if isinstance(s, Reduction)}
    if len(found) == 1 and not cut.leave and cut.ends >= reductions:
        return (compute,)
    return tuple(cut.computation(steps, number, found) for number, steps in enumerate(found))


def _sums(compute: Compute, narrow: ir.Tensor) -> ir.Tensor:
    """The f32 tensor in which the elements of a 16-bit tensor are added up."""
    name = fresh(f"{narrow.name}_sums", (t.name for t in compute.tensors))
    return ir.Tensor(name, narrow.dims, narrow.shape, ir.Layout.dense(f32, narrow.shape))


def _wide(compute: Compute, narrow: ir.Tensor) -> Compute:
    """The computation that adds to the f32 tensor."""
    wide = _sums(compute, narrow)
    return replace(
        compute,
        steps=tuple(
            replace(
                s,
                view=ir.View(wide, s.view.dims),
                value=s.value.x if isinstance(s.value, ir.Cast) else ir.Cast(s.value, f32),
            )
            if isinstance(s, Write) and s.view.tensor is narrow
            else s
            for s in compute.steps
        ),
    )


def _rounded(compute: Compute, narrow: ir.Tensor) -> Compute:
    """The computation that rounds the f32 sums."""
    wide = _sums(compute, narrow)
    axes = tuple(Axis(f"i{d}", n, "") for d, n in enumerate(narrow.shape))
    at = tuple(ir.ViewDim(x.var) for x in axes)
    read = Read("added", ir.View(wide, at))
    made = Write(ir.View(narrow, at), ir.Cast(read.var, narrow.dtype))
    return with_roles(replace(compute, name=f"{compute.name}_rounded", axes=axes, steps=(read, made)))


class Cut:
    """Assigns the reductions and stores of a computation to kernels."""

    def __init__(self, compute: Compute) -> None:
        self.compute, self.steps = compute, compute.steps
        self.sizes = compute.sizes
        self.made: dict[ir.Var, Step] = {s.var: s for s in self.steps if not isinstance(s, Write)}
        self.axes: dict[Step, Axes] = {}  # the axes along which a step's value varies
        self.needs: dict[Step, set[Step]] = {}  # the steps in ``kept`` that it depends on directly
        self.kept: set[Step] = set()  # reductions, and values stored in their place
        for step in self.steps:
            mentioned = used(step)
            before = [self.made[v] for v in mentioned if v in self.made]
            own = {v.name for v in mentioned if v.name in self.sizes and v not in self.made}
            along = frozenset(own).union(*(self.axes[s] for s in before))
            self.axes[step] = along - {*step.axes} if isinstance(step, Reduction) else along
            self.needs[step] = {r for s in before for r in ({s} if s in self.kept else self.needs[s])}
            if isinstance(step, Reduction) or self.stands_for(step):
                self.kept.add(step)
        self.ends: set[Step] = set()  # stores, and the kept steps that they need
        left: list[Step] = list(compute.writes)
        while left:
            self.ends.add(step := left.pop())
            left += self.needs[step] - self.ends
        self.done: set[Step] = set()
        self.leave: Left = {}
        self.behind: dict[Step, Left] = {}  # what leaves with a kernel, by its first step

    def stands_for(self, step: Step) -> bool:
        """Whether a value is stored in place of the reductions that it is computed from."""
        needs = self.needs[step]
        if not isinstance(step, Value) or not needs or any(self.axes[r] != self.axes[step] for r in needs):
            return False
        read, summed = (self.tensors(used(s) for s in of) for of in ([step], needs))
        return len(needs) > 1 or (bool(read & summed) and self.compute.factors is None)

    def tensors(self, named: Iterable[set[ir.Var]]) -> set[ir.Tensor]:
        """The tensors that some names depend on, not counting those behind kept steps."""
        found: set[ir.Tensor] = set()
        left = [v for names in named for v in names]
        while left:
            step = self.made.get(left.pop())
            if isinstance(step, Read):
                found.add(step.view.tensor)
            elif step is not None and step not in self.kept:
                left += used(step)
        return found

    def left(self) -> list[Step]:
        """The reductions and stores that no kernel has yet, first those whose inputs are known."""
        ends = [s for s in self.steps if s in self.ends and s not in self.done]
        return sorted(ends, key=lambda s: (not self.needs[s] <= self.done, isinstance(s, Write)))

    def kernel(self, left: list[Step]) -> list[Step]:
        """The reductions and stores of the next kernel."""
        first = left[0]
        reduced = frozenset(first.axes) if isinstance(first, Reduction) else frozenset()
        rows = self.axes[first]
        taken: list[Step] = []
        for step in (s for s in self.steps if s in left):
            if self.needs[step] <= self.done | {*taken} and self.fits(step, rows, reduced):
                taken.append(step)
        self.done |= {*taken}
        if found := leaving(self, taken, left):
            self.leave |= found
            self.behind[taken[0]] = found
            direct = [s for s in left if isinstance(s, Write) and any(stores(self, s, r) for r in found)]
            self.done |= {*found, *direct}
        return taken

    def fits(self, step: Step, rows: Axes, reduced: Axes) -> bool:
        """Whether a kernel over these rows and reduced axes can compute a step."""
        if isinstance(step, Reduction):
            return frozenset(step.axes) == reduced and self.axes[step] == rows
        return self.axes[step] in (rows, rows | reduced)

    def computation(self, ends: list[Step], number: int, all_ends: list[list[Step]]) -> Compute:
        """The computation of one kernel: it reads what earlier kernels stored and stores what later ones
        need."""
        if mine := self.behind.get(ends[0]):
            made = with_statistics(self, ends, mine)
            return made if len(all_ends) > 1 else replace(made, name=self.compute.name)
        later = {r for steps in all_ends[number + 1 :] for s in steps for r in self.needs[s]}
        own = self.wanted(ends)
        steps: list[Step] = []
        for step in self.steps:
            if step not in own:
                continue
            if isinstance(step, Kept) and step in self.kept and step not in ends:
                step = Read(step.name, self.leave[step].view if step in self.leave else self.between(step))
            steps.append(step)
        steps += [
            Write(self.between(s), ir.Cast(s.var, s.var.type))
            for s in ends
            if isinstance(s, Kept) and s in later
        ]
        along = {a for s in ends for a in (*self.axes[s], *getattr(s, "axes", ()))}
        name = f"{self.compute.name}_{number + 1}" if len(all_ends) > 1 else self.compute.name
        made = replace(
            self.compute,
            name=name,
            steps=tuple(steps),
            axes=tuple(x for x in self.compute.axes if x.name in along),
        )
        return with_roles(made)

    def wanted(self, ends: list[Step]) -> set[Step]:
        """The steps that some ends depend on, up to kept steps of earlier kernels."""
        found: set[Step] = set()
        left = list(ends)
        while left:
            step = left.pop()
            if step not in found:
                found.add(step)
                if step in ends or step not in self.kept:
                    left += [self.made[v] for v in used(step) if v in self.made]
        return found

    def between(self, step: Kept) -> ir.View:
        """The tensor that keeps a value between kernels, with one element for each row."""
        rows = [x for x in self.compute.axes if x.name in self.axes[step]]
        shape = tuple(x.size for x in rows) or (1,)
        name = fresh(f"{step.name}_kept", (t.name for t in self.compute.tensors))
        dims = tuple(x.name for x in rows) or ("one",)
        extents = tuple(ir.as_expr(x.size) if x.extent is None else x.extent for x in rows)
        numbers = all(isinstance(e, ir.Const) for e in extents)
        layout = ir.Layout.dense(step.var.type, shape)
        tensor = ir.Tensor(name, dims, shape, layout, extents=() if numbers else extents)
        return ir.View(tensor, tuple(ir.ViewDim(x.var) for x in rows) or (ir.ViewDim(ir.ZERO),))


# -- reductions of what a product stores --------------------------------------------------------------


# Elements of a row with which a program holds it and carries what leaves with it: longer ones leave no
# registers, and of shorter ones a tile has more rows than registers to add them up.
CARRIED = range(128, 8193)
Left = dict[Reduction, Write]
"""Reductions, each with the store that leaves it."""


def leaving(cut: Cut, taken: list[Step], left: list[Step]) -> Left:
    """The reductions that leave with the kernel that takes some steps of those that are left: behind a
    product those over the points of its result, after sums of rows those over all elements."""
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
        if (
            isinstance(step, Reduction)
            and step not in heads
            and (whole(cut, step) == points and cut.needs[step] <= heads | {*found})
        ):
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
    own = {*taken, *needed(cut.steps, (v for s in (*taken, *found.values()) for v in used(s)))}
    steps = (*(s for s in cut.steps if s in own), *found.values())
    along = frozenset().union(*(whole(cut, s) for s in taken))
    axes = tuple(x for x in cut.compute.axes if x.name in along)
    return with_roles(replace(cut.compute, name=f"{cut.compute.name}_1", steps=steps, axes=axes))


def whole(cut: Cut, step: Step) -> frozenset[str]:
    """The axes over whose points a step is evaluated."""
    return cut.axes[step] | (frozenset(step.axes) if isinstance(step, Reduction) else frozenset())


def _statistic(cut: Cut, step: Reduction, found: Left) -> tuple[ir.Expr, str] | None:
    """What a reduction reduces, and how; None if a statistic is not that."""
    if (deviating := _deviating(cut, step, found)) is not None:
        return deviating, "squares"
    if step.op not in STATISTICS or cut.needs[step] & {*found}:
        return None
    return step.value, step.op


def _deviating(cut: Cut, step: Reduction, found: Left) -> ir.Expr | None:
    """The value whose squared deviations from its mean are added up; None for other terms."""
    match step.value:
        case ir.Mul(ir.Var() as off, other) if off is other and step.op == "sum":
            match _value(cut, off):
                case ir.Sub(x, ir.Var() as mean):
                    match _value(cut, mean):
                        case ir.Div(ir.Var() as total, ir.Const(count)):
                            made = cut.made.get(total)
                            if (
                                isinstance(made, Reduction)
                                and made in found
                                and ((made.op, made.value) == ("sum", x))
                                and ({*made.axes} == {*step.axes})
                                and (count == prod(cut.sizes[a] for a in step.axes))
                            ):
                                return x
    return None


def _value(cut: Cut, v: ir.Var) -> ir.Expr | None:
    step = cut.made.get(v)
    return step.value if isinstance(step, Value) else None


def _place(cut: Cut, step: Reduction) -> ir.View:
    """Where a reduction is kept: where it is stored itself, or between kernels."""
    own = next((w for w in cut.compute.writes if stores(cut, w, step)), None)
    return cut.between(step) if own is None else own.view


def stores(cut: Cut, write: Write, step: Reduction) -> bool:
    """Whether a store has a reduction, and nothing else, at places that its rows tell."""
    view, value = write.view, uncast(write.value)
    coords = [d.coord.name for d in view.dims if isinstance(d.coord, ir.Var)]
    return (
        value is step.var
        and not write.op
        and view.tensor.dtype is step.var.type
        and view.mask() is ir.TRUE
        and len(coords) == len(view.dims)
        and sorted(coords) == sorted(cut.axes[step])
    )
