"""The kernels of a computation without a product: one, or several with its rows split into parts, if
there are too few rows to fill the chip, or if registers do not hold a row, and the estimate says that
several are faster."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from transconv.compute import Compute, axis_strides, kernels, parted, touched, why_not_lowered
from transconv.cost import estimate
from transconv.selection.proposals import heuristics
from transconv.support import ScheduleError
from transconv.target import Target

FEW = 2  # rows per multiprocessor with which one kernel is fast enough, if registers hold a row
HELD = 32768
"""The most elements of a row that registers hold."""
ALONG = 4096  # elements of a part, if rows are contiguous
ACROSS = (128, 1024)  # elements of a part, at least and at most, if rows have a stride
BESIDE = 64  # the fewest rows of a program, if rows have a stride
FILL = 16 * BESIDE  # parts that keep a multiprocessor busy
UNTIMED = 1.3  # by how much sweeps in alternating directions must be faster than parts: no trial has them
SHORT = 64  # innermost reduced axes with fewer elements are left to the second kernel


@lru_cache(maxsize=256)
def spread(compute: Compute, target: Target, asked: bool = False) -> tuple[Compute, ...]:
    """The computation alone, or the computations of several kernels with rows in parts: if the estimate
    says that these are faster, or, if ``asked`` for (``red=split``), whenever it is possible."""
    if compute.named or compute.statistics:  # the number of parts would depend on sizes or on tiles
        return (compute,)
    if asked:
        made = _in_parts(compute, target) if compute.again and compute.streams else None
        return (compute,) if made is None or any(why_not_lowered(k) for k in made) else made
    rows, row = (prod(x.size for x in compute.axes_of(kind)) for kind in "MK")
    if not compute.again or not compute.streams or target.backend == "interpreter":
        return (compute,)
    if not _along(compute):
        rows //= BESIDE
    if row <= HELD and rows >= FEW * target.sms:
        return (compute,)
    made = _in_parts(compute, target)
    if made is None or any(why_not_lowered(k) for k in made):
        return (compute,)
    try:
        one = heuristics.default(compute, target)
        whole = estimate(one, compute, target) * (UNTIMED if one.turn else 1)
        apart = sum(estimate(heuristics.default(k, target), k, target) for k in made)
    except ScheduleError:
        return (compute,)
    return made if apart < whole else (compute,)


def _along(compute: Compute) -> bool:
    """Whether the largest input is contiguous along a reduced axis."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute))
    gap = axis_strides(view, compute)
    return any(abs(gap[x.name]) == 1 for x in compute.axes_of("K") if x.size > 1)


def _in_parts(compute: Compute, target: Target) -> tuple[Compute, ...] | None:
    """The computations of the kernels, with parts that are close together in memory; None if no suitable
    length of a part divides the axes."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute))
    gap = {a: abs(s) for a, s in axis_strides(view, compute).items()}
    summed = sorted((x for x in compute.axes_of("K") if x.size > 1), key=lambda x: -gap[x.name])
    free = [gap[x.name] for x in compute.axes_of("M") if x.size > 1 and gap[x.name]]
    inside = [x for x in summed if any(s > gap[x.name] for s in free)]
    late = inside if prod(x.size for x in inside) < SHORT and len(inside) < len(summed) else []
    left = [x for x in summed if x not in late]
    if not left:
        return None
    across = prod(x.size for x in compute.axes) // (FILL * target.sms)
    wanted = ALONG if any(gap[x.name] == 1 for x in left) else max(ACROSS[0], min(ACROSS[1], across))
    while len(left) > 1 and prod(x.size for x in left[1:]) >= wanted:
        late, left = [*late, left[0]], left[1:]
    beside = prod(x.size for x in left[1:])
    most = left[0].size if len(late) else left[0].size // 2
    within = next((n for n in range(min(wanted // beside, most), 0, -1) if left[0].size % n == 0), 0)
    if within * beside < wanted // 4:
        return None
    return kernels(parted(compute, left[0].name, within, tuple(x.name for x in late)))
