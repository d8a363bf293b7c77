"""Stage 4. In: Compute. Out: Kernel: a scalar loop nest that is right, and nothing else.

    for every point of the axes that are not reduced (parallel):
        acc = 0
        for every point of the reduced axes:
            a = load(...); b = load(...)
            acc = acc + a * b
        store(c, epilogue(acc))

Without a reduction: loads, values and stores at every point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv.compute import Compute, Read, Reduction, Step, Value, Write
from transconv.ir import (
    REDUCERS,
    TRUE,
    Alloc,
    Const,
    Expr,
    For,
    Kernel,
    Let,
    Load,
    Seq,
    Stmt,
    Update,
    Var,
    View,
    free_vars,
    index,
    seq,
    store,
    substitute,
)

Seen = dict[Step, View]  # the views of steps, their coordinates named


def naive(compute: Compute, name: str) -> Kernel:
    """The loop nest of a computation. A reduction over no elements has no loops: it is the identity."""
    compute = _apart(compute)
    summed = compute.axes_of("K")
    nest = _Nest(compute)
    whole = _map(compute, nest) if compute.sum is None else _reduction(compute, compute.sum, nest)
    for x in reversed(compute.axes):
        if x not in summed:
            whole = For(x.var, x.size, whole, "parallel")
    return Kernel(name, compute.tensors, whole)


# What lanes and positions of a tile are called: a value of such a name gets another one.
LANES = frozenset(("m", "n", "k", "grp"))


def _is_lanes(name: str) -> bool:
    """Whether a name may be that of lanes, which are counted where there are several."""
    return name.rstrip("0123456789") in LANES


def _apart(compute: Compute) -> Compute:
    """The computation with values that are called as no lane is."""
    old = [s.var for s in compute.steps if not isinstance(s, Write) and _is_lanes(s.name)]
    if not old:
        return compute
    values: dict[Expr, Expr] = {v: Var(f"{v.name}_value", v.type) for v in old}
    steps: list[Step] = []
    for s in compute.steps:
        if not isinstance(s, Read):
            s = replace(s, value=substitute(s.value, values))
        if not isinstance(s, Write) and _is_lanes(s.name):
            s = replace(s, name=f"{s.name}_value")
        steps.append(s)
    return replace(compute, steps=tuple(steps))


def _map(compute: Compute, nest: _Nest) -> Stmt:
    """No accumulator, so that what is only moved keeps its bits."""
    seen = nest.at_once(compute.steps)
    return seq(*nest.lets, *nest.steps(compute.steps, seen))


def _reduction(compute: Compute, total: Reduction, nest: _Nest) -> Stmt:
    """The coordinates that no reduced axis is in, the accumulator, the loops around the terms, and what
    is behind them."""
    acc, summed = total.var, compute.axes_of("K")
    k_vars = {x.var for x in summed}
    before = compute.steps[:compute.steps.index(total)]
    results = nest.at_once(compute.writes[:1])
    named, nest.lets = nest.lets, []
    loops: list[Stmt] = []
    for step in before:
        seen = nest.at_once((step,))
        loops += [*(x for x in nest.lets if x not in named), *nest.steps((step,), seen)]
        nest.lets = []
    outside = _outside(loops, k_vars, compute.names.indices)
    inside = [x for x in loops if x not in outside]
    body: Stmt = seq(*inside, Update(acc, REDUCERS[total.op].node(acc, total.value)))
    for x in reversed(summed):
        body = For(x.var, x.size, body)
    if any(x.size == 0 for x in summed):
        body = Seq(())
    nest.names = {x.value: x.var for x in named}
    behind = results | nest.at_once([s for s in compute.after if s not in results])
    return seq(*named, *outside, Alloc(acc, (), REDUCERS[total.op].identity(acc.type)), body,
               *(x for x in nest.lets if x not in named), *nest.steps(compute.after, behind, "epilogue"))


def _outside(loops: Sequence[Stmt], k_vars: set[Var], indices: frozenset[Var]) -> list[Stmt]:
    """What no reduced axis is in: coordinates, and the reads of indices that they mention."""
    found: list[Stmt] = []
    changing = set(k_vars)
    for x in loops:
        assert isinstance(x, Let)
        moved = _is_coordinate(x) and not isinstance(x.value, Load) or x.var in indices
        if moved and not free_vars(x.value) & changing:
            found.append(x)
        else:
            changing.add(x.var)
    return found


def _is_coordinate(let: Let) -> bool:
    return let.var.type is index


class _Nest:
    """Names for computed coordinates: ``let y = h*2 + kh - 1``, each given once."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.taken = {x.name for x in compute.axes}
        self.origins = {read.name: letter for read, letter in zip(compute.operands, "ab", strict=False)}
        self.lets: list[Let] = []
        self.given: dict[str, Expr] = {}  # what every name stands for
        self.names: dict[Expr, Expr] = {}  # the names of the result, for what is read behind a sum

    def named(self, view: View) -> View:
        """The view over names; new ones are added to ``lets``."""
        view = substitute(view, self.names)
        for name, dim in zip(view.tensor.dims, view.dims, strict=True):
            if isinstance(dim.coord, (Var, Const)) or name in self.taken:
                continue
            name = self.free(name, dim.coord)
            let = Let(Var(name), dim.coord)
            if let not in self.lets:
                self.lets.append(let)
            view = substitute(view, {dim.coord: Var(name)})
        return view

    def at_once(self, steps: Sequence[Step]) -> Seen:
        """The views of steps over names, but those that values are in: they come behind the values."""
        return {s: self.named(s.view) for s in steps
                if isinstance(s, (Read, Write)) and not self.compute.names.told(s.view)}

    def free(self, name: str, coord: Expr) -> str:
        """A name that stands for nothing else: that of the dimension, or one with a number."""
        tried, number = name, 1
        while tried in self.taken or self.given.get(tried, coord) is not coord:
            tried, number = f"{name}_{number}", number + 1
        self.given[tried] = coord
        return tried

    def steps(self, steps: Sequence[Step], seen: Seen, origin: str = "") -> list[Stmt]:
        """The statements of some steps. ``origin``: what their lets are for, if not operands."""
        made: list[Stmt] = []
        for step in steps:
            if isinstance(step, (Read, Write)) and step not in seen:
                known = len(self.lets)
                seen = seen | {step: self.named(step.view)}
                made += [replace(x, origin=origin) for x in self.lets[known:]]
            if isinstance(step, Read):
                view = seen[step]
                load = Load(view.tensor, view.offset(), view.mask(), step.fill)
                made.append(Let(step.var, load, self.origins.get(step.name, origin)))
            elif isinstance(step, Value):
                made.append(Let(step.var, step.value, origin))
            elif isinstance(step, Write):
                view = seen[step]
                mask = view.mask()
                made.append(store(view.tensor, view.offset(), step.value, TRUE if mask is TRUE else mask))
        return made
