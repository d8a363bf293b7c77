"""The pass ``blockwise``: decides how operands are loaded and stored, and which program sums what.

    a = load(A, n*.. + h*.., mask=...)  ->  a = box_load(A, at=[n_blk*2, h_blk*8 + kh - 1, ..])

The copy engine moves an operand whose word in the schedule is ``box`` in rectangular pieces
(``schedule/tiles/boxes.py`` says when that is legal); other operands keep an address and a mask per
element.

The pass ``widen``: loads an operand along all lanes of its product if it lacks some.

    b = load(B + (grp + k*96))        ->      b = load(B + spread(grp + k*96, [grp m k]))

Triton chooses a register layout for each load. A narrow load (32 x 4 elements by 128 threads) gives each
thread one element, and converting that to the layout of the product takes shared memory and two barriers.
Along all lanes every thread loads what it multiplies, 16 bytes at a time. Threads that load the same
elements hit the cache."""

from __future__ import annotations

from dataclasses import replace

from transconv import ir
from transconv.compute import Compute
from transconv.passes.lowering import tile_statistics
from transconv.passes.lowering.split_k import split_sums
from transconv.schedule import Box, Schedule, box_of, boxes_behind, pile, result_boxes


def blockwise(kernel: ir.Kernel, schedule: Schedule, compute: Compute) -> ir.Kernel:
    """Move operands in boxes, split the sum, and leave statistics in parts, as the schedule says."""
    shared = split_sums(kernel, schedule, compute)
    if compute.statistics:
        shared = tile_statistics.place_partials(shared, _positions(kernel))
    return boxes(shared, schedule, compute)


def boxes(kernel: ir.Kernel, schedule: Schedule, compute: Compute) -> ir.Kernel:
    """Let the copy engine fetch and store what the schedule says is a ``box``."""
    found: dict[ir.Tensor, Box] = {}
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
    made: ir.Kernel = _Boxes(found, positions).mutate(kernel)
    params = tuple(found[t].tensor if t in found else t for t in kernel.params)
    return replace(kernel, params=params, body=made.body)


def _rounded(box: Box, compute: Compute) -> Box:
    """The box of an operand. If it is multiplied as tf32, the copy engine rounds it, at no cost; the
    matrix unit would truncate it, with twice the error."""
    taken = ir.multiplied_as(box.tensor.dtype, compute.math)
    return replace(box, tensor=replace(box.tensor, near=taken)) if taken.within else box


def _positions(kernel: ir.Kernel) -> dict[ir.Var, tuple[ir.Expr, ir.Expr]]:
    """For each tiled axis (block begin, position in the block): ``oh = oh_blk*8 + oh_in``."""
    found: dict[ir.Var, tuple[ir.Expr, ir.Expr]] = {}
    for let in ir.find(kernel, ir.Let):
        match let.value:
            case ir.Add(ir.Mul(_, ir.Const()) as first, within):
                found[let.var] = (first, within)
    return found


def _piled(
    view: ir.View, schedule: Schedule, compute: Compute, positions: dict[ir.Var, tuple[ir.Expr, ir.Expr]]
) -> dict[ir.Var, tuple[ir.Expr, ir.Expr]]:
    """The same for axes whose block is several boxes (a pile): the begin of the lane's box, and the
    position in that box."""
    found = {}
    for block in schedule.blocks:
        if wide := pile(block, view, schedule, compute):
            first, within = positions[ir.Var("_".join(block.axes))]
            begin = (first + within // wide * wide) % compute.size(block.last)
            found[ir.Var(block.last)] = (begin, within % wide)
    return found


class _Boxes(ir.Mutator):
    def __init__(
        self, found: dict[ir.Tensor, Box], positions: dict[ir.Var, tuple[ir.Expr, ir.Expr]]
    ) -> None:
        self.found, self.positions = found, positions

    def place(self, box: Box) -> tuple[tuple[ir.Expr, ...], tuple[ir.Expr, ...]]:
        """The corner, and the position of each lane relative to it, per dimension."""
        corner, within = [], []
        for coord, axis in zip(box.coords, box.moving, strict=True):
            first, inside = self.positions[axis] if axis is not None else (ir.ZERO, ir.ZERO)
            corner.append(ir.substitute(coord, {axis: first}) if axis is not None else coord)
            within.append(inside)
        return tuple(corner), tuple(within)

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        box = self.found.get(let.value.tensor) if isinstance(let.value, ir.Load) else None
        if box is None:
            return let
        return ir.Let(let.var, ir.BoxLoad(box.tensor, *self.place(box), box.extents), let.origin)

    def mutate_Store(self, at: ir.Store) -> ir.Stmt:
        box = self.found.get(at.tensor)
        if box is None:
            return at
        return ir.BoxStore(box.tensor, *self.place(box), box.extents, at.value)


def widen(kernel: ir.Kernel, schedule: Schedule, compute: Compute) -> ir.Kernel:
    """Spread the addresses of operands, if the schedule keeps sums or operands in registers (words
    ``late`` and ``regs``)."""
    if not (schedule.late or schedule.regs):
        return kernel
    summed = {
        r for r in compute.operands if compute.factors or compute.names.rooted[r.var] & {*compute.reduced}
    }
    return _Widen({r.view.tensor for r in summed}).rebuilt(kernel)


class _Widen(ir.Mutator):
    def __init__(self, operands: set[ir.Tensor]) -> None:
        self.operands = operands
        self.scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}
        self.values: dict[ir.Var, ir.Expr] = {}
        self.lanes: tuple[ir.Lane, ...] = ()

    def mutate_Alloc(self, at: ir.Alloc) -> ir.Stmt:
        self.scope[at.var] = at.lanes
        self.lanes = at.lanes if len(at.lanes) > len(self.lanes) else self.lanes
        return at

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        load = let.value
        if isinstance(load, ir.Load) and load.tensor in self.operands:
            own = ir.lanes_of(load, self.scope)
            if own != self.lanes and set(own) <= set(self.lanes) and self.neighbours(load.offset):
                let = ir.Let(let.var, replace(load, offset=self.spread(load.offset)), let.origin)
        else:
            self.values[let.var] = let.value
        self.scope[let.var] = ir.lanes_of(let.value, self.scope)
        return let

    def spread(self, offset: ir.Expr) -> ir.Expr:
        """The offset along all lanes; its constant stays behind it (see scalar/hoist.py)."""
        match offset:
            case ir.Add(rest, ir.Const() as constant):
                return ir.Spread(rest, self.lanes) + constant
        return ir.Spread(offset, self.lanes)

    def neighbours(self, offset: ir.Expr) -> bool:
        """Whether the offset steps by 1 along a lane."""
        match offset:
            case ir.Add(a, b):
                return self.neighbours(a) or self.neighbours(b)
            case ir.Sub(a, _):
                return self.neighbours(a)
            case ir.Var() if offset in self.values:
                return self.neighbours(self.values[offset])
        return isinstance(offset, ir.Lane)
