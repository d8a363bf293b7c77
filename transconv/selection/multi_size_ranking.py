"""Schedules of kernels whose sizes are arguments, ranked by their estimates for several sizes.

Tiles that fit the sizes of an example leave no lane idle there; for most other sizes they do, each tile
for others. So the example's best schedules with each tile are ranked again, by the mean over sizes around
it:

    MB=8 IH=56 IW=56    at    MB=5 IH=91 IW=34    MB=13 IH=58 IW=77    ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import lcm, log, sqrt
from typing import cast

from transconv.compute import Compute
from transconv.cost import AtSizes, estimate, spills
from transconv.ir import Const, Mod, Sizes, find, free_vars, values_of
from transconv.schedule import Schedule
from transconv.selection.proposals.accumulation_chains import too_long
from transconv.target import Target

MOST = 96  # schedules that are ranked again
OF_TILE = 3  # of these, with one tile
COUNT = 8  # sizes
REACH = 2.0  # the largest factor between a size and the example's
WORSE = 1.09  # the factor by which a schedule may be slower at other sizes than at the example
GOLDEN = (sqrt(5) - 1) / 2  # its multiples spread evenly


def at_several(schedules: list[Schedule], compute: Compute, target: Target) -> list[Schedule]:
    """Schedules, of which the first few with each tile come first, in the order of their estimates for
    several sizes. Those of another kind than the first (whose registers or chains are too long) stay
    behind. Unchanged where no sizes are arguments, and for computations without a product."""
    if compute.named is None or compute.b is None or target.backend == "interpreter" or not schedules:
        return schedules
    sizes = [*around(compute.named)]
    kind = _kind(schedules[0], compute, target)
    tiles: Counter[object] = Counter()
    mean: dict[Schedule, float] = {}
    for schedule in schedules if sizes else ():
        tiles[schedule.blocks] += 1
        if (tiles[schedule.blocks] <= OF_TILE and len(mean) < MOST
                and _kind(schedule, compute, target) == kind):
            mean[schedule] = _mean(schedule, compute, target, sizes)
    return [*sorted(mean, key=mean.__getitem__), *(s for s in schedules if s not in mean)]


def lasts(schedule: Schedule, best: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a schedule is hardly slower beside the best one at several sizes than at the example, by
    their estimates: a tile may fit the example's images alone."""
    if compute.named is None or compute.b is None or target.backend == "interpreter":
        return True
    if not (sizes := [*around(compute.named)]):
        return True
    slower = _mean(schedule, compute, target, sizes) - _mean(best, compute, target, sizes)
    here = estimate(schedule, compute, target) / estimate(best, compute, target)
    return slower <= log(max(1.0, here) * WORSE)


def around(sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """Sizes that meet the requirements, none of them further than ``REACH`` from the example's."""
    divisors = {m: int(m.b.value) for r in sizes.where for m in find(r, Mod) if isinstance(m.b, Const)}
    share = lcm(*divisors.values())
    shared = {v.name for m in divisors for v in free_vars(m)}
    for turn in range(1, COUNT + 1):
        drawn = {}
        for place, (name, like) in enumerate(sizes.like.items(), 1):
            part = turn * GOLDEN * place % 1
            n = max(1, round(like * REACH ** (2 * part - 1)))
            drawn[name] = -(-n // share) * share if name in shared else n
        if not sizes.why_not(drawn):
            yield tuple(drawn.values())


_counting = lru_cache(maxsize=256)(values_of)  # schedules with one tile have the same counts


def _kind(schedule: Schedule, compute: Compute, target: Target) -> tuple[bool, bool]:
    return too_long(schedule, compute, target), bool(spills(schedule, compute, target))


def _mean(schedule: Schedule, compute: Compute, target: Target, sizes: list[tuple[int, ...]]) -> float:
    """The mean of the logarithms of the estimates."""
    assert compute.named is not None
    at = AtSizes(schedule, compute, target)
    counts = _counting(at.counts, compute.named.names)
    us = [cast(float, at.us(*counts(*drawn))) for drawn in sizes]
    return sum(map(log, us)) / len(us)
