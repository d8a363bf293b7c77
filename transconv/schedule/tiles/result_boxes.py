"""Which results leave a kernel as TMA boxes (the word ``c=box``).

    store  Y0[n, y, x, o] = i8(...)           that of the sum: Y0
    store  Y1[n, y, x, o] = relu(s + r)       and in warp-specialized kernels others of the same tile

Without a box, consumers of a warp-specialized kernel store what the matrix unit leaves in their registers:
16 bytes of a row at a time, half a sector. Triton's own kernels reorder such results before they store
them.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from transconv.compute import Compute, Write, axis_facts
from transconv.ir import View
from transconv.schedule.counts import sides
from transconv.schedule.tiles.boxes import Box, box_of
from transconv.schedule.tiles.packing import ROW_ALIGN
from transconv.simplify import Facts, multiple_of, simplify
from transconv.support import is_direct

if TYPE_CHECKING:
    from transconv.schedule.schedule import Schedule


@lru_cache(maxsize=4096)
def result_boxes(c: Schedule, compute: Compute) -> dict[View, Box]:
    """The boxes of the results that are stored so, by view, that of the sum first; none without the
    word."""
    found = box_of(compute.c, c, compute, stored=True) if c.c == "box" else ""
    if isinstance(found, str):
        return {}
    others = {w.view: _other(w, c, compute) for w in compute.writes
              if c.via == "gluon" and w.view is not compute.c}
    return {compute.c: found} | {view: box for view, box in others.items() if box is not None}


def result_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory from which one tile's results leave as boxes."""
    return sum([prod(box.extents) * box.tensor.dtype.bytes for box in result_boxes(c, compute).values()])


def _other(write: Write, c: Schedule, compute: Compute) -> Box | None:
    """The box of another result than the sum's, or None: of elements of a tile, each stored once, by rows
    that the copy engine writes whole."""
    view = write.view
    if (write.op or view.tensor.dtype.kind == "bool" or compute.why_not_plain(view)
            or sum(v.tensor is view.tensor for v in compute.views()) > 1):
        return None
    found = box_of(view, c, compute, stored=True)
    if isinstance(found, str) or not is_whole(found, c, compute) or found.tensor.every and not is_direct():
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
