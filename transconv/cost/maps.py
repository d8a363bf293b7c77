"""Estimated time of computations without a product: maps, reductions, rows that are swept several times.

Such a kernel is bound by the bandwidth of memory if enough bytes are in flight:

    program alone  = start + sweeps * steps * (latency + bytes + instructions) + exchanges between threads
    multiprocessor = max(programs * bytes, programs * instructions, programs / together * alone)
    kernel         = launch + max(multiprocessor, bytes of all tensors / bandwidth)
                     + launches and bytes of the kernels that combine statistics

A row that stays in registers is loaded once, with all loads in flight together. Elements that are loaded
again come from the L1 cache if it holds the rows of all programs of a multiprocessor (on NVIDIA's chips it
is what shared memory leaves), or from the L2 cache if that holds all rows in flight. With ``turn=1`` the
part of a row that a cache holds is found there also where the whole is too long. Persistent programs with
``stages=3`` load the next tile while they compute; with 2, Triton (3.6) has one buffer, which is filled
when it is free. The constants are round figures, fitted to trials on an H200
(bench/results/h200_map_trials.csv, h200_part_trials.csv) so that the order of schedules is right; none of
these trials has ``turn=1``. What windows share is loaded from the caches, what a mask excludes is not
loaded: of both, a tensor's elements count once, and the rest as loads from the L1 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from transconv.compute import Compute, Read, Reduction, Step, Write, axis_strides, touched
from transconv.cost.additions import adding_us, meeting_us
from transconv.cost.fetches import Fetch, fetch
from transconv.cost.issue import ACCESS, SECTOR
from transconv.cost.reloads import LATENCY_NS, NEAR, loaded
from transconv.ir import Call, Expr, View, find
from transconv.schedule import (
    Block,
    Schedule,
    ahead,
    ahead_bytes,
    carried,
    groups,
    k_steps,
    left_bytes,
    programs,
    tile,
    within,
)
from transconv.target import Target

WINDOW = 64  # elements of a row up to which lanes beyond its end cost as much as others: as in trials
WRITTEN = 16  # unrolled steps whose loads are in flight together
OVERHEAD = 20  # registers of a thread for addresses and masks
HEAVY = 6  # instructions of exp and the like
STALL = 2.0  # clocks between two instructions of a warp
ISSUED = 2.5  # counted instructions a clock of a scheduler; above 1, because the counts are too high
SMALL_GBS = 130.0  # GB/s of tensors that stay in the caches, beside what comes from memory
SMALL = 1 / 16  # tensors below this fraction of the L2 cache and of the largest tensor stay in the cache
EXCHANGE_NS = {"lane": 0.0, "warp": 150.0, "block": 145.0}  # to combine results of threads of a row
CROSSING_NS = 1.15  # for each place and each group of warps that has it, by way of shared memory
CROSS = 1 / 120  # of a block's exchange: for each row of each warp, written to shared memory and read
FULL = 0.88  # the fraction of the bandwidth that copies reach
SHORT, LINE = 0.04, 128  # extra time of runs of half a cache line; bytes of a cache line
EDGE_GBS = 80.0  # GB/s into one multiprocessor
START_NS, NEXT_NS = 1100.0, 77.0  # of a program; the shortest time between two starts


@dataclass(frozen=True, slots=True)
class _Swept:
    """A step of one sweep of a program: bytes that it reads for the first time or writes, bytes that it
    reads ``again``, bytes of ``small`` tensors, instructions of a thread, whether it reads, whether
    something for the first time (``fresh``), and the number of its reductions."""

    bytes: float
    again: float
    small: float
    instructions: float
    reads: bool
    fresh: bool
    exchanges: int


def microseconds(schedule: Schedule, compute: Compute, target: Target) -> float:
    """Microseconds of the kernel, and of the one that adds partial sums, if there is one."""
    chip, threads = target.rates.issue, schedule.warps * target.warp_size
    facts = _facts(compute, target)
    tiled = _tiled(schedule.blocks, compute)
    steps = ceil(tiled.steps / schedule.split_k)
    held = steps == 1
    found = _sweeps(schedule.blocks, schedule.warps, compute, held, target)
    elements = tiled.elements / threads
    sums = 0.0 if held or schedule.late else compute.acc.bytes / 4  # each step adds up its own
    registers = OVERHEAD + elements * (facts.live - sums)
    carries = carried(compute, schedule)
    if carries:
        places = tiled.elements if schedule.late else tiled.reduced
        registers += (len(compute.statistics) * places + facts.shared * tiled.reduced) / threads
    tiles = tiled.programs * schedule.split_k
    started = min(schedule.programs or tiles, tiles)
    turns = ceil(tiles / started)  # tiles of a program
    spilled = max(1.0, registers / min(chip.most_registers, target.regs / threads)) ** 2
    together = max(1, int(min(chip.threads / threads, target.regs / (threads * min(registers, 255)), 32)))
    deep = ahead(schedule, compute) if turns > 1 else 0
    if deep:
        fit = target.shared_bytes // max(1, _ahead(schedule.blocks, deep, compute))
        together = max(1, min(together, fit))
    rate = min(EDGE_GBS, target.bandwidth_gbs * FULL / min(started, target.sms))
    thread = sum(s.instructions for s in found) * steps * spilled / chip.clock  # one instruction a clock
    each = ceil(started / target.sms)
    beside = min(each, together)
    reloads = [loaded(s.again, steps, beside, bool(schedule.turn), target) for s in found]
    moved = steps * sum(s.bytes + again for s, (again, _) in zip(found, reloads, strict=True))
    hit = steps * sum(s.small for s in found) / SMALL_GBS
    at_once = schedule.unroll and steps <= WRITTEN
    latency = LATENCY_NS if held or at_once else steps * sum(
        LATENCY_NS if s.fresh else ns for s, (_, ns) in zip(found, reloads, strict=True) if s.reads)
    divided = within(schedule.blocks, schedule.warps, tiled.reduced, compute, target.warp_size)
    exchange = EXCHANGE_NS[divided]
    meets = sum(s.exchanges for s in found) * (1 if schedule.late else steps) * exchange
    # Programs of several tiles that are not beside others leave the memory idle while they compute.
    share = EDGE_GBS if turns == 1 else min(EDGE_GBS, rate * min(each, together))
    works = meets + thread * max(STALL, schedule.warps / chip.schedulers / ISSUED)
    turn = latency + moved / share + hit + works
    if deep > 2:  # the loads of tiles go on beside, but not those of one element for a tile
        turn = max(works + LATENCY_NS * _lone(schedule.blocks, compute), moved / share,
                   (LATENCY_NS + moved / share) / (deep - 2))
    alone = START_NS + turns * turn
    issued = hit + thread * schedule.warps / chip.schedulers / ISSUED
    if compute.statistics and not (carries and schedule.late):
        issued += steps * len(compute.statistics) * _crossing(schedule, tiled, compute, target)
    if divided == "block":
        issued += meets * (1 + CROSS * tiled.elements / tiled.reduced * schedule.warps)
    busy = max(each * max(turns * moved / rate, turns * issued, NEXT_NS), ceil(each / together) * alone)
    bandwidth = target.bandwidth_gbs * FULL * 1e3
    us = chip.empty_us + max(busy / 1e3, facts.everything / bandwidth)
    us += adding_us(compute, target)
    if compute.statistics:
        left = _left(schedule.blocks, schedule.programs, compute)
        us += len(groups(compute)) * chip.empty_us + 2 * left / bandwidth
    if schedule.split_k > 1 and schedule.reduce == "atomic":
        c = compute.c.tensor
        us += meeting_us(prod(c.shape), c.dtype.bytes, schedule.split_k, target)
    elif schedule.split_k > 1:
        parts = schedule.split_k * compute.acc.bytes / compute.c.tensor.dtype.bytes
        us += chip.empty_us + 2 * parts * facts.sizes[compute.c] / bandwidth
    return us


@dataclass(frozen=True, slots=True)
class _Facts:
    """Properties of a computation that are the same for all schedules. ``sizes``: the bytes that each view
    must move at least; ``small``: views that stay in the L2 cache; ``everything``: the sum of ``sizes``;
    ``live``: see ``_live``; ``shared``: registers of an element for what is the same in all rows."""

    sizes: dict[View, int]
    small: frozenset[View]
    everything: int
    live: float
    shared: float
    sweeps: tuple[tuple[Step, ...], ...]


@lru_cache(maxsize=64)
def _facts(compute: Compute, target: Target) -> _Facts:
    sizes = {v: touched(v, compute) for v in compute.views()}
    largest = max(sizes.values())
    small = {v for v, n in sizes.items() if n < SMALL * min(target.l2_bytes, largest)}
    return _Facts(sizes, frozenset(small), sum(sizes.values()), _live(compute, small),
                  sum(_words(v) for v in {r.view for r in compute.reads} if not any(
                      axis_strides(v, compute)[x.name] for x in compute.axes_of("M"))),
                  tuple(s.steps for s in compute.sweeps.each) or (compute.sweeps.behind,))


@dataclass(frozen=True, slots=True)
class _Tiled:
    """Counts that follow from the blocks: elements of a tile, its extent along the reduced axes, steps of
    a row, and programs if rows are not split."""

    elements: int
    reduced: int
    steps: int
    programs: int


@lru_cache(maxsize=4096)
def _tiled(blocks: tuple[Block, ...], compute: Compute) -> _Tiled:
    schedule = Schedule(blocks, "fma")
    return _Tiled(prod(tile(schedule, compute, kind) for kind in "BMNK"), tile(schedule, compute, "K"),
                  k_steps(schedule, compute), programs(schedule, compute))


@lru_cache(maxsize=1024)
def _left(blocks: tuple[Block, ...], persistent: int, compute: Compute) -> int:
    """The bytes of statistics' parts."""
    return left_bytes(compute, Schedule(blocks, "fma", programs=persistent))


@lru_cache(maxsize=4096)
def _sweeps(blocks: tuple[Block, ...], warps: int, compute: Compute, held: bool,
            target: Target) -> list[_Swept]:
    """The sweeps of a program; a map is one sweep. It takes blocks and warps instead of a schedule, so
    that the cache hits for schedules that differ in other words."""
    facts = _facts(compute, target)
    schedule = Schedule(blocks, "fma", warps=warps)
    threads = warps * target.warp_size
    lanes = _tiled(blocks, compute).elements / threads
    moved = {v: fetch(v, schedule, compute, "gather") for v in facts.sizes}
    windows = not held and prod(x.size for x in compute.axes_of("K")) <= WINDOW
    bytes_of = {v: min(_bytes(f) * (1.0 if windows else _present(v, blocks, compute)),
                       _distinct(v, blocks, compute) * SECTOR,
                       facts.sizes[v] if v in facts.small else 1 << 60) for v, f in moved.items()}
    if windows:  # elements of overlapping windows are near, and what a mask excludes is not loaded
        tiled = _tiled(blocks, compute)
        for v in (r.view for r in compute.reads if r.view not in facts.small):
            each = facts.sizes[v] / max(1, tiled.programs * tiled.steps)  # a sum over nothing has none
            bytes_of[v] = min(bytes_of[v], each + (bytes_of[v] - each) / NEAR)
    return [_Swept(sum([bytes_of[v] for v in r.first]),
                   sum([bytes_of[v] for v in r.again if v not in facts.small]),
                   sum([bytes_of[v] for v in r.again if v in facts.small]),
                   lanes * r.instructions + 6 * (sum([moved[v].accesses for v in r.all]) / threads),
                   r.reads, r.fresh, r.exchanges) for r in _roles(compute, held, target)]


@dataclass(frozen=True, slots=True)
class _Role:
    """Properties of a sweep that do not depend on tiles: views that it reads for the first time or stores,
    views that it reads ``again``, all of them, instructions of an element, whether it reads, whether
    something for the first time, and the number of its reductions."""

    first: tuple[View, ...]
    again: tuple[View, ...]
    all: tuple[View, ...]
    instructions: float
    reads: bool
    fresh: bool
    exchanges: int


@lru_cache(maxsize=128)
def _roles(compute: Compute, held: bool, target: Target) -> tuple[_Role, ...]:
    facts = _facts(compute, target)
    seen: set[View] = set()
    found = []
    for inner in facts.sweeps:
        reads = [s.view for s in inner if isinstance(s, Read) and not (held and s.view in seen)]
        stored = [s.view for s in inner if isinstance(s, Write) and s not in compute.statistics]
        first = [v for v in reads if v not in seen and v not in facts.small]
        again = [v for v in reads if v in seen or v in facts.small]
        seen |= {*reads}
        found.append(_Role((*first, *stored), tuple(again), (*reads, *stored),
                           _instructions(inner), bool(reads), bool(first),
                           sum(isinstance(s, Reduction) for s in inner)))
    return tuple(found)


@lru_cache(maxsize=1024)
def _ahead(blocks: tuple[Block, ...], stages: int, compute: Compute) -> int:
    """Bytes of shared memory for loads in flight."""
    return ahead_bytes(Schedule(blocks, "fma", stages=stages), compute)


@lru_cache(maxsize=4096)
def _lone(blocks: tuple[Block, ...], compute: Compute) -> bool:
    """Whether a tile reads one element for all of its lanes, and another one in the next tile."""
    return any(not any(_moves(r.view, b, compute) for b in blocks)
               and any(axis_strides(r.view, compute).values()) for r in compute.reads)


def _bytes(moved: Fetch) -> float:
    """Bytes of a view's tile, increased for runs shorter than a cache line."""
    return moved.bytes * (1 + SHORT * max(0.0, LINE / moved.row - 1))


@lru_cache(maxsize=4096)
def _present(view: View, blocks: tuple[Block, ...], compute: Compute) -> float:
    """The fraction of a tile's lanes that a view has elements for, on average: lanes beyond the end of an
    axis load nothing."""
    return prod(n / (ceil(n / b.extent) * b.extent) for b in blocks if _moves(view, b, compute)
                for n in [prod(map(compute.size, b.axes))] if n)


@lru_cache(maxsize=4096)
def _distinct(view: View, blocks: tuple[Block, ...], compute: Compute) -> int:
    """The most different elements of a view in a tile. Along the innermost axes of a block, neighbouring
    lanes may read the same one."""
    strides, count = axis_strides(view, compute), 1
    for block in blocks:
        if _moves(view, block, compute):
            last = max(i for i, a in enumerate(block.axes) if strides[a])
            alike = prod(map(compute.size, block.axes[last + 1:]))
            count *= ceil(block.extent / max(1, alike))
    return count


def _moves(view: View, block: Block, compute: Compute) -> bool:
    strides = axis_strides(view, compute)
    return any(strides[a] for a in block.axes)


def _crossing(schedule: Schedule, tiled: _Tiled, compute: Compute, target: Target) -> float:
    """Nanoseconds in which a statistic of rows is combined between warps that hold elements of the same
    places: none if the lanes of a row take all warps."""
    threads = schedule.warps * target.warp_size
    beside = threads * ACCESS // compute.c.tensor.dtype.bytes / tiled.reduced
    crosses = beside > 1 and tiled.elements > tiled.reduced > 1
    return CROSSING_NS * tiled.reduced * beside if crosses else 0.0


@lru_cache(maxsize=256)
def _instructions(steps: tuple[Step, ...]) -> float:
    """Instructions of one element in a sweep."""
    values = [s.value for s in steps if not isinstance(s, Read)]
    inner = [e for v in values for e in find(v, Expr) if e.children()]
    return sum(HEAVY if isinstance(e, Call) else 1.0 for e in inner) + len(steps) - len(values)


def _live(compute: Compute, small: set[View]) -> float:
    """Registers of an element: for its inputs (if there are several sweeps, those that more than one
    reads) that are no ``small`` tensors, whose elements many share, and for the computed value."""
    each = [{s.view for s in sweep.steps if isinstance(s, Read)} for sweep in compute.sweeps.each]
    views = {r.view for r in compute.reads}
    if len(each) > 1:
        views = {v for v in views if sum(v in read for read in each) > 1}
    return sum(map(_words, views - small)) + compute.acc.bytes / 4


def _words(view: View) -> float:
    """Registers for an element of a view; two of 16 bits share one."""
    return max(0.5, view.tensor.dtype.bytes / 4)
