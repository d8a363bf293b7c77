"""The first kernel of a computation: a correct scalar loop nest without any optimisation.

    for every point of the axes that are not reduced (parallel):
        acc = 0
        for every point of the reduced axes:
            a = load(...); b = load(...)
            acc = acc + a * b
        store(c, epilogue(acc))

If elements of a row are needed again after a reduction, there are several such loops (see
compute/steps.py), each of which loads and computes the values that it needs:

        for every point of the reduced axes:
            a = load(...)
            store(c, a / acc)

Quotients in f32 of which numbers of few bits are made are rounded to nearest:

    store y[n] = i8(round(a / s))            ->        store y[n] = i8(round(divided(a, s)))

The languages' own division may be off in the last place. Where an integer or a float of 8 bits is made of
the quotient, or of what reduces quotients, that decides between two neighbours: of 1.5 comes 2, and of the
float below it 1."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from transconv import ir
from transconv.compute import Axis, Compute, Read, Reduction, Step, Sweep, Value, Write, fresh
from transconv.compute.analysis import statistics
from transconv.passes.scope import renamed
from transconv.simplify import facts_of, range_of, simplify

Seen = dict[Step, ir.View]  # the views of steps, with names for their coordinates


def naive(compute: Compute, name: str) -> ir.Kernel:
    """The loop nest of a computation. A reduction over no elements has no loops: its result is the neutral
    element."""
    compute = nearest_quotients(_apart(compute))
    nest = _Nest(compute)
    whole = _sweeps(compute, nest) if compute.sum else _map(compute, nest)
    for x in reversed(compute.axes):
        if x not in compute.axes_of("K"):
            whole = _loop(x, compute, whole, "parallel")
    return ir.Kernel(name, compute.tensors, whole, sizes=_with_extents(compute))


def _with_extents(compute: Compute) -> ir.Sizes | None:
    """The sizes that are arguments, required to be such that no dimension of a tensor is empty."""
    if (sizes := compute.named) is None:
        return None
    known = facts_of(sizes)
    conditions = dict.fromkeys(simplify(1 <= e, known) for t in compute.tensors for e in t.extents)
    return replace(sizes, where=(*sizes.where, *(c for c in conditions if c is not ir.TRUE)))


def _loop(x: Axis, compute: Compute, body: ir.Stmt, kind: str = "serial") -> ir.For:
    """The loop along an axis. If the size is an argument, it runs ``until`` that size and at most to the
    largest one."""
    if x.extent is None:
        return ir.For(x.var, x.size, body, kind)
    most = range_of(x.extent, facts_of(compute.named)).hi
    assert most is not None, f"{x.extent} has no end"
    return ir.For(x.var, most, body, kind, until=x.extent)


# The names of lanes. Values and coordinates with such a name are renamed.
LANES = frozenset(("m", "n", "k", "grp"))


def _is_lanes(name: str) -> bool:
    """Whether a name may be that of lanes, which are numbered if there are several: m0, m1."""
    return name.rstrip("0123456789") in LANES


def _apart(compute: Compute) -> Compute:
    """The computation, with values renamed whose names could be those of lanes."""
    taken = compute.names.all
    return renamed(
        compute,
        {
            s.var: fresh(f"{s.name}_value", taken)
            for s in compute.steps
            if not isinstance(s, Write) and _is_lanes(s.name)
        },
    )


def _map(compute: Compute, nest: _Nest) -> ir.Stmt:
    """The body without a reduction. It has no accumulator, so that moved values keep their bits."""
    seen = nest.at_once(compute.steps)
    return ir.seq(*nest.lets, *nest.steps(compute.steps, seen))


def _sweeps(compute: Compute, nest: _Nest) -> ir.Stmt:
    """The coordinates of the result, then each sweep after the steps of the row that it needs, then the
    steps after all sweeps."""
    inside = {s for sweep in compute.sweeps.each for s in sweep.steps}
    seen = nest.at_once([s for s in compute.writes[:1] if s not in inside])
    made: list[ir.Stmt] = []
    for sweep in compute.sweeps.each:
        made += [*nest.row(sweep.before, seen), *_elements(compute, sweep, nest)]
        nest.names = {x.value: x.var for x in nest.lets}
    return ir.seq(*made, *nest.row(compute.sweeps.behind, seen, "epilogue"))


def _elements(compute: Compute, sweep: Sweep, nest: _Nest) -> list[ir.Stmt]:
    """One sweep: the coordinates that are the same for a whole row, the accumulators, and the loops around
    the steps of each element."""
    summed = compute.axes_of("K")
    k_vars = {x.var for x in summed}
    within = nest.within()
    loops: list[ir.Stmt] = []
    ends: list[ir.Stmt] = []
    accs: list[ir.Stmt] = []
    for step in sweep.steps:
        if isinstance(step, Reduction):
            reducer = ir.REDUCERS[step.op]
            accs.append(ir.Alloc(step.var, (), reducer.identity(step.var.type)))
            ends.append(ir.Update(step.var, reducer.node(step.var, step.value)))
            continue
        loops += within.row((step,), {})
    outside = _outside(loops, k_vars, compute.names.indices)
    nest.know(outside)
    body: ir.Stmt = ir.seq(*(x for x in loops if x not in outside), *ends)
    for x in reversed(summed):
        body = _loop(x, compute, body)
    if any(x.size == 0 for x in summed):
        body = ir.Seq(())
    return [*outside, *accs, body]


def _outside(loops: Sequence[ir.Stmt], k_vars: set[ir.Var], indices: frozenset[ir.Var]) -> list[ir.Let]:
    """The lets that do not depend on a reduced axis: coordinates, and the reads of indices in them."""
    found: list[ir.Let] = []
    changing = set(k_vars)
    for x in (x for x in loops if isinstance(x, ir.Let)):
        moved = (x.var.type is ir.index and not isinstance(x.value, ir.Load)) or x.var in indices
        if moved and not ir.free_vars(x.value) & changing:
            found.append(x)
        else:
            changing.add(x.var)
    return found


class _Nest:
    """Names for computed coordinates: ``let y = h*2 + kh - 1``, each bound once."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.taken = compute.names.all
        self.origins = {read.name: letter for read, letter in zip(compute.operands, "ab", strict=False)}
        self.lets: list[ir.Let] = []
        self.placed = 0  # how many of the lets are in the nest already
        self.given: dict[str, ir.Expr] = {}  # name -> coordinate
        self.names: dict[ir.Expr, ir.Expr] = {}  # coordinate -> name, of the lets before the current sweep

    def within(self) -> _Nest:
        """A nest for one sweep. Its lets are visible in this sweep only; no name is used again."""
        made = copy(self)
        made.lets, made.placed = list(self.lets), len(self.lets)
        return made

    def new(self) -> list[ir.Let]:
        """The lets that are not in the nest yet."""
        found, self.placed = self.lets[self.placed :], len(self.lets)
        return found

    def know(self, outside: list[ir.Let]) -> None:
        """Add the lets that a sweep has placed before its loops."""
        self.lets += outside
        self.placed = len(self.lets)

    def row(self, steps: Sequence[Step], seen: Seen, origin: str = "") -> list[ir.Stmt]:
        """The statements of consecutive steps, after the coordinates that they need."""
        seen |= self.at_once([s for s in steps if s not in seen])
        made = [*self.new(), *self.steps(steps, seen, origin)]
        self.placed = len(self.lets)
        return made

    def named(self, view: ir.View) -> ir.View:
        """The view with names as coordinates; new names are added to ``lets``."""
        view = ir.substitute(view, self.names)
        for name, dim in zip(view.tensor.dims, view.dims, strict=True):
            if isinstance(dim.coord, (ir.Var, ir.Const)) or name in self.taken:
                continue
            name = self.free(name, dim.coord)
            let = ir.Let(ir.Var(name), dim.coord)
            if let not in self.lets:
                self.lets.append(let)
            view = ir.substitute(view, {dim.coord: ir.Var(name)})
        return view

    def at_once(self, steps: Sequence[Step]) -> Seen:
        """The views of steps, with names as coordinates. Views whose coordinates mention values are left
        out: their names must come after the values."""
        return {
            s: self.named(s.view)
            for s in steps
            if isinstance(s, (Read, Write)) and not self.compute.names.told(s.view)
        }

    def free(self, name: str, coord: ir.Expr) -> str:
        """A name for a coordinate that no other coordinate has: the dimension's, or that with a number. It
        is never a name of lanes."""
        name = f"{name}_coord" if _is_lanes(name) else name
        tried, number = name, 1
        while tried in self.taken or self.given.get(tried, coord) is not coord:
            tried, number = f"{name}_{number}", number + 1
        self.given[tried] = coord
        return tried

    def steps(self, steps: Sequence[Step], seen: Seen, origin: str = "") -> list[ir.Stmt]:
        """The statements of some steps. ``origin``: that of lets that are no operands."""
        made: list[ir.Stmt] = []
        for step in steps:
            if isinstance(step, (Read, Write)) and step not in seen:
                known = len(self.lets)
                seen = seen | {step: self.named(step.view)}
                made += [replace(x, origin=origin) for x in self.lets[known:]]
            if isinstance(step, Read):
                view = seen[step]
                fill = ir.held_constant(step.fill, view.tensor.dtype)
                load = ir.Load(view.tensor, view.offset(), view.mask(), fill)
                made.append(ir.Let(step.var, load, self.origins.get(step.name, origin)))
            elif isinstance(step, Value):
                made.append(ir.Let(step.var, step.value, origin))
            elif isinstance(step, Write):
                view = seen[step]
                mask = view.mask()
                if step.op == "add":
                    made.append(ir.FuncCall(ir.ATOMIC_ADD, (view.tensor, view.offset(), step.value, mask)))
                elif step.op:
                    value = statistics.value_of(step)
                    made.append(
                        ir.FuncCall(
                            ir.partial(step.op),
                            (view.tensor, view.offset(), value, mask, ir.Const(1.0, value.dtype)),
                        )
                    )
                else:
                    made.append(ir.store(view.tensor, view.offset(), step.value, mask))
        return made


@dataclass(frozen=True, slots=True)
class SweepLoops:
    """A sweep of a naive kernel: the statements before it, its loops, and their innermost body."""

    before: tuple[ir.Stmt, ...]
    loops: tuple[ir.For, ...]
    body: ir.Stmt


@dataclass(frozen=True, slots=True)
class Nest:
    """The parts of a naive kernel: parallel loops, sweeps over the reduced axes, statements after them."""

    around: tuple[ir.For, ...]
    sweeps: tuple[SweepLoops, ...]
    after: tuple[ir.Stmt, ...]

    @property
    def lets(self) -> dict[ir.Var, ir.Expr]:
        """The values of the nest's lets."""
        inner = [s for x in self.sweeps for s in (*x.before, *ir.statements(x.body))]
        return {s.var: s.value for s in (*inner, *self.after) if isinstance(s, ir.Let)}


def parts(kernel: ir.Kernel) -> Nest:
    """Take a naive kernel apart."""
    around, at = [], kernel.body
    while isinstance(at, ir.For) and at.kind == "parallel":
        around.append(at)
        at = at.body
    sweeps: list[SweepLoops] = []
    before: list[ir.Stmt] = []
    for s in ir.statements(at):
        if not isinstance(s, (ir.For, ir.Update)):
            before.append(s)
            continue
        loops = []
        while isinstance(s, ir.For):
            loops.append(s)
            s = s.body
        sweeps.append(SweepLoops(tuple(before), tuple(loops), s))
        before = []
    return Nest(tuple(around), tuple(sweeps), tuple(before))


def nearest_quotients(compute: Compute) -> Compute:
    """The computation with calls of ``divided`` on the way to such numbers: in what is cast and stored,
    and in the values that it names."""
    marking = _Marking()
    steps = [marking.step(s) for s in reversed(compute.steps)]
    return replace(compute, steps=tuple(reversed(steps))) if marking.names else compute


def _is_coarse(dtype: ir.DType) -> bool:
    return dtype.kind == "int" or dtype.is_short


class _Marking(ir.ExprMutator):
    """The finder of quotients to round. ``names``: of values that become numbers of few bits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[ir.Var] = set()

    def step(self, at: Step) -> Step:
        if isinstance(at, Read):
            return at
        whole = (
            _is_coarse(at.view.tensor.dtype)
            if isinstance(at, Write)
            else isinstance(at, (Value, Reduction)) and at.var in self.names
        )
        value = self.made(at.value) if whole else self.mutate(at.value)
        return at if value is at.value else replace(at, value=value)

    def made(self, x: ir.Expr) -> ir.Expr:
        self.names |= ir.free_vars(x)
        return ir.divided(x)

    def mutate_Cast(self, at: ir.Cast) -> ir.Expr:
        coarse = at.x.dtype.kind == "float" and _is_coarse(at.dtype)
        x = self.made(at.x) if coarse else self.mutate(at.x)
        return at if x is at.x else ir.Cast(x, at.dtype)
