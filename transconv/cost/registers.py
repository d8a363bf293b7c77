"""Estimated registers of products whose operands lie in registers.

Chips whose matrix unit reads its operands from there:

    a thread = base + sums + operands under way + their addresses, more where every load needs a mask

The numbers were fitted to 210 kernels compiled for gfx1100, of which 42 spill. Other chips
(without ``Target.lane_regs``) keep operands in shared memory instead, and products of f32 that no matrix
unit takes (math=ieee) are read from there when they are needed. Where operands are converted first, or
there is one step alone, Triton 3.6 has a thread's rows and columns of a whole step in registers:

    a thread = sums + (rows + columns) x depth of a step

Of seven kernels compiled for sm_90 whose operands are converted, the five above ``WHOLE`` spill (352 bytes
for 394 registers, 1,584 for 756) and the two below do not. Of five with one step alone, all above, two
spill (432 bytes for 756, 5,760 for 1,088): the estimate is cautious there, and such kernels come last."""

from __future__ import annotations

from math import prod, sqrt

from transconv.compute import Compute
from transconv.cost.fetches import fetch
from transconv.ir import f32
from transconv.schedule import Schedule, Scheduled, k_steps, tile
from transconv.target import Target

SAFE = 0.85  # the fraction of registers above which most kernels spill
BASE = 64
ADDRESS = 2  # registers for each load of a step
MASKED = 4  # more for each register of an operand, if loads need masks
SHORT = 14  # the compiler may unroll sums of at most so many steps, which takes for each load:
UNROLLED, UNROLLED_MASKED = 2, 16
WHOLE = 280
LANE = 4  # with unit fma, registers for the address and the mask of each product


def spills(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a kernel is likely to need more registers than a thread has."""
    if target.backend == "cuda":
        return _is_whole(schedule, compute) and _whole(schedule, compute, target) > WHOLE
    if not target.lane_regs or compute.b is None or (schedule.regs or schedule.late or schedule.unroll):
        return False
    return registers(schedule, compute, target) > SAFE * target.lane_regs


def _is_whole(schedule: Schedule, compute: Compute) -> bool:
    """Whether a thread has all operands of a step of an f32 product in registers."""
    if compute.b is None or compute.math != "ieee" or (schedule.unit, schedule.via) != ("mma", "tl"):
        return False
    types = {v.tensor.dtype.memory for v in (compute.a, compute.b)}
    return f32 in types and (len(types) > 1 or k_steps(schedule, compute) == 1)


def _whole(schedule: Schedule, compute: Compute, target: Target) -> float:
    m, n, k, group = (tile(schedule, compute, kind) for kind in "MNKB")
    sums = m * n * group / (schedule.warps * target.warp_size)
    return sums + 2 * sqrt(sums) * k  # about as many rows as columns


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
