"""Shared memory of warp-specialized kernels: a ring of buffers for each box that a step of the sum loads,
with the copies that fill a slot of it (see ``warp_spec/warp_roles.py``).

    a = box_load(A, at=[..])   ->   shared A_ring[3]; fetch A at=[..] -> A_ring[slot]

A tile may consist of several boxes (a pile), each a member of the slot. They lie side by side if the lane
that runs through them is that of the box's rows, else below one another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from transconv.ir import (
    ONE,
    ZERO,
    Barrier,
    BoxLoad,
    Const,
    Expr,
    Fetch,
    For,
    Lane,
    Let,
    SlotTile,
    SmemRing,
    Stmt,
    Tensor,
    Update,
    Var,
    eq,
    free_vars,
    lanes_of,
    select,
    substitute,
)
from transconv.simplify import simplify

SLOT, PHASE = Var("slot"), Var("phase")


@dataclass(frozen=True, slots=True)
class OperandRing:
    """An operand's buffer, the fetches that fill a slot of it, and what is multiplied: the slot
    (``piece``), or its ``transposed`` copy in another ring. Where several steps share a slot, ``pieces``
    has what each multiplies (see warp_spec/window_reuse.py)."""

    buffer: SmemRing
    piece: SlotTile
    fetches: tuple[Fetch, ...]
    transposed: SlotTile | None = None
    pieces: tuple[SlotTile, ...] = ()


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings by the variable of the let that loads them, and the barriers between roles, each with a
    barrier per slot. ``landed``: the boxes have been copied; ``free``: they have been read. For operands
    that are transposed, ``transposed``: the transposed copy is complete; ``taken``: it has been read. For
    a resident operand, ``kept``: its boxes of a step have been copied."""

    of: dict[Var, OperandRing]
    landed: Barrier
    free: Barrier
    transposed: Barrier
    taken: Barrier
    kept: Barrier | None = None

    @property
    def turns(self) -> list[OperandRing]:
        """The rings whose operand is transposed."""
        return [r for r in self.of.values() if r.transposed is not None]

    @property
    def direct(self) -> bool:
        """Whether an operand is multiplied without being transposed."""
        return len(self.turns) < len(self.of)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return (self.landed, self.free, *((self.transposed, self.taken) if self.turns else ()),
                *((self.kept,) if self.kept else ()))

    def fetches(self, barrier: Barrier) -> list[Fetch]:
        """The fetches whose bytes a barrier counts, in the order of the operands."""
        return [f for ring in self.of.values() for f in ring.fetches if f.barrier is barrier]

    @property
    def slots(self) -> int:
        return self.landed.slots


def rings(fetched: tuple[Let, ...], lets: tuple[Stmt, ...], stages: int, loop: For,
          keep: str = "") -> Rings:
    """A ring of ``stages`` slots for each box load in ``fetched``; ``lets`` are the lets before them. The
    resident operand ``keep`` has a slot for each step of the sum, the ``loop``."""
    landed, kept = Barrier("landed", stages), Barrier("kept", loop.stop)
    spread = laned_lets(lets)
    made = {}
    for let in fetched:
        box = let.value
        assert isinstance(box, BoxLoad)
        stays = bool(keep) and let.origin == keep
        barrier, slot = (kept, loop.var) if stays else (landed, SLOT)
        corners = [whole(c, spread) for c in box.corner]
        within = tuple(whole(w, spread) for w in box.within)
        pile = _pile({x for c in corners for x in lanes_of(c)}, within, box.extents)
        members, below = (pile.boxes, pile.below) if pile else (1, False)
        buffer = SmemRing(f"{box.tensor.name}_{'kept' if stays else 'ring'}", box.dtype, barrier.slots,
                        box.extents, members, below)
        piece = SlotTile(buffer, slot, simplify(pile.lane // pile.inner) if pile else ZERO, within)
        fetches = tuple(
            Fetch(box.tensor, tuple(_corner(c, j, pile) for c in corners),
                  replace(piece, member=Const(j)), barrier, slot)
            for j in range(buffer.members))
        made[let.var] = OperandRing(buffer, piece, fetches, _transposed(piece, box.tensor))
    readers = len({r.transposed is None for r in made.values()})
    free = Barrier("free", stages, readers)
    return Rings(made, landed, free, Barrier("transposed", stages), Barrier("taken", stages),
                 kept if keep else None)


def _transposed(piece: SlotTile, tensor: Tensor) -> SlotTile | None:
    """The transposed copy of a piece, K innermost; None if the matrix unit takes the piece as it is."""
    if piece.dtype.bits == 16:
        return None
    along, across = sorted(lanes_of(piece), key=lambda x: x.kind != "K")
    if along in lanes_of(piece.within[-1]):
        return None
    buffer = SmemRing(f"{tensor.name}_transposed", piece.dtype, piece.buffer.slots,
                    (across.extent, along.extent))
    return SlotTile(buffer, SLOT, ZERO, (across, along))


def laned_lets(lets: tuple[Stmt, ...]) -> dict[Var, Expr]:
    """The values of lets that vary along lanes. Corners must not mention them, so they are expanded."""
    scope: dict[Var, tuple[Lane, ...]] = {}
    found: dict[Var, Expr] = {}
    for s in lets:
        if isinstance(s, Let):
            scope[s.var] = lanes_of(s.value, scope)
            if scope[s.var]:
                found[s.var] = s.value
    return found


def whole(e: Expr, lets: dict[Var, Expr]) -> Expr:
    """The expression with the values of lets in place of their variables."""
    while values := {v: lets[v] for v in free_vars(e) if v in lets}:
        e = substitute(e, values)
    return e


@dataclass(frozen=True, slots=True)
class _Pile:
    """A lane that runs through ``boxes`` boxes of ``inner`` positions each, ``below`` one another or side
    by side."""

    lane: Lane
    boxes: int
    inner: int
    below: bool


def _pile(moved: set[Lane], within: tuple[Expr, ...], extents: tuple[int, ...]) -> _Pile | None:
    """The pile of a piece, or None if it is one box: a lane along which the corner varies, or that is
    longer than the box. (If a block extends beyond a window of one element, all its boxes have the same
    corner.)"""
    for lane in moved.union(*map(lanes_of, within)):
        inner = prod(e for w, e in zip(within, extents, strict=True) if lane in lanes_of(w))
        if lane in moved or lane.extent > inner:
            return _Pile(lane, lane.extent // inner, inner, lane not in lanes_of(within[-1]))
    return None


def _corner(corner: Expr, member: int, pile: _Pile | None) -> Expr:
    """The corner of box ``member`` of a pile."""
    if pile is None:
        return corner
    return simplify(substitute(corner, {pile.lane: Const(member * pile.inner)}))


def advance(slots: int) -> list[Stmt]:
    """Advance to the next slot; after the last one to the first, in the next phase."""
    last = eq(SLOT, slots - 1)
    return [Update(PHASE, select(last, ONE - PHASE, PHASE)), Update(SLOT, select(last, 0, SLOT + 1))]


def slot_before(steps: int, slots: int) -> Expr:
    """The slot of so many steps before the current one."""
    if steps == 1:
        return select(eq(SLOT, 0), slots - 1, SLOT - 1)
    return select(SLOT < steps, SLOT + (slots - steps), SLOT - steps)
