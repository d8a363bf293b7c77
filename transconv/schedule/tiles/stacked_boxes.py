"""Which blocks of a tile a Gluon kernel loads as several boxes, placed side by side or below one
another in shared memory: a pile.

    kh.kw.c:256   features innermost: a box of 64 features per window element   64 columns | 64 columns
    kh.c:256      positions innermost: a box per window element, its features are rows below one another
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.compute import Compute
from transconv.ir import Var, View, free_vars
from transconv.schedule.legality.box_dimensions import ENGINE_EXTENT, ROW, SHORTEST

if TYPE_CHECKING:
    from transconv.schedule.schedule import Block, Schedule

FEWEST_ROWS = 16  # of boxes that lie below one another; the swizzle repeats every 8 rows


def pile(block: Block, view: View, schedule: Schedule, compute: Compute) -> int:
    """The number of features in each box of a pile; 0 if the block is not a pile.

    A block that runs through window elements and then through features (``kh.kw.c:256``) is not one box,
    because each window element has a corner of its own. An explicit kernel loads a box per window element.
    If features are innermost, boxes of at most 128 bytes of features (a row of shared memory) lie side by
    side; rows of less than 32 bytes have no layout that can be read across boxes. If summed positions are
    innermost, boxes of all features lie below one another.
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
