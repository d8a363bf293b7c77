"""Which blocks of a tile a Gluon kernel loads as several boxes, placed side by side or below one
another in shared memory: a pile.

    kh.kw.c:256   features innermost: a box of 64 features per window element   64 columns | 64 columns
    kh.c:256      positions innermost: a box per window element, its features are rows below one another
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.compute import Compute
from transconv.ir import Var, View, free_vars
from transconv.schedule.box_rules import ENGINE_EXTENT, ROW, SHORTEST

if TYPE_CHECKING:
    from transconv.schedule.schedule import Block, Schedule

FEWEST_ROWS = 16  # of boxes that lie below one another: the pattern of a swizzle is 8 rows long


def pile(block: Block, view: View, schedule: Schedule, compute: Compute) -> int:
    """How many features each box of a pile holds, 0 for a block that is no pile.

    A block that runs through the elements of a window and then through features (``kh.kw.c:256``) is no
    box: every window element sees the same positions from another corner. An explicit kernel fetches a
    box per window element. Where features are innermost, boxes of up to 128 bytes of them (a row of
    shared memory) lie side by side; rows of less than 32 bytes have no layout that could be read across
    boxes. Where summed positions are innermost, boxes of all features lie below one another. Boxes begin
    at multiples of 16 bytes: such a window has one element along a row, or steps of 16 bytes.
    """
    *window, feature = block.axes
    roles = {x.name: x.role for x in compute.axes}
    if (schedule.via != "gluon" or not window or roles[feature] != "feature"
            or any(roles[a] != "window" for a in window) or compute.kind(feature) == "K"
            or view is compute.c):
        return 0
    positions = [x for x in compute.axes_of("K") if x.role == "position"]
    seen = {v.name for d in view.dims for v in free_vars(d.coord)}
    if feature not in seen or not any(x.name in seen for x in positions):
        return 0
    inner = {v for b in view.tensor.layout.blocks if b.stride == 1
             for v in free_vars(view.dims[b.dim].coord)}
    if Var(feature) in inner:
        most, least = ROW // view.tensor.dtype.bytes, SHORTEST // view.tensor.dtype.bytes
    elif inner & {x.var for x in positions}:
        most, least = ENGINE_EXTENT, FEWEST_ROWS
    else:
        return 0
    wide = min(block.extent, most)
    while compute.size(feature) % wide:
        wide //= 2
    return wide if wide >= least else 0
