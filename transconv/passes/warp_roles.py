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

With ``slide=`` a slot of a ring has the boxes of several steps of the sum (smem_pipeline.py). What the
epilogue reads can be fetched as well (``behind=box``, epilogue_reads.py).

With ``keep=b`` all tiles of a program multiply the same boxes of B, which must fit shared memory. They
are fetched once, before the first tile, each into a slot of its own, and are never freed.

The matrix unit takes operands of 8 and of 32 bits only with K innermost. A third role transposes other
boxes (see ``transposed_bytes`` in schedule) into a ring of their own:

    role transposer warps=4:
        for pid in program..784 dealt:
            for step: wait landed, taken; put A_transposed = A_ring; fence; arrive transposed, free

With ``transposers=2`` two such roles take turns at the steps. Each counts all slots:

    role even_transposer warps=4:                   role odd_transposer warps=4:
        resting = 0                                     resting = 1
        for step:                                       ...
            if resting == 0: wait landed, taken; ...
            resting = 1 - resting; next slot

With ``consumers=2`` two groups of warps take turns at the tiles of a program (ping-pong): while the one
stores its tile, the other multiplies. The rings stay as they are, in the order of the tiles:

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

Sums of 8-bit floats move to f32 after at most 128 products (``math=ieee``).

    for turn in 0..36:                   held = 0
        wait landed                      for pair in 0..18:
        dot_async(acc, a, b)                 even = 0; wait landed; dot_async(even, a, b)
        dot_wait(1); free          ->        acc = acc + held
                                             odd = 0; wait landed; dot_async(odd, a, b)
                                             part_wait(1, even, acc); free; acc = acc + even
                                             part_wait(0, odd, acc); free; held = odd
                                         acc = acc + held

While the matrix unit makes one part of a sum, the part before it is added to ``acc``, so that additions
take no time of their own. At the end of a pair all products have ended: where products run across the end
of an iteration, ptxas does not see which registers they still write, and waits after each instruction (its
warning C7514). A part is one step of the sum, or as many as 128 products have. The steps that are left
behind the last pair are parts that nothing runs beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from transconv import ir
from transconv.passes.epilogue_reads import EpilogueBoxes, Sooner, behind, sooner
from transconv.passes.scalar.cse import optimise_lets
from transconv.passes.smem_pipeline import (
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
    slot_before,
    take_apart,
)
from transconv.schedule import Schedule

CONSUMERS = ("evens", "odds")
FETCHED = ir.Var("fetched")
BATON = ir.Barrier("baton", 1)  # a phase completes at the end of a tile's sum


@dataclass(frozen=True, slots=True)
class Consumer:
    """A group of consumer warps: the only one, or one ``of`` two that alternate."""

    number: int = 0
    of: int = 1

    @property
    def name(self) -> str:
        return "consumer" if self.of == 1 else CONSUMERS[self.number]


ALONE = Consumer()


def multiply(
    tile: TileStatements,
    rings: Rings,
    brought: EpilogueBoxes,
    ahead: Sooner,
    grid: ir.For,
    consumer: Consumer,
) -> Act:
    """A consumer: multiply a slot as soon as it has landed, and free the one before, whose product has
    completed. What stands in the epilogue and need not wait for it comes ``ahead``."""
    pairs = [*zip(*(_operands(a, rings) for a in tile.product.args[1:]), strict=True)]
    left, right = pairs[0]
    ready = [b for b, there in ((rings.landed, rings.direct), (rings.transposed, rings.turns)) if there]
    read = [b for b, there in ((rings.free, rings.direct), (rings.taken, rings.turns)) if there]

    def start(acc: ir.Var, step: ir.Expr) -> tuple[ir.Stmt, ...]:
        kept = [ir.FuncCall(ir.WAIT, (rings.kept, tile.loop.var, ir.ZERO))] if rings.kept else []
        product = ir.seq(
            *kept,
            *(ir.FuncCall(ir.WAIT, (b, SLOT, PHASE)) for b in ready),
            *(ir.FuncCall(ir.DOT_ASYNC, (acc, *pair)) for pair in pairs),
        )
        return ir.statements(
            product if step is tile.loop.var else ir.substitute(product, {tile.loop.var: step})
        )

    def free(before: int, when: ir.Expr = ir.TRUE) -> tuple[ir.Stmt, ...]:
        return tuple(ir.FuncCall(ir.ARRIVE, (b, slot_before(before, rings.slots), when)) for b in read)

    onward = advance(rings.slots)
    ended: tuple[ir.Stmt, ...] = ()
    each = steps_of_a_part(left, right, tile.product.func.attr("precision"), rings.slots)
    if each and len(pairs) > 1:
        landed = (*tile.lets, *(ir.FuncCall(ir.WAIT, (b, SLOT, PHASE)) for b in ready))
        sums = in_groups(Multiplying(tile.loop, tile.acc, each, start, free), landed, pairs, onward)
    elif each:
        sums = in_parts(
            Multiplying(tile.loop, tile.acc, each, lambda acc, step: (*start(acc, step), *onward), free)
        )
    else:
        running = ir.FuncCall(ir.DOT_WAIT, (ir.Const(len(pairs)),))
        step = ir.seq(
            *tile.lets, *start(tile.acc.var, tile.loop.var), running, *free(1, tile.loop.var > 0), *onward
        )
        sums = (replace(tile.loop, body=step, stages=0),)
        ended = (ir.FuncCall(ir.DOT_WAIT, (ir.ZERO,)), *free(1))
    first = counters(0)
    if consumer.of > 1:
        first, sums = (), _in_turn(sums, tile, rings, grid, consumer)
    sent = [b for s in tile.after for b in ir.find(s, ir.BoxStore)]
    results = Results(consumer, brought, sent)
    moved = ahead.once + ahead.early
    after = [results.mutate(s) for s in brought.read(tile.after, consumer.number) if s not in moved]
    whole = ir.seq(*tile.before, *ahead.early, tile.acc, *sums, *ended, *after)
    return Act(
        (*ahead.once, *first, *brought.met()),
        whole,
        (ir.FuncCall(ir.SEND_WAIT, (ir.ZERO,)),) if sent else (),
    )


def _in_turn(
    sums: tuple[ir.Stmt, ...], tile: TileStatements, rings: Rings, grid: ir.For, consumer: Consumer
) -> tuple[ir.Stmt, ...]:
    """The sum of a consumer's tile: from the slot where the tiles before it end, and when the other one
    has begun all its products. What is left of those runs on beside the first ones here."""
    fetched = grid.var // grid.programs * tile.loop.stop
    return (
        ir.Let(FETCHED, fetched),
        ir.Alloc(SLOT, (), FETCHED % rings.slots),
        ir.Alloc(PHASE, (), FETCHED // rings.slots % 2),
        ir.FuncCall(ir.WAIT, (BATON, ir.ZERO, ir.Const(1 - consumer.number))),
        *sums,
        ir.FuncCall(ir.ARRIVE, (BATON, ir.ZERO, ir.TRUE)),
    )


def _operands(arg: ir.Node, rings: Rings) -> tuple[ir.SlotTile, ...]:
    """What the products of a slot multiply: one, or one for each step that shares it."""
    var = arg.x if isinstance(arg, ir.Spread) else arg
    assert isinstance(var, ir.Var)
    ring = rings.of[var]
    return ring.pieces or (ring.piece if ring.transposed is None else ring.transposed,)


class Results(ir.Mutator):
    """Stores boxes through shared memory, after the copies of the tile before have read that; one of them
    in place of a box that was brought, after which the producer may bring the next one."""

    def __init__(self, consumer: Consumer, brought: EpilogueBoxes, sent: Sequence[ir.BoxStore]) -> None:
        self.name = "tile" if consumer.of == 1 else f"tile{consumer.number}"
        self.brought, self.number = brought, consumer.number
        self.tensors = [s.tensor for s in sent]

    def mutate_BoxStore(self, at: ir.BoxStore) -> ir.Stmt:
        brought = self.brought
        if brought.result is not None and at.tensor is brought.stored:
            piece = ir.SlotTile(brought.result, ir.Const(self.number), ir.ZERO, at.within)
        else:
            own = ir.SmemRing(f"{at.tensor.name}_{self.name}", at.tensor.dtype, 1, at.extents)
            piece = ir.SlotTile(own, ir.ZERO, ir.ZERO, at.within)
        sent = (ir.Put(piece, at.value), ir.FuncCall(ir.FENCE, ()), ir.Send(at.tensor, at.corner, piece))
        if brought.result is not None:
            return ir.seq(*sent, *(brought.done(self.number) if at.tensor is self.tensors[-1] else ()))
        return ir.seq(
            *([ir.FuncCall(ir.SEND_WAIT, (ir.ZERO,))] if at.tensor is self.tensors[0] else []), *sent
        )


PAIR = ir.Var("pair")


@dataclass(frozen=True, slots=True)
class Multiplying:
    """A consumer's sum ``acc`` over the loop ``turns``. ``start`` are the statements of a step that add
    its product to an accumulator and go on to the next slot; ``free`` those that free the slot of so many
    steps before."""

    turns: ir.For
    acc: ir.Alloc
    each: int  # steps of a part
    start: Callable[[ir.Var, ir.Expr], tuple[ir.Stmt, ...]]
    free: Callable[[int], tuple[ir.Stmt, ...]]

    def products(self, acc: ir.Var, first: ir.Expr, steps: range) -> list[ir.Stmt]:
        """Start the products of some steps behind the ``first``."""
        return [s for i in steps for s in self.start(acc, first + i)]

    def zero(self, acc: ir.Var) -> ir.Alloc:
        return ir.Alloc(acc, self.acc.lanes, self.acc.init)

    def add(self, part: ir.Var) -> ir.Update:
        return ir.Update(self.acc.var, self.acc.var + part)


def steps_of_a_part(left: ir.SlotTile, right: ir.SlotTile, precision: str, slots: int) -> int:
    """How many steps have 128 products, and leave one of the ``slots`` to be filled; 0 if sums of these
    operands are not moved."""
    if not (precision == "ieee" and left.dtype.is_short and right.dtype.is_short):
        return 0
    summed = next(x for x in ir.lanes_of(left) if x in ir.lanes_of(right))
    return max(1, min(ir.EXACT_TERMS // summed.extent, slots - 1))


def in_parts(m: Multiplying) -> tuple[ir.Stmt, ...]:
    """The statements of the whole sum, behind which all slots are free."""
    even, odd, held = (ir.Var(name, m.acc.var.type) for name in ("even", "odd", "held"))
    each, turns = m.each, m.turns
    both = 2 * each
    pairs, until = turns.stop // both, None if turns.until is None else turns.until // both
    first, second, others = PAIR * both, PAIR * both + each, range(1, each)
    body = ir.seq(
        m.zero(even),
        *m.products(even, first, range(1)),
        m.add(held),
        *m.products(even, first, others),
        m.zero(odd),
        *m.products(odd, second, range(1)),
        ir.FuncCall(ir.PART_WAIT, (ir.ONE, even, m.acc.var)),
        *_freed(m, range(each + 1, 1, -1)),
        m.add(even),
        *m.products(odd, second, others),
        ir.FuncCall(ir.PART_WAIT, (ir.ZERO, odd, m.acc.var)),
        *_freed(m, range(each, 0, -1)),
        ir.Update(held, odd),
    )
    whole: list[ir.Stmt] = []
    if pairs:
        whole = [m.zero(held), ir.For(PAIR, pairs, body, until=until), m.add(held)]
    if until is not None or turns.stop % both:
        alone = ir.seq(
            m.zero(even),
            *m.products(even, turns.var, range(1)),
            ir.FuncCall(ir.PART_WAIT, (ir.ZERO, even, m.acc.var)),
            *m.free(1),
            m.add(even),
        )
        start = ir.Const(pairs * both) if until is None else until * both
        whole.append(ir.For(turns.var, turns.stop, alone, start=start, until=turns.until))
    return tuple(whole)


def in_groups(
    m: Multiplying,
    landed: tuple[ir.Stmt, ...],
    pairs: list[tuple[ir.SlotTile, ir.SlotTile]],
    onward: list[ir.Stmt],
) -> tuple[ir.Stmt, ...]:
    """The statements of a whole sum of groups of steps, whose products have these ``pairs`` of operands in
    a slot that has ``landed``. ``onward``: those that go on to the next slot."""
    held = ir.Var("held", m.acc.var.type)
    body, before = list(landed), held
    for at in range(0, len(pairs), m.each):
        part = ir.Var(f"part{at // m.each}", m.acc.var.type)
        first, *others = (ir.FuncCall(ir.DOT_ASYNC, (part, *pair)) for pair in pairs[at : at + m.each])
        body += [m.zero(part), first]
        body += [ir.FuncCall(ir.PART_WAIT, (ir.ONE, before, m.acc.var))] if at else []
        body += [m.add(before), *others]
        before = part
    body += [
        *onward,
        ir.FuncCall(ir.PART_WAIT, (ir.ZERO, before, m.acc.var)),
        *m.free(1),
        ir.Update(held, before),
    ]
    return m.zero(held), replace(m.turns, body=ir.seq(*body), stages=0), m.add(held)


def _freed(m: Multiplying, before: range) -> list[ir.Stmt]:
    return [s for steps in before for s in m.free(steps)]


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
    own = [
        _clean(
            t.name,
            schedule.warps,
            CONSUMER_REGISTERS if t.number else 0,
            _dealt(grid, around, multiply(tile, ring, brought, ahead, grid, t), t),
        )
        for t in consumers
    ]
    for number in range(schedule.transposers if ring.turns else 0):
        name = TRANSPOSERS[number] if schedule.transposers > 1 else "transposer"
        own.append(
            _clean(
                name,
                TRANSPOSER_WARPS,
                TRANSPOSER_REGISTERS[schedule.transposers - 1],
                _dealt(grid, around, transpose(tile, ring, number, schedule.transposers)),
            )
        )
    reserved = [ir.Shared(r.buffer) for r in ring.of.values()]
    reserved += [ir.Shared(r.transposed.buffer) for r in ring.of.values() if r.transposed is not None]
    reserved += [ir.Shared(b) for b in ring.barriers]
    reserved += [ir.Shared(BATON)] if schedule.consumers > 1 else []
    reserved += [ir.Shared(x) for x in brought.shared]
    reserved += [
        ir.Shared(x.piece.buffer)
        for role in own
        for x in ir.find(role, ir.Put)
        if x.piece.buffer.slots == 1 and x.piece.buffer is not brought.result
    ]
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
    once, from the corners of the program's first tile. What is read in the epilogue is ``brought``."""
    step = ir.seq(
        *tile.lets,
        ir.FuncCall(ir.WAIT, (rings.free, SLOT, PHASE)),
        *_expected(rings, rings.landed, SLOT),
        *advance(rings.slots),
    )
    first = (*counters(1), *brought.counters())
    if rings.kept is not None:
        once = ir.seq(*tile.lets, *_expected(rings, rings.kept, tile.loop.var))
        kept = ir.seq(*tile.before, replace(tile.loop, body=once, stages=0))
        names: dict[ir.Var, ir.Expr] = {
            s.var: ir.Var(f"first_{s.var.name}", s.var.type) for s in tile.before if isinstance(s, ir.Let)
        }
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
    step = ir.seq(
        *tile.lets,
        ir.FuncCall(ir.WAIT, (rings.taken, SLOT, ir.ONE - PHASE)),
        ir.FuncCall(ir.WAIT, (rings.landed, SLOT, PHASE)),
        *puts,
        ir.FuncCall(ir.FENCE, ()),
        ir.FuncCall(ir.ARRIVE, (rings.transposed, SLOT, ir.TRUE)),
        ir.FuncCall(ir.ARRIVE, (rings.free, SLOT, ir.TRUE)),
    )
    first = counters(0)
    if of > 1:
        first = (*first, ir.Alloc(RESTING, (), ir.Const(number)))
        step = ir.seq(ir.If(ir.eq(RESTING, ir.ZERO), step), ir.Update(RESTING, ir.ONE - RESTING))
    loop = replace(tile.loop, body=ir.seq(step, *advance(rings.slots)), stages=0)
    return Act(first, ir.seq(*tile.before, loop))
