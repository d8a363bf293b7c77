"""Stage 3, the estimate for kernels that keep sums and pixels in registers (``regs``, ``late``).

Such a kernel multiplies element by element and waits for little: what takes its time is how many
instructions its warps issue, how many cache lines they touch, and what comes through the second cache:

    step of a warp = max(instructions / 4 schedulers, cache lines) clocks
    instructions   = products + conversions + loads + a row's index and mask

The instructions are counted, not fitted to times; the constants below are round figures of the chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from transconv.algorithm import Algorithm
from transconv.config import Block, Config
from transconv.counts import lanes
from transconv.ir import View
from transconv.strides import axis_steps, axis_strides, places
from transconv.target import Target

CLOCK = 1.7  # clocks of a multiprocessor in a nanosecond
SCHEDULERS = 4  # of a multiprocessor: each issues an instruction a clock
SHARE = 0.8  # of these clocks in which something is issued
LATENCY_NS = 800.0  # of a step of one warp that nothing overlaps: its loads
STALL = 1.5  # clocks between two instructions of a warp that is alone
FILL_NS = 1500.0  # start and end of a program
CACHE_GBS = 42.0  # second cache to one multiprocessor
ACCESS = 16  # bytes: the most that one lane loads or stores at once
SECTOR = 32  # bytes: the least that a load or store moves
LINE = 128  # bytes of a cache line, and of the rows that the matrix unit likes best
ROW = 30.0  # instructions for the index and the mask of a row of pixels, per step
STEP = 30.0  # instructions of a step that are for all of them
BARRIERS_NS = 600.0  # to add up the lanes of a sum through shared memory
REGISTERS = 20  # of a thread, for addresses and masks
IN_FLIGHT = 96  # of a thread, for what is loaded: more loads wait for registers
MOST_REGISTERS = 240  # more are spilled


@dataclass(frozen=True, slots=True)
class _Operand:
    """What a thread does for one operand in one step."""

    positions: int  # of what is written out that differ
    elements: float  # at each
    loads: float  # at each
    lines: float  # of the cache that a warp's load touches

    @property
    def all(self) -> float:
        return self.positions * self.elements


def microseconds(config: Config, alg: Algorithm, target: Target, tiles: int, steps: int) -> float:
    """What the busiest multiprocessor needs for its tiles."""
    warps, views = config.warps, [v for v in (alg.a, alg.b) if v is not None]
    held = prod(lanes(config, alg, kind) for kind in "BMNK") / (warps * target.warp_size)
    held = max(1.0, held)
    found = [_operand(v, config, alg, target, held) for v in views]
    wide = [v.tensor.dtype.bits < 32 for v in views]
    written = prod(extent for _, extent in config.written)
    words = alg.acc.bytes / 4
    rows = max(1.0, held * views[0].tensor.dtype.bytes / ACCESS)
    issued = (words * written * held + STEP + ROW * rows
              + sum(1.5 * x.all for x, short in zip(found, wide, strict=True) if short)
              + sum(3 * x.positions * x.loads for x in found))
    clocks = max(issued / SCHEDULERS, sum(x.positions * x.loads * x.lines for x in found))
    sums = prod(b.extent for b in config.blocks
                if config.in_registers(b) and alg.kind(b.axes[0]) != "K") * held * words
    short = [x.all * v.tensor.dtype.bytes / 4 for x, v in zip(found, views, strict=True)]
    registers = REGISTERS + sums + min(sum(short), IN_FLIGHT)
    resident = max(1, int(min(target.regs / (warps * target.warp_size * min(registers, 255)),
                              2048 / (warps * target.warp_size))))
    rounds = ceil(tiles / target.sms)
    together = min(resident, rounds)
    step = warps * clocks / CLOCK / SHARE * max(1.0, registers / MOST_REGISTERS) ** 2
    if not config.late and lanes(config, alg, "K") > 1:
        step += BARRIERS_NS
    alone = LATENCY_NS + issued * STALL / CLOCK
    busy = rounds * max(step, alone / together) * steps + rounds / together * FILL_NS
    cache = rounds * _distinct(config, alg, views) / CACHE_GBS
    return (max(busy, cache) + rounds * _scattered(config, alg) / CACHE_GBS) / 1e3


def _operand(view: View, config: Config, alg: Algorithm, target: Target, held: float) -> _Operand:
    """The counts of a view's loads. Lanes run along the block that has neighbours in memory, as many
    of them in a thread as one access takes; a view without neighbours is loaded one by one."""
    strides, size = axis_strides(view, alg), view.tensor.dtype.bytes
    inner = _innermost(config, alg)
    widest = min(ACCESS // size, held, inner.extent if inner else 1)
    vector = 1
    if inner and strides[inner.axes[-1]] == 1:
        outer = [s for a, s in strides.items() if a not in inner.axes and (not a or alg.size(a) > 1)]
        while vector * 2 <= widest and all(s % (vector * 2) == 0 for s in outer):
            vector *= 2
    has = [b for b in config.blocks if strides[b.axes[-1]] and not config.in_registers(b)]
    elements = held if has and all(b in has for b in config.blocks if not config.in_registers(b)) or (
        vector > 1) else min(held, widest)
    across = max(1.0, min(target.warp_size, inner.extent / widest)) if inner else 1.0
    down = target.warp_size / across if any(b is not inner for b in has) else 1.0
    step = abs(strides[inner.axes[-1]]) if inner else 0
    lines = down * max(1.0, min(across, across * widest * step * size / LINE))
    return _Operand(places(view, alg, config.written), elements, elements / vector, max(1.0, lines))


def _scattered(config: Config, alg: Algorithm) -> float:
    """Bytes beyond its results that a program stores, because neighbouring lanes have no neighbours in
    memory: each of them moves a sector."""
    inner = _innermost(config, alg)
    if config.split_k > 1 or inner is None or inner.extent == 1 or (
            axis_strides(alg.c, alg)[inner.axes[-1]] in (0, 1)):
        return 0.0  # the parts of a sum lie as its lanes do
    return (SECTOR - alg.c.tensor.dtype.bytes) * prod(lanes(config, alg, kind) for kind in "BMN") * prod(
        n for a, n in config.written if alg.kind(a) != "K")


def _innermost(config: Config, alg: Algorithm) -> Block | None:
    """The block that lanes run along first: the one whose neighbours are next to one another in
    most of the operands."""
    views = [v for v in (alg.a, alg.b) if v is not None]

    def gap(b: Block) -> int:
        return min(abs(axis_strides(v, alg)[b.axes[-1]]) or 1 << 40 for v in views)

    return min((b for b in config.blocks if not config.in_registers(b)), key=gap, default=None)


def _distinct(config: Config, alg: Algorithm, views: list[View]) -> float:
    """Bytes of the operands that a program looks at, each counted once: the first cache keeps what its
    steps share."""
    total = 0.0
    reach = {x.name: alg.size(x.name) if alg.kind(x.name) == "K" else 1 for x in alg.axes}
    for b in config.blocks:
        left = b.extent
        for axis in reversed(b.axes):
            if alg.kind(axis) != "K":
                reach[axis] = min(left, alg.size(axis))
            left = -(-left // alg.size(axis))
    for v in views:
        points = 1.0
        for dim, size in zip(v.dims, v.tensor.shape, strict=True):
            far = 1 + sum(abs(step) * (reach[a] - 1) for a, step in axis_steps(dim, alg).items())
            points *= min(size, far, prod(reach[a] for a in axis_steps(dim, alg)))
        shared = alg.sums_pixels
        total += points * v.tensor.dtype.bytes / (config.split_k if shared else 1)
    return total
