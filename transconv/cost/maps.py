"""Stage 3, the estimate for computations without a product: maps, reductions, rows swept several times.

Such a kernel takes as long as memory moves its bytes, if enough of them are on their way at once:

    program alone  = start + sweeps * steps * (latency + bytes + instructions) + exchanges between threads
    multiprocessor = max(programs * bytes, programs * instructions, programs / together * alone)
    kernel         = launch + max(multiprocessor, bytes of all tensors / bandwidth)

A row that stays in registers is loaded once, and all its loads are under way together. What is loaded
again comes from the second cache where all rows that are under way fit it. The constants are round figures
fitted to trials on an H200 (bench/results/h200_map_trials.csv), for the order of schedules alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from transconv.compute import Compute, Read, Reduction, Step, Write, axis_strides, touched
from transconv.cost.work import fetch
from transconv.ir import Call, Expr, View, find
from transconv.schedule import Block, Schedule, k_steps, programs, tile
from transconv.target import Target

OVERHEAD = 20  # registers of a thread for addresses and masks
HEAVY = 6  # instructions of exp and the like
STALL = 2.0  # clocks between two instructions of a warp
ISSUED = 2.5  # of the counted instructions, which are generous, in a clock of a scheduler
CACHE = 4.0  # how many times as fast the second cache is as memory
ROOM = 0.6  # of the second cache that holds what is read again
SMALL = 1 / 16  # of the second cache, and of the largest tensor: what all programs read stays there
SPREAD_NS, MEET_NS = 150.0, 145.0  # to combine what the threads of a warp hold, and those of several warps
FULL = 0.88  # of the bandwidth that copies reach
SHORT, LINE = 0.04, 128  # more for runs of half a cache line than for those of a whole one; its bytes
EDGE_GBS = 80.0  # bytes a nanosecond that reach one multiprocessor
LATENCY_NS = 600.0  # from a load to its value
START_NS, NEXT_NS = 1100.0, 77.0  # a program's start, and the least between two starts
FEW_US = 2.2  # of a launch that computes nothing


@dataclass(frozen=True, slots=True)
class _Swept:
    """What a program does in a step of one sweep: bytes that it reads and writes first, those that it has
    read before, instructions of a thread, and how many reductions it ends with."""

    bytes: float
    again: float
    instructions: float
    reads: bool
    exchanges: int


def microseconds(schedule: Schedule, compute: Compute, target: Target) -> float:
    """What the kernel takes, with the one that adds parts of sums up, if there is one."""
    chip, threads = target.rates.issue, schedule.warps * target.warp_size
    steps = ceil(k_steps(schedule, compute) / schedule.split_k)
    found = _sweeps(Schedule(schedule.blocks, "fma", warps=schedule.warps), compute, steps == 1, target)
    elements = prod(tile(schedule, compute, kind) for kind in "BMNK") / threads
    registers = OVERHEAD + elements * _live(compute)
    spilled = max(1.0, registers / chip.most_registers) ** 2
    together = max(1, int(min(chip.threads / threads, target.regs / (threads * min(registers, 255)), 32)))
    tiles = programs(schedule, compute)
    rate = min(EDGE_GBS, target.bandwidth_gbs * FULL / min(tiles, target.sms))
    thread = sum(s.instructions for s in found) * steps * spilled / chip.clock  # one instruction a clock
    moved = steps * sum(s.bytes + _cached(s.again, steps, together, target) for s in found)
    waits = sum(s.reads for s in found) * steps if steps > 1 else 1
    exchange = _exchange(schedule, compute)
    meets = sum(s.exchanges for s in found) * (1 if schedule.late else steps) * exchange
    alone = (START_NS + waits * LATENCY_NS + moved / EDGE_GBS + meets
             + thread * max(STALL, schedule.warps / chip.schedulers))
    each = ceil(tiles / target.sms)
    issued = thread * schedule.warps / chip.schedulers / ISSUED
    issued += meets if exchange == MEET_NS else 0.0
    busy = max(each * max(moved / rate, issued, NEXT_NS), ceil(each / together) * alone)
    bandwidth = target.bandwidth_gbs * FULL * 1e3
    everything = sum(touched(v, compute) for v in dict.fromkeys(compute.views()))
    us = FEW_US + max(busy / 1e3, everything / bandwidth)
    if schedule.split_k > 1:
        parts = schedule.split_k * compute.acc.bytes / compute.c.tensor.dtype.bytes
        us += FEW_US + 2 * parts * touched(compute.c, compute) / bandwidth
    return us


@lru_cache(maxsize=4096)
def _sweeps(schedule: Schedule, compute: Compute, held: bool, target: Target) -> list[_Swept]:
    """The sweeps of a program. A map is one. Most words make no difference to it."""
    sizes = {v: touched(v, compute) for v in compute.views()}
    largest = max(sizes.values())
    small = {v for v, n in sizes.items() if n < SMALL * min(target.l2_bytes, largest)}
    steps = [s.steps for s in compute.sweeps.each] or [compute.sweeps.behind]
    threads = schedule.warps * target.warp_size
    lanes = prod(tile(schedule, compute, kind) for kind in "BMNK") / threads
    seen: set[View] = set()
    found = []
    for inner in steps:
        reads = [s.view for s in inner if isinstance(s, Read) and not (held and s.view in seen)]
        first = [v for v in reads if v not in seen | small]
        again = [v for v in reads if v in seen | small]
        seen |= {*reads}
        stored = [s.view for s in inner if isinstance(s, Write)]
        bytes_of = {v: min(_bytes(v, schedule, compute), sizes[v] if v in small else 1 << 60)
                    for v in (*reads, *stored)}
        accesses = sum(fetch(v, schedule, compute, "gather").accesses for v in (*reads, *stored)) / threads
        found.append(_Swept(sum(bytes_of[v] for v in (*first, *stored)), sum(bytes_of[v] for v in again),
                            lanes * _instructions(inner) + 6 * accesses, bool(reads),
                            sum(isinstance(s, Reduction) for s in inner)))
    return found


def _bytes(view: View, schedule: Schedule, compute: Compute) -> float:
    """Of a view's tile, as many as take the time of its runs."""
    moved = fetch(view, schedule, compute, "gather")
    return moved.bytes * (1 + SHORT * max(0.0, LINE / moved.row - 1))


def _cached(again: float, steps: int, together: int, target: Target) -> float:
    """Bytes that are loaded again, in bytes of memory that take as long."""
    return again / CACHE if again * steps * together * target.sms < ROOM * target.l2_bytes else again


def _exchange(schedule: Schedule, compute: Compute) -> float:
    """What it takes to combine the parts of a reduction that threads hold. They lie along the innermost
    block first, each with 16 bytes of it, as Triton deals them out."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute))
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    threads = schedule.warps * 32

    def gap(b: Block) -> int:
        return abs(strides[b.axes[-1]]) or 1 << 40

    inner = min(schedule.blocks, key=gap, default=None)
    if inner is None:
        return 0.0
    along = min(threads, max(1, inner.extent * size // 16))
    if compute.kind(inner.axes[0]) == "K":
        return SPREAD_NS if along <= 32 else MEET_NS
    beside = min(threads // along, tile(schedule, compute, "K"))
    if beside <= 1:
        return 0.0
    return SPREAD_NS if along * beside <= 32 else MEET_NS


@lru_cache(maxsize=256)
def _instructions(steps: tuple[Step, ...]) -> float:
    """Of one element."""
    values = [s.value for s in steps if not isinstance(s, Read)]
    inner = [e for v in values for e in find(v, Expr) if e.children()]
    return sum(HEAVY if isinstance(e, Call) else 1.0 for e in inner) + len(steps) - len(values)


def _live(compute: Compute) -> float:
    """Registers of an element: what is read of it, from sweep to sweep where there are several, and one
    for what is computed."""
    each = [{s.view for s in sweep.steps if isinstance(s, Read)} for sweep in compute.sweeps.each]
    views = {r.view for r in compute.reads}
    if len(each) > 1:
        views = {v for v in views if sum(v in read for read in each) > 1}
    return sum(max(0.5, v.tensor.dtype.bytes / 4) for v in views) + compute.acc.bytes / 4
