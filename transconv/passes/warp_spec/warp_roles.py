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
has the boxes of several steps of the sum (warp_spec/window_reuse.py). What the maps behind the sum read
can be fetched as well, to where the result will be put (``behind=box``, warp_spec/epilogue_reads.py).
Operands that the matrix unit does not take as they lie are transposed by roles of their own
(warp_spec/producer.py).
"""

from __future__ import annotations

from dataclasses import replace

from transconv.ir import For, Kernel, Put, Role, Roles, Shared, Stmt, find, minimum, seq, substitute
from transconv.passes.scalar.copy_propagation import optimise_lets
from transconv.passes.warp_spec.consumer import ALONE, BATON, Consumer, multiply
from transconv.passes.warp_spec.epilogue_prefetch import sooner
from transconv.passes.warp_spec.epilogue_reads import behind
from transconv.passes.warp_spec.producer import fetch, transpose
from transconv.passes.warp_spec.smem_pipeline import rings
from transconv.passes.warp_spec.tile_regions import PROGRAM, Act, Around, around_of, take_apart
from transconv.passes.warp_spec.window_reuse import grouped, shared_rings
from transconv.schedule import Schedule

TRANSPOSER_WARPS = 4
TRANSPOSER_REGISTERS = 104, 72  # per thread, of one role or two; a tile's side is held in them
TRANSPOSERS = ("even_transposer", "odd_transposer")
PRODUCER_REGISTERS = 24  # per thread of the warp that fetches; the others share what it leaves
CONSUMER_REGISTERS = 240  # of each of two consumers: what is then left, in steps of 8


def roles(kernel: Kernel, schedule: Schedule) -> Kernel:
    """Make the rings, barriers and roles of a kernel explicit, if the schedule asks for it."""
    if schedule.via != "gluon":
        return kernel
    grid = kernel.body
    assert isinstance(grid, For) and grid.kind == "grid", "an explicit kernel is one grid"
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
    reserved = [Shared(r.buffer) for r in ring.of.values()]
    reserved += [Shared(r.transposed.buffer) for r in ring.of.values() if r.transposed is not None]
    reserved += [Shared(b) for b in ring.barriers]
    reserved += [Shared(BATON)] if schedule.consumers > 1 else []
    reserved += [Shared(x) for x in brought.shared]
    reserved += [Shared(x.piece.buffer) for role in own for x in find(role, Put)
                 if x.piece.buffer.slots == 1 and x.piece.buffer is not brought.result]
    body = _dealt(grid, around, fetch(tile, ring, brought, grid.var))
    own.append(_clean("producer", 1, PRODUCER_REGISTERS, body))
    body = seq(*reserved, Roles(tuple(own)))
    until = grid.until
    if grid.programs and until is not None:  # one without a tile would end while its copies are in flight
        until = minimum(until, grid.programs)
    whole = For(PROGRAM, grid.programs or grid.stop, body, "grid", until=until)
    return replace(kernel, body=whole)


def _dealt(grid: For, around: Around, act: Act, consumer: Consumer = ALONE) -> Stmt:
    """The tiles of one program: one, every ``programs``-th, or a run of them. Consumers take turns."""
    tile = act.tile
    for before, loop in reversed(around):
        tile = seq(*before, replace(loop, body=tile))
    if grid.programs:
        start = PROGRAM + consumer.number * grid.programs if consumer.number else PROGRAM
        tile = replace(grid, body=tile, kind="dealt", start=start, programs=consumer.of * grid.programs)
    else:
        tile = substitute(tile, {grid.var: PROGRAM})
    return seq(*act.first, tile, *act.last)


def _clean(name: str, warps: int, registers: int, body: Stmt) -> Role:
    """A role, without the lets that only other roles use."""
    return Role(name, warps, registers, optimise_lets(Kernel(name, (), body)).body)
