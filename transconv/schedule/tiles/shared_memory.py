"""Shared memory of a tile: its operands, the results that leave as TMA boxes (the word
``c=box``), and the boxes that the epilogue reads (the word ``behind=box``).

    store  Y0[n, y, x, o] = i8(...)           that of the sum: Y0
    store  Y1[n, y, x, o] = relu(s + r)       and in warp-specialized kernels others of the same tile

Without a box, consumers of a warp-specialized kernel store what the matrix unit leaves in their registers:
16 bytes of a row at a time, half a sector. Triton's own kernels reorder such results before they store
them.

What is read in the epilogue, as large as the result, such as a residual or a gate, a warp-specialized
kernel may fetch as boxes:

    read  r = R[n, y, x, o]           let   s = sum(a * b; K)            store Y[n, y, x, o] = relu(s + r)

The box of R is that of the result: with the same extents and of the same type it is fetched to where the
result will be put, before it is sent. A vector that all rows of a tile share stays a load."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from transconv.compute import Compute, Read, Write, axis_facts, block_factors
from transconv.ir import View, free_vars
from transconv.schedule.counts import by_tile, k_steps, sides
from transconv.schedule.schedule import Block, Schedule
from transconv.schedule.tiles.boxes import Box, box_of, moves, rows_of, transposed
from transconv.schedule.tiles.packing import ROW_ALIGN
from transconv.schedule.tiles.partial_results import reduced_sides
from transconv.simplify import Facts, multiple_of, simplify
from transconv.support import is_direct
from transconv.target import Target


def shared_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory for the operands of a kernel that uses the matrix unit. Triton has one place
    for those of a sum of one step, whatever ``stages`` says: there is no loop in which steps overlap. A
    sum whose length is an argument has a loop, also where the example is one step."""
    extents, steps = sides(c, compute), k_steps(c, compute)
    loop = steps > 1 or any(x.extent is not None for x in compute.axes_of("K"))
    stages = max(1, c.stages) if loop or c.via != "tl" or c.programs else 1
    need = transposed_bytes(c, compute) * stages
    factors = block_factors(compute) if c.scaled else ""
    packed = (
        dict.fromkeys("ab", 1)
        if isinstance(factors, str)
        else {letter: f.packed for letter, f in zip("ab", factors, strict=True)}
    )
    for letter, kind, view in (("a", "M", compute.a), ("b", "N", compute.b)):
        times = steps if letter == c.keep else stages
        each = extents[kind] * extents["K"] * tiles_of_a_stage(view, c, compute) / packed[letter]
        need += int(times * each * view.tensor.dtype.bytes) if view is not None else 0
    return need


def tiles_of_a_stage(view: View | None, c: Schedule, compute: Compute) -> float:
    """How many tiles of an operand are fetched together: one, or where steps share boxes all their rows,
    or the tiles of all of these steps."""
    if not c.slide or view is None:
        return 1
    rows, own = rows_of(view, c, compute)
    return rows / own if rows else compute.size(c.slide) if moves(view, c) else 1


def transposed_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of the operand tiles of a step that an explicit kernel transposes."""
    return _transposed_bytes(c.blocks, compute, c.order) if c.via == "gluon" else 0


@by_tile
def _transposed_bytes(blocks: tuple[Block, ...], compute: Compute, order: str) -> int:
    c = Schedule(blocks, via="gluon", order=order)
    extents = sides(c, compute)
    return sum(
        extents[kind] * extents["K"] * view.tensor.dtype.bytes
        for kind, view in (("M", compute.a), ("N", compute.b))
        if view is not None and transposed(view, c, compute)
    )


def result_boxes(c: Schedule, compute: Compute) -> dict[View, Box]:
    """The boxes of the results that are stored so, by view, that of the sum first; none without the
    word."""
    return _result_boxes(c.blocks, compute, c.via, c.order) if c.c == "box" else {}


@by_tile
def _result_boxes(blocks: tuple[Block, ...], compute: Compute, via: str, order: str) -> dict[View, Box]:
    """``result_boxes`` for the words that it depends on, which many schedules share."""
    c = Schedule(blocks, c="box", via=via, order=order)
    found = box_of(compute.c, c, compute, stored=True)
    if isinstance(found, str):
        return {}
    others = {
        w.view: _other(w, c, compute)
        for w in compute.writes
        if c.via == "gluon" and w.view is not compute.c
    }
    return {compute.c: found} | {view: box for view, box in others.items() if box is not None}


def result_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory from which one tile's results leave as boxes."""
    return sum([prod(box.extents) * box.tensor.dtype.bytes for box in result_boxes(c, compute).values()])


def _other(write: Write, c: Schedule, compute: Compute) -> Box | None:
    """The box of another result than the sum's, or None: of elements of a tile, each stored once, by rows
    that the copy engine writes whole."""
    view = write.view
    if (
        write.op
        or view.tensor.dtype.kind == "bool"
        or compute.why_not_plain(view)
        or sum(v.tensor is view.tensor for v in compute.views()) > 1
    ):
        return None
    found = box_of(view, c, compute, stored=True)
    if (
        isinstance(found, str)
        or not is_whole(found, c, compute)
        or (found.tensor.every and not is_direct())
    ):
        return None
    return None if ends_short(found, view, axis_facts(compute)) else found


def is_whole(box: Box, c: Schedule, compute: Compute) -> bool:
    """Whether a box has as many elements as a tile of the result."""
    extents = sides(c, compute)
    return prod(box.extents) == extents["M"] * extents["N"] * extents["B"]


def ends_short(box: Box, view: View, facts: Facts) -> bool:
    """Whether rows of a stored tensor end between multiples of 16 bytes: TMA then writes beyond their end
    (observed on an H200). In a copy, the elements beyond are padding that nobody reads."""
    if view.tensor.copy_of:
        return False
    along = multiple_of(simplify(box.tensor.bounds[-1]), facts)
    return bool(along * view.tensor.dtype.bytes % ROW_ALIGN)


KEPT = 4096  # bytes of a warp


def boxes_behind(c: Schedule, compute: Compute) -> dict[View, Box]:
    """The boxes of the reads of the epilogue that the producer fetches, by view; none without the word."""
    if c.behind != "box" or c.via != "gluon":
        return {}
    return {view: box for view, box in told_behind(c, compute).items() if isinstance(box, Box)}


def told_behind(c: Schedule, compute: Compute) -> dict[View, Box | str]:
    """For each read of the epilogue: its box, or the reason why it stays a load."""
    return _told_behind(c.blocks, c.via, c.order, compute)


@lru_cache(maxsize=4096)
def _told_behind(
    blocks: tuple[Block, ...], via: str, order: str, compute: Compute
) -> dict[View, Box | str]:
    """``told_behind`` for the words that it depends on, which many schedules share."""
    c = Schedule(blocks, via=via, order=order)
    reads = [s for s in compute.sweeps.behind if isinstance(s, Read)] if compute.sum else []
    return {
        r.view: _why_not(r, compute) or _as_large(box_of(r.view, c, compute), r.view, c, compute)
        for r in reads
    }


@lru_cache(maxsize=512)
def _why_not(read: Read, compute: Compute) -> str | None:
    """Why a read can be no box under any schedule, or None."""
    name = read.view.tensor.name
    if sum(v.tensor is read.view.tensor for v in compute.views()) > 1:
        return f"{name} is read or stored elsewhere, too"
    if reason := compute.why_not_plain(read.view):
        return reason
    if read.fill:
        return f"a box is 0 outside of {name}, {read.fill:g} is asked for"
    return None


def _as_large(box: Box | str, view: View, c: Schedule, compute: Compute) -> Box | str:
    """The box, if it has as many elements as a tile of the result."""
    if isinstance(box, Box) and not is_whole(box, c, compute):
        return f"{view.tensor.name}: a box has fewer elements than the tile"
    return box


def in_place(c: Schedule, compute: Compute) -> View | None:
    """The read whose box a result takes the place of, in shared memory: of the same type and extents.
    None if there is none."""
    stored = result_boxes(c, compute).values()
    return next(
        (
            view
            for view, box in boxes_behind(c, compute).items()
            if any(
                box.extents == s.extents and box.moving == s.moving and box.tensor.dtype is s.tensor.dtype
                for s in stored
            )
        ),
        None,
    )


def behind_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory for fetched operands of the epilogue, of all consumers, without
    the one that a result takes the place of."""
    found = boxes_behind(c, compute)
    if not found:
        return 0
    kept = in_place(c, compute)
    return c.consumers * sum(
        [prod(box.extents) * box.tensor.dtype.bytes for view, box in found.items() if view is not kept]
    )


def exchanged_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory through which warps exchange what stands in the epilogue, beside the operands
    of the next tile: in explicit and in persistent kernels. Statistics that reduce the side of the tile
    that warps share have a value of each warp; where Triton reads elements as large as the tile, too, it
    keeps 4 KB of each warp (as its kernels for sm_90 say)."""
    if (c.via == "tl" and not c.programs) or not compute.statistics:
        return 0
    left, other = ("N", "M") if c.swap else ("M", "N")
    extents = sides(c, compute)
    shared = any(left in reduced_sides(w, compute, c) for w in compute.statistics)
    found = c.consumers * c.warps * extents[other] * 4 if shared else 0
    reads = [s.view for s in compute.sweeps.behind if isinstance(s, Read)] if compute.sum else []
    wide = any(len(_moved(v, c, compute)) > 1 for v in reads)
    return max(found, c.warps * KEPT) if wide and c.via == "tl" else found


def _moved(view: View, c: Schedule, compute: Compute) -> set[str]:
    """The sides of the tile along which a view moves."""
    own = {v.name for d in view.dims for v in free_vars(d.coord)}
    return {compute.kind(b.first) for b in c.blocks if b.extent > 1 and own.intersection(b.axes)}


def why_not_behind(c: Schedule, compute: Compute, target: Target) -> str | None:
    """The rule of the word ``behind``."""
    if c.behind == "gather":
        return None
    if c.via != "gluon":
        return "behind=box: only explicit kernels (via=gluon) have a warp that fetches for the others"
    if c.split_k > 1 or c.reduce == "stream":
        return "behind=box: no tile has its whole sum, what follows it is read when the parts are added"
    told = told_behind(c, compute)
    if not told:
        return "behind=box: nothing is read in the epilogue"
    if not any(isinstance(found, Box) for found in told.values()):
        return "behind=box: " + "; ".join(dict.fromkeys(str(x) for x in told.values()))
    return None
