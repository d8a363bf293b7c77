"""What the maps behind a sum read, in warp-specialized kernels: the producer fetches boxes of it while the
consumers multiply (see ``warp_spec/warp_roles.py``; the word ``behind=box``).

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

Also here: loads behind a sum that do not wait for it, in the consumers of warp-specialized kernels
(``warp_spec/warp_roles.py``).

    for pid ..:                                       let q = load(Q, 0); let i = 1 / q
        for step: dot_async(acc, ..)                  for pid ..:
        dot_wait(0)                              ->       let b = load(B, n_at*128 + n)
        let q = load(Q, 0)                                for step: dot_async(acc, ..)
        let b = load(B, n_at*128 + n)                     dot_wait(0)
        let y = (acc + b) * (1 / q)                       let y = (acc + b) * i

What is the same for all tiles is loaded once. Vectors along a side of the tile are loaded before its sum,
so that they are there when it is, as far as a thread has registers for them beside its sums: along the
columns of the register tile each thread holds a quarter of them, along its rows few. Behind the waits, a
tile of few steps spends more time on them than on its products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from transconv.ir import (
    ARRIVE,
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
    Const,
    Expr,
    Fetch,
    FuncCall,
    Lane,
    Let,
    Load,
    MemoryRead,
    SlotTile,
    SmemRing,
    Stmt,
    Store,
    Tensor,
    Update,
    Var,
    eq,
    find,
    free_vars,
    lanes_of,
    select,
)
from transconv.passes.warp_spec.smem_pipeline import laned_lets, whole
from transconv.schedule import Schedule

MET, BARE, TURN = Var("met"), Var("bare"), Var("turn")


@dataclass(frozen=True, slots=True)
class EpilogueBoxes:
    """The boxes read behind the sum. ``of``: their buffers by the variable of the let that reads them;
    ``result``: the buffer that the box of the ``stored`` tensor is put to as well, or None; ``again``:
    whether a program has several tiles; ``spread``: the values of names over lanes, of which the producer
    has none."""

    lets: tuple[Let, ...]
    names: tuple[Let, ...]  # before them, in which their corners are said
    of: dict[Var, SmemRing]
    result: SmemRing | None
    stored: Tensor | None
    consumers: int
    again: bool
    spread: dict[Var, Expr]

    @property
    def brought(self) -> Barrier:
        """The boxes of a tile have landed."""
        return Barrier("brought", self.consumers)

    @property
    def emptied(self) -> Barrier:
        """They have been read, and what took their place has been sent."""
        return Barrier("emptied", self.consumers)

    @property
    def shared(self) -> tuple[SmemRing | Barrier, ...]:
        """What they need in shared memory."""
        if not self.lets:
            return ()
        return (*self.of.values(), self.brought, *([self.emptied] if self.again else []))

    # -- the producer ----------------------------------------------------------------------------

    def counters(self) -> tuple[Stmt, ...]:
        """The producer's: whose tile is next, and the phase of its slot that is waited for."""
        if not self.lets or not self.again:
            return ()
        turn = (Alloc(TURN, (), ZERO),) if self.consumers > 1 else ()
        return (*turn, Alloc(BARE, (), ONE))

    def fetches(self) -> Iterator[Stmt]:
        """Of one tile, as soon as its consumer has done with the tile before."""
        if not self.lets:
            return
        slot: Expr = TURN if self.consumers > 1 else ZERO
        yield from (s for s in self.names if s.var not in self.spread)
        if self.again:
            yield FuncCall(WAIT, (self.emptied, slot, BARE))
        bytes_of = sum(b.box_bytes for b in self.of.values())
        yield FuncCall(EXPECT, (self.brought, slot, Const(bytes_of)))
        for let in self.lets:
            assert isinstance(let.value, BoxLoad)
            corner = tuple(whole(c, self.spread) for c in let.value.corner)
            piece = self.piece(let, slot)
            piece = replace(piece, within=tuple(whole(w, self.spread) for w in piece.within))
            yield Fetch(let.value.tensor, corner, piece, self.brought, slot)
        if self.again and self.consumers > 1:
            yield Update(BARE, select(eq(TURN, self.consumers - 1), ONE - BARE, BARE))
            yield Update(TURN, ONE - TURN)
        elif self.again:
            yield Update(BARE, ONE - BARE)

    def piece(self, let: Let, slot: Expr) -> SlotTile:
        """A box in shared memory, as a tile."""
        assert isinstance(let.value, BoxLoad)
        return SlotTile(self.of[let.var], slot, ZERO, let.value.within)

    # -- a consumer ------------------------------------------------------------------------------

    def met(self) -> tuple[Stmt, ...]:
        """A consumer's counter: the phase in which its tile's boxes land."""
        return (Alloc(MET, (), ZERO),) if self.lets and self.again else ()

    def read(self, after: tuple[Stmt, ...], number: int) -> Iterator[Stmt]:
        """The statements behind the sum of consumer ``number``, with the boxes read where they landed."""
        slot, left = Const(number), len(self.lets)
        for s in after:
            if s not in self.lets:
                yield s
                continue
            assert isinstance(s, Let)
            if left == len(self.lets):
                yield FuncCall(WAIT, (self.brought, slot, MET if self.again else ZERO))
            left -= 1
            yield replace(s, value=self.piece(s, slot))
            if not left and self.result is None:
                yield from self.done(number)

    def done(self, number: int) -> Iterator[Stmt]:
        """Let the producer fetch the boxes of the next tile."""
        if self.lets and self.again:
            yield FuncCall(FENCE, ()) if self.result is None else FuncCall(SEND_WAIT, (ZERO,))
            yield FuncCall(ARRIVE, (self.emptied, Const(number), TRUE))
            yield Update(MET, ONE - MET)


def behind(
    before: tuple[Stmt, ...], after: tuple[Stmt, ...], consumers: int, again: bool
) -> EpilogueBoxes:
    """The boxes that the statements after a sum read; ``before``: the lets before it."""
    lets = tuple(s for s in after if isinstance(s, Let) and isinstance(s.value, BoxLoad))
    last = max((after.index(s) for s in lets), default=0)
    names = tuple(s for s in after[:last] if isinstance(s, Let) and not find(s, MemoryRead))
    stored = [s for s in after if isinstance(s, BoxStore)]
    of, result, into = {}, None, None
    for let in lets:
        box = let.value
        assert isinstance(box, BoxLoad)
        own = f"{box.tensor.name}_tile"
        alike = (s for s in stored if result is None and s.extents == box.extents
                 and s.within == box.within and s.tensor.dtype is box.dtype)
        if (taken := next(alike, None)) is not None:
            own = f"{taken.tensor.name}_tile"
        of[let.var] = SmemRing(own, box.dtype, consumers, box.extents)
        if taken is not None:
            result, into = of[let.var], taken.tensor
    spread = laned_lets((*before, *names))
    return EpilogueBoxes(lets, names, of, result, into, consumers, again, spread)


# Of a thread, for its sums, the tiles that are added to them, and vectors: of the 255 that it may have,
# without those for addresses. Not fitted to times.
REGISTERS = 208
COLUMNS = 4  # threads that share a row of the register tile
ROWS = 8  # rows of it that a warp's threads share

Scope = Mapping[Var, tuple[Lane, ...]]


@dataclass(frozen=True, slots=True)
class Sooner:
    """Statements that stood behind the sum: those to execute ``once``, before the first tile, and those
    ``early``, before the sum of each."""

    once: tuple[Stmt, ...] = ()
    early: tuple[Stmt, ...] = ()


def sooner(after: Sequence[Stmt], names: Iterable[Stmt], acc: Alloc, schedule: Schedule) -> Sooner:
    """What of the statements behind the sum ``acc`` need not wait for it. ``names``: the statements before
    it, which say the places of a tile."""
    lets = [s for s in after if isinstance(s, Let)]
    stored = {x.tensor for s in after for x in find(s, Store)} | {
        x.tensor for s in after for x in find(s, BoxStore)}
    scope = _scope(names)
    once = _once(lets, stored, scope)
    late = {acc.var, *(s.var for s in lets)} - {s.var for s in once}
    left = REGISTERS - _of_tiles(acc, lets, schedule)
    early: list[Stmt] = []
    for s in lets:
        if s in once or not isinstance(s.value, Load) or s.value.tensor in stored or (
                late & free_vars(s.value)):
            continue
        along = lanes_of(s.value, scope)
        if len(along) < 2 and (need := _registers(s.value, along, schedule)) <= left:
            early.append(s)
            left -= need
    return Sooner(tuple(once), tuple(early))


def _scope(names: Iterable[Stmt]) -> dict[Var, tuple[Lane, ...]]:
    """The lanes along which names vary."""
    found: dict[Var, tuple[Lane, ...]] = {}
    for s in names:
        if isinstance(s, Let):
            found[s.var] = lanes_of(s.value, found)
    return found


def _once(lets: list[Let], stored: set[Tensor], scope: Scope) -> list[Let]:
    """Scalars that are the same for all tiles: loads, and what follows from them alone."""
    found: list[Let] = []
    for s in lets:
        known = free_vars(s.value) <= {x.var for x in found} and not lanes_of(s.value, scope)
        loads = isinstance(s.value, Load) and s.value.tensor not in stored
        if known and (loads or free_vars(s.value)):
            found.append(s)
    return found


def _of_tiles(acc: Alloc, lets: list[Let], schedule: Schedule) -> float:
    """Registers of a thread for a tile's sums, and for boxes that are read behind them."""
    points = prod(lane.extent for lane in acc.lanes) / (32 * schedule.warps)
    read = sum(s.value.dtype.bytes for s in lets if isinstance(s.value, BoxLoad))
    return points * (acc.var.type.bytes + read) / 4


def _registers(load: Load, along: tuple[Lane, ...], schedule: Schedule) -> float:
    """Registers of a thread for what it holds of a vector: a row's share of it, or a column's."""
    if not along:
        return 1
    left = along[0].kind == ("N" if schedule.swap else "M")
    shared = ROWS * schedule.warps if left else COLUMNS
    return max(1.0, along[0].extent / shared * max(2, load.dtype.bytes) / 4)
