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
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transconv.ir import (
    ZERO,
    Add,
    Alloc,
    BoxLoad,
    Cast,
    Expr,
    For,
    FuncCall,
    Kernel,
    Lane,
    Let,
    Max,
    Min,
    Mul,
    Mutator,
    Node,
    Reduce,
    Seq,
    Spread,
    Stmt,
    Update,
    Var,
    conjuncts,
    dot,
    find,
    lanes_of,
    multiplied_as,
    reducer_of,
    seq,
    substitute,
    walk,
)
from transconv.passes.lowering.tile_statistics import Reducing
from transconv.schedule import Schedule

# The order of a tile's dimensions. The left operand of a product is [left, k], the right [k, right].
AXIS = {"B": 0, "M": 1, "K": 2, "N": 3}
SWAPPED = {"B": 0, "N": 1, "K": 2, "M": 3}


def lanewise(kernel: Kernel, schedule: Schedule, precision: str) -> Kernel:
    """Turn tile loops into lanes. ``precision``: that of products of f32 on the matrix unit."""
    order = SWAPPED if schedule.swap else AXIS
    lanes = {n.var: Lane(n.var.name, n.stop, order[n.side], n.side)
             for n in walk(kernel) if isinstance(n, For) and n.kind == "tile"}
    made = _Vectorise(lanes, schedule, precision).mutate(kernel)
    assert isinstance(made, Kernel)
    return made


class _Vectorise(Mutator):
    def __init__(self, lanes: dict[Var, Lane], schedule: Schedule, precision: str) -> None:
        self.lanes, self.schedule, self.precision = lanes, schedule, precision
        self.around: list[Lane] = []  # the lanes of the surrounding tile loops
        self.scope: dict[Var, tuple[Lane, ...]] = {}
        self.near: dict[Var, Var] = {}  # operands that need rounding -> names of the rounded values
        self.late = tuple(x for x in lanes.values() if schedule.late and x.kind == "K")
        self.tiles = Reducing(bool(schedule.late))
        self.of_lanes: dict[Var, Var] = {}  # accumulator -> the one that has the lanes of K as well

    def mutate(self, at: Node) -> Any:
        if isinstance(at, Expr):
            return substitute(at, self.lanes)
        return super().mutate(at)

    def mutate_For(self, loop: For) -> Stmt | None:
        if loop.kind == "dealt":
            self.tiles.dealt = loop.var
            return self.tiles.around(self.generic(loop))
        if loop.kind != "tile":
            if loop.stop == 1 and loop.until is None and loop.kind != "grid":
                self.tiles.told[loop.var] = ZERO
            return self.generic(loop)
        self.around.append(self.lanes[loop.var])
        body: Stmt | None = self.mutate(loop.body)
        self.around.pop()
        return body

    def mutate_Let(self, let: Let) -> Stmt:
        value = substitute(let.value, self.lanes)
        self.scope[let.var] = lanes_of(value, self.scope)
        self.tiles.told[let.var] = value
        taken = multiplied_as(value.dtype, self.precision)
        if not isinstance(value, BoxLoad) and taken is not value.dtype:
            self.near[let.var] = Var(f"{let.var.name}_near", taken)
        return Let(let.var, value, let.origin)

    def mutate_FuncCall(self, at: FuncCall) -> Stmt:
        made: Stmt = self.generic(at)
        if not isinstance(made, FuncCall) or not made.func.leaves:
            return made
        _, offset, _, mask, _ = made.args
        assert isinstance(offset, Expr) and isinstance(mask, Expr)
        told = {e: lanes_of(e, self.scope) for e in (offset, *conjuncts(mask))}
        return self.tiles.of(made, self.around, told)

    def mutate_Seq(self, at: Seq) -> Stmt:
        made: list[Stmt | None] = []
        for s in at.stmts:
            made.append(self.mutate(s))
            made += [self.added(u) for x in at.stmts if isinstance(x, Alloc) and self.late
                     for u in find(s, Update) if u.var is x.var]
        return seq(*made)

    def mutate_Alloc(self, alloc: Alloc) -> Stmt:
        lanes = tuple(sorted([*self.around, *self.late], key=lambda x: (x.axis, x.name)))
        if self.late:
            own = alloc.var.name
            name = f"{own}_sums" if self.of_lanes or own == "sums" else "sums"
            self.of_lanes[alloc.var] = Var(name, alloc.var.type)
            alloc = replace(alloc, var=self.of_lanes[alloc.var])
        self.scope[alloc.var] = lanes
        return Alloc(alloc.var, lanes, alloc.init, alloc.scope)

    def mutate_Update(self, at: Update) -> Stmt:
        """``acc = acc + product``, summed over the lanes that acc lacks, becomes a dot or a Reduce."""
        value = substitute(at.value, self.lanes)
        if self.late:
            sums = self.of_lanes[at.var]
            at, value = Update(sums, value), substitute(value, {at.var: sums})
        own = self.scope[at.var]
        here = {*self.around, *lanes_of(value, self.scope)}
        summed = sorted((x for x in here if x not in own), key=lambda x: (x.axis, x.name))
        match value:
            case Add(old, Mul((Cast(Var() as a) | (Var() as a)), (Cast(Var() as b) | (Var() as b)))) if (
                    old is at.var and self.schedule.unit == "mma"):
                # An expanded operand's address may lack a lane. A lane that only the result has is given
                # to the operand without a lane of its own.
                alone = [x for x in own if x not in self.scope[a] and x not in self.scope[b]]
                near = {v: self.near[v] for v in (a, b) if v in self.near}
                left, right = sorted((Spread(near.get(v, v), self.side(v, own, alone)) for v in (a, b)),
                                     key=lambda s: s.lanes[0].axis)
                return seq(*(Let(n, Cast(v, n.type)) for v, n in near.items()),
                           FuncCall(dot(self.precision), (at.var, left, right)))
            case Add(old, term) | Mul(old, term) | Max(old, term) | Min(old, term) if old is at.var:
                op = type(value)
                for lane in summed:
                    term = Reduce(reducer_of(op), term, lane)
                return Update(at.var, op(old, term))
        raise AssertionError(f"not a sum: {at}")

    def side(self, v: Var, own: tuple[Lane, ...], alone: list[Lane]) -> tuple[Lane, ...]:
        """The lanes of an operand of a product: its own, and ``alone`` if it has none of the result's."""
        lanes = self.scope[v]
        more = () if any(x in own for x in lanes) else alone
        return tuple(sorted({*lanes, *more}, key=lambda x: (x.axis, x.name)))

    def added(self, update: Update) -> Stmt:
        """``let acc = sum(sums)`` over the lanes of K, or another reduction."""
        total: Expr = self.of_lanes[update.var]
        for lane in self.late:
            total = Reduce(reducer_of(type(update.value)), total, lane)
        return Let(update.var, total)
