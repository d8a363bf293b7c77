"""Estimated time of computations without a product: maps, reductions, rows that are swept several times.

Such a kernel is bound by the bandwidth of memory if enough bytes are in flight:

    program alone  = start of its warps + sweeps * steps * (latency + bytes + instructions)
                     + exchanges between threads
    multiprocessor = max(programs * bytes, programs * instructions, programs * (lines + shuffles),
                         programs / together * alone)
    kernel         = launch + max(multiprocessor, bytes of all tensors / bandwidth) + ramp of the memory
                     + launches and bytes of the kernels that combine statistics

Loads, stores and shuffles share a unit, which takes a clock for each shuffle of a warp and for each cache
line that an access of a warp touches. Counted, not fitted: a softmax of 49 numbers in a tile that two
warps share is expected to take 1.2 times what it took (four kernels of h200_swin_kernels.csv;
tests/compute/test_short_rows.py).

A row that stays in registers is loaded once, with all loads in flight together. Elements that are loaded
again come from the L1 cache if it holds the rows of all programs of a multiprocessor (on NVIDIA's chips it
is what shared memory leaves), or from the L2 cache if that holds all rows in flight. With ``turn=1`` the
part of a row that a cache holds is found there also where the whole is too long. Persistent programs with
``stages=3`` load the next tile while they compute; with 2, Triton (3.6) has one buffer, which is filled
when it is free. The constants are round figures, fitted to trials on an H200
(bench/results/h200_map_trials.csv, h200_part_trials.csv) so that the order of schedules is right; none of
these trials has ``turn=1``. Launch, start and ramp were fitted to h200_graph_trials.csv; of 34 kernels of
other models (h200_zoo_kernels.csv) estimates are then off by 0.2 at most in the median, those below 2.5 us
by 1.0 without. What windows share is loaded from the caches, what a mask excludes is not
loaded: of both, a tensor's elements count once, and the rest as loads from the L1 cache.

A ``SweepCost`` has what a program does in each sweep over its row: the bytes that it moves, where it finds
them (elements that are loaded again: from which cache, and how long that takes), and the instructions of a
thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, log2, prod
from typing import cast

from transconv.compute import Compute, Read, Reduction, Step, Write, axis_strides, touched
from transconv.cost.copies import adding_us, meeting_us
from transconv.cost.fetches import FetchCost, fetch
from transconv.cost.issue import ACCESS, SECTOR, slots
from transconv.cost.symbolic_cost import Number, kept, larger, smaller
from transconv.ir import View
from transconv.schedule import Block, Schedule, ahead, ahead_bytes, by_tile, k_steps, programs, tile
from transconv.schedule.tiles import partial_results
from transconv.target import Target

WRITTEN = 16  # unrolled steps whose loads are in flight together
OVERHEAD = 20  # registers of a thread for addresses and masks
STALL = 2.0  # clocks between two instructions of a warp
ISSUED = 2.5  # slots a clock of a scheduler, fitted: loads and exchanges leave warps idle elsewhere
SMALL_GBS = 130.0  # GB/s of tensors that stay in the caches, beside what comes from memory
EXCHANGE_NS = {"lane": 0.0, "warp": 150.0, "block": 145.0}  # to combine results of threads of a row
CROSSING_NS = 1.15  # for each place and each group of warps that has it, by way of shared memory
CROSS = 1 / 120  # of a block's exchange: for each row of each warp, written to shared memory and read
FULL = 0.88  # the fraction of the bandwidth that copies reach
EDGE_GBS = 80.0  # GB/s into one multiprocessor
LAUNCH_US = 0.5  # from the end of the kernel before to the first program, in a stream that is never idle
RAMP_US = 2.0  # until all of the memory is busy, and while the last programs end: as long as bytes move
START_NS, WARP_NS = 300.0, 25.0  # of a program, and for each of its warps
NEXT_NS = 77.0  # the shortest time between two starts


def microseconds(schedule: Schedule, compute: Compute, target: Target) -> float:
    """Microseconds of the kernel, and of the one that adds partial sums, if there is one."""
    tiled = tiled_by(schedule.blocks, compute)
    tiles, steps = tiled.programs * schedule.split_k, ceil(tiled.steps / schedule.split_k)
    traffic = facts_of(compute, target).everything
    return cast(float, MapTime(schedule, compute, target)(tiles, steps, traffic))


@dataclass(slots=True)
class MapTime:
    """The estimate of a map: ``microseconds`` for other numbers of tiles, of steps of each row and of
    bytes than those of the computation, whose sizes decide where elements are found that are loaded again,
    and whether a row is one step."""

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
        self.held = steps == 1 or partial_results.kept(schedule, compute) == "held"
        self.written = bool(schedule.unroll) and steps <= WRITTEN
        self.carries = partial_results.carried(compute, schedule)
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
        elements = tiled.elements * (tiled.steps if self.held else 1)
        registers = OVERHEAD + elements / threads * (facts.live - sums)
        if self.carries:
            places = tiled.elements if schedule.late else tiled.reduced
            registers += (len(compute.statistics) * places + facts.shared * tiled.reduced) / threads
        return registers

    def _step(self, registers: float, steps: int, beside: int) -> _Step:
        """What a step takes where so many programs are beside one another."""
        schedule, target, chip = self.schedule, self.target, self.target.rates.issue
        most = min(chip.most_registers, target.regs / (schedule.warps * target.warp_size))
        moved = small = ns = instructions = 0.0
        exchanges, accesses, turned = 0, 0.0, bool(schedule.turn)
        for s in sweeps(schedule.blocks, schedule.warps, self.compute, self.held, target):
            again, late = loaded(s.again, steps, beside, turned, target)
            moved += s.bytes + again
            small += s.small
            ns += (LATENCY_NS if s.fresh else late) if s.reads else 0.0
            instructions += s.instructions
            exchanges += s.exchanges
            accesses += s.accesses
        # one instruction a clock
        thread = instructions * max(1.0, registers / most) ** 2 / chip.clock
        return _Step(moved, small / SMALL_GBS, ns, thread, exchanges, accesses / chip.clock)

    def __call__(self, tiles: Number, steps: Number, traffic: Number) -> Number:
        schedule, compute, target = self.schedule, self.compute, self.target
        chip, tiled, step = target.rates.issue, self.tiled, self.each
        started = kept(smaller(schedule.programs, tiles) if schedule.programs else tiles)
        turns = kept(-(-tiles // schedule.programs)) if schedule.programs else 1  # tiles of a program
        each = kept(-(-started // target.sms))
        rate = kept(smaller(EDGE_GBS, target.bandwidth_gbs * FULL / smaller(started, target.sms)))
        thread, moved, hit = kept(step.thread * steps), kept(step.moved * steps), kept(step.hit * steps)
        latency = LATENCY_NS if self.held or self.written else step.latency * steps
        divided = partial_results.within(
            schedule.blocks, schedule.warps, tiled.reduced, compute, target.warp_size
        )
        meets = kept(step.exchanges * EXCHANGE_NS[divided] * (1 if schedule.late else steps))
        # Programs of several tiles that are not beside others leave the memory idle while they compute.
        share = EDGE_GBS if self.single else kept(smaller(EDGE_GBS, rate * smaller(each, self.together)))
        works = kept(meets + thread * max(STALL, schedule.warps / chip.schedulers / ISSUED))
        turn = latency + moved / share + hit + works
        if self.deep > 2:  # the loads of tiles go on beside, but not those of one element for a tile
            turn = larger(
                works + LATENCY_NS * _lone(schedule.blocks, compute),
                larger(moved / share, (LATENCY_NS + moved / share) / (self.deep - 2)),
            )
        alone = START_NS + WARP_NS * schedule.warps + turns * turn
        issued = hit + thread * schedule.warps / chip.schedulers / ISSUED
        if compute.statistics and not (self.carries and schedule.late):
            issued = issued + steps * (
                len(compute.statistics) * _crossing(schedule, tiled, compute, target)
            )
        if divided == "block":
            issued = issued + meets * (1 + CROSS * tiled.elements / tiled.reduced * schedule.warps)
        shared = step.exchanges * (1 if schedule.late else steps) * self._shuffles() / chip.clock
        passed = turns * kept(step.accesses * steps + shared)
        busy = larger(
            each * larger(larger(turns * moved / rate, larger(turns * issued, passed)), NEXT_NS),
            -(-each // self.together) * alone,
        )
        bandwidth = target.bandwidth_gbs * FULL * 1e3
        moving = kept(traffic / bandwidth)
        return LAUNCH_US + larger(busy / 1e3, moving) + smaller(moving, RAMP_US) + self._behind(bandwidth)

    def _shuffles(self) -> float:
        """What a reduction of all rows of a program sends from lane to lane, or by way of shared memory,
        in accesses of a warp."""
        schedule, tiled, lanes = self.schedule, self.tiled, self.target.warp_size
        sharing, reach = partial_results.sharers(
            schedule.blocks, schedule.warps, tiled.reduced, self.compute, lanes
        )
        if sharing == 1:
            return 0.0
        within = max(1.0, sharing * min(1.0, lanes / reach))
        values = max(schedule.warps, tiled.elements / tiled.reduced * sharing / lanes)
        return values * (log2(within) + (2 if reach > lanes else 0))

    def _behind(self, bandwidth: float) -> float:
        """What atomic additions take, and the kernels that combine parts of sums and of statistics."""
        schedule, compute, target = self.schedule, self.compute, self.target
        empty = target.rates.issue.empty_us
        us = adding_us(compute, target)
        if compute.statistics:
            left = _left(schedule.blocks, schedule.programs, compute)
            us += len(partial_results.groups(compute)) * empty + 2 * left / bandwidth
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
    loads, and of a thread's instructions; exchanges between threads; nanoseconds of accesses to lines."""

    moved: float
    hit: float
    latency: float
    thread: float
    exchanges: int
    accesses: float


@lru_cache(maxsize=1024)
def _left(blocks: tuple[Block, ...], persistent: int, compute: Compute) -> int:
    """The bytes of statistics' parts."""
    return partial_results.left_bytes(compute, Schedule(blocks, "fma", programs=persistent))


@lru_cache(maxsize=1024)
def _ahead(blocks: tuple[Block, ...], stages: int, compute: Compute) -> int:
    """Bytes of shared memory for loads in flight."""
    return ahead_bytes(Schedule(blocks, "fma", stages=stages), compute)


@lru_cache(maxsize=4096)
def _lone(blocks: tuple[Block, ...], compute: Compute) -> bool:
    """Whether a tile reads one element for all of its lanes, and another one in the next tile."""
    return any(
        not any(moves(r.view, b, compute) for b in blocks) and any(axis_strides(r.view, compute).values())
        for r in compute.reads
    )


def _crossing(schedule: Schedule, tiled: Tiled, compute: Compute, target: Target) -> float:
    """Nanoseconds in which a statistic of rows is combined between warps that hold elements of the same
    places: none if the lanes of a row take all warps."""
    threads = schedule.warps * target.warp_size
    beside = threads * ACCESS // compute.c.tensor.dtype.bytes / tiled.reduced
    crosses = beside > 1 and tiled.elements > tiled.reduced > 1
    return CROSSING_NS * tiled.reduced * beside if crosses else 0.0


WINDOW = 64  # elements of a row up to which lanes beyond its end cost as much as others: as in trials
SMALL = 1 / 16  # tensors below this fraction of the L2 cache and of the largest tensor stay in the cache
SHORT, LINE = 0.04, 128  # extra time of runs of half a cache line; bytes of a cache line


@dataclass(frozen=True, slots=True)
class SweepCost:
    """A step of one sweep of a program: bytes that it reads for the first time or writes, bytes that it
    reads ``again``, bytes of ``small`` tensors, instructions of a thread, whether it reads, whether
    something for the first time (``fresh``), the number of its reductions, and the cache lines of all
    accesses of the program's warps."""

    bytes: float
    again: float
    small: float
    instructions: float
    reads: bool
    fresh: bool
    exchanges: int
    accesses: float


@dataclass(frozen=True, slots=True)
class SweepFacts:
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
def facts_of(compute: Compute, target: Target) -> SweepFacts:
    """The properties of a computation."""
    sizes = {v: touched(v, compute) for v in compute.views()}
    largest = max(sizes.values())
    small = {v for v, n in sizes.items() if n < SMALL * min(target.l2_bytes, largest)}
    return SweepFacts(
        sizes,
        frozenset(small),
        sum(sizes.values()),
        _live(compute, small),
        sum(
            _words(v)
            for v in {r.view for r in compute.reads}
            if not any(axis_strides(v, compute)[x.name] for x in compute.axes_of("M"))
        ),
        tuple(s.steps for s in compute.sweeps.each) or (compute.sweeps.behind,),
    )


@dataclass(frozen=True, slots=True)
class Tiled:
    """Counts that follow from the blocks: elements of a tile, its extent along the reduced axes, steps of
    a row, and programs if rows are not split."""

    elements: int
    reduced: int
    steps: int
    programs: int


@lru_cache(maxsize=4096)
def tiled_by(blocks: tuple[Block, ...], compute: Compute) -> Tiled:
    schedule = Schedule(blocks, "fma")
    return Tiled(
        prod(tile(schedule, compute, kind) for kind in "BMNK"),
        tile(schedule, compute, "K"),
        k_steps(schedule, compute),
        programs(schedule, compute),
    )


@lru_cache(maxsize=4096)
def sweeps(
    blocks: tuple[Block, ...], warps: int, compute: Compute, held: bool, target: Target
) -> list[SweepCost]:
    """The sweeps of a program; a map is one sweep. It takes blocks and warps instead of a schedule, so
    that the cache hits for schedules that differ in other words."""
    schedule = Schedule(blocks, "fma", warps=warps)
    threads = warps * target.warp_size
    lanes = tiled_by(blocks, compute).elements / threads
    bytes_of, small = _bytes_of(blocks, compute, held, target), facts_of(compute, target).small
    moved = {v: fetch(v, schedule, compute, "gather") for v in bytes_of}
    return [
        SweepCost(
            sum([bytes_of[v] for v in r.first]),
            sum([bytes_of[v] for v in r.again if v not in small]),
            sum([bytes_of[v] for v in r.again if v in small]),
            lanes * r.instructions + 6 * (sum([moved[v].accesses for v in r.all]) / threads),
            r.reads,
            r.fresh,
            r.exchanges,
            sum([moved[v].accesses * moved[v].lines for v in r.all]) / target.warp_size,
        )
        for r in _roles(compute, held, target)
    ]


@by_tile
def _bytes_of(
    blocks: tuple[Block, ...], compute: Compute, held: bool, target: Target
) -> dict[View, float]:
    """The bytes of each view in a tile, however many warps have it."""
    facts, schedule = facts_of(compute, target), Schedule(blocks, "fma")
    tiled = tiled_by(blocks, compute)
    windows = tiled.steps > 1 and (held or prod(x.size for x in compute.axes_of("K")) <= WINDOW)
    found = {
        v: min(
            _bytes(fetch(v, schedule, compute, "gather"))
            * (1.0 if windows else _present(v, blocks, compute)),
            _distinct(v, blocks, compute) * SECTOR,
            facts.sizes[v] if v in facts.small else 1 << 60,
        )
        for v in facts.sizes
    }
    if windows:  # elements of overlapping windows are near, and what a mask excludes is not loaded
        stored = [w.view for w in compute.writes] if held else []
        for v in {*(r.view for r in compute.reads), *stored} - facts.small:
            each = facts.sizes[v] / max(1, tiled.programs * tiled.steps)  # a sum over nothing has none
            found[v] = min(found[v], each + (found[v] - each) / (FAR if v in stored else NEAR))
    return found


@dataclass(frozen=True, slots=True)
class _SweepRole:
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
def _roles(compute: Compute, held: bool, target: Target) -> tuple[_SweepRole, ...]:
    facts = facts_of(compute, target)
    seen: set[View] = set()
    found = []
    for inner in facts.sweeps:
        reads = [s.view for s in inner if isinstance(s, Read) and not (held and s.view in seen)]
        stored = [s.view for s in inner if isinstance(s, Write) and s not in compute.statistics]
        first = [v for v in reads if v not in seen and v not in facts.small]
        again = [v for v in reads if v in seen or v in facts.small]
        seen |= {*reads}
        values = [s.value for s in inner if not isinstance(s, Read)]
        found.append(
            _SweepRole(
                (*first, *stored),
                tuple(again),
                (*reads, *stored),
                slots(values) + len(inner) - len(values),
                bool(reads),
                bool(first),
                sum(isinstance(s, Reduction) for s in inner),
            )
        )
    return tuple(found)


def _bytes(moved: FetchCost) -> float:
    """Bytes of a view's tile, increased for runs shorter than a cache line."""
    return moved.bytes * (1 + SHORT * max(0.0, LINE / moved.row - 1))


@lru_cache(maxsize=4096)
def _present(view: View, blocks: tuple[Block, ...], compute: Compute) -> float:
    """The fraction of a tile's lanes that a view has elements for, on average: lanes beyond the end of an
    axis load nothing."""
    return prod(
        n / (ceil(n / b.extent) * b.extent)
        for b in blocks
        if moves(view, b, compute)
        for n in [prod(map(compute.size, b.axes))]
        if n
    )


@lru_cache(maxsize=4096)
def _distinct(view: View, blocks: tuple[Block, ...], compute: Compute) -> int:
    """The most different elements of a view in a tile. Along the innermost axes of a block, neighbouring
    lanes may read the same one."""
    strides, count = axis_strides(view, compute), 1
    for block in blocks:
        if moves(view, block, compute):
            last = max(i for i, a in enumerate(block.axes) if strides[a])
            alike = prod(map(compute.size, block.axes[last + 1 :]))
            count *= ceil(block.extent / max(1, alike))
    return count


def moves(view: View, block: Block, compute: Compute) -> bool:
    strides = axis_strides(view, compute)
    return any(strides[a] for a in block.axes)


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


NEAR, FAR = 4.0, 1.4  # the bandwidths of the L1 and L2 caches relative to that of memory
NEAR_NS, FAR_NS, LATENCY_NS = 60.0, 300.0, 600.0  # of a load: from them, and from memory
ROOM = 0.6  # the fraction of the L2 cache that holds elements until they are read again


def loaded(again: float, steps: int, beside: int, turned: bool, target: Target) -> tuple[float, float]:
    """Of what a step loads again: bytes of memory that take as long, and the latency in nanoseconds.
    ``beside``: programs of a multiprocessor at a time; ``turned``: each sweep begins where the last one
    ended."""
    if not again:
        return 0.0, NEAR_NS
    rows = again * steps * beside
    cache = target.shared_bytes if target.backend == "cuda" else 0
    over = rows * target.sms / (ROOM * target.l2_bytes)
    near = min(1.0, cache / rows)
    if not turned:  # rows of several programs are not all read at a time
        near = min(1.0, max(0.0, 2 - rows / cache)) if again * steps < cache else 0.0
    either = max(near, min(1.0, 1 / over) if turned else float(over < 1))
    far, lost = either - near, 1 - either
    return again * (near / NEAR + far / FAR + lost), near * NEAR_NS + far * FAR_NS + lost * LATENCY_NS
