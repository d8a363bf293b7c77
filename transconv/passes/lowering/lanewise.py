"""The pass ``lanewise``: turns tile loops into vectors, and the product into one call.

    for m in 0..128 tile:                   acc: f32[m:128, n:64] = 0
        for n in 0..64 tile:                for step in ...:
            acc = 0                  ->         a = load(..m[0:128].., ..k[0:32]..)
            for step in ...:                    b = load(..k[0:32].., ..n[0:64]..)
                for k in 0..32 tile:            dot(acc, a, b)
                    acc = acc + a * b       store(.., acc)
            store(.., acc)

Operands that the matrix unit multiplies as tf32 are rounded before, unless they are rounded copies: the
unit would truncate them, with twice the error. (The copy engine rounds boxes, see lowering/blockwise.py.)

    a_near = tf32(a)
    dot(acc, a_near, b)

With ``late=1`` the accumulator has the lanes of K as well, and they are added once, after the loop.

    acc = 0                                 sums: f32[m:32, k:16] = 0
    for step in ...:                ->      for step in ...:
        for k in 0..16 tile:                    sums = sums + a * b
            acc = acc + a * b               acc = sum(sums, k)

With ``scaled=1`` factors in blocks (compute/analysis/block_factors.py) are not multiplied by their scales.
What neighbours along K share is loaded once, along a lane for each, and the product takes it as it is.

    k = step*128 + k[0:128]                 a = load(A, ..step*128 + k[0:128]..)
    a = load(A, ..k..)              ->      r = load(R, ..(step*128 + k_by32[0:4]*32) // 32..)
    r = load(R, ..k // 32..)                dot_scaled(acc, a, b, r, s)
    x = bf16(a*f8e8m0(r))

The pass ``upright``: in the epilogue of a product whose sides are exchanged (``swap=1``), the rows of
the result are the first dimension of the tile again.

    acc: f32[n:128, m:128] = 0                       acc: f32[n:128, m:128] = 0
    for step in ..: dot(acc, b, a)                   for step in ..: dot(acc, b, a)
    store(C, P*n + remainder(m, P), acc)     ->      let acc_turned = acc[n, m]
                                                     store(C, P*n + remainder(m, P), acc_turned)

Triton lays the lanes of a warp along the dimension in which it sees that neighbours follow one another in
memory. Where positions are remainders of sizes that are arguments, it sees none, and takes the first
dimension. Were that the features, each lane would store to a sector of its own, and each thread would hold
the places of all positions of the tile: with Triton 3.6 such kernels spilled thousands of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd, inf
from typing import Any, NamedTuple

from transconv import ir
from transconv.compute import BlockFactor, Compute, block_factors
from transconv.passes.lowering.tile_statistics import Reducing
from transconv.passes.scope import VariableNames
from transconv.schedule import Schedule

# The order of a tile's dimensions. The left operand of a product is [left, k], the right [k, right].
AXIS = {"B": 0, "M": 1, "K": 2, "N": 3}
SWAPPED = {"B": 0, "N": 1, "K": 2, "M": 3}


def lanewise(kernel: ir.Kernel, schedule: Schedule, compute: Compute, precision: str) -> ir.Kernel:
    """Turn tile loops into lanes. ``precision``: that of products of f32 on the matrix unit."""
    order = SWAPPED if schedule.swap else AXIS
    lanes = {
        n.var: ir.Lane(n.var.name, n.stop, order[n.side], n.side)
        for n in ir.walk(kernel)
        if isinstance(n, ir.For) and n.kind == "tile"
    }
    if not schedule.scaled:
        return _Vectorise(lanes, schedule, precision).rebuilt(kernel)
    factors = block_factors(compute)
    assert not isinstance(factors, str), factors
    assert compute.factors is not None
    named = dict(zip((f.var for f in compute.factors), factors, strict=True))
    return _InBlocks(lanes, schedule, named, VariableNames(kernel)).rebuilt(kernel)


class _Vectorise(ir.Mutator):
    def __init__(self, lanes: dict[ir.Var, ir.Lane], schedule: Schedule, precision: str) -> None:
        self.lanes, self.schedule, self.precision = lanes, schedule, precision
        self.around: list[ir.Lane] = []  # the lanes of the surrounding tile loops
        self.scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.near: dict[ir.Var, ir.Var] = {}  # operands that need rounding -> names of the rounded values
        self.late = tuple(x for x in lanes.values() if schedule.late and x.kind == "K")
        self.tiles = Reducing(bool(schedule.late))
        self.of_lanes: dict[ir.Var, ir.Var] = {}  # accumulator -> the one that has the lanes of K as well

    def mutate(self, at: ir.Node) -> Any:
        if isinstance(at, ir.Expr):
            return ir.substitute(at, self.lanes)
        return super().mutate(at)

    def mutate_For(self, loop: ir.For) -> ir.Stmt | None:
        if loop.kind == "dealt":
            self.tiles.dealt = loop.var
            return self.tiles.around(self.generic(loop))
        if loop.kind != "tile":
            if loop.stop == 1 and loop.until is None and loop.kind != "grid":
                self.tiles.told[loop.var] = ir.ZERO
            return self.generic(loop)
        self.around.append(self.lanes[loop.var])
        body: ir.Stmt | None = self.mutate(loop.body)
        self.around.pop()
        return body

    def mutate_Let(self, let: ir.Let) -> ir.Stmt | None:
        value = ir.substitute(let.value, self.lanes)
        self.scope[let.var] = ir.lanes_of(value, self.scope)
        self.tiles.told[let.var] = value
        taken = ir.multiplied_as(value.dtype, self.precision)
        if not isinstance(value, ir.BoxLoad) and taken is not value.dtype:
            self.near[let.var] = ir.Var(f"{let.var.name}_near", taken)
        return ir.Let(let.var, value, let.origin)

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
        made: ir.Stmt = self.generic(at)
        if not isinstance(made, ir.FuncCall) or not made.func.leaves:
            return made
        _, offset, _, mask, _ = made.args
        assert isinstance(offset, ir.Expr) and isinstance(mask, ir.Expr)
        told = {e: ir.lanes_of(e, self.scope) for e in (offset, *ir.conjuncts(mask))}
        return self.tiles.of(made, self.around, told)

    def mutate_Seq(self, at: ir.Seq) -> ir.Stmt:
        made: list[ir.Stmt | None] = []
        for s in at.stmts:
            made.append(self.mutate(s))
            made += [
                self.added(u)
                for x in at.stmts
                if isinstance(x, ir.Alloc) and self.late
                for u in ir.find(s, ir.Update)
                if u.var is x.var
            ]
        return ir.seq(*made)

    def mutate_Alloc(self, alloc: ir.Alloc) -> ir.Stmt:
        lanes = tuple(sorted([*self.around, *self.late], key=lambda x: (x.axis, x.name)))
        if self.late:
            own = alloc.var.name
            name = f"{own}_sums" if self.of_lanes or own == "sums" else "sums"
            self.of_lanes[alloc.var] = ir.Var(name, alloc.var.type)
            alloc = replace(alloc, var=self.of_lanes[alloc.var])
        self.scope[alloc.var] = lanes
        return ir.Alloc(alloc.var, lanes, alloc.init, alloc.scope)

    def mutate_Update(self, at: ir.Update) -> ir.Stmt:
        """``acc = acc + product``, summed over the lanes that acc lacks, becomes a dot or a Reduce."""
        value = ir.substitute(at.value, self.lanes)
        if self.late:
            sums = self.of_lanes[at.var]
            at, value = ir.Update(sums, value), ir.substitute(value, {at.var: sums})
        own = self.scope[at.var]
        here = {*self.around, *ir.lanes_of(value, self.scope)}
        summed = sorted((x for x in here if x not in own), key=lambda x: (x.axis, x.name))
        match value:
            case ir.Add(
                old,
                ir.Mul(
                    (ir.Cast(ir.Var() as a) | (ir.Var() as a)), (ir.Cast(ir.Var() as b) | (ir.Var() as b))
                ),
            ) if old is at.var and self.schedule.unit == "mma":
                # An expanded operand's address may lack a lane. A lane that only the result has is given
                # to the operand without a lane of its own.
                alone = [x for x in own if x not in self.scope[a] and x not in self.scope[b]]
                near = {v: self.near[v] for v in (a, b) if v in self.near}
                left, right = sorted(
                    (ir.Spread(near.get(v, v), self.side(v, own, alone)) for v in (a, b)),
                    key=lambda s: s.lanes[0].axis,
                )
                return ir.seq(
                    *(ir.Let(n, ir.Cast(v, n.type)) for v, n in near.items()),
                    ir.FuncCall(ir.dot(self.precision), (at.var, left, right)),
                )
            case ir.Add(old, term) | ir.Mul(old, term) | ir.Max(old, term) | ir.Min(old, term) if (
                old is at.var
            ):
                op = type(value)
                for lane in summed:
                    term = ir.Reduce(ir.reducer_of(op), term, lane)
                return ir.Update(at.var, op(old, term))
        raise AssertionError(f"not a sum: {at}")

    def side(self, v: ir.Var, own: tuple[ir.Lane, ...], alone: list[ir.Lane]) -> tuple[ir.Lane, ...]:
        """The lanes of an operand of a product: its own, and ``alone`` if it has none of the result's."""
        lanes = self.scope[v]
        more = () if any(x in own for x in lanes) else alone
        return tuple(sorted({*lanes, *more}, key=lambda x: (x.axis, x.name)))

    def added(self, update: ir.Update) -> ir.Stmt:
        """``let acc = sum(sums)`` over the lanes of K, or another reduction."""
        total: ir.Expr = self.of_lanes[update.var]
        for lane in self.late:
            total = ir.Reduce(ir.reducer_of(type(update.value)), total, lane)
        return ir.Let(update.var, total)


class _InBlocks(_Vectorise):
    """``_Vectorise`` for a product of factors in blocks, by the variables that hold them."""

    def __init__(
        self,
        lanes: dict[ir.Var, ir.Lane],
        schedule: Schedule,
        factors: dict[ir.Var, BlockFactor],
        names: VariableNames,
    ) -> None:
        super().__init__(lanes, schedule, "ieee")
        self.factors = factors
        self.summed = next(x for x in lanes.values() if x.kind == "K")
        self.shared = {v: n for f in factors.values() for v, n in f.neighbours.items() if n > 1}
        self.by = {
            n: replace(
                self.summed, name=names.fresh(f"{self.summed.name}_by{n}"), extent=self.summed.extent // n
            )
            for n in sorted({*self.shared.values()})
        }
        self.gone: set[ir.Var] = set()  # values of elements and scales, which nothing reads

    def mutate_Let(self, let: ir.Let) -> ir.Stmt | None:
        read = {*self.gone, *(v for f in self.factors.values() for v in f.neighbours)}
        if not read.isdisjoint(ir.free_vars(let.value)):
            self.gone.add(let.var)
            return None
        if let.var not in self.shared:
            return super().mutate_Let(let)
        value = ir.substitute(let.value, self.lanes)
        while named := [v for v in ir.free_vars(value) if self.summed in self.scope.get(v, ())]:
            value = ir.substitute(value, {v: self.tiles.told[v] for v in named})
        n = self.shared[let.var]
        value = ir.substitute(value, {self.summed: self.by[n] * n})
        self.scope[let.var] = ir.lanes_of(value, self.scope)
        return replace(let, value=value)

    def mutate_Update(self, at: ir.Update) -> ir.Stmt:
        """``acc = acc + x*w`` becomes a product of what is read."""
        own = self.scope[at.var]
        found = [f for v, f in self.factors.items() if v in ir.free_vars(at.value)]
        seen = [{*self.scope[f.element.var], *self.scope[f.scale.var]} for f in found]
        alone = [x for x in own if not any(x in lanes for lanes in seen)]
        sides = [[x for x in own if x in lanes] or alone for lanes in seen]
        order = sorted(range(len(found)), key=lambda i: sides[i][0].axis)
        first, second = (found[i] for i in order)
        read = [getattr(found[i], part).var for part in ("element", "scale") for i in order]
        operands = (
            ir.Spread(v, self.side(v, (), sides[i])) for v, i in zip(read, (*order, *order), strict=True)
        )
        return ir.FuncCall(ir.dot_scaled(first.held, second.held, first.scales), (at.var, *operands))


def upright(kernel: ir.Kernel, schedule: Schedule) -> ir.Kernel:
    """Turn epilogues, if the sides of their products are exchanged and Triton sees no neighbours
    where results are stored. Explicit kernels lay out their lanes themselves."""
    if not schedule.swap or schedule.via != "tl" or schedule.c == "box":
        return kernel
    names = VariableNames(kernel, taken={x.name for x in ir.find(kernel, ir.Lane)})
    return _Upright(names).rebuilt(kernel)


class _Upright(ir.Mutator):
    """The pass ``upright``. ``lanes`` and ``values``: of the variables that are bound so far."""

    def __init__(self, names: VariableNames) -> None:
        self.names = names  # of variables and lanes
        self.lanes: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.values: dict[ir.Var, ir.Expr] = {}

    def mutate_Alloc(self, at: ir.Alloc) -> ir.Stmt:
        self.lanes[at.var] = at.lanes
        return at

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        self.lanes[let.var], self.values[let.var] = ir.lanes_of(let.value, self.lanes), let.value
        return let

    def mutate_Seq(self, at: ir.Seq) -> ir.Stmt:
        sums = next((n for n in range(len(at.stmts), 0, -1) if _grows(at.stmts[n - 1])), 0)
        made = [self.mutate(s) for s in at.stmts[:sums]]
        behind = [self.mutate(s) for s in at.stmts[sums:]]
        found = next((x for x in map(self.crosswise, _left(behind)) if x), ()) if made else ()
        return ir.seq(*made, *(self.turned(behind, *found) if found else behind))

    def crosswise(self, left: tuple[ir.Expr, ir.Expr]) -> tuple[ir.Lane, ...]:
        """The lanes of a tile that is stored, by its offset and value, if its rows are the second
        dimension and Triton sees no neighbours in either."""
        offset, value = left
        lanes = ir.lanes_of(offset, self.lanes)
        if len(lanes) != 2 or lanes != ir.lanes_of(value, self.lanes) or min(x.extent for x in lanes) == 1:
            return ()
        steps = steps_of(offset, self.values)
        along = steps.get(lanes[1], inf) < steps.get(lanes[0], inf)
        return lanes if along and all(run_of(offset, x, self.values).next == 1 for x in lanes) else ()

    def turned(self, behind: Sequence[ir.Stmt], first: ir.Lane, second: ir.Lane) -> Sequence[ir.Stmt]:
        """The statements with two dimensions of their tiles exchanged. Sums that they read are turned
        before them."""
        other = {
            x: replace(x, axis=y.axis, name=self.names.fresh(f"{x.name}_turned"))
            for x, y in ((first, second), (second, first))
        }
        own = {v for s in behind for v in ir.bound_vars(s)}
        read = dict.fromkeys(v for s in behind for v in ir.find(s, ir.Var) if v not in own)
        values: dict[ir.Node, ir.Expr] = dict(other.items())
        made: list[ir.Stmt] = []
        for v in read:
            lanes = tuple(x for x in self.lanes.get(v, ()) if x in other)
            if lanes:
                values[v] = ir.Renamed(v, lanes, tuple(other[x] for x in lanes))
            if len(lanes) > 1:
                whole = ir.Var(self.names.fresh(f"{v.name}_turned"), v.type)
                made.append(ir.Let(whole, values[v]))
                values[v] = whole
        return [*made, *map(_Exchange(values, other).mutate, behind)]


class _Exchange(ir.ExprMutator):
    """Gives statements other lanes, and other values for the variables that they read."""

    def __init__(self, values: Mapping[ir.Node, ir.Expr], other: Mapping[ir.Lane, ir.Lane]) -> None:
        super().__init__()
        self.done.update(values)
        self.other = other

    def these(self, lanes: Sequence[ir.Lane]) -> tuple[ir.Lane, ...]:
        return tuple(sorted((self.other.get(x, x) for x in lanes), key=lambda x: (x.axis, x.name)))

    def mutate_Alloc(self, at: ir.Alloc) -> ir.Stmt:
        return replace(at, lanes=self.these(at.lanes), init=self.mutate(at.init))

    def mutate_Spread(self, at: ir.Spread) -> ir.Expr:
        return ir.Spread(self.mutate(at.x), self.these(at.lanes))

    def mutate_Reduce(self, at: ir.Reduce) -> ir.Expr:
        return ir.Reduce(at.op, self.mutate(at.x), self.other.get(at.lane, at.lane))


def _grows(s: ir.Stmt) -> bool:
    """Whether a sum grows in it."""
    return bool(ir.find(s, ir.Update)) or any(
        isinstance(a, ir.Var) for f in ir.find(s, ir.FuncCall) for a in f.args[:1]
    )


def _left(stmts: Sequence[ir.Stmt]) -> Iterator[tuple[ir.Expr, ir.Expr]]:
    """The offset and value of whatever leaves the program."""
    for s in stmts:
        yield from ((x.offset, x.value) for x in ir.find(s, ir.Store))
        for call in ir.find(s, ir.FuncCall):
            if call.func.leaves or call.func is ir.ATOMIC_ADD:
                _, offset, value, *_ = call.args
                assert isinstance(offset, ir.Expr) and isinstance(value, ir.Expr)
                yield offset, value


Values = Mapping[ir.Var, ir.Expr]
"""What the variables of a kernel stand for."""


class LaneRun(NamedTuple):
    """Runs of lanes: in how many a number is the ``same``, and in how many it counts up (``next``)."""

    same: int
    next: int


def run_of(e: ir.Expr, lane: ir.Lane, values: Values) -> LaneRun:
    """The runs of an expression along a lane."""

    def of(x: ir.Expr) -> LaneRun:
        return run_of(x, lane, values)

    match e:
        case ir.Lane():
            return LaneRun(1, lane.extent) if e is lane else LaneRun(lane.extent, 1)
        case ir.Var():
            return of(values[e]) if e in values else LaneRun(lane.extent, 1)
        case ir.Cast(x, _):
            return of(x)
        case ir.Add(a, b):
            (same_a, next_a), (same_b, next_b) = of(a), of(b)
            return LaneRun(gcd(same_a, same_b), max(gcd(next_a, same_b), gcd(same_a, next_b)))
        case ir.Sub(a, b):
            (same_a, next_a), (same_b, _) = of(a), of(b)
            return LaneRun(gcd(same_a, same_b), gcd(next_a, same_b))
        case ir.FloorDiv(a, ir.Const(c)):
            return LaneRun(max(of(a).same, gcd(of(a).next, int(c))), 1)
        case ir.Mod(a, ir.Const(c)):
            return LaneRun(of(a).same, gcd(of(a).next, int(c)))
    return LaneRun(gcd(lane.extent, *(of(x).same for x in e.children() if isinstance(x, ir.Expr))), 1)


def steps_of(e: ir.Expr, values: Values) -> dict[ir.Lane, int]:
    """By how much a number grows from one element to the next along each lane, as far as that is a number,
    within the runs of a remainder; the least where there are several."""
    match e:
        case ir.Lane():
            return {e: 1}
        case ir.Var():
            return steps_of(values[e], values) if e in values else {}
        case ir.Cast(x, _) | ir.Mod(x, _) | ir.Sub(x, _):
            return steps_of(x, values)
        case ir.Mul(x, ir.Const(c)) | ir.Mul(ir.Const(c), x):
            return {lane: n * abs(int(c)) for lane, n in steps_of(x, values).items()}
        case ir.Add(a, b):
            found = steps_of(a, values)
            for lane, n in steps_of(b, values).items():
                found[lane] = min(n, found.get(lane, n))
            return found
    return {}
