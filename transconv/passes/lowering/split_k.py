"""Sums that several programs share; part of the pass ``blockwise``.

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
    Const,
    Expr,
    For,
    FuncCall,
    Kernel,
    Layout,
    Let,
    Load,
    MemoryRead,
    Mutator,
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
    seq,
    substitute,
)
from transconv.passes.lowering import stream_k
from transconv.passes.lowering.gridwise import STEP
from transconv.passes.lowering.stream_k import PART
from transconv.schedule import Schedule


def workspace(compute: Compute, split: int) -> Tensor:
    """The tensor of partial sums, of shape (split, *C's shape) and the accumulator's type, in the order of
    C's dimensions in memory."""
    c = compute.c.tensor
    order = [b.dim for b in c.layout.blocks]
    order = list(dict.fromkeys(order))
    shape = (split, *c.shape)
    layout = Layout.dense(compute.acc, shape, [0, *(d + 1 for d in order)])
    return Tensor("partials", ("part", *c.dims), shape, layout, parts_of=c.name)


def most_parts(schedule: Schedule, compute: Compute) -> int:
    """The largest number of partial sums of an element that the second kernel adds; 0 if there is none."""
    if schedule.reduce == "stream":
        return stream_k.deal(schedule, compute).parts
    return schedule.split_k if schedule.split_k > 1 and schedule.reduce == "partials" else 0


def second(compute: Compute, schedule: Schedule) -> Compute:
    """The computation of the second kernel, which adds the partial sums of a schedule."""
    made = combine(compute, most_parts(schedule, compute))
    return stream_k.only_shared(compute, schedule, made) if schedule.reduce == "stream" else made


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


def split_sums(kernel: Kernel, schedule: Schedule, compute: Compute) -> Kernel:
    """Split the sum as the schedule says; a kernel whose sums are not split is returned unchanged."""
    if schedule.reduce == "stream":
        parts = workspace(compute, most_parts(schedule, compute))
        return stream_k.stream(kernel, schedule, compute, parts)
    loop = next((x for x in find(kernel, For) if x.var is STEP), None)
    if schedule.split_k == 1 or loop is None:
        return kernel
    shared: Kernel = _Share(schedule.split_k, loop, schedule.via == "gluon").mutate(kernel)
    if schedule.reduce == "atomic":
        return _Atomic().rebuilt(shared)
    parts = workspace(compute, schedule.split_k)
    acc = stream_k.accumulator(kernel)
    made: Kernel = _Partials(parts, compute.c, acc, find(shared, Store)).mutate(shared)
    used = {x.tensor for x in find(made, MemoryRead)}
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
            return self.generic(loop)
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
