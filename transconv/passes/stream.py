"""Stream-K (``reduce=stream``): turns a kernel of tiles into one whose programs each take an equal run of
all the steps of all the tiles, wherever tiles begin and end in it.

    for pid in 0..72 grid programs=132:         for share in 0..132 grid:
        ...unpack(pid)                              for segment in 0..2 until ...:
        for step in 0..98:                 ->           tile = ...; from, to = its steps in this share
            acc += a * b                                for turn in 0..98 until to - from: ...
        store(c, epilogue(acc))                         if whole: store(c, epilogue(acc))
                                                        else: store(partials[part, ...], acc)

72 tiles leave 60 of 132 multiprocessors idle; 132 equal runs leave none. A tile that several programs
worked at meets in a second kernel, which adds its parts in their order: the same bits every time.
The scheme is known as stream-K (Osama et al., PPoPP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from transconv.compute import Compute
from transconv.ir import (
    ZERO,
    Alloc,
    Expr,
    For,
    If,
    Kernel,
    Let,
    Mutator,
    Stmt,
    Store,
    Tensor,
    Var,
    View,
    ViewDim,
    all_of,
    find,
    maximum,
    minimum,
    seq,
    substitute,
)
from transconv.passes.gridwise import STEP
from transconv.schedule import Schedule, k_steps

PART, TILE = Var("part"), Var("tile")
SHARE, SEGMENT, FIRST, LAST = Var("share"), Var("segment"), Var("first"), Var("last")
BEGIN, END = Var("begin"), Var("end")


@dataclass(frozen=True, slots=True)
class Deal:
    """How the steps are dealt out: ``chunk`` to each program, over tiles of ``steps`` each."""

    tiles: int
    steps: int
    programs: int

    @property
    def chunk(self) -> int:
        return -(-self.tiles * self.steps // self.programs)

    @property
    def shares(self) -> int:
        """Programs that get anything."""
        return -(-self.tiles * self.steps // self.chunk)

    @property
    def segments(self) -> int:
        """Tiles that one program works at, at most."""
        return max((min((p + 1) * self.chunk, self.tiles * self.steps) - 1) // self.steps
                   - p * self.chunk // self.steps + 1 for p in range(self.shares))

    @property
    def parts(self) -> int:
        """Programs that work at one tile, at most."""
        return max(self.last_of(t) - self.first_of(t) + 1 for t in range(self.tiles))

    @property
    def fewest(self) -> int:
        """Programs that work at one tile, at least."""
        return min(self.last_of(t) - self.first_of(t) + 1 for t in range(self.tiles))

    def first_of(self, tile: int) -> int:
        return tile * self.steps // self.chunk

    def last_of(self, tile: int) -> int:
        return (tile * self.steps + self.steps - 1) // self.chunk

    def more(self, tile: Expr) -> Expr:
        """How many programs besides the first work at a tile."""
        return (tile * self.steps + (self.steps - 1)) // self.chunk - tile * self.steps // self.chunk


def deal(schedule: Schedule, compute: Compute) -> Deal:
    """The deal that a schedule makes of a computation's tiles."""
    return Deal(_counted(schedule, compute)[1], k_steps(schedule, compute), schedule.programs)


def _counted(schedule: Schedule, compute: Compute) -> tuple[Expr, int]:
    """The number of the tile that a point of C is in, and how many tiles there are; rows and columns
    of tiles are counted as ``gridwise`` numbers them when it does not group rows."""
    number: Expr = ZERO
    index: Expr
    tiles = 1
    for kind in "BMN":
        for axis in compute.axes_of(kind):
            block = schedule.block_of(axis.name)
            if block is None or block.extent == 1:
                index, count = axis.var, axis.size
            elif axis.name == block.axes[0]:
                at: Expr = ZERO
                for name in block.axes:
                    at = at * compute.size(name) + Var(name)
                index = at // block.extent
                count = -(-prod(compute.size(a) for a in block.axes) // block.extent)
            else:
                continue
            number, tiles = number * count + index, tiles * count
    return number, tiles


def meeting(compute: Compute, schedule: Schedule, second: Compute) -> Compute:
    """The second kernel, restricted to the tiles and the parts that are left to it."""
    dealt = deal(schedule, compute)
    more = dealt.more(_counted(schedule, compute)[0])
    part, *rest = second.a.dims
    there = (part.coord < dealt.fewest) | (part.coord <= more)  # the first few are there for every tile
    a = View(second.a.tensor, (ViewDim(part.coord, all_of([part.mask, there])), *rest))
    if dealt.fewest > 1:
        return second.through(a=a)
    head, *tail = second.c.dims
    c = View(second.c.tensor, (ViewDim(head.coord, all_of([head.mask, more > 0])), *tail))
    return second.through(a=a, c=c)


def stream(kernel: Kernel, schedule: Schedule, compute: Compute, parts: Tensor) -> Kernel:
    """Deal the steps of all tiles out evenly. ``parts`` is where tiles worked at by several meet."""
    dealt = deal(schedule, compute)
    grid = kernel.body
    assert isinstance(grid, For)
    tile: Stmt = _Tile(dealt, parts, compute.c, accumulator(kernel)).mutate(grid.body)
    units = dealt.tiles * dealt.steps
    names = [Let(TILE, FIRST // dealt.steps + SEGMENT),
             Let(BEGIN, maximum(FIRST - TILE * dealt.steps, 0)),
             Let(END, minimum(LAST - TILE * dealt.steps, dealt.steps)),
             Let(PART, SHARE - TILE * dealt.steps // dealt.chunk)]
    segments = For(SEGMENT, dealt.segments, seq(*names, substitute(tile, {grid.var: TILE})),
                   until=(LAST - 1) // dealt.steps - FIRST // dealt.steps + 1)
    first = [Let(FIRST, SHARE * dealt.chunk), Let(LAST, minimum(FIRST + dealt.chunk, units))]
    body = For(SHARE, dealt.shares, seq(*first, segments), "grid")
    return replace(kernel, params=(*kernel.params, parts), body=body)


def accumulator(kernel: Kernel) -> Var:
    """What a kernel of tiles sums in: the only variable that it allocates."""
    (alloc,) = find(kernel, Alloc)
    return alloc.var


class _Tile(Mutator):
    """The steps of one share, and where their sum goes."""

    def __init__(self, dealt: Deal, parts: Tensor, c: View, acc: Var) -> None:
        self.dealt, self.parts, self.c, self.acc = dealt, parts, c, acc
        self.stored = False

    def mutate_For(self, loop: For) -> Stmt:
        if loop.var is not STEP:
            return self.generic(loop)  # type: ignore[no-any-return]
        return replace(loop, var=Var("turn"), body=seq(Let(STEP, BEGIN + Var("turn")), loop.body),
                       until=END - BEGIN)

    def mutate_Store(self, at: Store) -> Stmt | None:
        view = View(self.parts, (ViewDim(PART), *self.c.dims))
        part = None if self.stored else Store(self.parts, view.offset(), self.acc, at.mask)
        self.stored = True  # one sum, however many results are made of it
        if self.dealt.chunk < self.dealt.steps:  # no program works at a whole tile
            return part
        return If(END - BEGIN > self.dealt.steps - 1, at, part)
