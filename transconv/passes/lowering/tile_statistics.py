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
neutral element. Squared deviations are those from the tile's mean, of the sum before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transconv.compute import Compute
from transconv.ir import (
    REDUCERS,
    TRUE,
    Alloc,
    Expr,
    FloorDiv,
    For,
    FuncCall,
    Kernel,
    Lane,
    Let,
    Mutator,
    Node,
    Reduce,
    Select,
    Stmt,
    Store,
    Tensor,
    Update,
    Var,
    View,
    all_of,
    conjuncts,
    find,
    free_vars,
    seq,
    substitute,
)
from transconv.schedule import PROGRAM, Schedule, carried, parts_of


def leave_partials(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """The naive kernel, whose points leave partial values in the workspaces, in terms of its axes."""
    if not compute.statistics:
        return kernel
    found = {w.view.tensor: parts_of(w, compute, schedule) for w in compute.statistics}
    made: Kernel = _Left(found).mutate(kernel)
    params = tuple(found[t][0].tensor if t in found else t for t in kernel.params)
    return replace(kernel, params=params, body=made.body)


class _Left(Mutator):
    def __init__(self, found: dict[Tensor, tuple[View, Expr]]) -> None:
        self.found = found

    def mutate_FuncCall(self, at: FuncCall) -> Stmt:
        if not at.func.leaves:
            return at
        tensor, _, value, mask, _ = at.args
        assert isinstance(tensor, Tensor)
        view, count = self.found[tensor]
        return FuncCall(at.func, (view.tensor, view.offset(), value, mask, count))


def deal_tiles(grid: For, schedule: Schedule, compute: Compute) -> For:
    """The grid as programs that compute several tiles each, where these carry statistics through them, or
    have loads of the next tiles in flight."""
    if not carried(compute, schedule) and not grid.stages:
        return grid
    return For(PROGRAM, grid.programs, replace(grid, kind="dealt", start=PROGRAM), "grid")


def place_partials(kernel: Kernel, positions: Mapping[Var, tuple[Expr, Expr]]) -> Kernel:
    """The kernel whose tiles have one place for their lanes. ``positions``: of each block, where it
    begins, and the position in it."""
    made: Kernel = _Begun({v: first for v, (first, _) in positions.items()}).mutate(kernel)
    return made


class _Begun(Mutator):
    def __init__(self, begins: dict[Node, Expr]) -> None:
        self.begins = begins

    def mutate_FuncCall(self, at: FuncCall) -> Stmt:
        if not at.func.leaves:
            return at
        tensor, offset, value, mask, count = at.args
        assert isinstance(offset, Expr) and isinstance(count, Expr)
        parts = {*find(offset, FloorDiv), *find(count, FloorDiv)}  # the number of a block
        numbers: dict[Node, Expr] = {e: substitute(e, self.begins) for e in parts}
        return FuncCall(at.func, (tensor, substitute(offset, numbers), value, mask,
                                  substitute(count, numbers)))


class Reducing:
    """Makes the reductions of tiles. ``sums``: of each value, its sum over a tile; ``told``: the values of
    lets, and of the counters of loops that run once; ``dealt``: the counter of the tiles of one program;
    ``before`` and ``behind``: the statements around that loop; ``late``: lanes are combined behind it."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.sums: dict[Expr, Var] = {}
        self.told: dict[Node, Expr] = {}
        self.dealt: Var | None = None
        self.before: list[Stmt] = []
        self.behind: list[Stmt] = []

    def around(self, loop: For) -> Stmt:
        """A loop over tiles with what is carried through it."""
        made = seq(*self.before, loop, *self.behind)
        self.dealt, self.before, self.behind = None, [], []
        return made

    def of(self, at: FuncCall, around: Sequence[Lane],
           lanes_of: Mapping[Expr, Sequence[Lane]]) -> Stmt:
        """The statements of a call. ``around``: the lanes of the tile; ``lanes_of``: those of its offset
        and of each part of its mask."""
        tensor, offset, value, mask, count = at.args
        assert isinstance(tensor, Tensor) and isinstance(offset, Expr) and isinstance(value, Expr)
        assert isinstance(mask, Expr) and isinstance(count, Expr)
        over = [x for x in around if x not in lanes_of[offset]]
        inner = [c for c in conjuncts(mask) if {*over} & {*lanes_of[c]}]
        outer = [c for c in conjuncts(mask) if c not in inner]
        op, lets = at.func.attr("op"), []
        name = f"{tensor.name}_tile"
        if op == "squares":
            mean, off = Var(f"{name}_mean", value.dtype), Var(f"{name}_off", value.dtype)
            lets += [Let(mean, self.sums[value] / count), Let(off, value - mean)]
            term: Expr = off * off
        else:
            term = value
        apart = self.masked("sum" if op == "squares" else op, term, all_of(inner))
        found = self.reduced("sum" if op == "squares" else op, apart, over)
        made = Var(name, found.dtype)
        if op == "sum":
            self.sums[value] = made
        if self.dealt is not None:
            place, there = self.whole(offset), self.whole(all_of(outer))
            if self.dealt not in free_vars(place):
                lanes = [x for x in around if self.late or x not in over]
                return self.carried(op, apart if self.late else found, Store(tensor, place, made, there),
                                    lanes, over if self.late else ())
        return seq(*lets, Let(made, found), Store(tensor, offset, made, all_of(outer)))

    def whole(self, e: Expr) -> Expr:
        """An expression in terms of lanes and of what is known outside of the loop over tiles."""
        while named := {v: self.told[v] for v in free_vars(e) if v in self.told}:
            e = substitute(e, named)
        return e

    def carried(self, op: str, value: Expr, store: Store, lanes: Sequence[Lane],
                over: Sequence[Lane]) -> Stmt:
        """A reduction that goes on from tile to tile, is reduced along the lanes ``over`` behind the last
        tile, and stored there."""
        reducer, acc = REDUCERS[op], Var(f"{store.tensor.name}_all", value.dtype)
        ordered = tuple(sorted(lanes, key=lambda x: (x.axis, x.name)))
        self.before.append(Alloc(acc, ordered, reducer.identity(value.dtype)))
        whole = Var(f"{acc.name}_lanes", value.dtype) if over else acc
        self.behind += [Let(whole, self.reduced(op, acc, over))] if over else []
        self.behind.append(replace(store, value=whole))
        return Update(acc, reducer.node(acc, value))

    def masked(self, op: str, value: Expr, mask: Expr) -> Expr:
        """A value, where a mask does not hold what changes no reduction."""
        return value if mask is TRUE else Select(mask, value, REDUCERS[op].identity(value.dtype))

    def reduced(self, op: str, value: Expr, over: Sequence[Lane]) -> Expr:
        """A value reduced along lanes."""
        for lane in over:
            value = Reduce(op, value, lane)
        return value
