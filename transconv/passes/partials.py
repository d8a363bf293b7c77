"""Statistics of a product's tiles: where ``blockwise`` leaves their partial values, and how ``lanewise``
computes them.

    partial[sum](M, offset, y, mask)    ->    partial[sum](M_parts, tile's offset, y, mask)
                                        ->    let M_parts_tile = sum(where(mask, y, 0), over=m)
                                              store(M_parts, tile's offset, M_parts_tile)

Positions beyond the end of an axis count nothing: the mask of the lanes that are reduced chooses the
neutral element. Squared deviations are those from the tile's mean, of the sum before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transconv.compute import Compute, Write
from transconv.ir import (
    REDUCERS,
    TRUE,
    Const,
    Expr,
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
    Var,
    all_of,
    conjuncts,
    seq,
    substitute,
)
from transconv.schedule import Schedule, parts_of


def left(kernel: Kernel, schedule: Schedule, compute: Compute,
         positions: Mapping[Var, tuple[Expr, Expr]]) -> Kernel:
    """The kernel whose tiles leave partial values in the workspaces. ``positions``: of each block, where
    it begins, and the position in it."""
    if not compute.statistics:
        return kernel
    begins: dict[Node, Expr] = {v: first for v, (first, _) in positions.items()}
    found = {w.view.tensor: w for w in compute.statistics}
    made: Kernel = _Left(found, schedule, compute, begins).mutate(kernel)
    spaces = {w.view.tensor: parts_of(w, compute, schedule)[0].tensor for w in compute.statistics}
    return replace(kernel, params=tuple(spaces.get(t, t) for t in kernel.params), body=made.body)


class _Left(Mutator):
    def __init__(self, found: dict[Tensor, Write], schedule: Schedule, compute: Compute,
                 begins: dict[Node, Expr]) -> None:
        self.found, self.schedule, self.compute, self.begins = found, schedule, compute, begins

    def mutate_FuncCall(self, at: FuncCall) -> Stmt:
        if not at.func.leaves:
            return at
        tensor, _, value, mask, _ = at.args
        assert isinstance(tensor, Tensor)
        view, count = parts_of(self.found[tensor], self.compute, self.schedule)
        in_tile = {d.coord: substitute(d.coord, self.begins) for d in view.dims if d.coord.children()}
        view = substitute(view, in_tile)
        return FuncCall(at.func, (view.tensor, view.offset(), value, mask,
                                  substitute(count, self.begins)))


class Reducing:
    """Makes the reductions of tiles. ``sums``: of each value, its sum over a tile."""

    def __init__(self) -> None:
        self.sums: dict[Expr, Var] = {}

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
        found = self.reduced("sum" if op == "squares" else op, term, over, all_of(inner))
        made = Var(name, found.dtype)
        if op == "sum":
            self.sums[value] = made
        return seq(*lets, Let(made, found), Store(tensor, offset, made, all_of(outer)))

    def reduced(self, op: str, value: Expr, over: Sequence[Lane], mask: Expr) -> Expr:
        """A value reduced along lanes, where a mask holds."""
        if mask is not TRUE:
            nothing: Const = REDUCERS[op].identity(value.dtype)
            value = Select(mask, value, nothing)
        for lane in over:
            value = Reduce(op, value, lane)
        return value
