"""Estimated registers on chips whose matrix unit reads its operands from registers.

    a thread = base + sums + operands under way + their addresses, more where every load needs a mask

Other chips keep operands in shared memory; this estimate is not for them (``Target.lane_regs``). The
numbers were fitted to 210 kernels compiled for gfx1100, of which 42 spill.
"""

from __future__ import annotations

from math import prod

from transconv.compute import Compute
from transconv.cost.fetches import fetch
from transconv.schedule import Schedule, Scheduled, k_steps, tile
from transconv.target import Target

SAFE = 0.85  # the fraction of registers above which most kernels spill
BASE = 64
ADDRESS = 2  # registers for each load of a step
MASKED = 4  # more for each register of an operand, if loads need masks
SHORT = 14  # the compiler may unroll sums of at most so many steps, which takes for each load:
UNROLLED, UNROLLED_MASKED = 2, 16
LANE = 4  # with unit fma, registers for the address and the mask of each product


def spills(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a kernel is likely to need more registers than a thread has."""
    if not target.lane_regs or compute.b is None or (schedule.regs or schedule.late or schedule.unroll):
        return False
    return registers(schedule, compute, target) > SAFE * target.lane_regs


def registers(schedule: Schedule, compute: Compute, target: Target) -> float:
    """Registers of a thread of a kernel whose operands are gathered."""
    whole = Scheduled(compute, schedule, target)
    threads = schedule.warps * target.warp_size
    seen = whole.main
    views = [v for v in (seen.a, seen.b) if v is not None]
    loads = sum(fetch(v, schedule, seen, "gather").accesses for v in views) / threads
    m, n, k, group = (tile(schedule, seen, kind) for kind in "MNKB")
    words = (m + n) * k * group * seen.a.tensor.dtype.bytes / 4 / threads
    each = compute.acc.bytes / 4 + (0 if schedule.unit == "mma" else LANE)
    made = BASE + m * n * group * each / threads + words + ADDRESS * loads
    steps = k_steps(schedule, seen)
    short = -(-steps // schedule.split_k) <= SHORT
    masked = schedule.merge > 1 or _uneven(schedule, seen, steps)
    return made + (MASKED * words + UNROLLED_MASKED * short * loads) * masked + UNROLLED * short * loads


def _uneven(schedule: Schedule, compute: Compute, steps: int) -> bool:
    """Whether some step reaches beyond the end of the sum, or of a program's part of it."""
    return bool(steps % schedule.split_k) or any(
        prod(compute.size(a) for a in b.axes) % b.extent
        for b in schedule.blocks
        if compute.kind(b.first) == "K"
    )
