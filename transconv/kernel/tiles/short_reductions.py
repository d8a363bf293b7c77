"""Reductions over few elements, written out: in a thread's registers, without exchange between threads.

    x = load(X, row*3 + col)                   x_0 = load(X, row*3);  x_1 = load(X, row*3 + 1);  ..
    d = x[row] - y[page]             ->        d_0 = x_0[row] - y_0[page];  ..
    s = sum(d * d, over=col)                   s = d_0*d_0 + d_1*d_1 + ..

Elements are added in their order, as a loop adds them, with one rounding for a product and its sum
(``fma(d_2, d_2, fma(d_1, d_1, d_0*d_0))``). Only what nothing else reads is divided, so that nothing is
computed twice; loads may be repeated where they are small beside what is computed of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transconv import ir
from transconv.simplify import simplify

MOST = 16  # elements of a reduction of a tile of three dimensions or more
MOST_OF_ROWS = 4  # of others, whose loads have the reduced dimension innermost and would be strided


def written_out(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel with its short reductions written out where that computes nothing twice."""
    return _Short(kernel).made()


class _Unknown(Exception):
    """An element of a value that cannot be computed alone."""


class _Short:
    """The pass that writes reductions out. ``values``: of names, as they are written so far; ``scope``:
    their lanes; ``parts``: the names of single elements; ``made_of``: their definitions, to be placed
    behind that of the whole; ``gone``: names that nothing reads any more."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self.kernel = kernel
        self.values: dict[ir.Var, ir.Expr] = {}
        self.scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.readers: dict[ir.Var, set[ir.Var | None]] = {}
        self.changing = ir.updated(kernel.body)
        self.taken = {v.name for v in _bound(kernel)} | {t.name for t in kernel.params}
        self.parts: dict[tuple[ir.Var, ir.Lane, int], ir.Var] = {}
        self.made_of: dict[ir.Var, list[ir.Let]] = {}
        self.gone: set[ir.Var] = set()
        for at in ir.walk(kernel.body):
            if isinstance(at, ir.Alloc):
                self.scope[at.var] = at.lanes
            elif isinstance(at, ir.Let):
                self.scope[at.var] = ir.lanes_of(at.value, self.scope)
                self.values[at.var] = at.value
            if isinstance(at, ir.Stmt):
                reader = at.var if isinstance(at, ir.Let) else None
                for e in (c for c in at.children() if isinstance(c, ir.Expr)):
                    for v in ir.free_vars(e):
                        self.readers.setdefault(v, set()).add(reader)

    def made(self) -> ir.Kernel:
        for var, value in list(self.values.items()):
            if isinstance(value, ir.Reduce) and (found := self.sum_of(var, value)) is not None:
                self.values[var] = found
        if not self.made_of:
            return self.kernel
        elements = (let.value for made in self.made_of.values() for let in made)
        whole = {v for value in elements for v in ir.free_vars(value)}
        for var in reversed(self.made_of):  # what is read comes before what reads it
            if var not in whole and all(
                r is not None and (r in self.gone or var not in ir.free_vars(self.values[r]))
                for r in self.readers[var]
            ):
                self.gone.add(var)
        return _Placed(self).rebuilt(self.kernel)

    def sum_of(self, var: ir.Var, value: ir.Reduce) -> ir.Expr | None:
        """The elements, combined in their order; None if the reduction stays."""
        lanes = ir.lanes_of(value.x, self.scope)
        lane, most = value.lane, MOST if len(lanes) > 2 else MOST_OF_ROWS
        if lane.extent > most or len(lanes) < 2 or not self._alone(var, value.x, lane, len(lanes)):
            return None
        neutral = ir.REDUCERS[value.op].identity(value.dtype)
        made: ir.Expr | None = None
        for k in range(lane.extent):
            e = simplify(_LaneElement(self, lane, k).mutate(value.x))
            if e != neutral:
                made = e if made is None else self.combined(value.op, made, e)
        made = neutral if made is None else made
        return (
            made if ir.lanes_of(made, self.scope) == self.scope[var] else ir.Spread(made, self.scope[var])
        )

    def combined(self, op: str, made: ir.Expr, e: ir.Expr) -> ir.Expr:
        """One more element, combined with those before; a product that is summed is not rounded, and the
        factors of one that is inactive are 0."""
        match e:
            case ir.Mul() if op == "sum" and e.dtype is ir.f32:
                return ir.Call("fma", (e.a, e.b, made))
            case ir.Select(cond, ir.Mul(a, b), _) if op == "sum" and e.dtype is ir.f32:
                return ir.Call("fma", (*(ir.Select(cond, x, ir.Const(0.0, ir.f32)) for x in (a, b)), made))
        return ir.REDUCERS[op].node(made, e)

    def _alone(self, var: ir.Var, value: ir.Expr, lane: ir.Lane, rank: int) -> bool:
        """Whether the elements can be computed one by one, and nothing else reads what they are of."""
        try:
            needed = {v for v, _ in self._needed(value, lane)}
        except _Unknown:
            return False
        whole = {var, *needed}
        return bool(needed) and all(
            self.readers[v] <= whole or (isinstance(self.values[v], ir.Load) and len(self.scope[v]) < rank)
            for v in needed
        )

    def _needed(self, e: ir.Expr, lane: ir.Lane) -> Iterator[tuple[ir.Var, ir.Lane]]:
        """The names whose elements along a lane are needed. Raises _Unknown."""
        if lane not in ir.lanes_of(e, self.scope):
            return
        if isinstance(e, ir.Var):
            if e not in self.values or e in self.changing or ir.free_vars(self.values[e]) & self.changing:
                raise _Unknown
            yield e, lane
            yield from self._needed(self.values[e], lane)
        elif isinstance(e, ir.Reduce):
            raise _Unknown
        else:
            inner = e.old[e.new.index(lane)] if isinstance(e, ir.Renamed) and lane in e.new else lane
            for c in e.children():
                if isinstance(c, ir.Expr) and not isinstance(c, ir.Lane):
                    yield from self._needed(c, inner)

    def part(self, var: ir.Var, lane: ir.Lane, k: int) -> ir.Expr:
        """The name of an element of a value along a lane."""
        found = self.parts.get((var, lane, k))
        if found is None:
            value = simplify(_LaneElement(self, lane, k).mutate(self.values[var]))
            if isinstance(value, ir.Const):
                return value
            name, number = f"{var.name}_{k}", 2
            while name in self.taken:
                name, number = f"{var.name}_{k}_{number}", number + 1
            self.taken.add(name)
            found = self.parts[var, lane, k] = ir.Var(name, value.dtype)
            self.scope[found] = ir.lanes_of(value, self.scope)
            self.made_of.setdefault(var, []).append(ir.Let(found, value))
        return found


class _LaneElement(ir.ExprMutator):
    """An expression at one place of a lane."""

    def __init__(self, short: _Short, lane: ir.Lane, k: int) -> None:
        super().__init__()
        self.short, self.lane, self.k = short, lane, k
        self.done[lane] = ir.Const(k)

    def mutate_Var(self, at: ir.Var) -> ir.Expr:
        lanes = self.short.scope.get(at, ())
        return self.short.part(at, self.lane, self.k) if self.lane in lanes else at

    def mutate_Select(self, at: ir.Select) -> ir.Expr:
        """Of an element that is inactive nothing is computed."""
        cond = simplify(self.mutate(at.cond))
        if isinstance(cond, ir.Const):
            chosen: ir.Expr = self.mutate(at.yes if cond.value else at.no)
            return chosen
        return ir.Select(cond, self.mutate(at.yes), self.mutate(at.no))

    def mutate_Renamed(self, at: ir.Renamed) -> ir.Expr:
        lane = at.old[at.new.index(self.lane)] if self.lane in at.new else self.lane
        if lane is self.lane and lane in at.old:  # this lane of the result is not that of what is inside
            return at
        x = (
            at.x
            if lane not in ir.lanes_of(at.x, self.short.scope)
            else (_LaneElement(self.short, lane, self.k).mutate(at.x))
        )
        there = ir.lanes_of(x, self.short.scope)
        kept = [(o, n) for o, n in zip(at.old, at.new, strict=True) if o in there]
        return ir.Renamed(x, *map(tuple, zip(*kept, strict=True))) if kept else x

    def mutate_Spread(self, at: ir.Spread) -> ir.Expr:
        lanes = tuple(lane for lane in at.lanes if lane != self.lane)
        x = self.mutate(at.x)
        return ir.Spread(x, lanes) if lanes else x


class _Placed(ir.ExprMutator):
    """New values of names, and elements behind what they are of."""

    def __init__(self, short: _Short) -> None:
        super().__init__()
        self.short = short

    def mutate_Let(self, at: ir.Let) -> ir.Stmt:
        made = self.short.made_of.get(at.var, ())
        if at.var in self.short.gone:
            return ir.seq(*made)
        return ir.seq(replace(at, value=self.short.values[at.var]), *made)


def _bound(root: ir.Node) -> Iterator[ir.Var]:
    return (n for n in ir.walk(root) if isinstance(n, ir.Var))
