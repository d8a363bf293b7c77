"""The pass ``blockwise``: decides how operands are loaded and stored, and which program sums what.

    a = load(A, n*.. + h*.., mask=...)  ->  a = box_load(A, at=[n_blk*2, h_blk*8 + kh - 1, ..])

The copy engine moves an operand whose word in the schedule is ``box`` in rectangular pieces
(``schedule/tiles/boxes.py`` says when that is legal); other operands keep an address and a mask per
element.

With ``split_k`` several programs share a sum (lowering/split_k.py).

Also here: the pass ``widen``: loads an operand along all lanes of its product if it lacks some.

    b = load(B + (grp + k*96))        ->      b = load(B + spread(grp + k*96, [grp m k]))

Triton chooses a register layout for each load. A narrow load (32 x 4 elements by 128 threads) gives each
thread one element, and converting that to the layout of the product takes shared memory and two barriers.
Along all lanes every thread loads what it multiplies, 16 bytes at a time. Threads that load the same
elements hit the cache.
"""

from __future__ import annotations

from dataclasses import replace

from transconv.compute import Compute
from transconv.ir import (
    ZERO,
    Add,
    Alloc,
    BoxLoad,
    BoxStore,
    Const,
    Expr,
    Kernel,
    Lane,
    Let,
    Load,
    Mul,
    Mutator,
    Spread,
    Stmt,
    Store,
    Sub,
    Tensor,
    Var,
    View,
    find,
    lanes_of,
    multiplied_as,
    substitute,
)
from transconv.passes.lowering import tile_statistics
from transconv.passes.lowering.split_k import split_sums
from transconv.schedule import Box, Schedule, box_of, boxes_behind, pile, result_boxes


def blockwise(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Move operands in boxes, split the sum, and leave statistics in parts, as the schedule says."""
    shared = split_sums(kernel, schedule, compute)
    if compute.statistics:
        shared = tile_statistics.place_partials(shared, _positions(kernel))
    return boxes(shared, schedule, compute)


def boxes(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Let the copy engine fetch and store what the schedule says is a ``box``."""
    found: dict[Tensor, Box] = {}
    for word, view in ((schedule.a, compute.a), (schedule.b, compute.b)):
        if word == "box" and view is not None:
            box = box_of(view, schedule, compute)
            assert isinstance(box, Box), box
            found[view.tensor] = _rounded(box, compute)
    for more in (result_boxes(schedule, compute), boxes_behind(schedule, compute)):
        found |= {view.tensor: box for view, box in more.items()}
    if not found:
        return kernel
    positions = _positions(kernel)
    for view in (compute.a, compute.b):
        positions |= _piled(view, schedule, compute, positions) if view is not None else {}
    made: Kernel = _Boxes(found, positions).mutate(kernel)
    params = tuple(found[t].tensor if t in found else t for t in kernel.params)
    return replace(kernel, params=params, body=made.body)


def _rounded(box: Box, compute: Compute) -> Box:
    """The box of an operand. If it is multiplied as tf32, the copy engine rounds it, at no cost; the
    matrix unit would truncate it, with twice the error."""
    taken = multiplied_as(box.tensor.dtype, compute.math)
    return replace(box, tensor=replace(box.tensor, near=taken)) if taken.within else box


def _positions(kernel: Kernel) -> dict[Var, tuple[Expr, Expr]]:
    """For each tiled axis (block begin, position in the block): ``oh = oh_blk*8 + oh_in``."""
    found: dict[Var, tuple[Expr, Expr]] = {}
    for let in find(kernel, Let):
        match let.value:
            case Add(Mul(_, Const()) as first, within):
                found[let.var] = (first, within)
    return found


def _piled(view: View, schedule: Schedule, compute: Compute,
           positions: dict[Var, tuple[Expr, Expr]]) -> dict[Var, tuple[Expr, Expr]]:
    """The same for axes whose block is several boxes (a pile): the begin of the lane's box, and the
    position in that box."""
    found = {}
    for block in schedule.blocks:
        if wide := pile(block, view, schedule, compute):
            first, within = positions[Var("_".join(block.axes))]
            begin = (first + within // wide * wide) % compute.size(block.last)
            found[Var(block.last)] = (begin, within % wide)
    return found


class _Boxes(Mutator):
    def __init__(self, found: dict[Tensor, Box], positions: dict[Var, tuple[Expr, Expr]]) -> None:
        self.found, self.positions = found, positions

    def place(self, box: Box) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        """The corner, and the position of each lane relative to it, per dimension."""
        corner, within = [], []
        for coord, axis in zip(box.coords, box.moving, strict=True):
            first, inside = self.positions[axis] if axis is not None else (ZERO, ZERO)
            corner.append(substitute(coord, {axis: first}) if axis is not None else coord)
            within.append(inside)
        return tuple(corner), tuple(within)

    def mutate_Let(self, let: Let) -> Stmt:
        box = self.found.get(let.value.tensor) if isinstance(let.value, Load) else None
        if box is None:
            return let
        return Let(let.var, BoxLoad(box.tensor, *self.place(box), box.extents), let.origin)

    def mutate_Store(self, at: Store) -> Stmt:
        box = self.found.get(at.tensor)
        if box is None:
            return at
        return BoxStore(box.tensor, *self.place(box), box.extents, at.value)


def widen(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Spread the addresses of operands, if the schedule keeps sums or operands in registers (words
    ``late`` and ``regs``)."""
    if not (schedule.late or schedule.regs):
        return kernel
    summed = {r for r in compute.operands
              if compute.factors or compute.names.rooted[r.var] & {*compute.reduced}}
    return _Widen({r.view.tensor for r in summed}).rebuilt(kernel)


class _Widen(Mutator):
    def __init__(self, operands: set[Tensor]) -> None:
        self.operands = operands
        self.scope: dict[Var, tuple[Lane, ...]] = {}
        self.values: dict[Var, Expr] = {}
        self.lanes: tuple[Lane, ...] = ()

    def mutate_Alloc(self, at: Alloc) -> Stmt:
        self.scope[at.var] = at.lanes
        self.lanes = at.lanes if len(at.lanes) > len(self.lanes) else self.lanes
        return at

    def mutate_Let(self, let: Let) -> Stmt:
        load = let.value
        if isinstance(load, Load) and load.tensor in self.operands:
            own = lanes_of(load, self.scope)
            if own != self.lanes and set(own) <= set(self.lanes) and self.neighbours(load.offset):
                let = Let(let.var, replace(load, offset=self.spread(load.offset)), let.origin)
        else:
            self.values[let.var] = let.value
        self.scope[let.var] = lanes_of(let.value, self.scope)
        return let

    def spread(self, offset: Expr) -> Expr:
        """The offset along all lanes; its constant stays behind it (see scalar/hoist.py)."""
        match offset:
            case Add(rest, Const() as constant):
                return Spread(rest, self.lanes) + constant
        return Spread(offset, self.lanes)

    def neighbours(self, offset: Expr) -> bool:
        """Whether the offset steps by 1 along a lane."""
        match offset:
            case Add(a, b):
                return self.neighbours(a) or self.neighbours(b)
            case Sub(a, _):
                return self.neighbours(a)
            case Var() if offset in self.values:
                return self.neighbours(self.values[offset])
        return isinstance(offset, Lane)
