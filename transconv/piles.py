"""Which blocks of a tile an explicit kernel fetches as several boxes, laid side by side or below one
another in shared memory: a pile.

    kh.kw.ic:256    channels innermost: a box of 64 channels per tap      64 columns | 64 columns | ..
    kh.ic:256       pixels innermost: a box per tap, its channels rows below rows of the one before
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.algorithm import Algorithm
from transconv.box_rules import ENGINE_EXTENT, ROW, SHORTEST
from transconv.ir import Var, View, free_vars

if TYPE_CHECKING:
    from transconv.config import Block, Config

FEWEST_ROWS = 16  # of boxes that lie below one another: the pattern of a swizzle is 8 rows long


def pile(block: Block, view: View, config: Config, algorithm: Algorithm) -> int:
    """How many channels each box of a pile holds, 0 for a block that is no pile.

    A block that runs through the taps of a filter and then its channels (``kh.kw.ic:256``) is no
    box: every tap looks at the same pixels from another corner. An explicit kernel fetches a box per
    tap. Where channels are innermost, boxes of up to 128 bytes of them (a row of shared memory) lie
    side by side; rows of less than 32 bytes have no layout that could be read across boxes. Where
    the pixels that are summed are, boxes of as many channels as there are lie below one another: of
    filters with one tap along a row, or taps in steps of 16 bytes, at multiples of which boxes begin.
    """
    *taps, channel = block.axes
    roles = {x.name: x.role for x in algorithm.axes}
    if (config.via != "gluon" or not taps or roles[channel] != "channel"
            or any(roles[a] != "tap" for a in taps) or algorithm.kind(channel) == "K"
            or view is algorithm.c):
        return 0
    pixels = [x for x in algorithm.axes_of("K") if x.role == "pixel"]
    seen = {v.name for d in view.dims for v in free_vars(d.coord)}
    if channel not in seen or not any(x.name in seen for x in pixels):
        return 0
    inner = {v for b in view.tensor.layout.blocks if b.stride == 1
             for v in free_vars(view.dims[b.dim].coord)}
    if Var(channel) in inner:
        most, least = ROW // view.tensor.dtype.bytes, SHORTEST // view.tensor.dtype.bytes
    elif inner & {x.var for x in pixels}:
        most, least = ENGINE_EXTENT, FEWEST_ROWS
    else:
        return 0
    wide = min(block.extent, most)
    while algorithm.size(channel) % wide:
        wide //= 2
    return wide if wide >= least else 0
