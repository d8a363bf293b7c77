"""Boxes that several steps of a sum share (``slide=``).

    X[n, c, oh + kh - 1, ow + kw - 1]     the tiles of kh = 0, 1, 2 are rows 0..7, 1..8 and 2..9

Along an axis that moves a tile by whole rows, the tiles of its steps overlap. An explicit kernel fetches
all of their rows once, each as a box of its own, and a step multiplies those that are its tile: of a 3x3
filter and tiles of 8 rows 10 rows are fetched instead of 24. The other operand has the boxes of each step.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from transconv.compute import Compute, axis_facts
from transconv.ir import Const, Var, View, free_vars, substitute
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.box_dimensions import ROW
from transconv.schedule.tiles.boxes import Box, box_of
from transconv.simplify import simplify

SWIZZLED = 8  # rows after which the order of bytes in shared memory repeats


def rows_of(view: View | None, schedule: Schedule, compute: Compute) -> tuple[int, int]:
    """How many boxes of one row the steps of a group share, and how many of them one step reads; two
    zeros where they share none, and where the schedule does not ask for it."""
    if view is None or not schedule.slide:
        return 0, 0
    box = box_of(view, schedule, compute)
    found = None if isinstance(box, str) else along(box, schedule.slide, compute)
    if found is None or isinstance(box, str):
        return 0, 0
    dim, step = found
    own = box.extents[dim]
    return own + (compute.size(schedule.slide) - 1) * abs(step), own


def moves(view: View, schedule: Schedule) -> bool:
    """Whether an operand depends on the axis at all."""
    return any(Var(schedule.slide) in free_vars(d.coord) for d in view.dims)


@lru_cache(maxsize=1024)
def along(box: Box, axis: str, compute: Compute) -> tuple[int, int] | None:
    """The dimension that an axis moves a box through by whole rows of it, and by how many a step; None
    where it moves otherwise, or where the tiles do not overlap: those of boxes that take every so
    many-th position do not."""
    if box.tensor.every:
        return None
    facts, var = axis_facts(compute), Var(axis)
    ahead = [simplify(substitute(c, {var: var + 1}) - c, facts) for c in box.coords]
    if any(not isinstance(x, Const) for x in ahead):
        return None
    steps = {d: int(x.value) for d, x in enumerate(ahead) if isinstance(x, Const) and x.value}
    if len(steps) != 1:
        return None
    (dim, step), = steps.items()
    below = box.extents[dim + 1:]
    if (prod(box.extents[:dim]) > 1 or not below or box.extents[dim] <= abs(step)
            or prod(below[:-1]) % SWIZZLED or below[-1] * box.tensor.dtype.bytes > ROW):
        return None
    return dim, step
