"""The pass ``roles``: turns a lanewise kernel that loads TMA boxes into a warp-specialized one with
explicit shared memory and barriers, and with producer and consumer warps (``via=gluon``).

    for pid in 0..784 grid programs=132:          for program in 0..132 grid:
        ...lets                                       shared A_ring[3], B_ring[3], C_tile
        acc = 0                                       barrier landed[3], free[3]
        for step in 0..36:                            role consumer warps=8:
            a = box_load(A, at=[..])                      for pid in program..784 dealt:
            b = box_load(B, at=[..])         ->               for step: wait landed; dot_async; free
            dot(acc, b, a)                                    put, fence, send C_tile
        box_store(C, at=[..], acc)                    role producer warps=1:
                                                          for pid in program..784 dealt:
                                                              for step: wait free; fetch A, B

One warp, the producer, runs ahead and fills the rings, also with boxes of the next tile while the result
of this one is stored; the consumers only multiply and store. A consumer waits for a product one step
later, so two products are in flight.

With ``consumers=2`` two groups of warps multiply (warp_spec/consumer.py). With ``slide=`` a slot of a ring
has the boxes of several steps of the sum (warp_spec/smem_pipeline.py). What the maps behind the sum read
can be fetched as well, to where the result will be put (``behind=box``, warp_spec/epilogue_reads.py).
Operands that the matrix unit does not take as they lie are transposed by roles of their own.

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

from transconv import ir
from transconv.passes.scalar.cse import optimise_lets
from transconv.passes.warp_spec.consumer import ALONE, BATON, Consumer, multiply
from transconv.passes.warp_spec.epilogue_reads import EpilogueBoxes, behind, sooner
from transconv.passes.warp_spec.smem_pipeline import (
    PHASE,
    PROGRAM,
    SLOT,
    Act,
    Around,
    Rings,
    TileStatements,
    advance,
    around_of,
    counters,
    grouped,
    rings,
    shared_rings,
    take_apart,
)
from transconv.schedule import Schedule

TRANSPOSER_WARPS = 4
TRANSPOSER_REGISTERS = 104, 72  # per thread, of one role or two; a tile's side is held in them
TRANSPOSERS = ("even_transposer", "odd_transposer")
PRODUCER_REGISTERS = 24  # per thread of the warp that fetches; the others share what it leaves
CONSUMER_REGISTERS = 240  # of each of two consumers: what is then left, in steps of 8


def roles(kernel: ir.Kernel, schedule: Schedule) -> ir.Kernel:
    """Make the rings, barriers and roles of a kernel explicit, if the schedule asks for it."""
    if schedule.via != "gluon":
        return kernel
    grid = kernel.body
    assert isinstance(grid, ir.For) and grid.kind == "grid", "an explicit kernel is one grid"
    around, inner = around_of(grid.body)
    tile = take_apart(inner)
    lets = (*(s for before, _ in around for s in before), *tile.before)
    if group := grouped(tile.loop, tile.lets, schedule.slide):
        ring = shared_rings(tile.fetched, (*lets, *tile.lets), schedule.stages, group)
        tile = replace(tile, loop=group.loop, lets=group.lets)
    else:
        ring = rings(tile.fetched, (*lets, *tile.lets), schedule.stages, tile.loop, schedule.keep)
    consumers = [Consumer(number, schedule.consumers) for number in range(schedule.consumers)]
    brought = behind(lets, tile.after, schedule.consumers, bool(grid.programs))
    ahead = sooner(tile.after, lets, tile.acc, schedule)
    own = [_clean(t.name, schedule.warps, CONSUMER_REGISTERS if t.number else 0,
                  _dealt(grid, around, multiply(tile, ring, brought, ahead, grid, t), t))
           for t in consumers]
    for number in range(schedule.transposers if ring.turns else 0):
        name = TRANSPOSERS[number] if schedule.transposers > 1 else "transposer"
        own.append(_clean(name, TRANSPOSER_WARPS, TRANSPOSER_REGISTERS[schedule.transposers - 1],
                          _dealt(grid, around, transpose(tile, ring, number, schedule.transposers))))
    reserved = [ir.Shared(r.buffer) for r in ring.of.values()]
    reserved += [ir.Shared(r.transposed.buffer) for r in ring.of.values() if r.transposed is not None]
    reserved += [ir.Shared(b) for b in ring.barriers]
    reserved += [ir.Shared(BATON)] if schedule.consumers > 1 else []
    reserved += [ir.Shared(x) for x in brought.shared]
    reserved += [ir.Shared(x.piece.buffer) for role in own for x in ir.find(role, ir.Put)
                 if x.piece.buffer.slots == 1 and x.piece.buffer is not brought.result]
    body = _dealt(grid, around, fetch(tile, ring, brought, grid.var))
    own.append(_clean("producer", 1, PRODUCER_REGISTERS, body))
    body = ir.seq(*reserved, ir.Roles(tuple(own)))
    until = grid.until
    if grid.programs and until is not None:  # one without a tile would end while its copies are in flight
        until = ir.minimum(until, grid.programs)
    whole = ir.For(PROGRAM, grid.programs or grid.stop, body, "grid", until=until)
    return replace(kernel, body=whole)


def _dealt(grid: ir.For, around: Around, act: Act, consumer: Consumer = ALONE) -> ir.Stmt:
    """The tiles of one program: one, every ``programs``-th, or a run of them. Consumers take turns."""
    tile = act.tile
    for before, loop in reversed(around):
        tile = ir.seq(*before, replace(loop, body=tile))
    if grid.programs:
        start = PROGRAM + consumer.number * grid.programs if consumer.number else PROGRAM
        tile = replace(grid, body=tile, kind="dealt", start=start, programs=consumer.of * grid.programs)
    else:
        tile = ir.substitute(tile, {grid.var: PROGRAM})
    return ir.seq(*act.first, tile, *act.last)


def _clean(name: str, warps: int, registers: int, body: ir.Stmt) -> ir.Role:
    """A role, without the lets that only other roles use."""
    return ir.Role(name, warps, registers, optimise_lets(ir.Kernel(name, (), body)).body)


RESTING = ir.Var("resting")


def fetch(tile: TileStatements, rings: Rings, brought: EpilogueBoxes, number: ir.Var) -> Act:
    """The producer: fill a slot per step as soon as it is free. In the first round all slots are free, so
    it waits for the phase before the first one, which counts as completed. A resident operand is fetched
    once, from the corners of the program's first tile. What is read behind the sum is ``brought``."""
    step = ir.seq(*tile.lets, ir.FuncCall(ir.WAIT, (rings.free, SLOT, PHASE)),
                  *_expected(rings, rings.landed, SLOT), *advance(rings.slots))
    first = (*counters(1), *brought.counters())
    if rings.kept is not None:
        once = ir.seq(*tile.lets, *_expected(rings, rings.kept, tile.loop.var))
        kept = ir.seq(*tile.before, replace(tile.loop, body=once, stages=0))
        names: dict[ir.Var, ir.Expr] = {s.var: ir.Var(f"first_{s.var.name}", s.var.type)
                                        for s in tile.before if isinstance(s, ir.Let)}
        first = (*ir.statements(ir.substitute(kept, names | {number: PROGRAM})), *first)
    loop = replace(tile.loop, body=step, stages=0)
    return Act(first, ir.seq(*tile.before, loop, *brought.fetches()))


def _expected(rings: Rings, barrier: ir.Barrier, slot: ir.Var) -> Iterator[ir.Stmt]:
    """Announce the bytes of a barrier's copies, and start the copies."""
    fetches = rings.fetches(barrier)
    landing = sum(f.piece.buffer.box_bytes for f in fetches)
    yield ir.FuncCall(ir.EXPECT, (barrier, slot, ir.Const(landing)))
    yield from fetches


def transpose(tile: TileStatements, rings: Rings, number: int, of: int) -> Act:
    """A transposer: write a slot that has landed to the same slot of another ring, K innermost. In the
    first round all slots of that ring count as taken. One ``of`` two rests at every other step and does
    not see each phase of ``landed``: after the wait for ``taken``, only this step's phase is left."""
    puts = [ir.Put(r.transposed, r.piece) for r in rings.turns if r.transposed is not None]
    step = ir.seq(*tile.lets, ir.FuncCall(ir.WAIT, (rings.taken, SLOT, ir.ONE - PHASE)),
                  ir.FuncCall(ir.WAIT, (rings.landed, SLOT, PHASE)), *puts, ir.FuncCall(ir.FENCE, ()),
                  ir.FuncCall(ir.ARRIVE, (rings.transposed, SLOT, ir.TRUE)),
                  ir.FuncCall(ir.ARRIVE, (rings.free, SLOT, ir.TRUE)))
    first = counters(0)
    if of > 1:
        first = (*first, ir.Alloc(RESTING, (), ir.Const(number)))
        step = ir.seq(ir.If(ir.eq(RESTING, ir.ZERO), step), ir.Update(RESTING, ir.ONE - RESTING))
    loop = replace(tile.loop, body=ir.seq(step, *advance(rings.slots)), stages=0)
    return Act(first, ir.seq(*tile.before, loop))
