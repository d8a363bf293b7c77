"""What the maps behind a sum read, and which of it a warp-specialized kernel fetches as TMA boxes (the
word ``behind=box``): elements of a tile as large as the result's, such as a residual or a gate.

    read  r = R[n, y, x, o]           let   s = sum(a * b; K)            store Y[n, y, x, o] = relu(s + r)

The box of R is that of the result: with the same extents and of the same type it is fetched to where the
result will be put, before it is sent. A vector that all rows of a tile share stays a load.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from transconv.compute import Compute, Read
from transconv.ir import View, free_vars
from transconv.schedule.counts import sides
from transconv.schedule.schedule import Block, Schedule
from transconv.schedule.tiles.boxes import Box, box_of
from transconv.schedule.tiles.partial_results import reduced_sides
from transconv.schedule.tiles.result_boxes import is_whole, result_boxes
from transconv.target import Target

KEPT = 4096  # bytes of a warp


def boxes_behind(c: Schedule, compute: Compute) -> dict[View, Box]:
    """The boxes of the reads behind the sum that the producer fetches, by view; none without the word."""
    if c.behind != "box" or c.via != "gluon":
        return {}
    return {view: box for view, box in told_behind(c, compute).items() if isinstance(box, Box)}


def told_behind(c: Schedule, compute: Compute) -> dict[View, Box | str]:
    """For each read behind the sum: its box, or the reason why it stays a load."""
    return _told_behind(c.blocks, c.via, c.order, compute)


@lru_cache(maxsize=4096)
def _told_behind(blocks: tuple[Block, ...], via: str, order: str,
                 compute: Compute) -> dict[View, Box | str]:
    """``told_behind`` for the words that it depends on, which many schedules share."""
    c = Schedule(blocks, via=via, order=order)
    reads = [s for s in compute.sweeps.behind if isinstance(s, Read)] if compute.sum else []
    return {r.view: _why_not(r, compute) or _as_large(box_of(r.view, c, compute), r.view, c, compute)
            for r in reads}


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
    return next((view for view, box in boxes_behind(c, compute).items()
                 if any(box.extents == s.extents and box.moving == s.moving
                        and box.tensor.dtype is s.tensor.dtype for s in stored)), None)


def behind_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory for fetched operands of the maps behind the sum, of all consumers, without
    the one that a result takes the place of."""
    found = boxes_behind(c, compute)
    if not found:
        return 0
    kept = in_place(c, compute)
    return c.consumers * sum([prod(box.extents) * box.tensor.dtype.bytes
                              for view, box in found.items() if view is not kept])


def exchanged_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory through which warps exchange what stands behind the sum, beside the operands
    of the next tile: in explicit and in persistent kernels. Statistics that reduce the side of the tile
    that warps share have a value of each warp; where Triton reads elements as large as the tile, too, it
    keeps 4 KB of each warp (as its kernels for sm_90 say)."""
    if c.via == "tl" and not c.programs or not compute.statistics:
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
        return "behind=box: nothing is read behind the sum"
    if not any(isinstance(found, Box) for found in told.values()):
        return "behind=box: " + "; ".join(dict.fromkeys(str(x) for x in told.values()))
    return None
