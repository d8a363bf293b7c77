"""Stage 3, the estimate. In: a config, an algorithm, a target. Out: the microseconds it would take.

The model counts, per multiprocessor, what its programs do one after another:

    program = fill + steps * step + store             step = matrix unit | fetch | waiting
    two teams = fill + max(steps * step + baton, half of steps * step + store)
    kernel  = launch + max(programs on the busiest multiprocessor, bytes / bandwidth)

``Work`` holds the counts (see work.py), which need no constant; ``Constants`` the few rates that
counting cannot tell, fitted by ``python -m bench.fit`` to measured sweeps. Only the ranking matters:
the order of configs of one algorithm is what the estimate is made for, its microseconds are within
some 20%.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from transconv import issue
from transconv.algorithm import Algorithm
from transconv.config import Config
from transconv.counts import k_steps, main_of, programs, tile
from transconv.issue import LINE
from transconv.merging import merged
from transconv.packing import copies, share
from transconv.strides import touched
from transconv.target import Target
from transconv.work import Work, count


@dataclass(frozen=True, slots=True)
class Constants:
    """Rates of a chip's multiprocessor that its data sheet does not tell."""

    narrow: float = 25.0  # columns that the start of a matrix instruction is worth
    fetch_gbs: float = 102.0  # L2 to one multiprocessor, GB/s
    short_rows: float = 0.4  # added to fetching a row of 64 bytes, relative to one of 128 bytes
    access_ns: float = 0.011  # to compute and issue one gathered access of up to 16 bytes
    unpack_ns: float = 0.09  # more where pixels are summed: each step finds and masks other ones
    gather_step_ns: float = 50.0  # waiting per step of the sum, one program alone
    fill_ns: float = 1260.0  # start of a program until its first product
    store_gbs: float = 14.8  # of results that a multiprocessor stores
    box_store: float = 0.45  # time to store a box, relative to storing its elements one by one
    flat_pixels: float = 1.33  # how much slower sums over pixels are in a persistent program
    persistent: float = 0.62  # of the store that is left when the next tile's loads run behind it
    memory_share: float = 0.69  # of the memory's bandwidth that a kernel reaches
    exposed: float = 0.24  # of the shorter one of computing and moving bytes that nothing hides
    launch_us: float = 4.1
    # Not fitted: the sweeps hold too little about these.
    latency_ns: float = 900.0  # from asking for a tile until it can be multiplied
    late_access_ns: float = 0.07  # more for one of less than 4 bytes: it goes through registers
    scatter_ns: float = 1.6  # to store an element that has no neighbour beside it
    copy_us: float = 3.0  # a copy's launch, and that it begins when the kernel before has ended
    baton_ns: float = 150.0  # from the end of one team's products to the start of the other's
    meeting_us: float = 20.0  # more for sums dealt out evenly, whose parts differ from tile to tile
    through_ns: float = 0.15  # more for one of f32 that goes through registers, turned or rounded
    older: float = 1.6  # how much slower the older matrix unit is, which takes operands from registers
    shared_gbs: float = 190.0  # of a multiprocessor's shared memory, GB/s; bounds what turns operands
    fma_share: float = 0.35  # of the multiply-adds of the cores


SM90 = Constants()
# Explicit kernels: boxes land while others are multiplied, so little but the products is left.
SM90_EXPLICIT = Constants(narrow=22.0, short_rows=0.515, fill_ns=3843, store_gbs=5.8, box_store=0.332,
                          flat_pixels=1.114, persistent=0.424, memory_share=0.72, exposed=0.168,
                          launch_us=0.7)
CORES_PER_NS = 128 * issue.CLOCK  # multiply-adds of a multiprocessor's cores


def estimate(config: Config, alg: Algorithm, target: Target,
             constants: Constants | None = None) -> float:
    """Estimated microseconds on a target (in units of a step on the interpreter)."""
    if target.backend == "interpreter":
        return _interpreted(config, alg)
    constants = constants or (SM90_EXPLICIT if config.via == "gluon" else SM90)
    if config.regs or config.late:
        main = _issued(config, alg, target, constants)
    else:
        main = microseconds(count(config, alg, target), config, target, constants)
    if not config.pack:
        return main
    return main + _beside(merged(alg, config.merge), config.pack, config.split_k > 1, target)


@lru_cache(maxsize=512)
def _beside(alg: Algorithm, pack: str, split: bool, target: Target) -> float:
    """What the copies take that an algorithm asks for."""
    return share(alg) * sum(copying(c, target) for c in copies(alg, pack, 1 + split))


def copying(copy: Algorithm, target: Target, constants: Constants = SM90) -> float:
    """Microseconds of a copy into another order: bytes read and written, and its launch."""
    moved = sum(touched(v, copy) for v in (copy.a, copy.c))
    return constants.copy_us + moved / (target.bandwidth_gbs * 1e3 * constants.memory_share)


def _interpreted(config: Config, alg: Algorithm) -> float:
    """A step costs the same whatever its size, up to a point."""
    m, n, k, group = (tile(config, alg, kind) for kind in "MNKB")
    steps = -(-k_steps(config, alg) // config.split_k)
    fetched = (m * k + k * n) * group
    each = steps * (1 + fetched / 2**17 + m * n * group * k / 2**24) + 2
    return programs(config, alg) * each


def microseconds(w: Work, config: Config, target: Target, c: Constants) -> float:
    """The counts and the rates put together."""
    slots = config.programs or target.sms
    rounds: float = -(-w.tiles // slots)  # tiles on the busiest multiprocessor
    if config.reduce == "stream":
        rounds = w.tiles / slots
    together = min(w.resident, max(1.0, rounds))
    step = _step_ns(w, config, target, c, together)
    store = w.stored.bytes / c.store_gbs
    if config.c == "box":
        store *= c.box_store * (1 + c.short_rows * max(0.0, LINE / w.stored.row - 1))
    elif w.stored.alone:
        store = max(store, w.stored.accesses * c.scatter_ns)
    if config.programs:
        step *= c.flat_pixels if w.pixels_summed else 1.0
    fills = 1.0 if config.programs else rounds / together
    products = w.steps * step
    if config.teams > 1:  # a team stores while the other multiplies; nobody does at the last store
        each, last = max(products + c.baton_ns, (products + store) / config.teams), store
    else:
        each, last = products + store * (c.persistent if config.programs else 1 / together), 0.0
    busy = (rounds * each + last + fills * c.fill_ns + w.kept / c.fetch_gbs) / 1e3
    return _kernels(w, busy, config, target, c)


def _issued(config: Config, alg: Algorithm, target: Target, c: Constants) -> float:
    """The same for a kernel that keeps sums and pixels in registers: its instructions are counted."""
    w = count(config, alg, target)
    seen = main_of(alg, config)
    return _kernels(w, issue.microseconds(config, seen, target, w.tiles, w.steps), config, target, c)


def _kernels(w: Work, busy: float, config: Config, target: Target, c: Constants) -> float:
    """The launches, with what the multiprocessors do beside what memory does."""
    bandwidth = target.bandwidth_gbs * 1e3 * c.memory_share  # bytes a microsecond
    moving = (w.traffic + w.partial / 2) / bandwidth
    total = c.launch_us + max(busy, moving) + c.exposed * min(busy, moving)
    if config.reduce == "stream":
        total += c.meeting_us
    if w.partial:
        total += c.launch_us + w.partial / 2 / bandwidth
    return total


def _step_ns(w: Work, config: Config, target: Target, c: Constants, together: float) -> float:
    """One step of the sum on a multiprocessor that ``together`` programs share."""
    macs = w.m * w.n * w.k * w.group
    peak = target.tflops * 1e3 / 2 / target.sms  # multiply-adds a nanosecond of 16-bit operands
    if config.unit == "mma":
        multiply = macs / (peak * 16 / w.bits) * (1 + c.narrow / w.right)
        multiply *= c.older if w.small else max(1.0, 64 / w.left)
    else:
        multiply = macs / (CORES_PER_NS * c.fma_share)
    accesses = sum(f.accesses for f in w.fetched)
    fetch = sum(f.bytes * (1 + c.short_rows * max(0.0, LINE / f.row - 1)) for f in w.fetched)
    fetch /= c.fetch_gbs
    fetch += accesses * (c.access_ns + (c.unpack_ns if w.pixels_summed else 0.0))
    fetch += sum(f.accesses for f in w.fetched if not f.ahead) * c.late_access_ns
    fetch += sum(f.accesses for f in w.fetched if f.through) * c.through_ns
    ahead = all(f.ahead for f in w.fetched) or "async_copy" not in target.features
    in_flight = max(1, w.steps if config.unroll else config.stages - 1 if ahead else 1)
    late = c.latency_ns / in_flight
    wait = 0.0 if w.boxed else c.gather_step_ns / together
    if config.unit == "fma":  # the cores that multiply also compute addresses, and then they wait
        work = multiply + fetch
        return max(work, (work + late) / together) + wait
    return max(multiply, fetch, late / together, _turning_ns(w, config, c)) + wait


def _turning_ns(w: Work, config: Config, c: Constants) -> float:
    """What a step moves through shared memory where operands are turned there: what lands, what is
    read and written again, and what the products read (rows for up to 128 or 256 columns at a time,
    columns once for 64 rows)."""
    if not w.turned:
        return 0.0
    landed = (w.left + w.right) * w.k * w.bits / 8
    wide = 256 if config.warps == 4 else 128
    read = (w.left * -(-w.right // wide) + w.right * -(-w.left // 64)) * w.k * w.bits / 8
    return (landed + 2 * w.turned + read) / c.shared_gbs
