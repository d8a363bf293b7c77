"""Stage 3, the estimate. In: a config, an algorithm, a target. Out: the microseconds it would take.

The model counts, per multiprocessor, what its programs do one after another:

    program = fill + steps * step + store             step = matrix unit | fetch | waiting
    two teams = fill + max(steps * step + baton, half of steps * step + store)
    kernel  = launch + max(programs on the busiest multiprocessor, bytes / bandwidth)

``Work`` holds the counts, which need no constant; ``Constants`` the few rates that counting cannot
tell, fitted by ``python -m bench.fit`` to measured sweeps. Only the ranking matters: the order of
configs of one algorithm is what the estimate is made for, its microseconds are within some 20%.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transconv import issue
from transconv.algorithm import Algorithm
from transconv.config import Block, Config
from transconv.counts import k_steps, main_of, programs, tile, turned_bytes
from transconv.ir import View
from transconv.issue import ACCESS, LINE
from transconv.merging import inner_channel, merged
from transconv.packing import copies, diagonal, share
from transconv.strides import axis_strides, touched
from transconv.target import Target


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
    across_ns: float = 0.15  # more for one across the sum, where f32 must lie along it: 4 bytes each
    shared_gbs: float = 190.0  # of a multiprocessor's shared memory, GB/s; bounds what turns operands
    fma_share: float = 0.35  # of the multiply-adds of the cores


SM90 = Constants()
# Explicit kernels: boxes land while others are multiplied, so little but the products is left.
SM90_EXPLICIT = Constants(narrow=22.0, short_rows=0.515, fill_ns=3843, store_gbs=5.8, box_store=0.332,
                          flat_pixels=1.114, persistent=0.424, memory_share=0.72, exposed=0.168,
                          launch_us=0.7)
CORES_PER_NS = 128 * issue.CLOCK  # multiply-adds of a multiprocessor's cores
SECTOR = 32  # bytes: the least that a load or store moves
ASYNC = 4  # bytes: the least that is copied past the registers, and so ahead of time


@dataclass(frozen=True, slots=True)
class Fetch:
    """What an operand's tile costs to move once: bytes (whole sectors), lane accesses."""

    bytes: float
    accesses: float
    row: float  # bytes that follow one another in memory
    ahead: bool = True  # whether it can be under way while earlier ones are multiplied
    alone: bool = False  # whether every element has gaps on both sides
    across: bool = False  # whether it is written across its rows, for a unit that reads along K only


@dataclass(frozen=True, slots=True)
class Work:
    """The counts of a config. Extents in elements, of one program."""

    tiles: int  # programs' worth of results, parts of a sum counted one by one
    steps: int  # of one part of the sum
    m: int
    n: int
    k: int
    group: int
    left: int  # the extents of the left operand's rows and the right one's columns
    right: int
    boxed: bool
    pixels_summed: bool
    fetched: tuple[Fetch, ...]
    stored: Fetch
    resident: int  # programs that a multiprocessor holds at once
    traffic: int  # bytes that cross the memory's pins at least
    partial: int  # bytes of the partial sums, written and read again
    bits: int  # of an operand's element
    turned: int = 0  # bytes of a step that an explicit kernel writes to shared memory once more


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


def count(config: Config, alg: Algorithm, target: Target) -> Work:
    """Everything about a config that can be counted, of the main kernel."""
    alg = main_of(alg, config)
    m, n, k, group = (tile(config, alg, kind) for kind in "MNKB")
    views = [v for v in (alg.a, alg.b) if v is not None]
    words = (config.a, config.b)
    along = _only_along(config, alg, target)
    fetched = tuple(_fetch(v, config, alg, word, along) for v, word in zip(views, words, strict=False))
    results = prod(x.size for x in alg.axes if alg.kind(x.name) != "K")
    blocks = [b for b in config.blocks if alg.kind(b.axes[0]) == "K"]
    return Work(
        tiles=programs(config, alg), steps=-(-k_steps(config, alg) // config.split_k),
        m=m, n=n, k=k, group=group,
        left=n if config.swap else m, right=m if config.swap else n,
        boxed="box" in (config.a, config.b),
        pixels_summed=any(_role(b, alg) == "pixel" for b in blocks),
        fetched=fetched, stored=_stored(config, alg),
        resident=1 if config.programs else _resident(config, alg, target, m * n * group, k),
        traffic=sum(touched(v, alg) for v in (*views, alg.c)),
        partial=2 * alg.acc.bytes * _partials(config, alg, results, m * n * group),
        bits=alg.a.tensor.dtype.bits, turned=turned_bytes(config, alg))


def _only_along(config: Config, alg: Algorithm, target: Target) -> bool:
    """Whether the matrix unit reads shared memory along K only, and nobody but the fetching threads
    can see to that. Asynchronous units do so with operands of more than 16 bits."""
    return (config.unit == "mma" and config.via == "tl" and alg.a.tensor.dtype.name == "f32"
            and alg.math != "ieee" and bool({"wgmma", "tcgen05"} & target.features))


def _partials(config: Config, alg: Algorithm, results: int, tile_of_c: int) -> int:
    """Elements of the partial sums."""
    if config.reduce == "stream":  # a program begins and ends within tiles
        return tile_of_c * min(2 * config.programs, programs(config, alg) + config.programs)
    return results * config.split_k if config.split_k > 1 else 0


def _role(block: Block, alg: Algorithm) -> str:
    return next(x.role for x in alg.axes if x.name == block.axes[0])


def _resident(config: Config, alg: Algorithm, target: Target, results: int, k: int) -> int:
    """Programs that fit a multiprocessor together: its shared memory, its registers, its slots."""
    threads = config.warps * target.warp_size
    registers = _registers(config, alg, target)
    fit = [target.regs / (threads * min(registers, 255)), 2048 / threads]
    if config.unit == "mma" and alg.b is not None:
        a, b = alg.a.tensor.dtype.bytes, alg.b.tensor.dtype.bytes
        m, n = (tile(config, alg, kind) for kind in "MN")
        shared = config.stages * (k * (m * a + n * b) + turned_bytes(config, alg)) + 1024
        shared += results * alg.c.tensor.dtype.bytes if config.c == "box" else 0
        fit.append(target.shared_bytes / shared)
    return max(1, int(min(fit)))


def _registers(config: Config, alg: Algorithm, target: Target) -> float:
    """Registers of a thread. On the matrix unit, its share of the accumulator; element by element,
    also where each element lies, whether it exists, and its factors."""
    m, n, k, group = (tile(config, alg, kind) for kind in "MNKB")
    words = alg.acc.bytes / 4
    own, each = (48, words) if config.unit == "mma" else (32, words + 3)
    depth = 1 if config.unit == "mma" else k
    return own + m * n * depth * group * each / (config.warps * target.warp_size)


# -- how a tile lies in memory --------------------------------------------------------------------

def along_sum(view: View, alg: Algorithm) -> bool:
    """Whether neighbours in memory are neighbours in the sum."""
    strides = axis_strides(view, alg)
    return any(strides[x.name] == 1 for x in alg.axes_of("K") if x.size > 1)


def _fetch(view: View, config: Config, alg: Algorithm, word: str, only_along: bool = False) -> Fetch:
    """What it takes to move a view's tile once."""
    strides = axis_strides(view, alg)
    blocks = [b for b in config.blocks if any(strides[a] for a in b.axes)]
    elements = prod(b.extent for b in blocks)
    size = view.tensor.dtype.bytes
    runs = _runs(view, alg) if alg.merge > 1 else alg.sizes
    found = min((_row(strides, b, runs, size) for b in blocks), default=_Row(SECTOR, SECTOR))
    if only_along and not along_sum(view, alg):
        return Fetch(elements * max(size, found.each), elements, found.bytes, across=True)
    if word == "box":
        return Fetch(elements * size, 0, found.bytes)
    widest = min(ACCESS // size, max(1, elements // (config.warps * 32)))
    vector = _vector(strides, found, alg, widest)
    there = elements / diagonal(view, alg)  # off the diagonal nothing is moved
    return Fetch(there * max(size, found.each), elements / vector, found.bytes,
                 vector * size >= ASYNC, found.run == 1 and elements > 1)


def _stored(config: Config, alg: Algorithm) -> Fetch:
    """What it takes to store a tile. Where no two elements are neighbours, Triton deals the lanes of a
    warp along the first side of the tile; swapped, these are channels, each in a sector of its own."""
    stored = _fetch(alg.c, config, alg, config.c)
    if config.swap and config.c != "box" and stored.alone:
        return replace(stored, bytes=stored.accesses * SECTOR)
    return stored


@dataclass(frozen=True, slots=True, order=True)
class _Row:
    """Neighbours of a tile in memory: the bytes that are moved for each element and for all of
    them, how many follow one another without a gap, and along which axes."""

    each: float
    bytes: float
    run: int = 1
    axes: tuple[str, ...] = ()


def _runs(view: View, alg: Algorithm) -> dict[str, int]:
    """How many neighbours along each axis are equally far apart: all, or the channels of one of
    several groups on a diagonal."""
    across = inner_channel(view, alg)
    return alg.sizes | {across.name: across.size // alg.merge} if across else alg.sizes


def _row(strides: dict[str, int], block: Block, runs: dict[str, int], size: int) -> _Row:
    """The row that the innermost axes of a block make. Neighbours with a gap share sectors too."""
    step, length, axes = 0, 1, []
    for name in reversed(block.axes):
        if runs[name] == 1:
            continue
        step = step or abs(strides[name])
        if abs(strides[name]) != step * length or not step:
            break
        length *= runs[name]
        axes.append(name)
    length = max(1, min(length, block.extent))  # an axis may be empty
    sectors = -(-((length - 1) * step + 1) * size // SECTOR)
    moved = min(sectors, length) * SECTOR
    return _Row(moved / length, moved, length if step == 1 else 1, tuple(axes))


def _vector(strides: dict[str, int], row: _Row, alg: Algorithm, widest: int) -> int:
    """How many elements one access takes: as many as all rows of the tensor are aligned to."""
    steps = [s for a, s in strides.items() if a not in row.axes and (not a or alg.size(a) > 1)]
    vector = 1
    while vector * 2 <= min(row.run, widest) and all(s % (vector * 2) == 0 for s in steps):
        vector *= 2
    return vector


# -- time -----------------------------------------------------------------------------------------

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
    busy = (rounds * each + last + fills * c.fill_ns) / 1e3
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
        multiply *= max(1.0, 64 / w.left)
    else:
        multiply = macs / (CORES_PER_NS * c.fma_share)
    accesses = sum(f.accesses for f in w.fetched)
    fetch = sum(f.bytes * (1 + c.short_rows * max(0.0, LINE / f.row - 1)) for f in w.fetched)
    fetch /= c.fetch_gbs
    fetch += accesses * (c.access_ns + (c.unpack_ns if w.pixels_summed else 0.0))
    fetch += sum(f.accesses for f in w.fetched if not f.ahead) * c.late_access_ns
    fetch += sum(f.accesses for f in w.fetched if f.across) * c.across_ns
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
