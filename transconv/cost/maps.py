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

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, prod
from typing import cast

from transconv.compute import Compute, axis_strides
from transconv.cost.atomics import adding_us, meeting_us
from transconv.cost.cache_reloads import LATENCY_NS, loaded
from transconv.cost.issue import ACCESS
from transconv.cost.reduction_passes import Tiled, facts_of, moves, sweeps, tiled_by
from transconv.cost.symbolic_cost import Number, kept, larger, smaller
from transconv.schedule import (
    Block,
    Schedule,
    ahead,
    ahead_bytes,
    carried,
    groups,
    left_bytes,
    within,
)
from transconv.target import Target

WRITTEN = 16  # unrolled steps whose loads are in flight together
OVERHEAD = 20  # registers of a thread for addresses and masks
STALL = 2.0  # clocks between two instructions of a warp
ISSUED = 2.5  # counted instructions a clock of a scheduler; above 1, because the counts are too high
SMALL_GBS = 130.0  # GB/s of tensors that stay in the caches, beside what comes from memory
EXCHANGE_NS = {"lane": 0.0, "warp": 150.0, "block": 145.0}  # to combine results of threads of a row
CROSSING_NS = 1.15  # for each place and each group of warps that has it, by way of shared memory
CROSS = 1 / 120  # of a block's exchange: for each row of each warp, written to shared memory and read
FULL = 0.88  # the fraction of the bandwidth that copies reach
EDGE_GBS = 80.0  # GB/s into one multiprocessor
START_NS, NEXT_NS = 1100.0, 77.0  # of a program; the shortest time between two starts


def microseconds(schedule: Schedule, compute: Compute, target: Target) -> float:
    """Microseconds of the kernel, and of the one that adds partial sums, if there is one."""
    tiled = tiled_by(schedule.blocks, compute)
    tiles, steps = tiled.programs * schedule.split_k, ceil(tiled.steps / schedule.split_k)
    traffic = facts_of(compute, target).everything
    return cast(float, MapTime(schedule, compute, target)(tiles, steps, traffic))


@dataclass(slots=True)
class MapTime:
    """``microseconds`` for other numbers of tiles, of steps of each row and of bytes than those of the
    computation, whose sizes decide where elements are found that are loaded again, and whether a row is
    one step."""

    schedule: Schedule
    compute: Compute
    target: Target
    tiled: Tiled = field(init=False)
    held: bool = field(init=False)  # whether rows have one step
    written: bool = field(init=False)  # whether the loads of all steps are in flight together
    carries: bool = field(init=False)
    single: bool = field(init=False)  # whether each program has one tile
    together: int = field(init=False)  # programs on a multiprocessor at a time, at most
    deep: int = field(init=False)  # stages of loads of further tiles
    each: _Step = field(init=False)

    def __post_init__(self) -> None:
        schedule, compute, target = self.schedule, self.compute, self.target
        self.tiled = tiled = tiled_by(schedule.blocks, compute)
        steps, tiles = ceil(tiled.steps / schedule.split_k), tiled.programs * schedule.split_k
        self.held, self.written = steps == 1, bool(schedule.unroll) and steps <= WRITTEN
        self.carries = carried(compute, schedule)
        self.single = not schedule.programs or tiles <= schedule.programs
        threads, registers = schedule.warps * target.warp_size, self._registers()
        most = target.regs / (threads * min(registers, 255))
        self.together = max(1, int(min(target.rates.issue.threads / threads, most, 32)))
        self.deep = 0 if self.single else ahead(schedule, compute)
        if self.deep:
            fit = target.shared_bytes // max(1, _ahead(schedule.blocks, self.deep, compute))
            self.together = max(1, min(self.together, fit))
        started = min(schedule.programs or tiles, tiles)
        beside = min(ceil(started / target.sms), self.together)
        self.each = self._step(registers, steps, beside)

    def _registers(self) -> float:
        """Registers of a thread."""
        schedule, compute, tiled = self.schedule, self.compute, self.tiled
        threads, facts = schedule.warps * self.target.warp_size, facts_of(compute, self.target)
        # each step adds up its own
        sums = 0.0 if self.held or schedule.late else compute.acc.bytes / 4
        registers = OVERHEAD + tiled.elements / threads * (facts.live - sums)
        if self.carries:
            places = tiled.elements if schedule.late else tiled.reduced
            registers += (len(compute.statistics) * places + facts.shared * tiled.reduced) / threads
        return registers

    def _step(self, registers: float, steps: int, beside: int) -> _Step:
        """What a step takes where so many programs are beside one another."""
        schedule, target, chip = self.schedule, self.target, self.target.rates.issue
        most = min(chip.most_registers, target.regs / (schedule.warps * target.warp_size))
        found = sweeps(schedule.blocks, schedule.warps, self.compute, self.held, target)
        reloads = [loaded(s.again, steps, beside, bool(schedule.turn), target) for s in found]
        return _Step(
            sum(s.bytes + again for s, (again, _) in zip(found, reloads, strict=True)),
            sum(s.small for s in found) / SMALL_GBS,
            sum(LATENCY_NS if s.fresh else ns
                for s, (_, ns) in zip(found, reloads, strict=True) if s.reads),
            # one instruction a clock
            sum(s.instructions for s in found) * max(1.0, registers / most) ** 2 / chip.clock,
            sum(s.exchanges for s in found))

    def __call__(self, tiles: Number, steps: Number, traffic: Number) -> Number:
        schedule, compute, target = self.schedule, self.compute, self.target
        chip, tiled, step = target.rates.issue, self.tiled, self.each
        started = kept(smaller(schedule.programs, tiles) if schedule.programs else tiles)
        turns = kept(-(-tiles // schedule.programs)) if schedule.programs else 1  # tiles of a program
        each = kept(-(-started // target.sms))
        rate = kept(smaller(EDGE_GBS, target.bandwidth_gbs * FULL / smaller(started, target.sms)))
        thread, moved, hit = kept(step.thread * steps), kept(step.moved * steps), kept(step.hit * steps)
        latency = LATENCY_NS if self.held or self.written else step.latency * steps
        divided = within(schedule.blocks, schedule.warps, tiled.reduced, compute, target.warp_size)
        meets = kept(step.exchanges * EXCHANGE_NS[divided] * (1 if schedule.late else steps))
        # Programs of several tiles that are not beside others leave the memory idle while they compute.
        share = EDGE_GBS if self.single else kept(
            smaller(EDGE_GBS, rate * smaller(each, self.together)))
        works = kept(meets + thread * max(STALL, schedule.warps / chip.schedulers / ISSUED))
        turn = latency + moved / share + hit + works
        if self.deep > 2:  # the loads of tiles go on beside, but not those of one element for a tile
            turn = larger(works + LATENCY_NS * _lone(schedule.blocks, compute), larger(
                moved / share, (LATENCY_NS + moved / share) / (self.deep - 2)))
        alone = START_NS + turns * turn
        issued = hit + thread * schedule.warps / chip.schedulers / ISSUED
        if compute.statistics and not (self.carries and schedule.late):
            issued = issued + steps * (
                len(compute.statistics) * _crossing(schedule, tiled, compute, target))
        if divided == "block":
            issued = issued + meets * (1 + CROSS * tiled.elements / tiled.reduced * schedule.warps)
        busy = larger(each * larger(larger(turns * moved / rate, turns * issued), NEXT_NS),
                      -(-each // self.together) * alone)
        bandwidth = target.bandwidth_gbs * FULL * 1e3
        return chip.empty_us + larger(busy / 1e3, traffic / bandwidth) + self._behind(bandwidth)

    def _behind(self, bandwidth: float) -> float:
        """What atomic additions take, and the kernels that combine parts of sums and of statistics."""
        schedule, compute, target = self.schedule, self.compute, self.target
        empty = target.rates.issue.empty_us
        us = adding_us(compute, target)
        if compute.statistics:
            left = _left(schedule.blocks, schedule.programs, compute)
            us += len(groups(compute)) * empty + 2 * left / bandwidth
        if schedule.split_k > 1 and schedule.reduce == "atomic":
            c = compute.c.tensor
            us += meeting_us(prod(c.shape), c.dtype.bytes, schedule.split_k, target)
        elif schedule.split_k > 1:
            parts = schedule.split_k * compute.acc.bytes / compute.c.tensor.dtype.bytes
            us += empty + 2 * parts * facts_of(compute, target).sizes[compute.c] / bandwidth
        return us


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of all sweeps of a program: bytes, nanoseconds for tensors that stay in the caches, of its
    loads, and of a thread's instructions; exchanges between threads."""

    moved: float
    hit: float
    latency: float
    thread: float
    exchanges: int


@lru_cache(maxsize=1024)
def _left(blocks: tuple[Block, ...], persistent: int, compute: Compute) -> int:
    """The bytes of statistics' parts."""
    return left_bytes(compute, Schedule(blocks, "fma", programs=persistent))


@lru_cache(maxsize=1024)
def _ahead(blocks: tuple[Block, ...], stages: int, compute: Compute) -> int:
    """Bytes of shared memory for loads in flight."""
    return ahead_bytes(Schedule(blocks, "fma", stages=stages), compute)


@lru_cache(maxsize=4096)
def _lone(blocks: tuple[Block, ...], compute: Compute) -> bool:
    """Whether a tile reads one element for all of its lanes, and another one in the next tile."""
    return any(not any(moves(r.view, b, compute) for b in blocks)
               and any(axis_strides(r.view, compute).values()) for r in compute.reads)


def _crossing(schedule: Schedule, tiled: Tiled, compute: Compute, target: Target) -> float:
    """Nanoseconds in which a statistic of rows is combined between warps that hold elements of the same
    places: none if the lanes of a row take all warps."""
    threads = schedule.warps * target.warp_size
    beside = threads * ACCESS // compute.c.tensor.dtype.bytes / tiled.reduced
    crosses = beside > 1 and tiled.elements > tiled.reduced > 1
    return CROSSING_NS * tiled.reduced * beside if crosses else 0.0
