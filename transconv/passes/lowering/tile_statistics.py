"""Statistics of tiles: where ``gridwise`` leaves their partial values, and how ``lanewise`` computes them.

    partial[sum](M, offset, y, mask)    ->    partial[sum](M_parts, tile's offset, y, mask)
                                        ->    let M_parts_tile = sum(where(mask, y, 0), over=m)
                                              store(M_parts, tile's offset, M_parts_tile)

A program that computes several tiles carries the reduction if all of them have the same places:

    for pid in program..16384 dealt:       ->    M_parts_all = 0
        partial[sum](M_parts, k, y, mask)        for pid in program..16384 dealt:
                                                     M_parts_all = M_parts_all + sum(y, over=m)
                                                 store(M_parts, k, M_parts_all)

Positions beyond the end of an axis count nothing: the mask of the lanes that are reduced chooses the
neutral element. Squared deviations are those from the tile's mean, of the sum before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transconv import ir
from transconv.compute import Compute
from transconv.schedule import PROGRAM, Schedule, carried, parts_of


def leave_partials(kernel: ir.Kernel, schedule: Schedule, compute: Compute) -> ir.Kernel:
    """The naive kernel, whose points leave partial values in the workspaces, in terms of its axes."""
    if not compute.statistics:
        return kernel
    found = {w.view.tensor: parts_of(w, compute, schedule) for w in compute.statistics}
    made: ir.Kernel = _Left(found).mutate(kernel)
    params = tuple(found[t][0].tensor if t in found else t for t in kernel.params)
    return replace(kernel, params=params, body=made.body)


class _Left(ir.Mutator):
    def __init__(self, found: dict[ir.Tensor, tuple[ir.View, ir.Expr]]) -> None:
        self.found = found

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
        if not at.func.leaves:
            return at
        tensor, _, value, mask, _ = at.args
        assert isinstance(tensor, ir.Tensor)
        view, count = self.found[tensor]
        return ir.FuncCall(at.func, (view.tensor, view.offset(), value, mask, count))


def deal_tiles(grid: ir.For, schedule: Schedule, compute: Compute) -> ir.For:
    """The grid as programs that compute several tiles each, where these carry statistics through them, or
    have loads of the next tiles in flight."""
    if not carried(compute, schedule) and not grid.stages:
        return grid
    return ir.For(PROGRAM, grid.programs, replace(grid, kind="dealt", start=PROGRAM), "grid")


def place_partials(kernel: ir.Kernel, positions: Mapping[ir.Var, tuple[ir.Expr, ir.Expr]]) -> ir.Kernel:
    """The kernel whose tiles have one place for their lanes. ``positions``: of each block, where it
    begins, and the position in it."""
    made: ir.Kernel = _Begun({v: first for v, (first, _) in positions.items()}).mutate(kernel)
    return made


class _Begun(ir.Mutator):
    def __init__(self, begins: dict[ir.Node, ir.Expr]) -> None:
        self.begins = begins

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
        if not at.func.leaves:
            return at
        tensor, offset, value, mask, count = at.args
        assert isinstance(offset, ir.Expr) and isinstance(count, ir.Expr)
        parts = {*ir.find(offset, ir.FloorDiv), *ir.find(count, ir.FloorDiv)}  # the number of a block
        numbers: dict[ir.Node, ir.Expr] = {e: ir.substitute(e, self.begins) for e in parts}
        return ir.FuncCall(
            at.func, (tensor, ir.substitute(offset, numbers), value, mask, ir.substitute(count, numbers))
        )


class Reducing:
    """The builder of the reductions of tiles. ``sums``: of each value, its sum over a tile; ``told``: the
    values of lets, and of the counters of loops that run once; ``dealt``: the counter of the tiles of one
    program; ``before`` and ``behind``: the statements around that loop; ``late``: lanes are combined
    behind it."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.sums: dict[ir.Expr, ir.Var] = {}
        self.told: dict[ir.Node, ir.Expr] = {}
        self.dealt: ir.Var | None = None
        self.before: list[ir.Stmt] = []
        self.behind: list[ir.Stmt] = []

    def around(self, loop: ir.For) -> ir.Stmt:
        """A loop over tiles with what is carried through it."""
        made = ir.seq(*self.before, loop, *self.behind)
        self.dealt, self.before, self.behind = None, [], []
        return made

    def of(
        self, at: ir.FuncCall, around: Sequence[ir.Lane], lanes_of: Mapping[ir.Expr, Sequence[ir.Lane]]
    ) -> ir.Stmt:
        """The statements of a call. ``around``: the lanes of the tile; ``lanes_of``: those of its offset
        and of each part of its mask."""
        tensor, offset, value, mask, count = at.args
        assert isinstance(tensor, ir.Tensor) and isinstance(offset, ir.Expr)
        assert isinstance(value, ir.Expr) and isinstance(mask, ir.Expr) and isinstance(count, ir.Expr)
        over = [x for x in around if x not in lanes_of[offset]]
        inner = [c for c in ir.conjuncts(mask) if {*over} & {*lanes_of[c]}]
        outer = [c for c in ir.conjuncts(mask) if c not in inner]
        op, lets = at.func.attr("op"), []
        name = f"{tensor.name}_tile"
        if op == "squares":
            mean, off = ir.Var(f"{name}_mean", value.dtype), ir.Var(f"{name}_off", value.dtype)
            lets += [ir.Let(mean, self.sums[value] / count), ir.Let(off, value - mean)]
            term: ir.Expr = off * off
        else:
            term = value
        apart = self.masked("sum" if op == "squares" else op, term, ir.all_of(inner))
        found = self.reduced("sum" if op == "squares" else op, apart, over)
        made = ir.Var(name, found.dtype)
        if op == "sum":
            self.sums[value] = made
        if self.dealt is not None:
            place, there = self.whole(offset), self.whole(ir.all_of(outer))
            if self.dealt not in ir.free_vars(place):
                lanes = [x for x in around if self.late or x not in over]
                return self.carried(
                    op,
                    apart if self.late else found,
                    ir.Store(tensor, place, made, there),
                    lanes,
                    over if self.late else (),
                )
        return ir.seq(*lets, ir.Let(made, found), ir.Store(tensor, offset, made, ir.all_of(outer)))

    def whole(self, e: ir.Expr) -> ir.Expr:
        """An expression in terms of lanes and of what is known outside of the loop over tiles."""
        while named := {v: self.told[v] for v in ir.free_vars(e) if v in self.told}:
            e = ir.substitute(e, named)
        return e

    def carried(
        self, op: str, value: ir.Expr, store: ir.Store, lanes: Sequence[ir.Lane], over: Sequence[ir.Lane]
    ) -> ir.Stmt:
        """A reduction that goes on from tile to tile, is reduced along the lanes ``over`` behind the last
        tile, and stored there."""
        reducer, acc = ir.REDUCERS[op], ir.Var(f"{store.tensor.name}_all", value.dtype)
        ordered = tuple(sorted(lanes, key=lambda x: (x.axis, x.name)))
        self.before.append(ir.Alloc(acc, ordered, reducer.identity(value.dtype)))
        whole = ir.Var(f"{acc.name}_lanes", value.dtype) if over else acc
        self.behind += [ir.Let(whole, self.reduced(op, acc, over))] if over else []
        self.behind.append(replace(store, value=whole))
        return ir.Update(acc, reducer.node(acc, value))

    def masked(self, op: str, value: ir.Expr, mask: ir.Expr) -> ir.Expr:
        """A value, where a mask does not hold what changes no reduction."""
        neutral = ir.REDUCERS[op].identity(value.dtype)
        return value if mask is ir.TRUE else ir.Select(mask, value, neutral)

    def reduced(self, op: str, value: ir.Expr, over: Sequence[ir.Lane]) -> ir.Expr:
        """A value reduced along lanes."""
        for lane in over:
            value = ir.Reduce(op, value, lane)
        return value
