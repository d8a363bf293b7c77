"""Epilogue reads of warp-specialized kernels: the producer fetches boxes of it while the
consumers multiply (see ``warp_roles.py``; the word ``behind=box``).

    r = box_load(R, at=[..])                  producer, after the steps of a tile:
    box_store(C, at=[..], acc + r)                wait(emptied, 0, bare)
                                                  fetch R at=[..] -> C_tile[0], then brought[0]
                                          ->  consumer, after its last product:
                                                  wait(brought, 0, met)
                                                  let r = C_tile[0]
                                                  put C_tile[0] = acc + r; fence(); send C_tile[0] -> C
                                                  send_wait(0); arrive(emptied, 0)

The first box that is as large as the result's lies where the result will be put; others have a tile of
their own. Each consumer has its tiles, in the slots of one ring. They are fetched again when they have
been read, and where the result takes their place when it has been sent. A program of one tile fetches
once, so nothing is emptied.

Loads of an epilogue that do not wait for it, in the consumers of warp-specialized kernels
(``warp_roles.py``).

    for pid ..:                                       let q = load(Q, 0); let i = 1 / q
        for step: dot_async(acc, ..)                  for pid ..:
        dot_wait(0)                              ->       let b = load(B, n_at*128 + n)
        let q = load(Q, 0)                                for step: dot_async(acc, ..)
        let b = load(B, n_at*128 + n)                     dot_wait(0)
        let y = (acc + b) * (1 / q)                       let y = (acc + b) * i

What is the same for all tiles is loaded once. Vectors along a side of the tile are loaded before its sum,
as far as a thread has registers for them beside its sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from transconv import ir
from transconv.passes.smem_pipeline import laned_lets, whole
from transconv.schedule import Schedule

MET, BARE, TURN = ir.Var("met"), ir.Var("bare"), ir.Var("turn")


@dataclass(frozen=True, slots=True)
class EpilogueBoxes:
    """The boxes read in the epilogue. ``of``: their buffers by the variable of the let that reads them;
    ``result``: the buffer that the box of the ``stored`` tensor is put to as well, or None; ``again``:
    whether a program has several tiles; ``spread``: the values of names over lanes, of which the producer
    has none."""

    lets: tuple[ir.Let, ...]
    names: tuple[ir.Let, ...]  # before them, in which their corners are said
    of: dict[ir.Var, ir.SmemRing]
    result: ir.SmemRing | None
    stored: ir.Tensor | None
    consumers: int
    again: bool
    spread: dict[ir.Var, ir.Expr]

    @property
    def brought(self) -> ir.Barrier:
        """The boxes of a tile have landed."""
        return ir.Barrier("brought", self.consumers)

    @property
    def emptied(self) -> ir.Barrier:
        """They have been read, and what took their place has been sent."""
        return ir.Barrier("emptied", self.consumers)

    @property
    def shared(self) -> tuple[ir.SmemRing | ir.Barrier, ...]:
        """What they need in shared memory."""
        if not self.lets:
            return ()
        return (*self.of.values(), self.brought, *([self.emptied] if self.again else []))

    # -- the producer ----------------------------------------------------------------------------

    def counters(self) -> tuple[ir.Stmt, ...]:
        """The producer's: whose tile is next, and the phase of its slot that is waited for."""
        if not self.lets or not self.again:
            return ()
        turn = (ir.Alloc(TURN, (), ir.ZERO),) if self.consumers > 1 else ()
        return (*turn, ir.Alloc(BARE, (), ir.ONE))

    def fetches(self) -> Iterator[ir.Stmt]:
        """Of one tile, as soon as its consumer has done with the tile before."""
        if not self.lets:
            return
        slot: ir.Expr = TURN if self.consumers > 1 else ir.ZERO
        yield from (s for s in self.names if s.var not in self.spread)
        if self.again:
            yield ir.FuncCall(ir.WAIT, (self.emptied, slot, BARE))
        bytes_of = sum(b.box_bytes for b in self.of.values())
        yield ir.FuncCall(ir.EXPECT, (self.brought, slot, ir.Const(bytes_of)))
        for let in self.lets:
            assert isinstance(let.value, ir.BoxLoad)
            corner = tuple(whole(c, self.spread) for c in let.value.corner)
            piece = self.piece(let, slot)
            piece = replace(piece, within=tuple(whole(w, self.spread) for w in piece.within))
            yield ir.Fetch(let.value.tensor, corner, piece, self.brought, slot)
        if self.again and self.consumers > 1:
            yield ir.Update(BARE, ir.select(ir.eq(TURN, self.consumers - 1), ir.ONE - BARE, BARE))
            yield ir.Update(TURN, ir.ONE - TURN)
        elif self.again:
            yield ir.Update(BARE, ir.ONE - BARE)

    def piece(self, let: ir.Let, slot: ir.Expr) -> ir.SlotTile:
        """A box in shared memory, as a tile."""
        assert isinstance(let.value, ir.BoxLoad)
        return ir.SlotTile(self.of[let.var], slot, ir.ZERO, let.value.within)

    # -- a consumer ------------------------------------------------------------------------------

    def met(self) -> tuple[ir.Stmt, ...]:
        """A consumer's counter: the phase in which its tile's boxes land."""
        return (ir.Alloc(MET, (), ir.ZERO),) if self.lets and self.again else ()

    def read(self, after: tuple[ir.Stmt, ...], number: int) -> Iterator[ir.Stmt]:
        """The epilogue of consumer ``number``, with the boxes read where they landed."""
        slot, left = ir.Const(number), len(self.lets)
        for s in after:
            if s not in self.lets:
                yield s
                continue
            assert isinstance(s, ir.Let)
            if left == len(self.lets):
                yield ir.FuncCall(ir.WAIT, (self.brought, slot, MET if self.again else ir.ZERO))
            left -= 1
            yield replace(s, value=self.piece(s, slot))
            if not left and self.result is None:
                yield from self.done(number)

    def done(self, number: int) -> Iterator[ir.Stmt]:
        """Let the producer fetch the boxes of the next tile."""
        if self.lets and self.again:
            read = (ir.FENCE, ()) if self.result is None else (ir.SEND_WAIT, (ir.ZERO,))
            yield ir.FuncCall(*read)
            yield ir.FuncCall(ir.ARRIVE, (self.emptied, ir.Const(number), ir.TRUE))
            yield ir.Update(MET, ir.ONE - MET)


def behind(
    before: tuple[ir.Stmt, ...], after: tuple[ir.Stmt, ...], consumers: int, again: bool
) -> EpilogueBoxes:
    """The boxes that the statements after a sum read; ``before``: the lets before it."""
    lets = tuple(s for s in after if isinstance(s, ir.Let) and isinstance(s.value, ir.BoxLoad))
    last = max((after.index(s) for s in lets), default=0)
    names = tuple(s for s in after[:last] if isinstance(s, ir.Let) and not ir.find(s, ir.MemoryRead))
    stored = [s for s in after if isinstance(s, ir.BoxStore)]
    of, result, into = {}, None, None
    for let in lets:
        box = let.value
        assert isinstance(box, ir.BoxLoad)
        own = f"{box.tensor.name}_tile"
        alike = (
            s
            for s in stored
            if result is None
            and s.extents == box.extents
            and s.within == box.within
            and s.tensor.dtype is box.dtype
        )
        if (taken := next(alike, None)) is not None:
            own = f"{taken.tensor.name}_tile"
        of[let.var] = ir.SmemRing(own, box.dtype, consumers, box.extents)
        if taken is not None:
            result, into = of[let.var], taken.tensor
    spread = laned_lets((*before, *names))
    return EpilogueBoxes(lets, names, of, result, into, consumers, again, spread)


# Of a thread, for its sums, the tiles that are added to them, and vectors: of the 255 that it may have,
# without those for addresses. Not fitted to times.
REGISTERS = 208
COLUMNS = 4  # threads that share a row of the register tile
ROWS = 8  # rows of it that a warp's threads share

Scope = Mapping[ir.Var, tuple[ir.Lane, ...]]


@dataclass(frozen=True, slots=True)
class Sooner:
    """Loads and values moved out of the epilogue: those to execute ``once``, before the first tile, and
    those ``early``, before the sum of each."""

    once: tuple[ir.Stmt, ...] = ()
    early: tuple[ir.Stmt, ...] = ()


def sooner(
    after: Sequence[ir.Stmt], names: Iterable[ir.Stmt], acc: ir.Alloc, schedule: Schedule
) -> Sooner:
    """What of the epilogue of the sum ``acc`` need not wait for it. ``names``: the statements before
    it, which say the places of a tile."""
    lets = [s for s in after if isinstance(s, ir.Let)]
    stored = {x.tensor for s in after for x in ir.find(s, ir.Store)} | {
        x.tensor for s in after for x in ir.find(s, ir.BoxStore)
    }
    scope = _scope(names)
    once = _once(lets, stored, scope)
    late = {acc.var, *(s.var for s in lets)} - {s.var for s in once}
    left = REGISTERS - _of_tiles(acc, lets, schedule)
    early: list[ir.Stmt] = []
    for s in lets:
        if (
            s in once
            or not isinstance(s.value, ir.Load)
            or s.value.tensor in stored
            or (late & ir.free_vars(s.value))
        ):
            continue
        along = ir.lanes_of(s.value, scope)
        if len(along) < 2 and (need := _registers(s.value, along, schedule)) <= left:
            early.append(s)
            left -= need
    return Sooner(tuple(once), tuple(early))


def _scope(names: Iterable[ir.Stmt]) -> dict[ir.Var, tuple[ir.Lane, ...]]:
    """The lanes along which names vary."""
    found: dict[ir.Var, tuple[ir.Lane, ...]] = {}
    for s in names:
        if isinstance(s, ir.Let):
            found[s.var] = ir.lanes_of(s.value, found)
    return found


def _once(lets: list[ir.Let], stored: set[ir.Tensor], scope: Scope) -> list[ir.Let]:
    """Scalars that are the same for all tiles: loads, and what follows from them alone."""
    found: list[ir.Let] = []
    for s in lets:
        known = ir.free_vars(s.value) <= {x.var for x in found} and not ir.lanes_of(s.value, scope)
        loads = isinstance(s.value, ir.Load) and s.value.tensor not in stored
        if known and (loads or ir.free_vars(s.value)):
            found.append(s)
    return found


def _of_tiles(acc: ir.Alloc, lets: list[ir.Let], schedule: Schedule) -> float:
    """Registers of a thread for a tile's sums, and for boxes that their epilogue reads."""
    points = prod(lane.extent for lane in acc.lanes) / (32 * schedule.warps)
    read = sum(s.value.dtype.bytes for s in lets if isinstance(s.value, ir.BoxLoad))
    return points * (acc.var.type.bytes + read) / 4


def _registers(load: ir.Load, along: tuple[ir.Lane, ...], schedule: Schedule) -> float:
    """Registers of a thread for what it holds of a vector: a row's share of it, or a column's."""
    if not along:
        return 1
    left = along[0].kind == ("N" if schedule.swap else "M")
    shared = ROWS * schedule.warps if left else COLUMNS
    return max(1.0, along[0].extent / shared * max(2, load.dtype.bytes) / 4)
