"""The choice. In: a computation without a product, a target. Out: the kernels that compute it: one, or
those of its rows in parts, where there are too few rows to fill the chip and the estimate says so."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from transconv.compute import Compute, axis_strides, kernels, parted, touched, why_not_lowered
from transconv.cost import estimate
from transconv.errors import ScheduleError
from transconv.selection import heuristics
from transconv.target import Target

FEW = 2  # rows for each multiprocessor, with which one kernel keeps them all busy
ALONG, ACROSS = 8192, 128  # elements of a part: of rows along memory, and across it
SHORT = 64  # elements: reduced axes that lie innermost and are shorter are left to the second stage


@lru_cache(maxsize=256)
def spread(compute: Compute, target: Target) -> tuple[Compute, ...]:
    """The computation by itself, or kernels of parts of its rows."""
    rows = prod(x.size for x in compute.axes_of("M"))
    if not compute.again or not compute.streams or target.backend == "interpreter" or (
            rows >= FEW * target.sms):
        return (compute,)
    made = _in_parts(compute)
    if made is None or any(why_not_lowered(k) for k in made):
        return (compute,)
    try:
        whole, apart = (sum(estimate(heuristics.default(k, target), k, target) for k in every)
                        for every in ((compute,), made))
    except ScheduleError:
        return (compute,)
    return made if apart < whole else (compute,)


def _in_parts(compute: Compute) -> tuple[Compute, ...] | None:
    """The kernels of the computation with its reduced axes in parts that lie together; None where no part
    of a sensible size divides them."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute))
    gap = {a: abs(s) for a, s in axis_strides(view, compute).items()}
    summed = sorted((x for x in compute.axes_of("K") if x.size > 1), key=lambda x: -gap[x.name])
    free = [gap[x.name] for x in compute.axes_of("M") if x.size > 1 and gap[x.name]]
    inside = [x for x in summed if any(s > gap[x.name] for s in free)]
    late = inside if prod(x.size for x in inside) < SHORT and len(inside) < len(summed) else []
    left = [x for x in summed if x not in late]
    if not left:
        return None
    wanted = ALONG if any(gap[x.name] == 1 for x in left) else ACROSS
    while len(left) > 1 and prod(x.size for x in left[1:]) >= wanted:
        late, left = [*late, left[0]], left[1:]
    beside = prod(x.size for x in left[1:])
    most = left[0].size if len(late) else left[0].size // 2
    within = next((n for n in range(min(wanted // beside, most), 0, -1) if left[0].size % n == 0), 0)
    if within * beside < wanted // 4:
        return None
    return kernels(parted(compute, left[0].name, within, tuple(x.name for x in late)))
