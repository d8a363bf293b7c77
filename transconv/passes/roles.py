"""Stage 9b. In: a lanewise kernel that moves boxes. Out: the same with its shared memory and its waits
written down, and its warps in two roles (``via=gluon``).

    for pid in 0..784 grid programs=132:          for program in 0..132 grid:
        ...lets                                       shared src_ring[3], wei_ring[3], dst_tile
        acc = 0                                       barrier landed[3], free[3]
        for step in 0..36:                            role products warps=8:
            a = box_load(src, at=[..])                    for pid in program..784 dealt:
            b = box_load(wei, at=[..])       ->               for step: wait landed; dot_async; free
            dot(acc, b, a)                                    put, fence, send dst_tile
        box_store(dst, at=[..], acc)                  role fetches warps=1:
                                                          for pid in program..784 dealt:
                                                              for step: wait free; fetch src, wei

One warp runs ahead and fills the rings, also with boxes of the next tile while the result of this one
is stored; the others only multiply. A product is waited for one step later, so two are under way.

The matrix unit takes operands of 32 bits along K only. Boxes that lie otherwise (see ``boxes.turned``)
are turned between the two by a third role, into a ring of their own:

    role turns warps=4:
        for pid in program..784 dealt:
            for step: wait landed, taken; put src_turned = src_ring; fence; arrive turned, free
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transconv.config import Config
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
    Fetch,
    For,
    FuncCall,
    Kernel,
    Lane,
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
    free_vars,
    i32,
    lanes_of,
    select,
    seq,
    statements,
    substitute,
)
from transconv.passes.lanewise import AXIS as LANE_AXES
from transconv.passes.lets import optimise_lets
from transconv.simplify import simplify

TURN_WARPS, TURN_REGISTERS = 4, 104  # per thread; a tile's side is held in registers for a moment
FETCH_REGISTERS = 24  # per thread of the warp that fetches; the others share what it leaves
PROGRAM, SLOT, PHASE = Var("program"), Var("slot", i32), Var("phase", i32)


def roles(kernel: Kernel, config: Config) -> Kernel:
    """Make the rings, barriers and roles of a kernel explicit, if the config asks for it."""
    if config.via != "gluon":
        return kernel
    grid = kernel.body
    assert isinstance(grid, For) and grid.kind == "grid", "an explicit kernel is one grid"
    around, inner = _around(grid.body)
    tile = _take_apart(inner)
    rings = _rings(tile, config)
    own = [_clean("products", config.warps, 0, _dealt(grid, around, _products(tile, rings)))]
    if rings.turns:
        own.append(_clean("turns", TURN_WARPS, TURN_REGISTERS,
                          _dealt(grid, around, _turns(tile, rings))))
    own.append(_clean("fetches", 1, FETCH_REGISTERS, _dealt(grid, around, _fetches(tile, rings))))
    reserved = [Shared(r.buffer) for r in rings.of.values()]
    reserved += [Shared(r.turned.buffer) for r in rings.of.values() if r.turned is not None]
    reserved += [Shared(b) for b in rings.barriers]
    reserved += [Shared(x.piece.buffer) for x in find(own[0], Put)]
    body = seq(*reserved, Roles(tuple(own)))
    whole = For(PROGRAM, grid.programs or grid.stop, body, "grid")
    return Kernel(kernel.name, kernel.params, whole, kernel.notes)


@dataclass(frozen=True, slots=True)
class _Tile:
    """The parts of a program: names, the sum's loop with its fetches and its product, the rest."""

    before: tuple[Stmt, ...]
    acc: Alloc
    loop: For
    lets: tuple[Stmt, ...]
    fetched: dict[Var, BoxLoad]
    product: FuncCall
    after: tuple[Stmt, ...]


Around = tuple[tuple[tuple[Stmt, ...], For], ...]


def _around(body: Stmt) -> tuple[Around, Stmt]:
    """The loops over the tiles of one program, each with the statements before it, and a tile."""
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
    if at is None:  # a sum of one step, which has been written out
        at = next(i for i, s in enumerate(parts) if isinstance(s, FuncCall) and s.func.name == "dot")
        end, first = at + 1, next(i for i, s in enumerate(parts) if isinstance(s, Alloc)) + 1
        once = For(Var("once"), 1, seq(*parts[first:end]))
        parts = (*parts[:first], once, *parts[end:])
        at = first
    loop = parts[at]
    assert isinstance(loop, For)
    acc = next(s for s in parts[:at] if isinstance(s, Alloc))
    *steps, product = statements(loop.body)
    assert isinstance(product, FuncCall) and product.func.name == "dot"
    fetched = {s.var: s.value for s in steps if isinstance(s, Let) and isinstance(s.value, BoxLoad)}
    lets = tuple(s for s in steps if not (isinstance(s, Let) and s.var in fetched))
    return _Tile(tuple(s for s in parts[:at] if s is not acc), acc, loop, lets, fetched, product,
                 parts[at + 1:])


@dataclass(frozen=True, slots=True)
class _Ring:
    """An operand's buffer, the fetches that fill a slot of it, and what of it is multiplied: a slot
    itself, or what was turned of it."""

    buffer: Buffer
    piece: Piece
    fetches: tuple[Fetch, ...]
    turned: Piece | None = None


@dataclass(frozen=True, slots=True)
class _Rings:
    of: dict[Var, _Ring]
    landed: Barrier
    free: Barrier
    turned: Barrier
    taken: Barrier

    @property
    def turns(self) -> list[_Ring]:
        return [r for r in self.of.values() if r.turned is not None]

    @property
    def direct(self) -> bool:
        """Whether an operand is multiplied as it landed."""
        return len(self.turns) < len(self.of)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return (self.landed, self.free, *((self.turned, self.taken) if self.turns else ()))

    @property
    def slots(self) -> int:
        return self.landed.slots


def _rings(tile: _Tile, config: Config) -> _Rings:
    spread = _laned_lets((*tile.before, *tile.lets))
    made = {}
    landed = Barrier("landed", config.stages)
    for var, box in tile.fetched.items():
        corners = [_whole(c, spread) for c in box.corner]
        stacked = {x for c in corners for x in lanes_of(c)}
        members, member = _members(stacked, box) if stacked else (1, ZERO)
        buffer = Buffer(f"{box.tensor.name}_ring", box.dtype, config.stages, box.extents, members)
        within = tuple(_whole(w, spread) for w in box.within)
        piece = Piece(buffer, SLOT, member, within)
        fetches = tuple(
            Fetch(box.tensor, tuple(_member(c, j, members) for c in corners),
                  replace(piece, member=Const(j)), landed, SLOT)
            for j in range(members))
        made[var] = _Ring(buffer, piece, fetches, _turned(piece))
    readers = len({r.turned is None for r in made.values()})
    free = Barrier("free", config.stages, readers)
    return _Rings(made, landed, free, Barrier("turned", config.stages), Barrier("taken", config.stages))


def _turned(piece: Piece) -> Piece | None:
    """Where a piece goes, K innermost, that the matrix unit does not take as it lies."""
    if piece.dtype.bits <= 16:
        return None
    along, across = sorted(lanes_of(piece), key=lambda x: x.axis != LANE_AXES["k"])
    if along in lanes_of(piece.within[-1]):
        return None
    buffer = Buffer(piece.buffer.name.replace("_ring", "_turned"), piece.dtype, piece.buffer.slots,
                    (across.extent, along.extent))
    return Piece(buffer, SLOT, ZERO, (across, along))


def _laned_lets(lets: tuple[Stmt, ...]) -> dict[Var, Expr]:
    """Names that vary along lanes, which a copy's corner cannot."""
    scope: dict[Var, tuple[Lane, ...]] = {}
    found: dict[Var, Expr] = {}
    for s in lets:
        if isinstance(s, Let):
            scope[s.var] = lanes_of(s.value, scope)
            if scope[s.var]:
                found[s.var] = s.value
    return found


def _whole(e: Expr, lets: dict[Var, Expr]) -> Expr:
    while values := {v: lets[v] for v in free_vars(e) if v in lets}:
        e = substitute(e, values)
    return e


def _members(stacked: set[Lane], box: BoxLoad) -> tuple[int, Expr]:
    """How many boxes lie side by side along the lane that the corner varies along, and which of
    them a lane is in."""
    (lane,) = stacked
    inner = 1
    for within, extent in zip(box.within, box.extents, strict=True):
        inner *= extent if lane in lanes_of(within) else 1
    return lane.extent // inner, lane // inner


def _member(corner: Expr, member: int, members: int) -> Expr:
    """The corner of one box of several."""
    values = {x: Const(member * (x.extent // members)) for x in lanes_of(corner)}
    return simplify(substitute(corner, values)) if values else corner


@dataclass(frozen=True, slots=True)
class _Act:
    """What a role does at first, for every tile, and at last."""

    first: tuple[Stmt, ...]
    tile: Stmt
    last: tuple[Stmt, ...] = ()


def _counters(phase: int) -> tuple[Stmt, ...]:
    return Alloc(SLOT, (), Const(0, i32)), Alloc(PHASE, (), Const(phase, i32))


def _fetches(tile: _Tile, rings: _Rings) -> _Act:
    """Fill a slot per step as soon as it is free. Before the first round all of them are, which a
    wait for the phase before the first one says."""
    fetches = [f for ring in rings.of.values() for f in ring.fetches]
    bytes_ = sum(f.piece.buffer.box_bytes for f in fetches)
    step = seq(*tile.lets, FuncCall(WAIT, (rings.free, SLOT, PHASE)),
               FuncCall(EXPECT, (rings.landed, SLOT, Const(bytes_))), *fetches,
               *_advance(rings.slots))
    return _Act(_counters(1), seq(*tile.before, replace(tile.loop, body=step, stages=0)))


def _turns(tile: _Tile, rings: _Rings) -> _Act:
    """Write what has landed to the same slot of another ring, K innermost. Before the first round
    that slot has been taken."""
    puts = [Put(r.turned, r.piece) for r in rings.turns if r.turned is not None]
    step = seq(*tile.lets, FuncCall(WAIT, (rings.landed, SLOT, PHASE)),
               FuncCall(WAIT, (rings.taken, SLOT, ONE - PHASE)), *puts, FuncCall(FENCE, ()),
               FuncCall(ARRIVE, (rings.turned, SLOT, TRUE)),
               FuncCall(ARRIVE, (rings.free, SLOT, TRUE)), *_advance(rings.slots))
    return _Act(_counters(0), seq(*tile.before, replace(tile.loop, body=step, stages=0)))


def _products(tile: _Tile, rings: _Rings) -> _Act:
    """Multiply a slot as soon as it has landed; free the one before, whose product has ended."""
    last = select(eq(SLOT, 0), rings.slots - 1, SLOT - 1)
    left, right = (_operand(a, rings) for a in tile.product.args[1:])
    ready = [b for b, there in ((rings.landed, rings.direct), (rings.turned, rings.turns)) if there]
    read = [b for b, there in ((rings.free, rings.direct), (rings.taken, rings.turns)) if there]
    step = seq(*tile.lets, *(FuncCall(WAIT, (b, SLOT, PHASE)) for b in ready),
               FuncCall(DOT_ASYNC, (tile.acc.var, left, right)),
               FuncCall(DOT_WAIT, (ONE,)),
               *(FuncCall(ARRIVE, (b, last, tile.loop.var > 0)) for b in read),
               *_advance(rings.slots))
    after = [_Results().mutate(s) for s in tile.after]
    sent = any(find(s, BoxStore) for s in tile.after)
    whole = seq(*tile.before, tile.acc, replace(tile.loop, body=step, stages=0),
                FuncCall(DOT_WAIT, (ZERO,)), *(FuncCall(ARRIVE, (b, last, TRUE)) for b in read), *after)
    return _Act(_counters(0), whole, (FuncCall(SEND_WAIT, (ZERO,)),) if sent else ())


def _operand(arg: Node, rings: _Rings) -> Piece:
    var = arg.x if isinstance(arg, Spread) else arg
    assert isinstance(var, Var)
    ring = rings.of[var]
    return ring.piece if ring.turned is None else ring.turned


def _advance(slots: int) -> list[Stmt]:
    """The next slot; after the last one the first, whose barriers are then a phase further."""
    last = eq(SLOT, slots - 1)
    return [Update(PHASE, select(last, ONE - PHASE, PHASE)), Update(SLOT, select(last, 0, SLOT + 1))]


class _Results(Mutator):
    """A box goes out through shared memory, which the box before it must have left."""

    def mutate_BoxStore(self, at: BoxStore) -> Stmt:
        buffer = Buffer(f"{at.tensor.name}_tile", at.tensor.dtype, 1, at.extents)
        piece = Piece(buffer, ZERO, ZERO, at.within)
        return seq(FuncCall(SEND_WAIT, (ZERO,)), Put(piece, at.value), FuncCall(FENCE, ()),
                   Send(at.tensor, at.corner, piece))


def _dealt(grid: For, around: Around, act: _Act) -> Stmt:
    """The tiles of one program: one, every ``programs``-th, or a run of them."""
    tile = act.tile
    for before, loop in reversed(around):
        tile = seq(*before, replace(loop, body=tile))
    tile = replace(grid, body=tile, kind="dealt", start=PROGRAM) if grid.programs else (
        substitute(tile, {grid.var: PROGRAM}))
    return seq(*act.first, tile, *act.last)


def _clean(name: str, warps: int, registers: int, body: Stmt) -> Role:
    """A role without the names that only the other one reads."""
    return Role(name, warps, registers, optimise_lets(Kernel(name, (), body)).body)
