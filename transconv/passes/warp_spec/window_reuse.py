"""The sums of explicit kernels whose steps share boxes (``slide=``, see schedule/tiles/window_reuse.py).

    for step in 0..81:                               for step in 0..27:
        let kd = step // 27                              let kd = step // 9
        let kh = step % 3                                fetch 10 rows of A, and B for kh = 0, 1, 2
        a = box_load(A, at=[.., oh_blk*8 + kh, ..])  ->  dot_async(acc, rows 0..7 of A, B[0])
        b = box_load(B, at=[.., kh*96, ..])              dot_async(acc, rows 1..8 of A, B[1])
        dot(acc, a, b)                                   dot_async(acc, rows 2..9 of A, B[2])

A slot of a ring has the boxes of a group of steps: those of all rows that its steps read, below one
another, or the boxes of the steps one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transconv.ir import (
    ZERO,
    Barrier,
    BoxLoad,
    Const,
    Expr,
    Fetch,
    For,
    Let,
    Mod,
    SlotTile,
    SmemRing,
    Stmt,
    Var,
    free_vars,
    substitute,
)
from transconv.passes.warp_spec.smem_pipeline import SLOT, OperandRing, Rings, laned_lets, whole
from transconv.simplify import simplify


@dataclass(frozen=True, slots=True)
class SharedBoxSteps:
    """The steps of the sum that share boxes. ``axis``: along which they follow one another; ``loop``: over
    the groups; ``lets``: of a group; ``moving``: the values of lets that differ between its steps."""

    axis: Var
    count: int
    loop: For
    lets: tuple[Stmt, ...]
    moving: dict[Var, Expr]

    def at(self, e: Expr, step: int, spread: dict[Var, Expr]) -> Expr:
        """An expression at one of the steps."""
        return simplify(substitute(whole(e, self.moving | spread), {self.axis: Const(step)}))


def grouped(loop: For, lets: tuple[Stmt, ...], axis: str) -> SharedBoxSteps | None:
    """The groups of a sum's loop, whose innermost axis is ``axis``: its variable modulo the size. None
    where it is no axis of this loop: no word asks for it, or a stride phase has one step along it."""
    var, moving = Var(axis), dict[Var, Expr]()
    sizes = [s.value.b for s in lets if isinstance(s, Let) and s.var == var and isinstance(s.value, Mod)]
    if not sizes or not isinstance(sizes[0], Const):
        return None
    count = int(sizes[0].value)
    kept: list[Stmt] = []
    for s in lets:
        assert isinstance(s, Let)
        if s.var == var:
            continue
        if free_vars(s.value) & {var, *moving}:
            moving[s.var] = s.value
            continue
        value = simplify(substitute(s.value, {loop.var: loop.var * count}))
        kept.append(replace(s, value=value))
    return SharedBoxSteps(var, count, replace(loop, stop=loop.stop // count), tuple(kept), moving)


def shared_rings(
    fetched: tuple[Let, ...], lets: tuple[Stmt, ...], stages: int, group: SharedBoxSteps
) -> Rings:
    """``rings`` for groups of steps; ``lets`` are those before the boxes."""
    landed, spread = Barrier("landed", stages), laned_lets(lets)
    made = {}
    for let in fetched:
        box = let.value
        assert isinstance(box, BoxLoad)
        corners = [tuple(group.at(c, step, spread) for c in box.corner) for step in range(group.count)]
        within = tuple(whole(w, spread) for w in box.within)
        ways = [[simplify(x - y) for x, y in zip(corner, corners[0], strict=True)] for corner in corners]
        made[let.var] = (_rows(box, corners, within, ways, landed)
                         or _in_turn(box, corners, within, landed))
    return Rings(made, landed, Barrier("free", stages), Barrier("transposed", stages),
                 Barrier("taken", stages))


def _rows(box: BoxLoad, corners: list[tuple[Expr, ...]], within: tuple[Expr, ...],
          ways: list[list[Expr]], landed: Barrier) -> OperandRing | None:
    """All rows that the steps read, once; None where tiles do not overlap."""
    moved = [d for d, x in enumerate(ways[1]) if x != ZERO]
    if len(moved) != 1 or any(e > 1 for e in box.extents[:moved[0]]) or not all(
            isinstance(way[moved[0]], Const) for way in ways):
        return None
    (dim,) = moved
    places = [int(x.value) for way in ways if isinstance(x := way[dim], Const)]
    least, own = min(places), box.extents[dim]
    if abs(places[1]) >= own:
        return None
    rows = own + max(places) - least
    each = 1  # rows of a box: fewer than those of a tile, and all rows are boxes
    while rows % (2 * each) == 0 and 2 * each < own:
        each *= 2

    def changed(dims: tuple[Expr, ...], at: Expr) -> tuple[Expr, ...]:
        return (*dims[:dim], simplify(at), *dims[dim + 1:])

    buffer = SmemRing(f"{box.tensor.name}_ring", box.dtype, landed.slots,
                    (*box.extents[:dim], each, *box.extents[dim + 1:]), rows // each, below=True)
    starts = [within[dim] + (at - least) for at in places]
    pieces = tuple(SlotTile(buffer, SLOT, simplify(at // each), changed(within, at % each))
                   for at in starts)
    inside = changed(within, within[dim] % each)
    fetches = tuple(Fetch(box.tensor, changed(corners[0], corners[0][dim] + (least + i * each)),
                          SlotTile(buffer, SLOT, Const(i), inside), landed, SLOT)
                    for i in range(rows // each))
    return OperandRing(buffer, pieces[0], fetches, pieces=pieces)


def _in_turn(box: BoxLoad, corners: list[tuple[Expr, ...]], within: tuple[Expr, ...],
             landed: Barrier) -> OperandRing:
    """The boxes of the steps one after another; one, where they are the same."""
    each = [*dict.fromkeys(corners)]
    buffer = SmemRing(f"{box.tensor.name}_ring", box.dtype, landed.slots, box.extents, len(each),
                      below=True)
    pieces = tuple(SlotTile(buffer, SLOT, Const(each.index(c)), within) for c in corners)
    fetches = tuple(Fetch(box.tensor, c, SlotTile(buffer, SLOT, Const(i), within), landed, SLOT)
                    for i, c in enumerate(each))
    return OperandRing(buffer, pieces[0], fetches, pieces=pieces)
