"""Shared memory of warp-specialized kernels: a ring of buffers for each box that a step of the sum loads,
with the copies that fill a slot of it (see ``warp_roles.py``).

    a = box_load(A, at=[..])   ->   shared A_ring[3]; fetch A at=[..] -> A_ring[slot]

A tile may consist of several boxes (a pile), each a member of the slot. They lie side by side if the lane
that runs through them is that of the box's rows, else below one another.

Steps of the sum may share boxes (``slide=``, see schedule/tiles/boxes.py):

    for step in 0..81:                               for step in 0..27:
        let kd = step // 27                              let kd = step // 9
        let kh = step % 3                                fetch 10 rows of A, and B for kh = 0, 1, 2
        a = box_load(A, at=[.., oh_blk*8 + kh, ..])  ->  dot_async(acc, rows 0..7 of A, B[0])
        b = box_load(B, at=[.., kh*96, ..])              dot_async(acc, rows 1..8 of A, B[1])
        dot(acc, a, b)                                   dot_async(acc, rows 2..9 of A, B[2])

A slot of a ring then has the boxes of a group of steps: those of all rows that its steps read, below one
another, or the boxes of the steps one after another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from transconv import ir
from transconv.simplify import simplify

SLOT, PHASE = ir.Var("slot"), ir.Var("phase")


@dataclass(frozen=True, slots=True)
class OperandRing:
    """An operand's buffer, the fetches that fill a slot of it, and what is multiplied: the slot
    (``piece``), or its ``transposed`` copy in another ring. Where several steps share a slot, ``pieces``
    has what each multiplies (``slide=``)."""

    buffer: ir.SmemRing
    piece: ir.SlotTile
    fetches: tuple[ir.Fetch, ...]
    transposed: ir.SlotTile | None = None
    pieces: tuple[ir.SlotTile, ...] = ()


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings by the variable of the let that loads them, and the barriers between roles, each with a
    barrier per slot. ``landed``: the boxes have been copied; ``free``: they have been read. For operands
    that are transposed, ``transposed``: the transposed copy is complete; ``taken``: it has been read. For
    a resident operand, ``kept``: its boxes of a step have been copied."""

    of: dict[ir.Var, OperandRing]
    landed: ir.Barrier
    free: ir.Barrier
    transposed: ir.Barrier
    taken: ir.Barrier
    kept: ir.Barrier | None = None

    @property
    def turns(self) -> list[OperandRing]:
        """The rings whose operand is transposed."""
        return [r for r in self.of.values() if r.transposed is not None]

    @property
    def direct(self) -> bool:
        """Whether an operand is multiplied without being transposed."""
        return len(self.turns) < len(self.of)

    @property
    def barriers(self) -> tuple[ir.Barrier, ...]:
        return (
            self.landed,
            self.free,
            *((self.transposed, self.taken) if self.turns else ()),
            *((self.kept,) if self.kept else ()),
        )

    def fetches(self, barrier: ir.Barrier) -> list[ir.Fetch]:
        """The fetches whose bytes a barrier counts, in the order of the operands."""
        return [f for ring in self.of.values() for f in ring.fetches if f.barrier is barrier]

    @property
    def slots(self) -> int:
        return self.landed.slots


def rings(
    fetched: tuple[ir.Let, ...], lets: tuple[ir.Stmt, ...], stages: int, loop: ir.For, keep: str = ""
) -> Rings:
    """A ring of ``stages`` slots for each box load in ``fetched``; ``lets`` are the lets before them. The
    resident operand ``keep`` has a slot for each step of the sum, the ``loop``."""
    landed, kept = ir.Barrier("landed", stages), ir.Barrier("kept", loop.stop)
    spread = laned_lets(lets)
    made = {}
    for let in fetched:
        box = let.value
        assert isinstance(box, ir.BoxLoad)
        stays = bool(keep) and let.origin == keep
        barrier, slot = (kept, loop.var) if stays else (landed, SLOT)
        corners = [whole(c, spread) for c in box.corner]
        within = tuple(whole(w, spread) for w in box.within)
        pile = _pile({x for c in corners for x in ir.lanes_of(c)}, within, box.extents)
        members, below = (pile.boxes, pile.below) if pile else (1, False)
        buffer = ir.SmemRing(
            f"{box.tensor.name}_{'kept' if stays else 'ring'}",
            box.dtype,
            barrier.slots,
            box.extents,
            members,
            below,
        )
        piece = ir.SlotTile(buffer, slot, simplify(pile.lane // pile.inner) if pile else ir.ZERO, within)
        fetches = tuple(
            ir.Fetch(
                box.tensor,
                tuple(_corner(c, j, pile) for c in corners),
                replace(piece, member=ir.Const(j)),
                barrier,
                slot,
            )
            for j in range(buffer.members)
        )
        made[let.var] = OperandRing(buffer, piece, fetches, _transposed(piece, box.tensor))
    readers = len({r.transposed is None for r in made.values()})
    free = ir.Barrier("free", stages, readers)
    return Rings(
        made,
        landed,
        free,
        ir.Barrier("transposed", stages),
        ir.Barrier("taken", stages),
        kept if keep else None,
    )


def _transposed(piece: ir.SlotTile, tensor: ir.Tensor) -> ir.SlotTile | None:
    """The transposed copy of a piece, K innermost; None if the matrix unit takes the piece as it is."""
    if piece.dtype.bits == 16:
        return None
    along, across = sorted(ir.lanes_of(piece), key=lambda x: x.kind != "K")
    if along in ir.lanes_of(piece.within[-1]):
        return None
    buffer = ir.SmemRing(
        f"{tensor.name}_transposed", piece.dtype, piece.buffer.slots, (across.extent, along.extent)
    )
    return ir.SlotTile(buffer, SLOT, ir.ZERO, (across, along))


def laned_lets(lets: tuple[ir.Stmt, ...]) -> dict[ir.Var, ir.Expr]:
    """The values of lets that vary along lanes. Corners must not mention them, so they are expanded."""
    scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}
    found: dict[ir.Var, ir.Expr] = {}
    for s in lets:
        if isinstance(s, ir.Let):
            scope[s.var] = ir.lanes_of(s.value, scope)
            if scope[s.var]:
                found[s.var] = s.value
    return found


def whole(e: ir.Expr, lets: dict[ir.Var, ir.Expr]) -> ir.Expr:
    """The expression with the values of lets in place of their variables."""
    while values := {v: lets[v] for v in ir.free_vars(e) if v in lets}:
        e = ir.substitute(e, values)
    return e


@dataclass(frozen=True, slots=True)
class _Pile:
    """A lane that runs through ``boxes`` boxes of ``inner`` positions each, ``below`` one another or side
    by side."""

    lane: ir.Lane
    boxes: int
    inner: int
    below: bool


def _pile(moved: set[ir.Lane], within: tuple[ir.Expr, ...], extents: tuple[int, ...]) -> _Pile | None:
    """The pile of a piece, or None if it is one box: a lane along which the corner varies, or that is
    longer than the box. (If a block extends beyond a window of one element, all its boxes have the same
    corner.)"""
    for lane in moved.union(*map(ir.lanes_of, within)):
        inner = prod(e for w, e in zip(within, extents, strict=True) if lane in ir.lanes_of(w))
        if lane in moved or lane.extent > inner:
            return _Pile(lane, lane.extent // inner, inner, lane not in ir.lanes_of(within[-1]))
    return None


def _corner(corner: ir.Expr, member: int, pile: _Pile | None) -> ir.Expr:
    """The corner of box ``member`` of a pile."""
    if pile is None:
        return corner
    return simplify(ir.substitute(corner, {pile.lane: ir.Const(member * pile.inner)}))


def advance(slots: int) -> list[ir.Stmt]:
    """Advance to the next slot; after the last one to the first, in the next phase."""
    last = ir.eq(SLOT, slots - 1)
    return [
        ir.Update(PHASE, ir.select(last, ir.ONE - PHASE, PHASE)),
        ir.Update(SLOT, ir.select(last, 0, SLOT + 1)),
    ]


def slot_before(steps: int, slots: int) -> ir.Expr:
    """The slot of so many steps before the current one."""
    if steps == 1:
        return ir.select(ir.eq(SLOT, 0), slots - 1, SLOT - 1)
    return ir.select(SLOT < steps, SLOT + (slots - steps), SLOT - steps)


@dataclass(frozen=True, slots=True)
class SharedBoxSteps:
    """The steps of the sum that share boxes. ``axis``: along which they follow one another; ``loop``: over
    the groups; ``lets``: of a group; ``moving``: the values of lets that differ between its steps."""

    axis: ir.Var
    count: int
    loop: ir.For
    lets: tuple[ir.Stmt, ...]
    moving: dict[ir.Var, ir.Expr]

    def at(self, e: ir.Expr, step: int, spread: dict[ir.Var, ir.Expr]) -> ir.Expr:
        """An expression at one of the steps."""
        return simplify(ir.substitute(whole(e, self.moving | spread), {self.axis: ir.Const(step)}))


def grouped(loop: ir.For, lets: tuple[ir.Stmt, ...], axis: str) -> SharedBoxSteps | None:
    """The groups of a sum's loop, whose innermost axis is ``axis``: its variable modulo the size. None
    where it is no axis of this loop: no word asks for it, or a stride phase has one step along it."""
    var, moving = ir.Var(axis), dict[ir.Var, ir.Expr]()
    sizes = [
        s.value.b for s in lets if isinstance(s, ir.Let) and s.var == var and isinstance(s.value, ir.Mod)
    ]
    if not sizes or not isinstance(sizes[0], ir.Const):
        return None
    count = int(sizes[0].value)
    kept: list[ir.Stmt] = []
    for s in lets:
        assert isinstance(s, ir.Let)
        if s.var == var:
            continue
        if ir.free_vars(s.value) & {var, *moving}:
            moving[s.var] = s.value
            continue
        value = simplify(ir.substitute(s.value, {loop.var: loop.var * count}))
        kept.append(replace(s, value=value))
    return SharedBoxSteps(var, count, replace(loop, stop=loop.stop // count), tuple(kept), moving)


def shared_rings(
    fetched: tuple[ir.Let, ...], lets: tuple[ir.Stmt, ...], stages: int, group: SharedBoxSteps
) -> Rings:
    """``rings`` for groups of steps; ``lets`` are those before the boxes."""
    landed, spread = ir.Barrier("landed", stages), laned_lets(lets)
    made = {}
    for let in fetched:
        box = let.value
        assert isinstance(box, ir.BoxLoad)
        corners = [tuple(group.at(c, step, spread) for c in box.corner) for step in range(group.count)]
        within = tuple(whole(w, spread) for w in box.within)
        ways = [[simplify(x - y) for x, y in zip(corner, corners[0], strict=True)] for corner in corners]
        made[let.var] = _rows(box, corners, within, ways, landed) or _in_turn(box, corners, within, landed)
    return Rings(
        made,
        landed,
        ir.Barrier("free", stages),
        ir.Barrier("transposed", stages),
        ir.Barrier("taken", stages),
    )


def _rows(
    box: ir.BoxLoad,
    corners: list[tuple[ir.Expr, ...]],
    within: tuple[ir.Expr, ...],
    ways: list[list[ir.Expr]],
    landed: ir.Barrier,
) -> OperandRing | None:
    """All rows that the steps read, once; None where tiles do not overlap."""
    moved = [d for d, x in enumerate(ways[1]) if x != ir.ZERO]
    if (
        len(moved) != 1
        or any(e > 1 for e in box.extents[: moved[0]])
        or not all(isinstance(way[moved[0]], ir.Const) for way in ways)
    ):
        return None
    (dim,) = moved
    places = [int(x.value) for way in ways if isinstance(x := way[dim], ir.Const)]
    least, own = min(places), box.extents[dim]
    if abs(places[1]) >= own:
        return None
    rows = own + max(places) - least
    each = 1  # rows of a box: fewer than those of a tile, and all rows are boxes
    while rows % (2 * each) == 0 and 2 * each < own:
        each *= 2

    def changed(dims: tuple[ir.Expr, ...], at: ir.Expr) -> tuple[ir.Expr, ...]:
        return (*dims[:dim], simplify(at), *dims[dim + 1 :])

    buffer = ir.SmemRing(
        f"{box.tensor.name}_ring",
        box.dtype,
        landed.slots,
        (*box.extents[:dim], each, *box.extents[dim + 1 :]),
        rows // each,
        below=True,
    )
    starts = [within[dim] + (at - least) for at in places]
    pieces = tuple(
        ir.SlotTile(buffer, SLOT, simplify(at // each), changed(within, at % each)) for at in starts
    )
    inside = changed(within, within[dim] % each)
    fetches = tuple(
        ir.Fetch(
            box.tensor,
            changed(corners[0], corners[0][dim] + (least + i * each)),
            ir.SlotTile(buffer, SLOT, ir.Const(i), inside),
            landed,
            SLOT,
        )
        for i in range(rows // each)
    )
    return OperandRing(buffer, pieces[0], fetches, pieces=pieces)


def _in_turn(
    box: ir.BoxLoad, corners: list[tuple[ir.Expr, ...]], within: tuple[ir.Expr, ...], landed: ir.Barrier
) -> OperandRing:
    """The boxes of the steps one after another; one, where they are the same."""
    each = [*dict.fromkeys(corners)]
    buffer = ir.SmemRing(
        f"{box.tensor.name}_ring", box.dtype, landed.slots, box.extents, len(each), below=True
    )
    pieces = tuple(ir.SlotTile(buffer, SLOT, ir.Const(each.index(c)), within) for c in corners)
    fetches = tuple(
        ir.Fetch(box.tensor, c, ir.SlotTile(buffer, SLOT, ir.Const(i), within), landed, SLOT)
        for i, c in enumerate(each)
    )
    return OperandRing(buffer, pieces[0], fetches, pieces=pieces)


PROGRAM = ir.Var("program")


@dataclass(frozen=True, slots=True)
class TileStatements:
    """The statements of a program for one tile: those ``before`` the sum, its loop with the fetches and
    the product, and those ``after`` it."""

    before: tuple[ir.Stmt, ...]
    acc: ir.Alloc
    loop: ir.For
    lets: tuple[ir.Stmt, ...]
    fetched: tuple[ir.Let, ...]  # of boxes
    product: ir.FuncCall
    after: tuple[ir.Stmt, ...]


Around = tuple[tuple[tuple[ir.Stmt, ...], ir.For], ...]
"""Loops over the tiles of one program, outer ones first, each with the statements before it."""


def around_of(body: ir.Stmt) -> tuple[Around, ir.Stmt]:
    """The loops over the tiles of one program, each with the statements before it, and the tile's body."""
    parts = ir.statements(body)
    if any(isinstance(s, ir.Alloc) for s in parts):
        return (), body
    *before, loop = parts
    assert isinstance(loop, ir.For), "the tiles of a program are a loop"
    outer, tile = around_of(loop.body)
    return ((tuple(before), loop), *outer), tile


def take_apart(body: ir.Stmt) -> TileStatements:
    """The parts of a tile's body."""
    parts = ir.statements(body)
    at = next((i for i, s in enumerate(parts) if isinstance(s, ir.For)), None)
    if at is None:  # a sum of one step has no loop any more
        at = next(i for i, s in enumerate(parts) if isinstance(s, ir.FuncCall) and s.func.multiplies)
        end, first = at + 1, next(i for i, s in enumerate(parts) if isinstance(s, ir.Alloc)) + 1
        once = ir.For(ir.Var("once"), 1, ir.seq(*parts[first:end]))
        parts = (*parts[:first], once, *parts[end:])
        at = first
    loop = parts[at]
    assert isinstance(loop, ir.For)
    acc = next(s for s in parts[:at] if isinstance(s, ir.Alloc))
    *steps, product = ir.statements(loop.body)
    assert isinstance(product, ir.FuncCall) and product.func.multiplies
    fetched = tuple(s for s in steps if isinstance(s, ir.Let) and isinstance(s.value, ir.BoxLoad))
    lets = tuple(s for s in steps if s not in fetched)
    return TileStatements(
        tuple(s for s in parts[:at] if s is not acc), acc, loop, lets, fetched, product, parts[at + 1 :]
    )


@dataclass(frozen=True, slots=True)
class Act:
    """What a role does before the first tile, for every tile, and after the last one."""

    first: tuple[ir.Stmt, ...]
    tile: ir.Stmt
    last: tuple[ir.Stmt, ...] = ()


def counters(phase: int) -> tuple[ir.Stmt, ...]:
    """The slot that a role uses next, and the phase that it waits for there."""
    return ir.Alloc(SLOT, (), ir.Const(0)), ir.Alloc(PHASE, (), ir.Const(phase))
