"""What the warps that fetch and those that transpose do for a tile (see warp_spec/warp_roles.py).

With ``keep=b`` all tiles of a program multiply the same boxes of B, which must fit shared memory. They
are fetched once, before the first tile, each into a slot of its own, and are never freed.

The matrix unit takes operands of 8 and of 32 bits only with K innermost. A third role transposes other
boxes (see ``transposed_bytes`` in schedule) into a ring of their own:

    role transposer warps=4:
        for pid in program..784 dealt:
            for step: wait landed, taken; put A_transposed = A_ring; fence; arrive transposed, free

With ``transposers=2`` two such roles take turns at the steps, so that one reads a slot while the other
writes one. Each counts all slots:

    role even_transposer warps=4:                   role odd_transposer warps=4:
        resting = 0                                     resting = 1
        for step:                                       ...
            if resting == 0: wait landed, taken; ...
            resting = 1 - resting; next slot
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transconv.ir import (
    ARRIVE,
    EXPECT,
    FENCE,
    ONE,
    TRUE,
    WAIT,
    ZERO,
    Alloc,
    Barrier,
    Const,
    Expr,
    FuncCall,
    If,
    Let,
    Put,
    Stmt,
    Update,
    Var,
    eq,
    seq,
    statements,
    substitute,
)
from transconv.passes.warp_spec.epilogue_reads import EpilogueBoxes
from transconv.passes.warp_spec.smem_pipeline import PHASE, SLOT, Rings, advance
from transconv.passes.warp_spec.tile_regions import PROGRAM, Act, TileStatements, counters

RESTING = Var("resting")


def fetch(tile: TileStatements, rings: Rings, brought: EpilogueBoxes, number: Var) -> Act:
    """The producer: fill a slot per step as soon as it is free. In the first round all slots are free, so
    it waits for the phase before the first one, which counts as completed. A resident operand is fetched
    once, from the corners of the program's first tile. What is read behind the sum is ``brought``."""
    step = seq(*tile.lets, FuncCall(WAIT, (rings.free, SLOT, PHASE)),
               *_expected(rings, rings.landed, SLOT), *advance(rings.slots))
    first = (*counters(1), *brought.counters())
    if rings.kept is not None:
        once = seq(*tile.lets, *_expected(rings, rings.kept, tile.loop.var))
        kept = seq(*tile.before, replace(tile.loop, body=once, stages=0))
        names: dict[Var, Expr] = {s.var: Var(f"first_{s.var.name}", s.var.type)
                                  for s in tile.before if isinstance(s, Let)}
        first = (*statements(substitute(kept, names | {number: PROGRAM})), *first)
    loop = replace(tile.loop, body=step, stages=0)
    return Act(first, seq(*tile.before, loop, *brought.fetches()))


def _expected(rings: Rings, barrier: Barrier, slot: Var) -> Iterator[Stmt]:
    """Announce the bytes of a barrier's copies, and start the copies."""
    fetches = rings.fetches(barrier)
    yield FuncCall(EXPECT, (barrier, slot, Const(sum(f.piece.buffer.box_bytes for f in fetches))))
    yield from fetches


def transpose(tile: TileStatements, rings: Rings, number: int, of: int) -> Act:
    """A transposer: write a slot that has landed to the same slot of another ring, K innermost. In the
    first round all slots of that ring count as taken. One ``of`` two rests at every other step and does
    not see each phase of ``landed``: after the wait for ``taken``, only this step's phase is left."""
    puts = [Put(r.transposed, r.piece) for r in rings.turns if r.transposed is not None]
    step = seq(*tile.lets, FuncCall(WAIT, (rings.taken, SLOT, ONE - PHASE)),
               FuncCall(WAIT, (rings.landed, SLOT, PHASE)), *puts, FuncCall(FENCE, ()),
               FuncCall(ARRIVE, (rings.transposed, SLOT, TRUE)),
               FuncCall(ARRIVE, (rings.free, SLOT, TRUE)))
    first = counters(0)
    if of > 1:
        first = (*first, Alloc(RESTING, (), Const(number)))
        step = seq(If(eq(RESTING, ZERO), step), Update(RESTING, ONE - RESTING))
    loop = replace(tile.loop, body=seq(step, *advance(rings.slots)), stages=0)
    return Act(first, seq(*tile.before, loop))
