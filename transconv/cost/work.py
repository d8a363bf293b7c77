"""The counts that the cost model uses. ``Work`` has the tiles and steps of a schedule, the bytes and
accesses of each, and the programs that fit a multiprocessor. No constant is fitted here."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import NamedTuple

from transconv.compute import Compute, Value, block_factors, needed, touched
from transconv.cost.copies import EpilogueCost, read_behind
from transconv.cost.fetches import FetchCost, along_sum, elements_of, fetch, stored
from transconv.cost.issue import slots
from transconv.ir import Const, FloorDiv, View, f32, substitute
from transconv.schedule import (
    INTEGERS,
    Block,
    Schedule,
    Scheduled,
    block_mma,
    counts,
    in_registers,
    sides,
    tile,
)
from transconv.schedule.tiles import shared_memory
from transconv.target import Target

ASYNCHRONOUS = {"wgmma", "tcgen05"}
"""The features of chips whose matrix unit reads operands from shared memory."""
HELD_TWICE = 192  # registers of a thread for both sums; with more, ptxas waits after each product
CALLED, HEAVY = 32, 8  # registers more of a thread for functions of an epilogue, of so many slots at least
KEPT = 3.0  # slots in which an element of a computed operand is rounded and stored
OLDER_TURNS = 3  # times as fast where ``mma.sync`` takes bytes from shared memory as it needs them


class Work(NamedTuple):
    """The counts of a schedule. Extents in elements, of one program."""

    tiles: int  # parts of a split sum counted separately
    steps: int  # of one part of the sum
    m: int
    n: int
    k: int
    group: int
    left: int  # rows of the left operand
    right: int  # columns of the right operand, at most those of one product
    boxed: bool
    positions_summed: bool
    fetched: tuple[FetchCost, ...]
    stored: FetchCost
    resident: int  # programs that a multiprocessor holds at once
    traffic: int  # bytes of global memory at least
    partial: int  # bytes of the partial sums, written and read again
    bits: int  # of an operand's element
    transposed: int = 0  # bytes of a step that an explicit kernel transposes
    kept: float = 0.0  # bytes of a resident operand, which a program loads once
    moved: int = 0  # sums that move to f32, where the matrix unit keeps too few bits of them
    serial: bool = False  # whether each product waits for the one before it, for want of registers
    whole: int = 0  # sums of integers that are converted, scaled and rounded before they are stored
    divided: bool = False  # whether summed positions are unpacked by sizes that are arguments
    behind: EpilogueCost = EpilogueCost()  # what the epilogue reads
    small: bool = False  # whether the older matrix unit multiplies f32, because warps or rows are too few
    shared: int = 1  # steps that share boxes, which are fetched together
    bytewise: int = 0  # bytes of a step that Triton transposes one by one, for a product of 8-bit operands
    sized: bool = False  # whether sizes are arguments
    exact: bool = False  # whether f32 is multiplied in full precision, which no matrix unit does
    prepared: float = 0.0  # slots of the operands of a step that are computed before they are multiplied

    @property
    def sums(self) -> int:
        """The sums of a tile."""
        return self.m * self.n * self.group


class LaunchCounts(NamedTuple):
    """The counts of ``Work`` that do not depend on how a tile is computed."""

    tiles: int
    steps: int
    traffic: int
    partial: int

    @staticmethod
    def of(schedule: Schedule, compute: Compute) -> LaunchCounts:
        """The counts of a kernel whose computation is ``Scheduled.main``."""
        results = prod(x.size for kind in "BMN" for x in compute.axes_of(kind))
        views = [v for v in (compute.a, compute.b, compute.c) if v is not None]
        each = prod(tile(schedule, compute, kind) for kind in "BMN")
        return LaunchCounts(
            counts.programs(schedule, compute),
            -(-counts.k_steps(schedule, compute) // schedule.split_k),
            sum([touched(v, of) for v, of in _reads(schedule, compute, views)])
            + read_behind(schedule, compute).traffic,
            2 * compute.acc.bytes * _partials(schedule, compute, results, each),
        )


def count(schedule: Schedule, compute: Compute, target: Target) -> Work:
    """The counts of a schedule's main kernel. Proposals with one tile differ most often in words that its
    own counts do not depend on."""
    compute = Scheduled(compute, schedule, target).main
    tiles, steps, traffic, partial = LaunchCounts.of(schedule, compute)
    behind = read_behind(schedule, compute)
    known, words = _known_tiles(schedule.blocks, compute, target), _of_tile(schedule)
    work = known.get(words)
    if work is None:
        work = known[words] = count_tile(schedule, compute, target)
    kept, fetched = 0.0, work.fetched
    if schedule.keep:
        at = "ab".index(schedule.keep)
        kept = fetched[at].bytes * counts.k_steps(schedule, compute)
        fetched = (*fetched[:at], fetched[at]._replace(bytes=0), *fetched[at + 1 :])
    return work._replace(
        tiles=tiles,
        steps=steps,
        fetched=fetched,
        resident=1 if schedule.programs else _resident(schedule, compute, target),
        traffic=traffic,
        partial=partial,
        kept=kept,
        whole=work.whole * (schedule.split_k == 1),
        behind=behind,
    )


OF_TILE = tuple("unit a b c merge pack swap scaled order regs transposers slide warps via".split())
"""The words that the counts of a tile depend on."""
_of_tile = attrgetter(*OF_TILE)


@counts.by_tile
def _known_tiles(
    blocks: tuple[Block, ...], compute: Compute, target: Target
) -> dict[tuple[str | int, ...], Work]:
    """The counts of tiles with these blocks by words, which ``count`` fills in."""
    return {}


def count_tile(schedule: Schedule, compute: Compute, target: Target) -> Work:
    """The counts of one tile and one step, whatever the words are that ``OF_TILE`` lacks: without those of
    a launch, of what programs keep or share, and of what the epilogue reads."""
    extents = sides(schedule, compute)
    m, n, k, group = extents["M"], extents["N"], extents["K"], extents["B"]
    views = [v for v in (compute.a, compute.b) if v is not None]
    words, wide = (schedule.a, schedule.b), in_registers(schedule.pack)
    along = _only_along(schedule, compute, target)
    small = along and compute.a.tensor.dtype.memory is f32 and "wgmma" in target.features
    small = small and is_small(schedule, compute)
    pairs = zip(views, words, strict=False)
    fetched = tuple(fetch(v, schedule, compute, word, along and not small) for v, word in pairs)
    if schedule.slide:  # the bytes of a step, of which a group shares rows
        fetched = tuple(
            f._replace(
                bytes=f.bytes
                * shared_memory.tiles_of_a_stage(v, schedule, compute)
                / compute.size(schedule.slide),
                common=_is_common(v, compute),
            )
            for f, v in zip(fetched, views, strict=True)
        )
    if wide:
        fetched = tuple(f._replace(through=True) for f in fetched)
    fetched += tuple(fetch(v, schedule, compute, "gather") for v in further_reads(compute))
    unit = block_mma(compute, target, schedule.swap) if schedule.scaled else None
    if unit is not None:
        fetched = tuple(fetch(*one) for one in _shared_reads(schedule, compute))
    blocks = [b for b in schedule.blocks if compute.kind(b.first) == "K"]
    sums = m * n * group
    moved = schedule.unit == "mma" and counts.moves_sums(compute)
    whole = compute.acc.kind == "int" and compute.c.tensor.dtype is not compute.acc
    return Work(
        tiles=1,
        steps=1,
        m=m,
        n=n,
        k=k,
        group=group,
        left=n if schedule.swap else m,
        right=min(
            counts.product_columns(schedule, compute), INTEGERS if compute.acc.kind == "int" else m * n
        ),
        boxed="box" in (schedule.a, schedule.b),
        positions_summed=any(compute.axis(b.first).role == "position" for b in blocks),
        fetched=fetched,
        stored=stored(schedule, compute),
        resident=1,
        traffic=0,
        partial=0,
        bits=16 // unit.rate if unit else 16 if wide else compute.a.tensor.dtype.bits,
        transposed=shared_memory.transposed_bytes(schedule, compute),
        shared=compute.size(schedule.slide) if schedule.slide else 1,
        moved=sums * moved,
        whole=sums * whole,
        divided=any(compute.axis(a).extent is not None for b in blocks for a in b.axes[1:]),
        small=small,
        bytewise=0 if unit else _bytewise(schedule, compute, target),
        sized=compute.named is not None,
        exact=(target.backend, compute.math) == ("cuda", "ieee")
        and any(f.var.type.memory is f32 for f in compute.factors or ()),
        prepared=0.0 if unit else _prepared(schedule, compute),
        serial=moved and schedule.via == "tl" and 2 * sums > HELD_TWICE * 32 * schedule.warps,
    )


def _reads(schedule: Schedule, compute: Compute, views: list[View]) -> list[tuple[View, Compute]]:
    """The views whose elements a kernel reads and stores, and the computations that they are of."""
    if not schedule.scaled:
        return [(v, compute) for v in (*views, *further_reads(compute))]
    return [(compute.c, compute), *((v, of) for v, _, of, _ in _shared_reads(schedule, compute))]


def _shared_reads(schedule: Schedule, compute: Compute) -> list[tuple[View, Schedule, Compute, str]]:
    """Elements and scales of factors in blocks, as ``fetch`` takes them: what neighbours along an axis
    share is read once, so that the axis is as much shorter."""
    factors, found = block_factors(compute), []
    assert not isinstance(factors, str)
    for factor in factors:
        for read, n in ((factor.element, factor.packed), (factor.scale, factor.size)):
            of = shared(compute, factor.axis, n)
            blocks = tuple(
                replace(b, extent=max(1, b.extent // n)) if factor.axis in b.axes else b
                for b in schedule.blocks
            )
            view = of.reads[compute.reads.index(read)].view
            found.append((view, replace(schedule, blocks=blocks), of, "gather"))
    return found


@lru_cache(maxsize=256)
def shared(compute: Compute, axis: str, n: int) -> Compute:
    """The computation along every ``n``-th point of an axis, where views have what n points share."""
    at, places = compute.axis(axis).var, compute.size(axis) // n
    each = {FloorDiv(at, Const(n)): at}
    axes = tuple(replace(x, size=max(1, places)) if x.var is at else x for x in compute.axes)
    return replace(compute.over(lambda v: substitute(v, each)), axes=axes)


def further_reads(compute: Compute) -> tuple[View, ...]:
    """What computed operands are made of beside their main reads."""
    made = [r.view for f in compute.prologue for r in compute.names.made_of[f.var]]
    return tuple(v for v in dict.fromkeys(made) if v not in (compute.a, compute.b))


def _prepared(schedule: Schedule, compute: Compute) -> float:
    """Slots in which a step's computed operands are made and stored for the matrix unit."""
    total = 0.0
    for view, factor in zip((compute.a, compute.b), compute.factors or (), strict=False):
        if factor in compute.prologue and view is not None:
            made = [s.value for s in needed(compute.steps, {factor.var}) if isinstance(s, Value)]
            total += (slots(made) + KEPT) * elements_of(schedule.blocks, compute, view)
    return total


def _is_common(view: View, compute: Compute) -> bool:
    """Whether no position of a view depends on the program's."""
    seen = compute.seen_by(view)
    return not any(x.name in seen for x in compute.axes if x.role == "position")


def _only_along(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether the matrix unit needs K innermost in shared memory, so that other operands go through
    registers to be transposed. Asynchronous units need that of operands of 32 bits, and of 8 bits, which
    ``_bytewise`` counts."""
    return (
        schedule.unit == "mma"
        and schedule.via == "tl"
        and compute.a.tensor.dtype.memory is f32
        and compute.math != "ieee"
        and bool(ASYNCHRONOUS & target.features)
    )


def _bytewise(schedule: Schedule, compute: Compute, target: Target) -> int:
    """Bytes of a step that go through registers, to lie in shared memory with K innermost: those of tiles
    of 8 bits that lie otherwise in memory."""
    if in_registers(schedule.pack) or not (
        schedule.unit == "mma" and schedule.via == "tl" and ASYNCHRONOUS & target.features
    ):
        return 0
    found = sum(
        elements_of(schedule.blocks, compute, v)
        for v in (compute.a, compute.b)
        if v is not None and v.tensor.dtype.bits == 8 and not along_sum(v, compute)
    )
    return found // OLDER_TURNS if is_small(schedule, compute) else found


def is_small(schedule: Schedule, compute: Compute) -> bool:
    """Whether there are too few warps or rows for an asynchronous product. Triton then uses ``mma.sync``,
    whose operands are in registers. (It is not much slower on Hopper; on Blackwell it is not measured.)"""
    left = tile(schedule, compute, "N" if schedule.swap else "M")
    return schedule.warps < counts.WARP_GROUP or left < counts.ROWS


def _partials(schedule: Schedule, compute: Compute, results: int, tile_of_c: int) -> int:
    """Elements of the partial sums."""
    if schedule.reduce == "atomic":  # they meet in the result
        return 0
    if schedule.reduce == "stream":  # a program begins and ends within tiles
        most = counts.programs(schedule, compute) + schedule.programs
        return tile_of_c * min(2 * schedule.programs, most)
    return results * schedule.split_k if schedule.split_k > 1 else 0


def _resident(schedule: Schedule, compute: Compute, target: Target) -> int:
    """Programs that fit one multiprocessor: by its registers, its threads and its shared memory."""
    threads = schedule.warps * target.warp_size
    registers = _registers(schedule, compute, target)
    fit = [target.regs / (threads * min(registers, 255)), 2048 / threads]
    if schedule.unit == "mma" and compute.b is not None:
        parts = (shared_memory.shared_bytes, shared_memory.result_bytes, shared_memory.behind_bytes)
        sizes = [of(schedule, compute) for of in parts]
        # Triton stores results from where the stages were.
        shared = 1024 + (max(sizes) if schedule.via == "tl" else sum(sizes))
        fit.append(target.shared_bytes / shared)
    return max(1, int(min(fit)))


def _registers(schedule: Schedule, compute: Compute, target: Target) -> float:
    """Registers of a thread: its share of the accumulator; with unit fma also three for the address, mask
    and factors of each product."""
    extents = sides(schedule, compute)
    m, n, k, group = extents["M"], extents["N"], extents["K"], extents["B"]
    words = compute.acc.bytes / 4
    own, each = (48, words) if schedule.unit == "mma" else (32, words + 3)
    depth = 1 if schedule.unit == "mma" else k
    called = CALLED if read_behind(schedule, compute).called > HEAVY * m * n * group else 0
    return own + called + m * n * depth * group * each / (schedule.warps * target.warp_size)
