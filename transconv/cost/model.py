"""The cost model: the estimated microseconds of a schedule of a computation on a target.

The model adds up the time of the programs of one multiprocessor:

    program = fill + steps * step + epilogue + store  step = matrix unit | fetch | waiting
    two consumers = fill + max(steps * step + baton, half of steps * step + store)
    kernel  = launch + max(programs on the busiest multiprocessor, bytes / bandwidth)

``Work`` has the counts (work.py), without any constants; the target's ``rates`` has the constants, which
``python -m bench.fit`` fitted to measured sweeps. The estimate is made to rank the schedules of one
computation; its microseconds are within some 20%.

The estimate of a kernel whose sizes are arguments, for one size after another.

What a tile and a step take is counted once, for the sizes that the schedule was chosen for. How many tiles
and steps there are, and how many bytes cross the memory's pins, are expressions of the sizes:

    us(sizes) = rates(counts of the example, tiles(sizes), steps(sizes), bytes(sizes))

Given numbers, ``us`` is a number; given texts of the counts (symbolic_cost.py), it is the text of an
expression (``CostFormula``), which is all that another process needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, prod
from typing import cast

from transconv.compute import Axis, Compute
from transconv.cost import issue, maps
from transconv.cost.copies import copied, copied_at, leaving_us, meeting_us, read_behind
from transconv.cost.issue import LINE
from transconv.cost.symbolic_cost import Lines, Number, kept, larger, smaller
from transconv.cost.work import HEAVY, LaunchCounts, Work, count, further_reads
from transconv.ir import EXACT_TERMS, Expr, View, as_expr, minimum, value_at
from transconv.schedule import PRICED, Block, Schedule, Scheduled, k_steps, programs, tile
from transconv.target import L2_GBS, Constants, Target

# In parentheses: the kernels that a number comes from, whose rows are in bench/results (for some, a test
# finds it again: tests/cost/test_fitted_numbers.py).
PAIR_NS = 250.0  # from the last product of a pair of parts to the first of the next (34 kernels, H100)
# Of a step whose operands of 8 bits are transposed: for warps that wait for one another, by the number of
# transposing groups, and the rate of the bytes (weight gradients of 10 layers on an H100).
TURN_NS, TURNED_GBS = (250.0, 160.0), 280.0
TURNED_LATE = 0.85  # the fraction of their latency that is waited for (five kernels of two stages, H100)
NEAR_NS = 150.0  # from a load that the L1 cache answers to the product (23 kernels, H100 and H200)
# Of steps that share boxes, from the L2 cache to a multiprocessor while others fetch, too: what each of
# them reads for itself, what all read alike, and the extra time of a row of 64 bytes (174 kernels, H200).
OWN_GBS, COMMON_GBS, SHORT_ROWS = 60.0, 140.0, 0.4
# Times the time to fetch boxes of every second position (46 kernels, H100 and H200; 0.9 to 1.2 are as near
# to them).
STEPPED = 1.1
ENDED = 2.2  # times the time to fetch rows that a group has a part of (48 elements; six kernels, H100)
DIVIDED = 1.7  # times the time to unpack positions, if the divisors are arguments (a stem on an H200)
MOVING_NS = 150.0  # that the matrix unit waits when sums move out of it (29 layers on an H200)
WAITING = 2.0  # times all of it, where products wait for one another, for want of registers (as above)
SUMS = 16  # of a thread, whose operands are read from shared memory; fewer share less of what is read
# To transpose a byte in registers: by a program alone, and by many together (gradients of 22 layers in
# 8-bit floats on an H100: 0.25 with one program on a multiprocessor, 0.15 with two, 0.075 with six).
BYTEWISE_NS, BYTEWISE_TOGETHER_NS = 0.25, 0.06


def estimate(
    schedule: Schedule, compute: Compute, target: Target, constants: Constants | None = None
) -> float:
    """Estimated microseconds on a target (on the interpreter, in steps), corrected by the words that have
    a ``price``. ``constants``: instead of the target's."""
    us = _estimate(schedule, compute, target, constants)
    for word in PRICED.values():
        if word.price is not None and schedule.word(word.name) != word.default:
            us = word.price(us, schedule, compute, target)
    return us


def of_phases(schedules: Sequence[Schedule], computes: Sequence[Compute], target: Target) -> float:
    """Estimated microseconds of stride phases: of one launch, which starts and fills its stages once, if
    they have one schedule of an explicit kernel whose programs take turns at the tiles of each; else of
    one launch after another."""
    pairs = [*zip(schedules, computes, strict=True)]
    if len(pairs) < 2 or not all(s == schedules[0] and takes_turns(s, c, target) for s, c in pairs):
        return sum(estimate(s, c, target) for s, c in pairs)
    pairs.sort(key=lambda pair: -prod(x.size for x in pair[1].axes_of("K")))  # as they follow one another
    total = estimate(*pairs[0], target)
    for s, c in pairs[1:]:
        like, at = c.named.like if c.named else {}, AtSizes(s, c, target, behind=True)
        total += cast(float, at.us(*[value_at(n, like) for n in at.counts]))
    return total


def takes_turns(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether the programs of an explicit kernel have several tiles each, as those of stride phases must
    that are one launch: known before they are lowered."""
    tiles = inf if compute.named else programs(schedule, Scheduled(compute, schedule, target).main)
    return schedule.via == "gluon" and 0 < schedule.programs < tiles


@lru_cache(maxsize=1 << 14)  # ranking, neighbours and the output of commands ask for the same schedules
def _estimate(
    schedule: Schedule, compute: Compute, target: Target, constants: Constants | None = None
) -> float:
    if target.backend == "interpreter":
        return interpreted(schedule, Scheduled(compute, schedule, target).grouped)
    if compute.streams:
        return maps.microseconds(schedule, compute, target)
    constants = constants or (target.rates.gluon if schedule.via == "gluon" else target.rates.triton)
    if schedule.regs or schedule.late:
        main = _issued(schedule, compute, target, constants)
    else:
        main = microseconds(count(schedule, compute, target), schedule, target, constants)
    if schedule.split_k > 1 and schedule.reduce == "atomic":
        c = compute.c.tensor
        main += meeting_us(prod(c.shape), c.dtype.bytes, schedule.split_k, target)
    if compute.statistics:
        main += leaving_us(schedule, Scheduled(compute, schedule, target).main, target)
    return main + copied(compute, schedule, target) if schedule.pack else main


def interpreted(schedule: Schedule, compute: Compute) -> float:
    """Cost on the interpreter: that of a step is nearly constant for small tiles."""
    m, n, k, group = (tile(schedule, compute, kind) for kind in "MNKB")
    steps = -(-k_steps(schedule, compute) // schedule.split_k)
    fetched = (m * k + k * n) * group
    each = steps * (1 + fetched / 2**17 + m * n * group * k / 2**24) + 2
    return programs(schedule, compute) * each


def microseconds(w: Work, schedule: Schedule, target: Target, c: Constants) -> float:
    """Microseconds of the main kernel and of the one that adds partial sums, from counts and rates."""
    return cast(float, ModelTime(w, schedule, target, c)(w.tiles, w.steps, w.traffic))


@dataclass(slots=True)
class ModelTime:
    """The estimate of a product: ``microseconds`` for other numbers of tiles, of steps and of bytes than
    those of ``work``. ``behind``: its tiles follow others of the same launch, without a wait for the last
    of those."""

    work: Work
    schedule: Schedule
    target: Target
    rates: Constants
    behind: bool = False
    store: float = field(init=False)  # nanoseconds of a tile's
    made: float = field(init=False)  # nanoseconds of a tile's whole results, which no load hides
    crowded: float = field(init=False)  # nanoseconds of a step's bytes, where they may take longer

    def __post_init__(self) -> None:
        stored, c = self.work.stored, self.rates
        self.store = stored.bytes / c.store_gbs
        behind = self.work.behind
        if self.schedule.c == "box":
            self.store *= c.box_store * (1 + c.short_rows * max(0.0, LINE / stored.row - 1))
        elif stored.alone:
            self.store = max(self.store, stored.accesses * c.scatter_ns)
        self.store += (behind.sent * c.box_store + behind.stored) / c.store_gbs
        self.store += behind.accesses * c.behind_ns + behind.fetched / c.fetch_gbs
        self.crowded = _crowded_ns(self.work, self.target, c)
        issue = self.target.rates.issue
        self.made = self.work.whole * issue.whole_ns + behind.waits * c.latency_ns
        if self.schedule.via == "tl" and self.schedule.c != "box" and self.schedule.swap:
            self.made += self.work.whole * issue.turned_ns

    def __call__(self, tiles: Number, steps: Number, traffic: Number) -> Number:
        schedule, c = self.schedule, self.rates
        store: Number = self.store
        slots = schedule.programs or self.target.sms
        # tiles on the busiest multiprocessor
        dealt = schedule.reduce == "stream" or self.behind
        rounds = kept(tiles / slots if dealt else -(-tiles // slots))
        resident = self.work.resident
        together = kept(smaller(resident, larger(rounds, 1.0))) if resident > 1 else 1
        # A persistent program of Triton begins to load a tile when the one before it is stored.
        ahead = schedule.programs and schedule.via == "gluon"
        fills = float(not self.behind) if ahead else rounds / together
        products = kept(steps * self._step_ns(together, steps))
        last: Number = 0.0
        each: Number
        if schedule.consumers > 1:  # one group stores while the other multiplies, except at the last store
            last = store = store + self.made + self._called_ns(1.0)
            each = larger(products + c.baton_ns, (products + store) / schedule.consumers)
        elif schedule.programs:
            each = products + store * c.persistent + self.made + self._called_ns(1.0)
        else:
            # Programs that began together come to their functions, and to their stores, at one time.
            beside = 1 if self.work.behind.called > HEAVY * self.work.sums else together
            each = products + (store + self.made) / beside + self._called_ns(together)
        if self.crowded:
            each = larger(each, steps * self.crowded)
        busy = (rounds * each + last + fills * c.fill_ns + self.work.kept / c.fetch_gbs) / 1e3
        return launched(self.work.partial, busy, traffic, schedule, self.target, c, self.behind)

    def _called_ns(self, together: Number) -> Number:
        """The functions of a tile's epilogue."""
        return _worked_ns(self.work.behind.called, self.schedule, self.target, together)

    def _step_ns(self, together: Number, steps: Number) -> Number:
        found = _step_ns(self.work, self.schedule, self.target, self.rates, together, steps)
        if self.schedule.programs and self.work.positions_summed:
            found = found * self.rates.flat_positions
        return found


def _worked_ns(slots: float, schedule: Schedule, target: Target, together: Number) -> Number:
    """Nanoseconds of operations of elements, which the warps of some programs issue in turn."""
    if not slots:
        return 0.0
    issue = target.rates.issue
    alone = issue.hiding_warps / (schedule.warps * together)
    return slots * issue.called_ns * larger(1.0, alone)


def _issued(schedule: Schedule, compute: Compute, target: Target, c: Constants) -> float:
    """``microseconds`` of a kernel that keeps sums and operands in registers (issue.py)."""
    seen = Scheduled(compute, schedule, target).main
    w = LaunchCounts.of(schedule, seen)
    busy = issue.microseconds(schedule, seen, target, w.tiles, w.steps)
    return cast(float, launched(w.partial, busy, w.traffic, schedule, target, c))


def launched(
    partial: int,
    busy: Number,
    traffic: Number,
    schedule: Schedule,
    target: Target,
    c: Constants,
    behind: bool = False,
) -> Number:
    """Microseconds of the launches, from the time of the multiprocessors (``busy``) and of the bytes
    (``traffic``) that cross the memory's pins; ``partial``: bytes of partial sums, written and read again;
    ``behind``: without the launch itself."""
    bandwidth = target.bandwidth_gbs * 1e3 * c.memory_share  # bytes a microsecond
    busy, moving = kept(busy), kept((traffic + partial / 2) / bandwidth)
    total = larger(busy, moving) + c.exposed * smaller(busy, moving)
    total = total if behind else c.launch_us + total
    if schedule.reduce == "stream":
        total = total + c.meeting_us
    if partial:
        total = total + (c.launch_us + partial / 2 / bandwidth)
    return total


def _step_ns(
    w: Work, schedule: Schedule, target: Target, c: Constants, together: Number, steps: Number
) -> Number:
    """Nanoseconds of one of the ``steps`` of a sum, on a multiprocessor that ``together`` programs
    share."""
    macs = w.m * w.n * w.k * w.group
    peak = target.tflops * 1e3 / 2 / target.sms  # multiply-adds a nanosecond of 16-bit operands
    chip = target.rates.issue
    if schedule.unit == "mma" and w.exact:  # Triton multiplies them without the matrix unit
        each = w.sums / (schedule.warps * target.warp_size)  # of a thread
        multiply = macs / (chip.cores * chip.clock * c.fma_share) * max(1.0, SUMS / each) ** 0.5
    elif schedule.unit == "mma":
        multiply = macs / (peak * 16 / w.bits) * (1 + c.narrow / w.right)
        multiply *= c.older if w.small else max(1.0, 64 / w.left)
        if w.moved:
            multiply = _moving_ns(w, schedule, multiply, w.moved / (chip.cores * chip.clock))
        multiply *= WAITING if w.serial else 1.0
    else:
        multiply = macs / (chip.cores * chip.clock * c.fma_share)
    accesses = sum(f.accesses for f in w.fetched)
    short = c.short_rows if w.shared == 1 else SHORT_ROWS
    fetch = sum(
        f.bytes
        * (1 + short * max(0.0, LINE / f.row - 1))
        * (STEPPED if f.stepped else 1)
        * (ENDED if f.ends else 1)
        / (c.fetch_gbs if w.shared == 1 else COMMON_GBS if f.common else OWN_GBS)
        for f in w.fetched
    )
    unpacked = c.unpack_ns * (DIVIDED if w.divided else 1.0) if w.positions_summed else 0.0
    fetch += accesses * (c.access_ns + unpacked)
    fetch += sum(f.accesses for f in w.fetched if not f.ahead) * c.late_access_ns
    fetch += sum(f.accesses for f in w.fetched if f.through) * c.through_ns
    ahead = all(f.ahead for f in w.fetched) or "async_copy" not in target.features
    in_flight = larger(1, steps if schedule.unroll else (schedule.stages - 1) * w.shared if ahead else 1)
    late = c.latency_ns / in_flight
    wait = 0.0 if w.boxed else c.gather_step_ns / together
    wait += _worked_ns(w.prepared, schedule, target, together)
    if w.bytewise:  # by the warps that multiply
        wait += w.bytewise * larger(BYTEWISE_TOGETHER_NS, BYTEWISE_NS / together)
    if schedule.unit == "fma":  # one unit multiplies and computes addresses, so these times add up
        work = multiply + fetch
        return larger(work, (work + late) / together) + wait
    if not ahead and all(f.near or f.ahead for f in w.fetched):
        late = NEAR_NS + fetch  # a program computes no addresses while it waits
    if w.transposed and w.bits == 8:  # whatever lands in one of two places is waited for
        late = TURNED_LATE * (c.latency_ns + fetch) / in_flight
    return larger(max(multiply, fetch, _turning_ns(w, schedule, c)), late / together) + wait


def _crowded_ns(w: Work, target: Target, c: Constants) -> float:
    """Nanoseconds of a step's bytes on their way from the L2 cache, while all multiprocessors fetch; 0
    where the time to fetch has them. Sums over positions have operands that few programs share, and a
    filter of few features stays in the L1 cache. A card's own figure is of kernels of any size. Of the
    choices for given sizes that an H100's would change, 19 were timed, on an H200 alone: eleven would be
    up to 20 % slower, eight up to 6 % faster (bench/results/h200_l2_pairs.csv)."""
    apart = w.positions_summed or any(f.near for f in w.fetched)
    gbs = c.fetch_gbs if apart else min(c.fetch_gbs, target.l2_gbs if w.sized else L2_GBS)
    return sum(f.bytes for f in w.fetched) / gbs if w.shared > 1 or gbs < c.fetch_gbs else 0.0


def _moving_ns(w: Work, schedule: Schedule, multiply: float, adding: float) -> float:
    """Nanoseconds of the products of a step whose sums move to f32, which takes ``adding``. In explicit
    kernels the next part of the sums is made beside that (part_sums.py). At the end of a pair of parts, or
    of the steps that share boxes, the matrix unit waits."""
    if schedule.via == "tl":
        return multiply + -(-w.k // EXACT_TERMS) * (adding + MOVING_NS)
    parts = w.k / EXACT_TERMS  # of a step
    return max(multiply, parts * adding) + PAIR_NS * (parts / 2 if w.shared == 1 else 1 / w.shared)


def _turning_ns(w: Work, schedule: Schedule, c: Constants) -> float:
    """Nanoseconds of a step for the traffic of shared memory, if operands are transposed there: bytes that
    land, bytes that the transposer reads and writes, and bytes that products read (rows once for 128 or
    256 columns, columns once for 64 rows)."""
    if not w.transposed:
        return 0.0
    landed = (w.left + w.right) * w.k * w.bits / 8
    wide = 256 if schedule.warps == 4 else 128
    read = (w.left * -(-w.right // wide) + w.right * -(-w.left // 64)) * w.k * w.bits / 8
    moved = landed + 2 * w.transposed + read
    turn = TURN_NS[schedule.transposers - 1]
    return turn + moved / TURNED_GBS if w.bits == 8 else moved / c.shared_gbs


HERE = "here_"  # what names in the texts of a formula begin with; they become its own where it is used
OWN = re.compile(rf"{HERE}[a-z]+\d*")
ARITHMETIC = re.compile(rf"\b(?:{OWN.pattern}|if|else|inf|\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b|[-+*/%<>=() ]")


@dataclass(frozen=True, slots=True)
class CostFormula:
    """The estimate of one kernel as texts of Python: ``us``, which uses the names of ``lines``, and for
    the values of ``counts`` here_c0, here_c1 and so on."""

    counts: tuple[Expr, ...]
    lines: tuple[tuple[str, str], ...]
    us: str

    def __post_init__(self) -> None:
        """Raise ValueError for texts that are more than arithmetic of such names: they become a
        function's, and may come from a record on disk."""
        for name, text in (*self.lines, (f"{HERE}us", self.us)):
            if not OWN.fullmatch(name) or ARITHMETIC.sub("", text):
                raise ValueError(f"{name} = {text:.80}; expected arithmetic of {HERE} names")

    def among(self, others: Lines, at: int, counts: Sequence[str]) -> str:
        """The text of the estimate as the ``at``-th in the text of a function, whose lines get those that
        it needs; ``counts``: the texts of their values there."""
        names = [c if c.isidentifier() or c.isdecimal() else others.name(others.number(c)) for c in counts]

        def own(text: str) -> str:
            for n, name in enumerate(names):
                text = text.replace(f"{HERE}c{n}", name)
            return text.replace(HERE, f"e{at}_")

        others.named += [(own(name), own(text)) for name, text in self.lines]
        return own(self.us)


@dataclass(slots=True)
class AtSizes:
    """The estimates of one kernel with its copies. ``us``, of the values of ``counts`` for some sizes:
    microseconds on the target, or units of a step on the interpreter. ``counts``: tiles, steps of each,
    bytes, and the elements of each copy whose sizes are arguments. ``behind``: another stride phase of the
    same launch goes before it."""

    schedule: Schedule
    compute: Compute
    target: Target
    behind: bool = False
    counts: tuple[Expr, ...] = field(init=False)
    us: Callable[..., Number] = field(init=False)

    def __post_init__(self) -> None:
        compute, schedule, split = self.compute, self.schedule, self.schedule.split_k
        grouped = Scheduled(compute, schedule, self.target).grouped
        many, long = tiles(schedule, grouped), steps(schedule, grouped)
        others = *further_reads(compute), *read_behind(schedule, compute).views
        self.counts = many * split, (long + (split - 1)) // split, moved(compute, others)
        if self.target.backend == "interpreter":
            self.us = self._interpreted()
            return
        if compute.streams:
            self.us = maps.MapTime(schedule, compute, self.target)
            return
        rates = self.target.rates
        if schedule.regs or schedule.late:  # sums and operands are kept in registers
            main = Scheduled(compute, schedule, self.target).main
            partial = LaunchCounts.of(schedule, main).partial
            issued = issue.Issued.of(schedule, main, self.target)
            self.us = lambda tiles, steps, traffic: launched(
                partial, issued(tiles, steps), traffic, schedule, self.target, rates.triton, self.behind
            )
        else:
            self.us = ModelTime(
                count(schedule, compute, self.target),
                schedule,
                self.target,
                rates.gluon if schedule.via == "gluon" else rates.triton,
                self.behind,
            )
        if schedule.pack:
            elements, beside = copied_at(compute, schedule, self.target)
            self.counts += elements
            alone = self.us
            self.us = lambda *counts: beside(*counts[3:]) + alone(*counts[:3])

    def formula(self) -> CostFormula:
        """The same as texts."""
        lines = Lines(sign=f"{HERE}v")
        us = lines.name(self.us(*[lines.number(f"{HERE}c{n}") for n in range(len(self.counts))]))
        return CostFormula(self.counts, tuple(lines.named), us)

    def _interpreted(self) -> Callable[[Number, Number, Number], Number]:
        compute, schedule = self.compute, self.schedule
        each = interpreted(schedule, compute) / programs(schedule, compute)
        unit = (each - 2) / max(1, -(-k_steps(schedule, compute) // schedule.split_k))
        return lambda tiles, steps, traffic: tiles * (steps * unit + 2)


def tiles(schedule: Schedule, compute: Compute) -> Expr:
    """Tiles of results, as an expression of sizes."""
    return _blocks(schedule.blocks, compute, "BMN")


def steps(schedule: Schedule, compute: Compute) -> Expr:
    """``k_steps``, as an expression of sizes."""
    return _blocks(schedule.blocks, compute, "K")


@lru_cache(maxsize=64)  # many schedules of a computation are compared
def moved(compute: Compute, others: tuple[View, ...]) -> Expr:
    """The bytes that are read and written at least once, with those of the ``others`` that operands of a
    product or what follows it are made of, as an expression of sizes."""
    total = as_expr(0)
    factors = filter(None, (compute.a, compute.b, compute.c, *others))
    for view in dict.fromkeys(compute.views()) if compute.streams else factors:
        total = total + _touched(view, compute) * view.tensor.dtype.bytes
    return total


def _touched(view: View, compute: Compute) -> Expr:
    points, elements = as_expr(1), as_expr(1)
    seen = compute.seen_by(view)
    for extent in (e for name, e in {x.name: _extent(x) for x in compute.axes}.items() if name in seen):
        points = points * extent
    for size in view.tensor.bounds:
        elements = elements * size
    return minimum(points, elements)


@lru_cache(maxsize=1024)
def _blocks(blocks: tuple[Block, ...], compute: Compute, kinds: str) -> Expr:
    """How many blocks there are along axes of these kinds; axes without a block are taken one by one."""
    found = as_expr(1)
    axes = {x.name: x for x in compute.axes if compute.kind(x.name) in kinds}
    for block in blocks:
        if not {*block.axes} <= axes.keys():
            continue
        points = as_expr(1)
        for name in block.axes:
            points = points * _extent(axes.pop(name))
        found = found * ((points + (block.extent - 1)) // block.extent)
    for x in axes.values():
        found = found * _extent(x)
    return found


def _extent(x: Axis) -> Expr:
    return as_expr(x.size) if x.extent is None else x.extent
