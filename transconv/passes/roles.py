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

With ``consumers=2`` two groups of warps multiply, and take turns at the tiles of a program (ping-pong):
while the one stores its tile, the other multiplies. The rings stay as they are, in the order of the tiles:

    role evens warps=4:                             role odds warps=4:
        for pid in program..784 dealt 264:              for pid in program+132..784 dealt 264:
            fetched = pid // 132 * 36                       fetched = pid // 132 * 36
            slot, phase = fetched % 3, fetched // 3 % 2     ...
            wait(baton, 0, 1)                               wait(baton, 0, 0)
            for step: wait landed; dot_async; free          ...
            arrive(baton)                                   arrive(baton)
            put, fence, send C_tile0                        put, fence, send C_tile1

A barrier knows only whether a phase is even or odd, so a consumer that waits for a slot must not be a
round of the ring early: it begins when the other one has seen all of its steps land, and hands over the
baton, a barrier whose parity is the consumer whose turn it is.

What the maps behind the sum read can be fetched as well, to where the result will be put (``behind=box``,
see behind.py).

With ``keep=b`` all tiles of a program multiply the same boxes of B, which must fit shared memory. They
are fetched once, before the first tile, each into a slot of its own, and are never freed.

With ``slide=`` a slot of a ring has the boxes of several steps of the sum (see sliding.py).

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transconv.ir import (
    ARRIVE,
    DOT_ASYNC,
    DOT_WAIT,
    EXPECT,
    FENCE,
    ONE,
    SEND_WAIT,
    TRUE,
    WAIT,
    ZERO,
    Alloc,
    Barrier,
    BoxLoad,
    BoxStore,
    Buffer,
    Const,
    Expr,
    For,
    FuncCall,
    If,
    Kernel,
    Let,
    Mutator,
    Node,
    Piece,
    Put,
    Role,
    Roles,
    Send,
    Shared,
    Spread,
    Stmt,
    Update,
    Var,
    eq,
    find,
    seq,
    statements,
    substitute,
)
from transconv.passes.behind import Behind, behind
from transconv.passes.lets import optimise_lets
from transconv.passes.part_sums import Multiplying, in_groups, in_parts, steps_of_a_part
from transconv.passes.rings import PHASE, SLOT, Rings, advance, rings, slot_before
from transconv.passes.sliding import grouped, shared_rings
from transconv.passes.sooner import Sooner, sooner
from transconv.schedule import Schedule

TURN_WARPS = 4
TURN_REGISTERS = 104, 72  # per thread, of one role or two; a tile's side is held in them for a moment
TRANSPOSERS, RESTING = ("even_transposer", "odd_transposer"), Var("resting")
FETCH_REGISTERS = 24  # per thread of the warp that fetches; the others share what it leaves
CONSUMER_REGISTERS = 240  # of each of two consumers: what is then left, in steps of 8
CONSUMERS = ("evens", "odds")
PROGRAM, FETCHED = Var("program"), Var("fetched")
BATON = Barrier("baton", 1)  # a phase completes at the end of a tile's sum


def roles(kernel: Kernel, schedule: Schedule) -> Kernel:
    """Make the rings, barriers and roles of a kernel explicit, if the schedule asks for it."""
    if schedule.via != "gluon":
        return kernel
    grid = kernel.body
    assert isinstance(grid, For) and grid.kind == "grid", "an explicit kernel is one grid"
    around, inner = _around(grid.body)
    tile = _take_apart(inner)
    lets = (*(s for before, _ in around for s in before), *tile.before)
    if group := grouped(tile.loop, tile.lets, schedule.slide):
        ring = shared_rings(tile.fetched, (*lets, *tile.lets), schedule.stages, group)
        tile = replace(tile, loop=group.loop, lets=group.lets)
    else:
        ring = rings(tile.fetched, (*lets, *tile.lets), schedule.stages, tile.loop, schedule.keep)
    consumers = [_Consumer(number, schedule.consumers) for number in range(schedule.consumers)]
    brought = behind(tile.after, schedule.consumers, bool(grid.programs))
    ahead = sooner(tile.after, lets, tile.acc, schedule)
    own = [_clean(t.name, schedule.warps, CONSUMER_REGISTERS if t.number else 0,
                  _dealt(grid, around, _products(tile, ring, brought, ahead, grid, t), t))
           for t in consumers]
    for number in range(schedule.transposers if ring.turns else 0):
        name = TRANSPOSERS[number] if schedule.transposers > 1 else "transposer"
        own.append(_clean(name, TURN_WARPS, TURN_REGISTERS[schedule.transposers - 1],
                          _dealt(grid, around, _turns(tile, ring, number, schedule.transposers))))
    reserved = [Shared(r.buffer) for r in ring.of.values()]
    reserved += [Shared(r.transposed.buffer) for r in ring.of.values() if r.transposed is not None]
    reserved += [Shared(b) for b in ring.barriers]
    reserved += [Shared(BATON)] if schedule.consumers > 1 else []
    reserved += [Shared(x) for x in brought.shared]
    reserved += [Shared(x.piece.buffer) for role in own for x in find(role, Put)
                 if x.piece.buffer.slots == 1 and x.piece.buffer is not brought.result]
    body = _dealt(grid, around, _fetches(tile, ring, brought, grid.var))
    own.append(_clean("producer", 1, FETCH_REGISTERS, body))
    body = seq(*reserved, Roles(tuple(own)))
    whole = For(PROGRAM, grid.programs or grid.stop, body, "grid",
                until=None if grid.programs else grid.until)
    return replace(kernel, body=whole)


@dataclass(frozen=True, slots=True)
class _Consumer:
    """A group of consumer warps: the only one, or one ``of`` two that alternate."""

    number: int = 0
    of: int = 1

    @property
    def name(self) -> str:
        return "consumer" if self.of == 1 else CONSUMERS[self.number]


@dataclass(frozen=True, slots=True)
class _Tile:
    """The statements of a program for one tile: those ``before`` the sum, its loop with the fetches and
    the product, and those ``after`` it."""

    before: tuple[Stmt, ...]
    acc: Alloc
    loop: For
    lets: tuple[Stmt, ...]
    fetched: tuple[Let, ...]  # of boxes
    product: FuncCall
    after: tuple[Stmt, ...]


Around = tuple[tuple[tuple[Stmt, ...], For], ...]


def _around(body: Stmt) -> tuple[Around, Stmt]:
    """The loops over the tiles of one program, each with the statements before it, and the tile's body."""
    parts = statements(body)
    if any(isinstance(s, Alloc) for s in parts):
        return (), body
    *before, loop = parts
    assert isinstance(loop, For), "the tiles of a program are a loop"
    outer, tile = _around(loop.body)
    return ((tuple(before), loop), *outer), tile


def _take_apart(body: Stmt) -> _Tile:
    parts = statements(body)
    at = next((i for i, s in enumerate(parts) if isinstance(s, For)), None)
    if at is None:  # a sum of one step has no loop any more
        at = next(i for i, s in enumerate(parts) if isinstance(s, FuncCall) and s.func.multiplies)
        end, first = at + 1, next(i for i, s in enumerate(parts) if isinstance(s, Alloc)) + 1
        once = For(Var("once"), 1, seq(*parts[first:end]))
        parts = (*parts[:first], once, *parts[end:])
        at = first
    loop = parts[at]
    assert isinstance(loop, For)
    acc = next(s for s in parts[:at] if isinstance(s, Alloc))
    *steps, product = statements(loop.body)
    assert isinstance(product, FuncCall) and product.func.multiplies
    fetched = tuple(s for s in steps if isinstance(s, Let) and isinstance(s.value, BoxLoad))
    lets = tuple(s for s in steps if s not in fetched)
    return _Tile(tuple(s for s in parts[:at] if s is not acc), acc, loop, lets, fetched, product,
                 parts[at + 1:])


@dataclass(frozen=True, slots=True)
class _Act:
    """What a role does before the first tile, for every tile, and after the last one."""

    first: tuple[Stmt, ...]
    tile: Stmt
    last: tuple[Stmt, ...] = ()


def _counters(phase: int) -> tuple[Stmt, ...]:
    return Alloc(SLOT, (), Const(0)), Alloc(PHASE, (), Const(phase))


def _fetches(tile: _Tile, rings: Rings, brought: Behind, number: Var) -> _Act:
    """The producer: fill a slot per step as soon as it is free. In the first round all slots are free, so
    it waits for the phase before the first one, which counts as completed. A resident operand is fetched
    once, from the corners of the program's first tile. What is read behind the sum is ``brought``."""
    step = seq(*tile.lets, FuncCall(WAIT, (rings.free, SLOT, PHASE)),
               *_expected(rings, rings.landed, SLOT), *advance(rings.slots))
    first = (*_counters(1), *brought.counters())
    if rings.kept is not None:
        once = seq(*tile.lets, *_expected(rings, rings.kept, tile.loop.var))
        kept = seq(*tile.before, replace(tile.loop, body=once, stages=0))
        names: dict[Var, Expr] = {s.var: Var(f"first_{s.var.name}", s.var.type)
                                  for s in tile.before if isinstance(s, Let)}
        first = (*statements(substitute(kept, names | {number: PROGRAM})), *first)
    loop = replace(tile.loop, body=step, stages=0)
    return _Act(first, seq(*tile.before, loop, *brought.fetches()))


def _expected(rings: Rings, barrier: Barrier, slot: Var) -> Iterator[Stmt]:
    """Announce the bytes of a barrier's copies, and start the copies."""
    fetches = rings.fetches(barrier)
    yield FuncCall(EXPECT, (barrier, slot, Const(sum(f.piece.buffer.box_bytes for f in fetches))))
    yield from fetches


def _turns(tile: _Tile, rings: Rings, number: int, of: int) -> _Act:
    """A transposer: write a slot that has landed to the same slot of another ring, K innermost. In the
    first round all slots of that ring count as taken. One ``of`` two rests at every other step and does
    not see each phase of ``landed``: after the wait for ``taken``, only this step's phase is left."""
    puts = [Put(r.transposed, r.piece) for r in rings.turns if r.transposed is not None]
    step = seq(*tile.lets, FuncCall(WAIT, (rings.taken, SLOT, ONE - PHASE)),
               FuncCall(WAIT, (rings.landed, SLOT, PHASE)), *puts, FuncCall(FENCE, ()),
               FuncCall(ARRIVE, (rings.transposed, SLOT, TRUE)),
               FuncCall(ARRIVE, (rings.free, SLOT, TRUE)))
    first = _counters(0)
    if of > 1:
        first = (*first, Alloc(RESTING, (), Const(number)))
        step = seq(If(eq(RESTING, ZERO), step), Update(RESTING, ONE - RESTING))
    loop = replace(tile.loop, body=seq(step, *advance(rings.slots)), stages=0)
    return _Act(first, seq(*tile.before, loop))


def _products(tile: _Tile, rings: Rings, brought: Behind, ahead: Sooner, grid: For,
              consumer: _Consumer) -> _Act:
    """A consumer: multiply a slot as soon as it has landed, and free the one before, whose product has
    completed. What stands behind the sum and need not wait for it comes ``ahead``."""
    pairs = [*zip(*(_operands(a, rings) for a in tile.product.args[1:]), strict=True)]
    left, right = pairs[0]
    ready = [b for b, there in ((rings.landed, rings.direct), (rings.transposed, rings.turns)) if there]
    read = [b for b, there in ((rings.free, rings.direct), (rings.taken, rings.turns)) if there]

    def start(acc: Var, step: Expr) -> tuple[Stmt, ...]:
        kept = [FuncCall(WAIT, (rings.kept, tile.loop.var, ZERO))] if rings.kept else []
        product = seq(*kept, *(FuncCall(WAIT, (b, SLOT, PHASE)) for b in ready),
                      *(FuncCall(DOT_ASYNC, (acc, *pair)) for pair in pairs))
        return statements(product if step is tile.loop.var else substitute(product, {tile.loop.var: step}))

    def free(before: int, when: Expr = TRUE) -> tuple[Stmt, ...]:
        return tuple(FuncCall(ARRIVE, (b, slot_before(before, rings.slots), when)) for b in read)

    onward = advance(rings.slots)
    ended: tuple[Stmt, ...] = ()
    each = steps_of_a_part(left, right, tile.product.func.attr("precision"), rings.slots)
    if each and len(pairs) > 1:
        landed = (*tile.lets, *(FuncCall(WAIT, (b, SLOT, PHASE)) for b in ready))
        sums = in_groups(Multiplying(tile.loop, tile.acc, each, start, free), landed, pairs, onward)
    elif each:
        sums = in_parts(Multiplying(tile.loop, tile.acc, each,
                                    lambda acc, step: (*start(acc, step), *onward), free))
    else:
        running = FuncCall(DOT_WAIT, (Const(len(pairs)),))
        step = seq(*tile.lets, *start(tile.acc.var, tile.loop.var), running,
                   *free(1, tile.loop.var > 0), *onward)
        sums = (replace(tile.loop, body=step, stages=0),)
        ended = (FuncCall(DOT_WAIT, (ZERO,)), *free(1))
    first = _counters(0)
    if consumer.of > 1:
        first, sums = (), _in_turn(sums, tile, rings, grid, consumer)
    sent = [b for s in tile.after for b in find(s, BoxStore)]
    results = _Results(consumer, brought, sent)
    moved = ahead.once + ahead.early
    after = [results.mutate(s) for s in brought.read(tile.after, consumer.number) if s not in moved]
    whole = seq(*tile.before, *ahead.early, tile.acc, *sums, *ended, *after)
    return _Act((*ahead.once, *first, *brought.met()), whole,
                (FuncCall(SEND_WAIT, (ZERO,)),) if sent else ())


def _in_turn(sums: tuple[Stmt, ...], tile: _Tile, rings: Rings, grid: For,
             consumer: _Consumer) -> tuple[Stmt, ...]:
    """The sum of a consumer's tile: from the slot where the tiles before it end, and when the other one
    has begun all its products. What is left of those runs on beside the first ones here."""
    fetched = grid.var // grid.programs * tile.loop.stop
    return (Let(FETCHED, fetched), Alloc(SLOT, (), FETCHED % rings.slots),
            Alloc(PHASE, (), FETCHED // rings.slots % 2),
            FuncCall(WAIT, (BATON, ZERO, Const(1 - consumer.number))), *sums,
            FuncCall(ARRIVE, (BATON, ZERO, TRUE)))


def _operands(arg: Node, rings: Rings) -> tuple[Piece, ...]:
    """What the products of a slot multiply: one, or one for each step that shares it."""
    var = arg.x if isinstance(arg, Spread) else arg
    assert isinstance(var, Var)
    ring = rings.of[var]
    return ring.pieces or (ring.piece if ring.transposed is None else ring.transposed,)


class _Results(Mutator):
    """Stores boxes through shared memory, after the copies of the tile before have read that; one of them
    in place of a box that was brought, after which the producer may bring the next one."""

    def __init__(self, consumer: _Consumer, brought: Behind, sent: Sequence[BoxStore]) -> None:
        self.name = "tile" if consumer.of == 1 else f"tile{consumer.number}"
        self.brought, self.number = brought, consumer.number
        self.tensors = [s.tensor for s in sent]

    def mutate_BoxStore(self, at: BoxStore) -> Stmt:
        brought = self.brought
        if brought.result is not None and at.tensor is brought.stored:
            piece = Piece(brought.result, Const(self.number), ZERO, at.within)
        else:
            own = Buffer(f"{at.tensor.name}_{self.name}", at.tensor.dtype, 1, at.extents)
            piece = Piece(own, ZERO, ZERO, at.within)
        sent = (Put(piece, at.value), FuncCall(FENCE, ()), Send(at.tensor, at.corner, piece))
        if brought.result is not None:
            return seq(*sent, *(brought.done(self.number) if at.tensor is self.tensors[-1] else ()))
        return seq(*([FuncCall(SEND_WAIT, (ZERO,))] if at.tensor is self.tensors[0] else []), *sent)


def _dealt(grid: For, around: Around, act: _Act, consumer: _Consumer = _Consumer()) -> Stmt:
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
