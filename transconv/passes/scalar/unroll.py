"""The pass ``unroll``: unrolls a loop, so that its index arithmetic becomes constant.

    for step in 0..2 unroll:            kh_0 = 0;  a_0 = load(.., kh_0)
        kh = step               ->      acc = acc + a_0 * b_0
        a = load(.., kh)                kh_1 = 1;  a_1 = load(.., kh_1)
        acc = acc + a * b               acc = acc + a_1 * b_1

The least of places that are chosen is found from the last one on, by ``at = select(c, 1, at)`` in place of
``at = min(at, select(c, 1, 3))``: no condition is held meanwhile.

A loop around accumulators (``jam``) is written out statement by statement, so that its iterations share
the loop of the sum and all statements that do not depend on the iteration:

    for ow_in in 0..2 jam:              acc_0 = 0;  acc_1 = 0
        acc = 0                         for step in 0..9:
        for step in 0..9:       ->          a_0 = load(.., 0);  a_1 = load(.., 1);  b = load(..)
            a = load(.., ow_in)             acc_0 = acc_0 + a_0 * b
            b = load(..)                    acc_1 = acc_1 + a_1 * b
            acc = acc + a * b           store(.., 0, acc_0);  store(.., 1, acc_1)
        store(.., ow_in, acc)

Where tiles lie inside, the pass ``edges`` gives what was written out a text without the masks of edges.

    in_9 = w + 8 < W                           inside = in_0 & .. & in_9
    ...                                        if inside:
    a_9 = load(A, .., in_m & in_9)     ->          a_9_in = load(A, .., in_m)
    acc = acc + a_9 * b                            ...
                                                   acc = acc + a_9_in * b_in
                                               else:
                                                   (as before)

Where sizes are arguments, no mask is known to hold, and each costs an instruction a load. But one without
lanes holds for a whole tile or not at all, and few tiles lie at an edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from transconv import ir
from transconv.passes.scope import ScopedMutator, VariableNames
from transconv.schedule import LONGEST, Schedule
from transconv.simplify import simplify


def unroll(kernel: ir.Kernel) -> ir.Kernel:
    """Write out loops of kind ``unroll`` and ``jam``, and serial loops of one iteration. A loop of kind
    ``unroll`` becomes serial if its bounds are not numbers, or if it has more than ``LONGEST`` iterations,
    which would take long to compile."""
    return _Unroll().rebuilt(kernel)


def _iterations(loop: ir.For) -> range | None:
    """The iterations of a loop, or None if its bounds are not numbers."""
    if not isinstance(loop.start, ir.Const) or loop.until is not None:
        return None
    return range(int(loop.start.value), loop.stop)


class _Unroll(ir.Mutator):
    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        made: ir.Stmt = self.generic(loop)
        if not isinstance(made, ir.For) or made.kind not in ("serial", "unroll", "jam"):
            return made
        counted = _iterations(made)
        if counted and made.kind == "jam":
            return _Jam(made.var, counted).written(made.body)
        if counted and made.kind == "serial" and len(counted) == 1:
            return ir.substitute(made.body, {made.var: ir.Const(counted[0], made.var.type)})
        if made.kind == "serial":
            return made
        if counted is None or len(counted) > LONGEST:
            return replace(made, kind="serial")
        lets = [x.var for x in ir.find(made.body, ir.Let)]
        copies = []
        for i in counted:
            names: dict[ir.Var, ir.Expr] = {v: ir.Var(f"{v.name}_{i}", v.type) for v in lets}
            copies.append(ir.substitute(made.body, {made.var: ir.Const(i, made.var.type), **names}))
        return ir.seq(*_least_first(made, counted, copies))


def _least_first(loop: ir.For, counted: range, copies: list[ir.Stmt]) -> list[ir.Stmt]:
    """The iterations of a loop, from the last one if it finds the least of places that rise below the
    number which stands for none: a place that is chosen then replaces what was found."""
    *lets, last = ir.statements(loop.body)
    match last:
        case ir.Update(at, ir.Min(a, ir.Select(_, place, ir.Const(none)))) if a == at:
            for let in reversed(lets):
                place = ir.substitute(place, {let.var: let.value}) if isinstance(let, ir.Let) else at
        case _:
            return copies
    each = [simplify(ir.substitute(place, {loop.var: ir.Const(i, loop.var.type)})) for i in counted]
    numbers = [*(e.value for e in each if isinstance(e, ir.Const)), none]
    if len(numbers) <= len(each) or numbers != sorted({*numbers}):
        return copies
    first = [m for m in ir.find(ir.seq(*copies[:-1]), ir.Min) if m.a == at]
    found = {m: replace(m.b, no=at) for m in first if isinstance(m.b, ir.Select)}
    return [ir.substitute(c, found) for c in reversed(copies)]


class _Jam:
    """Writes out the iterations of one loop, statement by statement. ``names``: for each iteration, its
    own variables; variables that do not depend on the iteration are bound once."""

    def __init__(self, var: ir.Var, counted: range) -> None:
        self.names: list[dict[ir.Var, ir.Expr]] = [{var: ir.Const(i, var.type)} for i in counted]

    def written(self, body: ir.Stmt) -> ir.Stmt:
        return ir.seq(*(self.statement(s) for s in ir.statements(body)))

    def statement(self, s: ir.Stmt) -> ir.Stmt:
        if isinstance(s, ir.For):
            return replace(s, body=self.written(s.body))
        pure = isinstance(s, ir.Let) or (isinstance(s, ir.FuncCall) and s.func is ir.ASSUME)
        if pure and not any(ir.free_vars(e) & self.names[0].keys() for e in _values(s)):
            return s
        if isinstance(s, (ir.Let, ir.Alloc)):
            for i, names in enumerate(self.names):
                names[s.var] = ir.Var(f"{s.var.name}_{i}", s.var.type)
        return ir.seq(*(ir.substitute(s, names) for names in self.names))


def _values(s: ir.Stmt) -> list[ir.Expr]:
    if isinstance(s, ir.Let):
        return [s.value]
    return [e for e in s.children() if isinstance(e, ir.Expr)]


FEW = 4  # conditions: fewer are not worth a second text


def edges(kernel: ir.Kernel, schedule: Schedule) -> ir.Kernel:
    """Divide what is loaded and summed in two, if positions are written out and sizes are arguments."""
    if kernel.sizes is None or not schedule.regs:
        return kernel
    return _Edges(kernel).rebuilt(kernel)


class _Edges(ScopedMutator):
    def __init__(self, kernel: ir.Kernel) -> None:
        super().__init__(kernel.sizes)
        self.names = VariableNames(kernel)
        self.lanes: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.conditions: dict[ir.Var, ir.Expr] = {}
        self.found: dict[ir.Var, list[ir.Expr]] = {}  # what holds inside, by the name of all of it

    def mutate_Alloc(self, at: ir.Alloc) -> ir.Stmt:
        self.lanes[at.var] = at.lanes
        return at

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        self.lanes[let.var] = ir.lanes_of(let.value, self.lanes)
        if let.value.dtype.kind == "bool" and not ir.find(let.value, ir.MemoryRead):
            self.conditions[let.var] = let.value
        return let

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        """A condition that does not change in a loop is decided in front of it: the compiler would join
        the two texts again behind what they load, and keep all of that in registers."""
        made = super().mutate_For(loop)
        assert isinstance(made, ir.For)
        parts, at = _parts(made.body), self.branch(_parts(made.body))
        if at is None:
            return made
        inside, branch = parts[at - 1], parts[at]
        assert isinstance(inside, ir.Let) and isinstance(branch, ir.If) and branch.other is not None
        if ir.free_vars(inside.value) & {loop.var, *ir.bound_vars(loop.body)}:
            return made
        each = [
            replace(made, body=ir.seq(*parts[: at - 1], way, *parts[at + 1 :]))
            for way in (branch.then, branch.other)
        ]
        return ir.seq(inside, ir.If(branch.cond, *each))

    def mutate_Seq(self, at: ir.Seq) -> ir.Stmt:
        parts = _parts(super().mutate_Seq(at))
        if (n := self.branch(parts)) is not None:
            return self.stored(parts[:n], parts[n], parts[n + 1 :])
        first = next(
            (n for n, s in enumerate(parts) if isinstance(s, ir.Let) and ir.find(s, ir.Load)), None
        )
        last = next((n for n in reversed(range(len(parts))) if isinstance(parts[n], ir.Update)), None)
        if first is None or last is None:
            return ir.seq(*parts)
        before, body, behind = parts[:first], parts[first : last + 1], parts[last + 1 :]
        bound = {v for s in body for v in ir.bound_vars(s)}
        if not all(isinstance(s, (ir.Let, ir.Update)) for s in body) or any(
            _read(s) & bound for s in behind
        ):
            return ir.seq(*parts)
        found = list(dict.fromkeys(c for s in body for c in self.of_tile(s, bound)))
        if len(found) < FEW:
            return ir.seq(*parts)
        inside = ir.Let(
            ir.Var(self.names.fresh("inside"), found[0].dtype), ir.all_of(self.strongest(found))
        )
        self.found[inside.var] = found
        branch = ir.If(inside.var, self.without(body, found), ir.seq(*body))
        return self.stored([*before, inside], branch, behind)

    def branch(self, parts: Sequence[ir.Stmt]) -> int | None:
        """The place of a branch of this pass."""
        return next(
            (n for n, s in enumerate(parts) if isinstance(s, ir.If) and s.cond in self.found), None
        )

    def stored(self, before: Sequence[ir.Stmt], branch: ir.Stmt, behind: Sequence[ir.Stmt]) -> ir.Stmt:
        """The statements, with those behind a branch inside it if they are stores: these have the same
        masks."""
        assert isinstance(branch, ir.If) and isinstance(branch.cond, ir.Var) and branch.other is not None
        if not any(isinstance(s, ir.Store) for s in behind) or not all(
            isinstance(s, (ir.Let, ir.Store)) for s in behind
        ):
            return ir.seq(*before, branch, *behind)
        then = ir.seq(branch.then, self.without(behind, self.found[branch.cond]))
        return ir.seq(*before, ir.If(branch.cond, then, ir.seq(branch.other, *behind)))

    def of_tile(self, s: ir.Stmt, bound: set[ir.Var]) -> Iterator[ir.Expr]:
        """The comparisons in the masks of a statement that hold for all lanes or for none."""
        for mask in [x.mask for x in ir.find(s, ir.Load)] + [x.cond for x in ir.find(s, ir.Select)]:
            for part in self.expanded(mask):
                if (
                    isinstance(part, ir.Compare)
                    and not ir.lanes_of(part, self.lanes)
                    and not (ir.free_vars(part) & bound or ir.find(part, ir.MemoryRead))
                ):
                    yield part

    def expanded(self, mask: ir.Expr) -> Iterator[ir.Expr]:
        """The parts of a mask, without the names of conditions."""
        for part in ir.conjuncts(mask):
            known = self.conditions.get(part) if isinstance(part, ir.Var) else None
            yield from [part] if known is None else self.expanded(known)

    def strongest(self, found: Sequence[ir.Expr]) -> list[ir.Expr]:
        """The conditions that no other one implies."""
        kept: list[ir.Expr] = []
        for c in found:
            if not any(self.implies(other, c) for other in kept):
                kept = [*(other for other in kept if not self.implies(c, other)), c]
        return kept

    def without(self, body: Sequence[ir.Stmt], found: Sequence[ir.Expr]) -> ir.Stmt:
        """The statements where the conditions hold, with names of their own."""
        names = {
            v: ir.Var(self.names.fresh(f"{v.name}_in"), v.type) for s in body for v in ir.bound_vars(s)
        }
        gone = {*found}

        def left(mask: ir.Expr) -> ir.Expr:
            kept = [p for p in ir.conjuncts(mask) if not gone.issuperset(self.expanded(p))]
            return ir.all_of(kept)

        made: list[ir.Stmt] = []
        for s in body:
            s = replace(s, mask=left(s.mask)) if isinstance(s, ir.Store) else s
            changes: dict[ir.Node, ir.Expr] = {
                x: replace(x, mask=left(x.mask)) for x in ir.find(s, ir.Load)
            }
            for x in ir.find(s, ir.Select):
                cond = left(x.cond)
                changes[x] = replace(x, cond=cond) if list(ir.conjuncts(cond)) else x.yes
            new: ir.Stmt = ir.substitute(ir.substitute(s, changes), names)
            if isinstance(s, ir.Let) and isinstance(new, ir.Let):
                new = replace(new, var=names[s.var])
            made.append(new)
        return ir.seq(*made)


def _parts(s: ir.Stmt) -> tuple[ir.Stmt, ...]:
    return s.stmts if isinstance(s, ir.Seq) else (s,)


def _read(s: ir.Stmt) -> set[ir.Var]:
    """The variables that a statement reads, and those that statements inside it do."""
    return {v for inner in ir.statements(s) for v in ir.find(inner, ir.Var)}
