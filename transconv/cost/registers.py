"""Estimated registers on chips whose matrix unit reads its operands from registers.

    a thread = base + sums + operands under way + their addresses, more where every load needs a mask

Where a copy from memory past the registers exists, operands wait in shared memory instead, and nothing
here is asked. The numbers were fitted to 210 kernels compiled for gfx1100, of which 42 spill.
"""

from __future__ import annotations

from math import prod

from transconv.compute import Compute
from transconv.cost.work import fetch
from transconv.schedule import Schedule, Scheduled, k_steps, tile
from transconv.target import Target

WAVE = 8  # registers of a thread for each lane of a wave: 256 of 32, 512 of 64
SAFE = 0.85  # of them, above which most kernels spill
BASE = 64
ADDRESS = 2  # for each load of a step
MASKED = 4  # for each register of an operand, where parts of a sum end within a step
SHORT = 14  # steps that the compiler may unroll, with all their loads:
UNROLLED, UNROLLED_MASKED = 2, 16  # for each load
LANE = 4  # element by element: for each product, where it lies and whether it is there


def spills(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a kernel is likely to need more registers than a thread has."""
    if target.backend != "hip" or "async_copy" in target.features or compute.b is None or (
            schedule.regs or schedule.late or schedule.unroll):
        return False
    return registers(schedule, compute, target) > SAFE * WAVE * target.warp_size


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
    """Whether some step goes beyond the sum, or beyond the part of it that a program has."""
    return bool(steps % schedule.split_k) or any(
        prod(compute.size(a) for a in b.axes) % b.extent for b in schedule.blocks
        if compute.kind(b.axes[0]) == "K")
