"""Split sums, which several programs share; part of the pass ``blockwise``.

    for pid in 0..36 grid:                      for pid in 0..144 grid:
        ...unpack(pid)                              part = pid // 36; ...unpack(pid % 36)
        for step in 0..64:              ->          for turn in 0..16: step = part*16 + turn
            acc += a * b                                acc += a * b
        store(c, epilogue(acc))                     store(partials[part, ...], acc)

``reduce=partials`` stores tiles of the accumulator's type in a workspace, in the order of C's elements. A
second kernel, lowered by the same pipeline from ``combine``, adds them in a fixed order, applies the
epilogue and casts, so results are deterministic. With ``deal=1`` a program takes every so many-th step,
``step = turn*4 + part``: which steps are added up in one part does not depend on how many there are.
``reduce=atomic`` adds to ``c`` itself, which must be zero before; the order of additions, hence the last
bits, may differ from run to run.

Stream-K (``reduce=stream``): each program takes an equal range of the steps of all tiles,
wherever tiles begin and end in it.

    for pid in 0..72 grid programs=132:         for share in 0..132 grid:
        ...unpack(pid)                              for segment in 0..2 until ...:
        for step in 0..98:                 ->           tile = ...; from, to = its steps in this share
            acc += a * b                                for turn in 0..98 until to - from: ...
        store(c, epilogue(acc))                         if whole: store(c, epilogue(acc))
                                                        else: store(partials[part, ...], acc)

72 tiles leave 60 of 132 multiprocessors idle; 132 equal ranges leave none. A second kernel adds the parts
of tiles that several programs share, in a fixed order, so results are deterministic. Source: Osama et al.,
*Stream-K*, PPoPP 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from transconv import ir
from transconv.compute import Axis, Compute, Write, total
from transconv.passes.lowering.gridwise import STEP
from transconv.schedule import Schedule, k_steps


def workspace(compute: Compute, split: int) -> ir.Tensor:
    """The tensor of partial sums, of shape (split, *C's shape) and the accumulator's type, in the order of
    C's dimensions in memory."""
    c = compute.c.tensor
    order = [b.dim for b in c.layout.blocks]
    order = list(dict.fromkeys(order))
    shape = (split, *c.shape)
    layout = ir.Layout.dense(compute.acc, shape, [0, *(d + 1 for d in order)])
    return ir.Tensor("partials", ("part", *c.dims), shape, layout, parts_of=c.name)


def most_parts(schedule: Schedule, compute: Compute) -> int:
    """The largest number of partial sums of an element that the second kernel adds; 0 if there is none."""
    if schedule.reduce == "stream":
        return deal(schedule, compute).parts
    return schedule.split_k if schedule.split_k > 1 and schedule.reduce == "partials" else 0


def second(compute: Compute, schedule: Schedule) -> Compute:
    """The computation of the second kernel, which adds the partial sums of a schedule."""
    made = combine(compute, most_parts(schedule, compute))
    return only_shared(compute, schedule, made) if schedule.reduce == "stream" else made


def combine(compute: Compute, split: int) -> Compute:
    """The computation ``c = epilogue(sum over the parts)``, over exactly the elements that the first
    kernel computes (those of one stride phase, for example)."""
    parts = workspace(compute, split)
    axis = Axis("part", split, "part")
    points = [x for x in compute.axes if compute.kind(x.name) != "K"]
    points.sort(key=lambda x: -_stride(compute.c, x))  # so that lanes run along contiguous memory
    a = ir.View(parts, (ir.ViewDim(axis.var), *compute.c.dims))
    return total(f"{compute.name}_sum", (*points, axis), a, compute.c, compute)


def _stride(c: ir.View, axis: Axis) -> int:
    """The stride of C along an axis, in elements (that of the innermost block, if blocked)."""
    for dim, seen in enumerate(c.dims):
        if axis.var in ir.free_vars(seen.coord):
            own = c.tensor.layout.of_dim(dim)[-1].stride
            return own * (c.tensor.shape[dim] if axis.role == "batch" else 1)
    return 0


def split_sums(kernel: ir.Kernel, schedule: Schedule, compute: Compute) -> ir.Kernel:
    """Split the sum as the schedule says; a kernel whose sums are not split is returned unchanged."""
    if schedule.reduce == "stream":
        parts = workspace(compute, most_parts(schedule, compute))
        return stream(kernel, schedule, compute, parts)
    loop = next((x for x in ir.find(kernel, ir.For) if x.var is STEP), None)
    if schedule.split_k == 1 or loop is None:
        return kernel
    shared: ir.Kernel = _Share(schedule, loop).mutate(kernel)
    if schedule.reduce == "atomic":
        return _Atomic().rebuilt(shared)
    parts = workspace(compute, schedule.split_k)
    acc = accumulator(kernel)
    made: ir.Kernel = _Partials(parts, compute.c, acc, ir.find(shared, ir.Store)).mutate(shared)
    used = {x.tensor for x in ir.find(made, ir.MemoryRead)}
    params = tuple(t for t in kernel.params if t in used)
    return replace(kernel, params=(*params, parts), body=made.body)


class _Share(ir.Mutator):
    """The mutator that gives each of ``split`` programs an equal number of the steps: a range, or with
    ``deal`` every so many-th. An ``explicit`` kernel loads boxes, which have no masks, so a program with
    fewer steps ends its loop earlier; otherwise its loads are masked. If the number of steps is an
    expression of sizes, so are the ends of the loops; some may be empty."""

    def __init__(self, schedule: Schedule, loop: ir.For) -> None:
        self.split, self.deal, self.explicit = schedule.split_k, schedule.deal, schedule.via == "gluon"
        self.steps, self.chunk = loop.stop, -(-loop.stop // self.split)

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        if loop.kind == "grid":
            tile = ir.Var("tile")
            lets = [ir.Let(PART, loop.var // loop.stop), ir.Let(tile, loop.var % loop.stop)]
            body = self.mutate(ir.substitute(loop.body, {loop.var: tile}))
            return replace(loop, stop=loop.stop * self.split, body=ir.seq(*lets, body))
        if loop.var is not STEP:
            return self.generic(loop)
        turn, steps, body = ir.Var("turn"), loop.until, loop.body
        if steps is None and self.chunk * self.split != self.steps:
            if self.explicit:
                steps = ir.Const(self.steps)
            else:
                body = ir.substitute(body, self._masked(body))
        chunk = ir.Const(self.chunk) if loop.until is None else _ceiling(loop.until, self.split)
        first = turn * self.split + PART if self.deal else PART * chunk + turn
        until = None if steps is None else self._until(steps, chunk)
        return replace(
            loop, var=turn, stop=self.chunk, body=ir.seq(ir.Let(STEP, first), body), until=until
        )

    def _until(self, steps: ir.Expr, chunk: ir.Expr) -> ir.Expr:
        """How many of so many steps a program has, where these are ``chunk`` at most."""
        if self.deal:
            return _ceiling(steps - PART, self.split)
        return ir.minimum(steps - PART * chunk, chunk)

    def _masked(self, body: ir.Stmt) -> dict[ir.Load, ir.Expr]:
        """The loads of a loop, of nothing beyond the last step."""
        return {x: replace(x, mask=ir.all_of([x.mask, STEP < self.steps])) for x in ir.find(body, ir.Load)}


def _ceiling(number: ir.Expr, parts: int) -> ir.Expr:
    return (number + (parts - 1)) // parts


class _Atomic(ir.Mutator):
    def mutate_Store(self, at: ir.Store) -> ir.Stmt:
        return ir.FuncCall(ir.ATOMIC_ADD, (at.tensor, at.offset, at.value, at.mask))


class _Partials(ir.Mutator):
    """Store the bare sum to the workspace, where the result is, in the place of the last of several
    stores: one that needs no sum may come before it. What the epilogue reads is read by the second
    kernel."""

    def __init__(self, parts: ir.Tensor, c: ir.View, acc: ir.Var, stores: Sequence[ir.Store]) -> None:
        self.parts, self.c, self.acc = parts, c, acc
        self.mask = next(s.mask for s in stores if s.tensor is c.tensor)
        self.last = stores[-1]

    def mutate_Let(self, at: ir.Let) -> ir.Stmt | None:
        return None if at.origin == "epilogue" else at

    def mutate_Store(self, at: ir.Store) -> ir.Stmt | None:
        if at is not self.last:  # one sum, however many results are made of it
            return None
        view = ir.View(self.parts, (ir.ViewDim(PART), *self.c.dims))
        return ir.Store(self.parts, view.offset(), self.acc, self.mask)


PART, TILE = ir.Var("part"), ir.Var("tile")
SHARE, SEGMENT, FIRST, LAST = ir.Var("share"), ir.Var("segment"), ir.Var("first"), ir.Var("last")
BEGIN, END = ir.Var("begin"), ir.Var("end")


@dataclass(frozen=True, slots=True)
class Deal:
    """How steps are divided among programs: ``chunk`` consecutive steps each, of ``tiles`` tiles with
    ``steps`` steps."""

    tiles: int
    steps: int
    programs: int

    @property
    def chunk(self) -> int:
        """Steps of each program; the last one may have fewer."""
        return -(-self.tiles * self.steps // self.programs)

    @property
    def shares(self) -> int:
        """Programs that have steps."""
        return -(-self.tiles * self.steps // self.chunk)

    @property
    def segments(self) -> int:
        """The most tiles that one program has steps of."""
        return max(
            (min((p + 1) * self.chunk, self.tiles * self.steps) - 1) // self.steps
            - p * self.chunk // self.steps
            + 1
            for p in range(self.shares)
        )

    @property
    def parts(self) -> int:
        """The most programs that share a tile."""
        return max(self.last_of(t) - self.first_of(t) + 1 for t in range(self.tiles))

    @property
    def fewest(self) -> int:
        """The fewest programs that share a tile."""
        return min(self.last_of(t) - self.first_of(t) + 1 for t in range(self.tiles))

    def first_of(self, tile: int) -> int:
        """The first program that has steps of a tile."""
        return tile * self.steps // self.chunk

    def last_of(self, tile: int) -> int:
        """The last program that has steps of a tile."""
        return (tile * self.steps + self.steps - 1) // self.chunk

    def more(self, tile: ir.Expr) -> ir.Expr:
        """``last_of(tile) - first_of(tile)`` as an expression."""
        return (tile * self.steps + (self.steps - 1)) // self.chunk - tile * self.steps // self.chunk


def deal(schedule: Schedule, compute: Compute) -> Deal:
    """How a schedule divides the steps of a computation."""
    return Deal(_counted(schedule, compute)[1], k_steps(schedule, compute), schedule.programs)


def _counted(schedule: Schedule, compute: Compute) -> tuple[ir.Expr, int]:
    """The index of the tile of a point of C, and the number of tiles. Tiles are numbered as in
    ``gridwise`` without groups of rows."""
    number: ir.Expr = ir.ZERO
    index: ir.Expr
    tiles = 1
    for kind in "BMN":
        for axis in compute.axes_of(kind):
            block = schedule.block_of(axis.name)
            if block is None or block.extent == 1:
                index, count = axis.var, axis.size
            elif block.first == axis.name:
                at: ir.Expr = ir.ZERO
                for name in block.axes:
                    at = at * compute.size(name) + ir.Var(name)
                index = at // block.extent
                count = -(-prod(compute.size(a) for a in block.axes) // block.extent)
            else:
                continue
            number, tiles = number * count + index, tiles * count
    return number, tiles


def only_shared(compute: Compute, schedule: Schedule, second: Compute) -> Compute:
    """The second kernel's computation, masked to tiles that programs share and to their parts. The first
    kernel stores all results of the other tiles, which have no parts."""
    dealt = deal(schedule, compute)
    more = dealt.more(_counted(schedule, compute)[0])
    part, *rest = second.a.dims
    there = (part.coord < dealt.fewest) | (part.coord <= more)  # every tile has ``fewest`` parts
    a = ir.View(second.a.tensor, (ir.ViewDim(part.coord, ir.all_of([part.mask, there])), *rest))
    if dealt.fewest > 1:
        return second.through(a=a)

    def shared(view: ir.View) -> ir.View:
        head, *tail = view.dims
        return ir.View(view.tensor, (ir.ViewDim(head.coord, ir.all_of([head.mask, more > 0])), *tail))

    made = second.through(a=a, c=shared(second.c))
    return replace(
        made,
        steps=tuple(
            replace(s, view=shared(s.view)) if isinstance(s, Write) and s.view is not made.c else s
            for s in made.steps
        ),
    )


def stream(kernel: ir.Kernel, schedule: Schedule, compute: Compute, parts: ir.Tensor) -> ir.Kernel:
    """Divide the steps of all tiles evenly among the programs. ``parts``: the workspace of tiles that
    several programs share."""
    dealt = deal(schedule, compute)
    grid = kernel.body
    assert isinstance(grid, ir.For)
    tile: ir.Stmt = _Tile(dealt, parts, compute.c, kernel).mutate(grid.body)
    units = dealt.tiles * dealt.steps
    names = [
        ir.Let(TILE, FIRST // dealt.steps + SEGMENT),
        ir.Let(BEGIN, ir.maximum(FIRST - TILE * dealt.steps, 0)),
        ir.Let(END, ir.minimum(LAST - TILE * dealt.steps, dealt.steps)),
        ir.Let(PART, SHARE - TILE * dealt.steps // dealt.chunk),
    ]
    segments = ir.For(
        SEGMENT,
        dealt.segments,
        ir.seq(*names, ir.substitute(tile, {grid.var: TILE})),
        until=(LAST - 1) // dealt.steps - FIRST // dealt.steps + 1,
    )
    first = [ir.Let(FIRST, SHARE * dealt.chunk), ir.Let(LAST, ir.minimum(FIRST + dealt.chunk, units))]
    body = ir.For(SHARE, dealt.shares, ir.seq(*first, segments), "grid")
    return replace(kernel, params=(*kernel.params, parts), body=body)


def accumulator(kernel: ir.Kernel) -> ir.Var:
    """The accumulator of a kernel: the only variable that it allocates."""
    (alloc,) = ir.find(kernel, ir.Alloc)
    return alloc.var


class _Tile(ir.Mutator):
    """Restricts a tile to the steps of one program, and stores its sum to C or to the workspace."""

    def __init__(self, dealt: Deal, parts: ir.Tensor, c: ir.View, kernel: ir.Kernel) -> None:
        self.dealt, self.parts, self.c, self.acc = dealt, parts, c, accumulator(kernel)
        stores = ir.find(kernel, ir.Store)
        self.mask = next(s.mask for s in stores if s.tensor is c.tensor)
        self.last = stores[-1]

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        if loop.var is not STEP:
            return self.generic(loop)
        step = ir.Let(STEP, BEGIN + ir.Var("turn"))
        return replace(loop, var=ir.Var("turn"), body=ir.seq(step, loop.body), until=END - BEGIN)

    def mutate_Store(self, at: ir.Store) -> ir.Stmt | None:
        """Of several results the last one's place has the sum: one that needs none may come before it."""
        view = ir.View(self.parts, (ir.ViewDim(PART), *self.c.dims))
        part = ir.Store(self.parts, view.offset(), self.acc, self.mask) if at is self.last else None
        if self.dealt.chunk < self.dealt.steps:  # no program has a whole tile
            return part
        return ir.If(END - BEGIN > self.dealt.steps - 1, at, part)
