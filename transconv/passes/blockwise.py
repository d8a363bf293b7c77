"""The pass ``blockwise``: decides how operands are loaded and stored, and which program sums what.

    a = load(A, n*.. + h*.., mask=...)  ->  a = box_load(A, at=[n_blk*2, h_blk*8 + kh - 1, ..])

The copy engine moves an operand whose word in the schedule is ``box`` in rectangular pieces
(``schedule/boxes.py`` says when that is legal); other operands keep an address and a mask per element.

With ``split_k`` several programs share a sum:

    for pid in 0..36 grid:                      for pid in 0..144 grid:
        ...unpack(pid)                              part = pid // 36; ...unpack(pid % 36)
        for step in 0..64:              ->          for turn in 0..16: step = part*16 + turn
            acc += a * b                                acc += a * b
        store(c, epilogue(acc))                     store(partials[part, ...], acc)

``reduce=partials`` stores tiles of the accumulator's type in a workspace, in the order of C's elements. A
second kernel, lowered by the same pipeline from ``combine``, adds them in a fixed order, applies the
epilogue and casts, so results are deterministic. ``reduce=atomic`` adds to ``c`` itself, which must be
zero before; the order of additions, hence the last bits, may differ from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv.compute import Axis, Compute, total
from transconv.ir import (
    ATOMIC_ADD,
    ZERO,
    Add,
    BoxLoad,
    BoxStore,
    Const,
    Expr,
    For,
    FuncCall,
    Kernel,
    Layout,
    Let,
    Load,
    Mul,
    Mutator,
    Read,
    Stmt,
    Store,
    Tensor,
    Var,
    View,
    ViewDim,
    all_of,
    find,
    free_vars,
    minimum,
    multiplied_as,
    seq,
    substitute,
)
from transconv.passes import partials, stream
from transconv.passes.gridwise import STEP
from transconv.passes.stream import PART
from transconv.schedule import Box, Schedule, box_of, boxes_behind, pile, result_boxes


def workspace(compute: Compute, split: int) -> Tensor:
    """The tensor of partial sums, of shape (split, *C's shape) and the accumulator's type, in the order of
    C's dimensions in memory."""
    c = compute.c.tensor
    order = [b.dim for b in c.layout.blocks]
    order = list(dict.fromkeys(order))
    shape = (split, *c.shape)
    layout = Layout.dense(compute.acc, shape, [0, *(d + 1 for d in order)])
    return Tensor("partials", ("part", *c.dims), shape, layout, parts_of=c.name)


def meeting(schedule: Schedule, compute: Compute) -> int:
    """The largest number of partial sums of an element that the second kernel adds; 0 if there is none."""
    if schedule.reduce == "stream":
        return stream.deal(schedule, compute).parts
    return schedule.split_k if schedule.split_k > 1 and schedule.reduce == "partials" else 0


def second(compute: Compute, schedule: Schedule) -> Compute:
    """The computation of the second kernel, which adds the partial sums of a schedule."""
    made = combine(compute, meeting(schedule, compute))
    return stream.meeting(compute, schedule, made) if schedule.reduce == "stream" else made


def combine(compute: Compute, split: int) -> Compute:
    """The computation ``c = epilogue(sum over the parts)``, over exactly the elements that the first
    kernel computes (those of one stride phase, for example)."""
    parts = workspace(compute, split)
    axis = Axis("part", split, "part")
    points = [x for x in compute.axes if compute.kind(x.name) != "K"]
    points.sort(key=lambda x: -_stride(compute.c, x))  # so that lanes run along contiguous memory
    a = View(parts, (ViewDim(axis.var), *compute.c.dims))
    return total(f"{compute.name}_sum", (*points, axis), a, compute.c, compute)


def _stride(c: View, axis: Axis) -> int:
    """The stride of C along an axis, in elements (that of the innermost block, if blocked)."""
    for dim, seen in enumerate(c.dims):
        if axis.var in free_vars(seen.coord):
            own = c.tensor.layout.of_dim(dim)[-1].stride
            return own * (c.tensor.shape[dim] if axis.role == "batch" else 1)
    return 0


def blockwise(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Move operands in boxes, split the sum, and leave statistics in parts, as the schedule says."""
    shared = share(kernel, schedule, compute)
    if compute.statistics:
        shared = partials.begun(shared, _positions(kernel))
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


def share(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Split the sum as the schedule says; a kernel whose sums are not split is returned unchanged."""
    if schedule.reduce == "stream":
        parts = workspace(compute, meeting(schedule, compute))
        return stream.stream(kernel, schedule, compute, parts)
    loop = next((x for x in find(kernel, For) if x.var is STEP), None)
    if schedule.split_k == 1 or loop is None:
        return kernel
    shared: Kernel = _Share(schedule.split_k, loop, schedule.via == "gluon").mutate(kernel)
    if schedule.reduce == "atomic":
        return _Atomic().mutate(shared)  # type: ignore[no-any-return]
    parts = workspace(compute, schedule.split_k)
    acc = stream.accumulator(kernel)
    made: Kernel = _Partials(parts, compute.c, acc, find(shared, Store)).mutate(shared)
    used = {x.tensor for x in find(made, Read)}
    params = tuple(t for t in kernel.params if t in used)
    return replace(kernel, params=(*params, parts), body=made.body)


class _Share(Mutator):
    """Give each of ``split`` programs an equal range of the steps. ``explicit``: the kernel loads boxes,
    which have no masks, so the last program ends its loop earlier; otherwise its loads are masked. If the
    number of steps is an expression of sizes, so are the ends of the ranges; the last may be empty."""

    def __init__(self, split: int, loop: For, explicit: bool) -> None:
        self.explicit = explicit
        self.split, self.steps, self.chunk = split, loop.stop, -(-loop.stop // split)

    def mutate_For(self, loop: For) -> Stmt:
        if loop.kind == "grid":
            tile = Var("tile")
            lets = [Let(PART, loop.var // loop.stop), Let(tile, loop.var % loop.stop)]
            body = self.mutate(substitute(loop.body, {loop.var: tile}))
            return replace(loop, stop=loop.stop * self.split, body=seq(*lets, body))
        if loop.var is not STEP:
            return self.generic(loop)  # type: ignore[no-any-return]
        turn = Var("turn")
        body = loop.body
        until = None
        chunk: Expr = Const(self.chunk)
        if loop.until is not None:
            chunk = (loop.until + (self.split - 1)) // self.split
            until = minimum(loop.until - PART * chunk, chunk)
        elif self.explicit and self.chunk * self.split != self.steps:
            until = minimum(self.steps - PART * self.chunk, self.chunk)
        elif self.chunk * self.split != self.steps:
            body = substitute(body, {x: replace(x, mask=all_of([x.mask, STEP < self.steps]))
                                     for x in find(body, Load)})
        first = Let(STEP, PART * chunk + turn)
        return replace(loop, var=turn, stop=self.chunk, body=seq(first, body), until=until)


class _Atomic(Mutator):
    def mutate_Store(self, at: Store) -> Stmt:
        return FuncCall(ATOMIC_ADD, (at.tensor, at.offset, at.value, at.mask))


class _Partials(Mutator):
    """Store the bare sum to the workspace, where the result is, in the place of the last of several
    stores: one that needs no sum may come before it. What the epilogue reads is read by the second
    kernel."""

    def __init__(self, parts: Tensor, c: View, acc: Var, stores: Sequence[Store]) -> None:
        self.parts, self.c, self.acc = parts, c, acc
        self.mask = next(s.mask for s in stores if s.tensor is c.tensor)
        self.last = stores[-1]

    def mutate_Let(self, at: Let) -> Stmt | None:
        return None if at.origin == "epilogue" else at

    def mutate_Store(self, at: Store) -> Stmt | None:
        if at is not self.last:  # one sum, however many results are made of it
            return None
        view = View(self.parts, (ViewDim(PART), *self.c.dims))
        return Store(self.parts, view.offset(), self.acc, self.mask)
