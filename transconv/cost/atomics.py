"""Estimated time of additions to memory: stores that add, split sums that meet in place, and statistics.

    additions  = clearing the result + max(bytes added / second cache, additions to one place / clock)
    statistics = tiles * (instructions + shuffles + exchange of warps) + bytes of the parts / bandwidth

Additions are done in the second cache, where those to one place follow one another. In the results of the
matrix unit eight groups of lanes, and each warp, have rows of their own, and the four lanes of a group the
columns: a reduction over rows shuffles every column three times and meets in shared memory, one over
columns every row twice. A chip's record has the rates; no figure of statistics is measured here yet.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, prod

from transconv.compute import Compute
from transconv.schedule import Schedule, left_bytes, programs, reduced_sides, tile
from transconv.target import Target

SHUFFLED = 4.0  # instructions that take as long as a shuffle
INSTRUCTIONS = {"sum": 2.0, "max": 2.0, "min": 2.0, "squares": 3.0}  # of each value that a tile reduces
EXCHANGED_NS = 150.0  # of a reduction across warps


@lru_cache(maxsize=256)
def adding_us(compute: Compute, target: Target) -> float:
    """What stores that add take beside the kernel: 0 without any."""
    if not compute.added:
        return 0.0
    tensor = compute.added[0].tensor
    each = prod(x.size for x in compute.axes if compute.kind(x.name) != "K")
    points = each * len(compute.added)
    places = max(1, min(points, prod(tensor.shape)))
    return meeting_us(prod(tensor.shape), max(4, tensor.dtype.bytes), points / places, target)


def meeting_us(elements: int, size: int, each: float, target: Target) -> float:
    """What it takes to clear a result of so many elements of ``size`` bytes, and to add to each of them
    ``each`` times, in microseconds."""
    chip = target.rates.issue
    clearing = chip.empty_us + elements * size / (target.bandwidth_gbs * 1e3)
    moved = elements * each * size / (chip.cache_gbs * target.sms)
    return clearing + max(moved, ceil(each) * chip.adds_clocks / chip.clock) / 1e3


def leaving_us(schedule: Schedule, compute: Compute, target: Target) -> float:
    """What a product's statistics take in its kernel, in microseconds; the kernel that combines the parts
    is estimated by itself."""
    if not compute.statistics:
        return 0.0
    chip = target.rates.issue
    values = prod(tile(schedule, compute, kind) for kind in "BMN")
    each = 0.0
    for w in compute.statistics:
        shuffled, meets = _across_lanes(reduced_sides(w, compute, schedule), schedule, compute)
        each += (INSTRUCTIONS[w.op] * values + shuffled) / (chip.cores * chip.clock) + EXCHANGED_NS * meets
    moved = left_bytes(compute, schedule)
    return (programs(schedule, compute) / target.sms * each / 1e3
            + moved / (target.bandwidth_gbs * 1e3))


def _across_lanes(reduced: str, schedule: Schedule, compute: Compute) -> tuple[float, bool]:
    """The instructions as long as the shuffles of a tile's reduction over some sides, and whether warps
    meet."""
    left, right = "NM" if schedule.swap else "MN"
    if schedule.unit != "mma":
        return 0.0, True
    shuffles = 0.0
    if right in reduced:
        shuffles += 2 * 4 * tile(schedule, compute, left)
    if left in reduced:
        columns = 1 if right in reduced else tile(schedule, compute, right)
        shuffles += 3 * 8 * schedule.warps * columns
    return shuffles * SHUFFLED, left in reduced
