"""Estimated time of kernels that keep sums and operands in registers (schedule words ``regs``, ``late``).

Such a kernel multiplies element by element. Its time is bound by the instructions that its warps issue,
the cache lines that they touch, and the bytes that come through the L2 cache:

    step of a warp = max(instructions / 4 schedulers, cache lines) clocks
    instructions   = products + conversions + loads + a row's index and mask

The instructions are counted, not fitted to times; the target's record has the rate of issue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from transconv.compute import Compute, axis_steps, axis_strides, places
from transconv.cost.symbolic_cost import Number, kept, larger, smaller
from transconv.ir import CALLS, Add, Call, Cast, Const, Div, Expr, Mul, Sub, View, find
from transconv.schedule import Block, Schedule, by_tile, has_quads, k_steps, lanes
from transconv.target import Target

ACCESS = 16
"""The most bytes that one lane loads or stores at once."""
SECTOR = 32  # bytes: the smallest transfer of a load or store
LINE = 128  # bytes of a cache line, and of rows that the matrix unit reads fastest
ROW = 30.0  # instructions for the index and the mask of a row of positions, per step
STEP = 30.0  # other instructions of a step
REGISTERS = 20  # of a thread, for addresses and masks
UNPACKED = 48  # more of a thread that unpacks bytes and converts them: 40 to 50 in four depthwise kernels
# Of bytes of integers, which are multiplied four at a time (passes/scalar/dp4a.py), in turns of an
# instruction; those for words and their products take two.
FOURTH = 0.5  # for each product
QUADS = 3.0, 1.0  # for each element of A, whose words are mostly made of two others, and of B
WORDS = 16  # more registers of a thread
IN_FLIGHT = 96  # registers of a thread for loaded elements; further loads wait
# ptxas (sm_90) puts loads of a weight's gradient where their first products stand, so that a step waits
# several times, each time for so many registers: few where all loads of a row have one mask, because its
# columns are written out whole, more for other loads of 16 bytes. Counted in the machine code of 58
# kernels of 14 to 76 loads a step: 14 waits in the mean (2 to 22) of whole rows, 8 (3 to 14) of other
# loads of 16 bytes, 2 (1 to 3) of narrower ones. TURN is near to the times, for many of the 8 are short.
# TURN_NS: of a wait; two kernels of one tile (H200) with 14 and 9 waits in each of four steps.
TURN_WHOLE, TURN, TURN_NS = 8.0, 20.0, 190.0
# Clocks of a warp for each register that goes through shared memory, beside one for each load, where loads
# are ahead: of eight tiles (H200), that of loads of 4 bytes takes 1.6 times as long with them.
COPIED = 0.5


QUOTIENT = 8.0  # slots of a quotient; one of a number's reciprocal


def slots(values: Iterable[Expr]) -> float:
    """Slots of issue that the operations of an element take, each once: of functions those of their rows,
    of others one, which a product and what is added to it share. Loads and stores have the casts."""
    each = {e for v in values for e in find(v, Expr) if e.children() and not isinstance(e, Cast)}
    fused = sum(isinstance(e, Add | Sub) and Mul in map(type, e.children()) for e in each)
    return (
        sum(
            CALLS[e.name].slots
            if isinstance(e, Call)
            else QUOTIENT
            if isinstance(e, Div) and not isinstance(e.b, Const)
            else 1.0
            for e in each
        )
        - fused
    )


@dataclass(frozen=True, slots=True)
class _Operand:
    """Counts of a thread for one operand in one step."""

    positions: int  # different positions among those written out
    elements: float  # per position
    loads: float  # per position
    lines: float  # cache lines that a load of a warp touches
    within: int  # positions within the tensor: a whole row has others beyond its ends

    @property
    def all(self) -> float:
        return self.positions * self.elements


def microseconds(
    schedule: Schedule, compute: Compute, target: Target, tiles: Number, steps: Number
) -> Number:
    """Microseconds of the busiest multiprocessor for its share of ``tiles``, of ``steps`` steps each."""
    return Issued.of(schedule, compute, target)(tiles, steps)


@dataclass(frozen=True, slots=True)
class Issued:
    """The estimate of one kernel: ``microseconds`` for any number of tiles and of steps."""

    step: float  # nanoseconds on a full multiprocessor
    alone: float  # nanoseconds of a program that has it for itself
    resident: int
    distinct: float  # bytes that a program reads
    scattered: float  # bytes that it stores beyond its results
    target: Target

    def __call__(self, tiles: Number, steps: Number) -> Number:
        chip = self.target.rates.issue
        rounds = kept(-(-tiles // self.target.sms))
        together = smaller(self.resident, rounds)
        busy = rounds * larger(self.step, self.alone / together) * steps + rounds / together * chip.fill_ns
        cache = rounds * self.distinct / chip.cache_gbs
        return (larger(busy, cache) + rounds * self.scattered / chip.cache_gbs) / 1e3

    @staticmethod
    def of(schedule: Schedule, compute: Compute, target: Target) -> Issued:
        """The counts of a kernel."""
        chip = target.rates.issue
        step, alone, resident, loaded, loads = _issued(
            schedule.blocks, compute, schedule.regs, schedule.warps, target
        )
        if schedule.stages > 1 and not schedule.unroll and k_steps(schedule, compute) > schedule.split_k:
            # Loads are ahead, and each passes through shared memory.
            held = (schedule.stages - 1) * loaded * 4 * schedule.warps * target.warp_size
            resident = max(1, min(resident, int(target.shared_bytes / held)))
            step += schedule.warps * (loads + COPIED * max(loads, loaded)) / chip.clock
        elif compute.sums_positions:
            alone += TURN_NS * max(0.0, _turns(loaded, loads, schedule, compute) - 1)
        if not schedule.late and lanes(schedule, compute, "K") > 1:
            step += chip.barriers_ns * prod(n for a, n in schedule.written if compute.kind(a) != "K")
        views = [v for v in (compute.a, compute.b) if v is not None]
        distinct = _distinct(schedule, compute, views)
        return Issued(step, alone, resident, distinct, _scattered(schedule, compute), target)


@by_tile
def _issued(
    blocks: tuple[Block, ...], compute: Compute, regs: str, warps: int, target: Target
) -> tuple[float, float, int, float, float]:
    """Of ``Issued`` the ``step`` without barriers, ``alone`` without further waits, and ``resident``; the
    registers that a thread loads in a step, and its loads. How a sum is divided makes no difference to
    them."""
    chip, schedule = target.rates.issue, Schedule(blocks, regs=regs, warps=warps)
    views = [v for v in (compute.a, compute.b) if v is not None]
    held = prod(lanes(schedule, compute, kind) for kind in "BMNK") / (warps * target.warp_size)
    held = max(1.0, held)
    found = [_operand(v, schedule, compute, target, held) for v in views]
    bits = [v.tensor.dtype.bits for v in views]
    written = prod(extent for _, extent in schedule.written)
    words = compute.acc.bytes / 4
    rows = max(1.0, held * views[0].tensor.dtype.bytes / ACCESS)
    quads = by_fours(schedule, compute, target)
    made = [*QUADS] if quads else [1.5 * (wide < 32) for wide in bits]
    issued = (
        words * written * held * (FOURTH if quads else 1.0)
        + STEP
        + ROW * rows
        + sum(each * x.all for each, x in zip(made, found, strict=True))
        + sum(3 * x.positions * x.loads for x in found)
    )
    clocks = max(issued / chip.schedulers, sum(x.positions * x.loads * x.lines for x in found))
    sums = (
        prod(
            b.extent for b in schedule.blocks if schedule.in_registers(b) and compute.kind(b.first) != "K"
        )
        * held
        * words
    )
    short = [x.all * v.tensor.dtype.bytes / 4 for x, v in zip(found, views, strict=True)]
    registers = (
        REGISTERS + sums + min(sum(short), IN_FLIGHT) + (WORDS if quads else UNPACKED if 8 in bits else 0)
    )
    resident = max(
        1,
        int(
            min(
                target.regs / (warps * target.warp_size * min(registers, 255)),
                chip.threads / (warps * target.warp_size),
            )
        ),
    )
    step = warps * clocks / chip.clock / chip.share * max(1.0, registers / chip.most_registers) ** 2
    loads = sum(x.within * x.loads for x in found)
    loaded = sum(n * x.within / x.positions for n, x in zip(short, found, strict=True))
    return step, chip.latency_ns + issued * chip.stall / chip.clock, resident, loaded, loads


def _turns(loaded: float, loads: float, schedule: Schedule, compute: Compute) -> float:
    """How often a thread waits for the loads of a step, of so many registers."""
    if all(n >= compute.size(a) for a, n in schedule.written if compute.kind(a) == "K"):
        return loaded / TURN_WHOLE
    return loaded / TURN if loaded * 4 >= loads * ACCESS else 1.0


def by_fours(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether the bytes of a sum of integers are multiplied four at a time."""
    views = [v for v in (compute.a, compute.b) if v is not None]
    return (
        has_quads(schedule, compute, target)
        and not compute.prologue
        and len(views) == 2
        and all(v.tensor.dtype.is_integer and v.tensor.dtype.bits == 8 for v in views)
    )


def _operand(view: View, schedule: Schedule, compute: Compute, target: Target, held: float) -> _Operand:
    """The counts of a view's loads. Lanes run along the block that is contiguous in memory; a thread has
    as many of them as one access takes. A view without such a block is loaded element by element."""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    inner = _innermost(schedule, compute)
    widest = min(ACCESS // size, held, inner.extent if inner else 1)
    vector = 1
    if inner and strides[inner.last] == 1:
        outer = [s for a, s in strides.items() if a not in inner.axes and (not a or compute.size(a) > 1)]
        while vector * 2 <= widest and all(s % (vector * 2) == 0 for s in outer):
            vector *= 2
    has = [b for b in schedule.blocks if strides[b.last] and not schedule.in_registers(b)]
    whole = has and all(b in has for b in schedule.blocks if not schedule.in_registers(b))
    elements = held if whole or vector > 1 else min(held, widest)
    across = max(1.0, min(target.warp_size, inner.extent / widest)) if inner else 1.0
    down = target.warp_size / across if any(b != inner for b in has) else 1.0
    step = abs(strides[inner.last]) if inner else 0
    lines = down * max(1.0, min(across, across * widest * step * size / LINE))
    axes = dict(schedule.written).keys()
    reach = prod(
        n
        for d, n in zip(view.dims, view.tensor.shape, strict=True)
        if not axes.isdisjoint(axis_steps(d, compute))
    )
    positions = places(view, compute, schedule.written)
    return _Operand(positions, elements, elements / vector, max(1.0, lines), min(positions, reach))


def _scattered(schedule: Schedule, compute: Compute) -> float:
    """Bytes that a program stores beyond its results: if adjacent lanes are not contiguous in memory, each
    element moves a sector."""
    inner = _innermost(schedule, compute)
    if (
        schedule.split_k > 1
        or inner is None
        or inner.extent == 1
        or (axis_strides(compute.c, compute)[inner.last] in (0, 1))
    ):
        return 0.0  # partial sums are contiguous along the lanes
    stored = prod(lanes(schedule, compute, kind) for kind in "BMN")
    stored *= prod(n for a, n in schedule.written if compute.kind(a) != "K")
    return (SECTOR - compute.c.tensor.dtype.bytes) * stored


def _innermost(schedule: Schedule, compute: Compute) -> Block | None:
    """The block that lanes run along first: the one with the smallest stride in any operand."""
    return _closest(tuple([b for b in schedule.blocks if not schedule.in_registers(b)]), compute)


@lru_cache(maxsize=4096)
def _closest(blocks: tuple[Block, ...], compute: Compute) -> Block | None:
    strides = [axis_strides(v, compute) for v in (compute.a, compute.b) if v is not None]

    def gap(b: Block) -> int:
        return min(abs(s[b.last]) or 1 << 40 for s in strides)

    return min(blocks, key=gap, default=None)


def _distinct(schedule: Schedule, compute: Compute, views: list[View]) -> float:
    """Bytes of the operands that a program reads, each counted once, because the L1 cache keeps what steps
    share."""
    total, parts = 0.0, schedule.split_k if compute.sums_positions else 1
    for v in views:
        total += _read_once(schedule.blocks, compute, v) / parts
    return total


@by_tile
def _read_once(blocks: tuple[Block, ...], compute: Compute, view: View) -> float:
    """Bytes of one operand that a program reads whose sum is whole."""
    reach = {x.name: compute.size(x.name) if compute.kind(x.name) == "K" else 1 for x in compute.axes}
    for b in blocks:
        left = b.extent
        for axis in reversed(b.axes):
            if compute.kind(axis) != "K":
                reach[axis] = min(left, compute.size(axis))
            left = -(-left // compute.size(axis))
    points = 1.0
    for dim, size in zip(view.dims, view.tensor.shape, strict=True):
        steps = axis_steps(dim, compute)
        far = 1 + sum(abs(step) * (reach[a] - 1) for a, step in steps.items())
        points *= min(size, far, prod(reach[a] for a in steps))
    return points * view.tensor.dtype.bytes
