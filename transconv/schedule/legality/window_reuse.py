"""Which schedules may have steps that share boxes (``slide=``, see tiles/window_reuse.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.compute import Compute
from transconv.schedule.counts import transposed_bytes
from transconv.schedule.tiles.window_reuse import rows_of
from transconv.target import Target, has_wide_views, triton_version

if TYPE_CHECKING:
    from transconv.schedule.schedule import Schedule

MOST_STEPS = 8  # that share boxes; their products are written one after another
MOST_ROWS = 32  # boxes of a slot, each with a copy of its own


def why_not_slide(c: Schedule, compute: Compute, target: Target) -> str | None:
    """The rule of the word."""
    if not c.slide:
        return None
    if c.via != "gluon":
        return f"slide={c.slide}: only explicit kernels (via=gluon) have shared memory of their own"
    if not has_wide_views():
        return (f"slide={c.slide}: Triton {triton_version()} refuses views of shared memory larger than "
                "what they are views of; 3.7 takes them")
    if c.slide not in compute.sizes or compute.kind(c.slide) != "K" or c.block_of(c.slide) is not None:
        return f"slide={c.slide} names no axis that the sum runs through one by one"
    if c.order.split(".")[-1] != c.slide:
        return f"slide={c.slide}: expected it as the innermost axis of the sum, at the end of order="
    size = compute.size(c.slide)
    if size == 1 and compute.phase:  # others have more steps, this one shares nothing
        return None
    if not 1 < size <= MOST_STEPS or compute.axis(c.slide).extent is not None:
        return f"slide={c.slide}: 2 to {MOST_STEPS} steps share boxes, not {size}"
    if c.split_k > 1 or c.keep or c.reduce == "stream":
        return f"slide={c.slide}: a program has whole sums, and fetches both operands at each step"
    if transposed_bytes(c, compute):
        return f"slide={c.slide}: boxes are shared where operands are multiplied as they lie"
    shared = [rows for v in (compute.a, compute.b) if (rows := rows_of(v, c, compute)[0])]
    if not shared:
        return f"slide={c.slide} moves no operand by whole rows of a box, over others of its rows"
    if max(shared) > MOST_ROWS:
        return f"slide={c.slide}: {max(shared)} rows are boxes of their own, at most {MOST_ROWS}"
    if len([x for x in compute.axes_of("K") if x.size > 1]) < 2:
        return f"slide={c.slide}: a sum of one step of shared boxes has no loop"
    return None
