"""Stage 3, the estimate for computations without a product: maps, reductions, rows swept several times.

Such a kernel takes as long as memory moves its bytes, if enough of them are on their way at once:

    program alone  = fill + sweeps * steps * (latency + instructions) + exchanges between lanes
    multiprocessor = max(programs * bytes / rate, programs * instructions, programs / together * alone)
    kernel         = launch + max(multiprocessor, bytes of all tensors / bandwidth)

Elements that stay in registers are loaded by the first sweep alone. What later sweeps load again comes
from the second cache, where all rows that are under way fit it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from transconv.compute import Compute, Read, Reduction, Step, Write, touched
from transconv.cost.work import fetch
from transconv.ir import Call, Expr, Node, View, find
from transconv.schedule import Schedule, k_steps, programs, tile
from transconv.target import Target

OVERHEAD = 24  # registers of a thread for addresses and masks
HEAVY = 8  # instructions of exp and the like
CACHE = 2.5  # how many times as fast the second cache is as memory
SPREAD_NS, MEET_NS = 60.0, 400.0  # to add up the lanes of a warp, and those of several
FULL = 0.92  # of the bandwidth that copies reach
TURN_NS = 900.0  # from one program's end to the first load of the next in its place
SMALL = 1 / 16  # of the second cache, and of the largest tensor: what all programs read stays there
FEW_US = 2.2  # of a launch that computes nothing


@dataclass(frozen=True, slots=True)
class _Swept:
    """What a program does in one sweep: bytes and instructions of a step, loads under way, exchanges."""

    bytes: float
    again: float
    instructions: float
    loads: bool
    exchanges: int


def microseconds(schedule: Schedule, compute: Compute, target: Target) -> float:
    """What the kernel takes, with the one that adds parts of sums up, if there is one."""
    chip, threads = target.rates.issue, schedule.warps * target.warp_size
    steps = ceil(k_steps(schedule, compute) / schedule.split_k)
    tiles = programs(schedule, compute)
    found = _sweeps(schedule, compute, steps == 1, target)
    elements = prod(tile(schedule, compute, kind) for kind in "BMNK") / threads
    registers = OVERHEAD + elements * _live(compute)
    spilled = max(1.0, registers / chip.most_registers) ** 2
    together = max(1, int(min(chip.threads / threads, target.regs / (threads * min(registers, 255)), 32)))
    rate = target.bandwidth_gbs * FULL / target.sms
    issued = sum(s.instructions for s in found) * steps * threads / target.warp_size / chip.schedulers
    issued *= spilled / chip.clock / chip.share
    waits = sum(steps * chip.latency_ns * s.loads for s in found)
    across = tile(schedule, compute, "K") > target.warp_size * elements
    meets = sum(s.exchanges for s in found) * (1 if schedule.late else steps)
    alone = TURN_NS + waits + issued * chip.stall + meets * (MEET_NS if across else SPREAD_NS)
    each = ceil(tiles / target.sms)
    moved = sum(s.bytes + _cached(s.again, steps, together, target) for s in found) * steps
    busy = max(each * moved / rate, each * issued, ceil(each / together) * alone)
    everything = sum(touched(v, compute) for v in dict.fromkeys(compute.views()))
    us = FEW_US + max(busy / 1e3, everything / (target.bandwidth_gbs * FULL * 1e3))
    if schedule.split_k > 1:
        parts = 2 * compute.acc.bytes * schedule.split_k * touched(compute.c, compute) / (
            compute.c.tensor.dtype.bytes)
        us += FEW_US + parts / (target.bandwidth_gbs * FULL * 1e3)
    return us


def _sweeps(schedule: Schedule, compute: Compute, held: bool, target: Target) -> list[_Swept]:
    """The sweeps of a program. A map is one, and what is stored for a whole row is of the last one."""
    small = {v for v in compute.views() if touched(v, compute) < SMALL * target.l2_bytes}
    largest = max(touched(v, compute) for v in compute.views())
    small = {v for v in small if touched(v, compute) < SMALL * largest}
    each = [(s.before, s.steps) for s in compute.sweeps.each]
    steps = [inner for _, inner in each] or [()]
    steps[-1] = (*steps[-1], *(compute.sweeps.behind if not each else ()))
    seen: set[View] = set()
    found = []
    for inner in steps:
        reads = [s.view for s in inner if isinstance(s, Read)]
        new = [v for v in reads if v not in seen]
        again = [] if held else [v for v in reads if v in seen]
        seen |= {*reads}
        writes = [s.view for s in inner if isinstance(s, Write)]
        shared = [v for v in new if v in small]
        new, again = [v for v in new if v not in small], [*again, *shared]
        ends = sum(isinstance(s, Reduction) for s in inner)
        moved = [fetch(v, schedule, compute, "gather") for v in (*new, *again, *writes)]
        lanes = prod(tile(schedule, compute, kind) for kind in "BMNK") / (schedule.warps * 32)
        found.append(_Swept(
            sum(f.bytes for f in (moved[:len(new)] + moved[len(new) + len(again):])),
            sum(f.bytes for f in moved[len(new):len(new) + len(again)]),
            lanes * sum(_instructions(s) for s in inner)
            + 6 * sum(f.accesses for f in moved) / (schedule.warps * 32),
            bool(new or again), ends))
    return found


def _cached(again: float, steps: int, together: int, target: Target) -> float:
    """Bytes that are loaded again, in bytes of memory that take as long."""
    return again / CACHE if again * steps * together * target.sms < target.l2_bytes else again


def _instructions(step: Step) -> float:
    """Of one element."""
    if isinstance(step, Read):
        return 1.0
    return sum(HEAVY if isinstance(e, Call) else 1.0 for e in _inner(step.value))


def _inner(e: Expr) -> list[Node]:
    return [x for x in find(e, Expr) if x.children()]


def _live(compute: Compute) -> float:
    """Registers of an element: what is read of it, and one for what is computed."""
    reads = [s for sweep in compute.sweeps.each for s in sweep.steps if isinstance(s, Read)]
    names = {r.name: r for r in (reads or compute.reads)}
    return sum(max(0.5, r.view.tensor.dtype.bytes / 4) for r in names.values()) + compute.acc.bytes / 4
