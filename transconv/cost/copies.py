"""Estimated time of what is beside a product: copies of a schedule with the word ``pack``, additions to
memory (stores that add, split sums that meet in place, and statistics), and the epilogue.

    additions  = clearing the result + max(bytes added / second cache, additions to one place / clock)
    statistics = tiles * (instructions + shuffles + exchange of warps) + bytes of the parts / bandwidth

Additions are done in the second cache, where those to one place follow one another. In the results of the
matrix unit eight groups of lanes, and each warp, have rows of their own, and the four lanes of a group the
columns: a reduction over rows shuffles every column three times and meets in shared memory, one over
columns every row twice. A chip's record has the rates; no figure of statistics is measured here yet.

Of an epilogue what it reads is counted, what it stores beside the sum's own result, and the
operations that they take. In explicit kernels, tensors as large as the result are read by loads of the
consumers, whose registers are laid out for products, or in boxes that the producer fetches (the word
``behind``); other results leave as boxes or by lanes. Kernels that Triton lays out load and store 16 bytes
at once; they are not counted. Operations are counted for each element, by their rows; a few of them are
short beside the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod
from typing import cast

from transconv.compute import Compute, Read, axis_strides, touched
from transconv.cost.fetches import ASYNC, in_rows
from transconv.cost.issue import ACCESS, slots
from transconv.cost.symbolic_cost import Number, larger
from transconv.ir import CALLS, ONE, Call, Expr, View, find, value_at
from transconv.schedule import Block, Schedule, Scheduled, by_tile, programs, share, sides, tile
from transconv.schedule.tiles import partial_results, shared_memory
from transconv.target import Constants, Target

STRAY_NS = 1.0  # to store a lane's one or two bytes beside those of others (x3d_m_dw3_54 on an H100)
UNEVEN_NS = 3.0  # to store a few bytes of a row whose length no longer access divides (4 copies, H100)


def copied(compute: Compute, schedule: Schedule, target: Target) -> float:
    """Microseconds of the copies of a schedule; where sizes are arguments, for the examples."""
    grouped = Scheduled(compute, schedule, target).grouped
    return _beside(grouped, schedule.pack, schedule.split_k > 1, target)


@lru_cache(maxsize=512)
def _beside(compute: Compute, pack: str, split: bool, target: Target) -> float:
    counts, us = copied_at(compute, Schedule(pack=pack, split_k=1 + split), target)
    like = compute.named.like if compute.named else {}
    return cast(float, us(*[value_at(n, like) for n in counts]))


def copied_at(
    compute: Compute, schedule: Schedule, target: Target
) -> tuple[tuple[Expr, ...], Callable[..., Number]]:
    """The elements of those copies whose sizes are arguments, as expressions of these; and of their values
    the microseconds of all copies, times the computation's share of them."""
    grouped = Scheduled(compute, schedule, target).grouped
    return _copied_at(grouped, schedule.pack, schedule.split_k > 1, schedule.unit, target)


@lru_cache(maxsize=512)  # many schedules of a computation have the same copies
def _copied_at(
    compute: Compute, pack: str, split: bool, unit: str, target: Target
) -> tuple[tuple[Expr, ...], Callable[..., Number]]:
    made = Scheduled(compute, Schedule(pack=pack, split_k=1 + split, unit=unit), target)
    part, each = share(compute), made.copies
    sized = [c for c in each if c.named is not None]
    fixed = sum(cast(float, copying(c, target)) for c in each if c.named is None)

    def us(*counts: Number) -> Number:
        total: Number = fixed
        for copy, elements in zip(sized, counts, strict=True):
            total = total + copying(copy, target, elements=elements)
        return total * part

    return tuple(prod(c.c.tensor.extents, start=ONE) for c in sized), us


def copying(
    copy: Compute, target: Target, constants: Constants | None = None, elements: Number | None = None
) -> Number:
    """Microseconds of a copy into another order: bytes read and written, and its launch. Rows of bytes
    that begin anywhere are stored one or two bytes at a time; those of odd lengths in runs that divide the
    length. ``elements``: how many there are, if not those of the copy's examples."""
    constants = constants or target.rates.triton
    a, c = copy.a.tensor, copy.c.tensor
    moved: Number
    if elements is None:
        moved, elements = sum(touched(v, copy) for v in (copy.a, copy.c)), prod(c.shape)
    else:
        moved = elements * (a.dtype.bytes + c.dtype.bytes)
    us = moved / (target.bandwidth_gbs * 1e3 * constants.memory_share)
    if a.dtype.bits == 8 and (each := in_rows(copy)) < ASYNC:
        us = larger(us, elements / each * STRAY_NS / target.sms / 1e3)
    if a.dtype.bits == 8 and (each := gcd(copy.axes[-1].size, ACCESS)) < ACCESS:
        us = larger(us, elements / each * UNEVEN_NS / target.sms / 1e3)
    return constants.copy_us + us


SHUFFLED = 4.0  # instructions that take as long as a shuffle
INSTRUCTIONS = {"sum": 2.0, "max": 2.0, "min": 2.0, "squares": 3.0}  # of each value that a tile reduces
EXCHANGED_NS = 150.0  # of a reduction across warps


@lru_cache(maxsize=256)
def adding_us(compute: Compute, target: Target) -> float:
    """What stores that add take beside the kernel: 0 without any."""
    if not compute.added:
        return 0.0
    tensor = compute.added[0].tensor
    each = prod(x.size for x in compute.axes if compute.kind(x.name) != "K")
    points = each * len(compute.added)
    places = max(1, min(points, prod(tensor.shape)))
    return meeting_us(prod(tensor.shape), max(4, tensor.dtype.bytes), points / places, target)


def meeting_us(elements: int, size: int, each: float, target: Target) -> float:
    """What it takes to clear a result of so many elements of ``size`` bytes, and to add to each of them
    ``each`` times, in microseconds."""
    chip = target.rates.issue
    clearing = chip.empty_us + elements * size / (target.bandwidth_gbs * 1e3)
    moved = elements * each * size / (chip.cache_gbs * target.sms)
    return clearing + max(moved, ceil(each) * chip.adds_clocks / chip.clock) / 1e3


def leaving_us(schedule: Schedule, compute: Compute, target: Target) -> float:
    """What a product's statistics take in its kernel, in microseconds; the kernel that combines the parts
    is estimated by itself."""
    if not compute.statistics:
        return 0.0
    chip = target.rates.issue
    values = prod(tile(schedule, compute, kind) for kind in "BMN")
    each = 0.0
    for w in compute.statistics:
        reduced = partial_results.reduced_sides(w, compute, schedule)
        shuffled, meets = _across_lanes(reduced, schedule, compute)
        each += (INSTRUCTIONS[w.op] * values + shuffled) / (chip.cores * chip.clock) + EXCHANGED_NS * meets
    moved = partial_results.left_bytes(compute, schedule)
    return programs(schedule, compute) / target.sms * each / 1e3 + moved / (target.bandwidth_gbs * 1e3)


def _across_lanes(reduced: str, schedule: Schedule, compute: Compute) -> tuple[float, bool]:
    """The instructions as long as the shuffles of a tile's reduction over some sides, and whether warps
    meet."""
    left, right = "NM" if schedule.swap else "MN"
    if schedule.unit != "mma":
        return 0.0, True
    shuffles = 0.0
    if right in reduced:
        shuffles += 2 * 4 * tile(schedule, compute, left)
    if left in reduced:
        columns = 1 if right in reduced else tile(schedule, compute, right)
        shuffles += 3 * 8 * schedule.warps * columns
    return shuffles * SHUFFLED, left in reduced


PLAIN = 1.0  # slots of a bias, which the times of stores have
# A function with a branch of a whole program takes all elements of a thread at once, which holds their
# sums as well: the registers for both, and slots of a word beyond them (out and in again, a clock each).
HELD, SPILLED = 192, 8.0
TOGETHER = 2  # elements beside one another in a register tile: those of two columns of a row


@dataclass(frozen=True, slots=True)
class EpilogueCost:
    """Counts of an epilogue. Of a tile: ``accesses`` of single lanes, ``fetched`` bytes, bytes of other
    results than the sum's that are ``sent`` as boxes or ``stored`` by lanes, slots of what is ``called``,
    how often its loads are waited for (``waits``); of the kernel: its ``traffic``, that of ``views``."""

    accesses: float = 0.0
    fetched: float = 0.0
    sent: float = 0.0
    stored: float = 0.0
    traffic: int = 0
    called: float = 0.0
    waits: int = 0
    views: tuple[View, ...] = ()


@lru_cache(maxsize=4096)
def read_behind(schedule: Schedule, compute: Compute) -> EpilogueCost:
    """The counts. What is read when the parts of a sum are added is no load of this kernel."""
    reads, others, called, branches = _behind(compute)
    if not reads and not called and not others:
        return EpilogueCost()
    extents = sides(schedule, compute)
    whole = extents["M"] * extents["N"] * extents["B"]
    spilled = branches * max(0.0, 2 * whole - HELD * 32 * schedule.warps)
    large = [v for v in reads if _elements(schedule.blocks, compute, v) == whole]
    boxes = shared_memory.boxes_behind(schedule, compute)
    here = schedule.via == "gluon" and schedule.split_k == 1 and schedule.reduce != "stream"
    loaded = [v for v in large if here and v not in boxes]
    results = shared_memory.result_boxes(schedule, compute)
    written = [v for v in others if _elements(schedule.blocks, compute, v) == whole]
    sent = sum(float(whole * v.tensor.dtype.bytes) for v in written if v in results)
    stored = sum(float(whole * v.tensor.dtype.bytes) for v in written if v not in results) * here
    return EpilogueCost(
        sum(whole / _at_once(v, schedule, compute) for v in loaded),
        sum(float(whole * v.tensor.dtype.bytes) for v in boxes),
        sent,
        stored,
        sum(touched(v, compute) for v in (*large, *written)),
        (whole * called + SPILLED * spilled) * (schedule.split_k == 1),
        int(bool(large) and schedule.via == "tl" and schedule.split_k == 1),
        (*large, *written),
    )


@lru_cache(maxsize=512)
def _behind(compute: Compute) -> tuple[list[View], list[View], float, bool]:
    """What the epilogue reads, what is stored beside its result, the slots that an element takes there
    beyond those that the times of stores have, and whether a function there branches."""
    steps = compute.sweeps.behind if compute.sum else ()
    values = [s.value for s in steps if not isinstance(s, Read)]
    others = [w.view for w in compute.writes if compute.sum and w.view is not compute.c and not w.op]
    return (
        [s.view for s in steps if isinstance(s, Read)],
        others,
        max(0.0, slots(values) - PLAIN),
        any(CALLS[e.name].branches for v in values for e in find(v, Call)),
    )


@by_tile
def _elements(tiles: tuple[Block, ...], compute: Compute, view: View) -> int:
    strides = axis_strides(view, compute)
    return prod(
        b.extent for b in tiles if compute.kind(b.first) != "K" and any(strides[a] for a in b.axes)
    )


def _at_once(view: View, schedule: Schedule, compute: Compute) -> int:
    """How many elements a lane loads at once: two, if the columns of the register tile are contiguous."""
    strides = axis_strides(view, compute)
    columns = "M" if schedule.swap else "N"
    along = any(
        strides[b.last] == 1 and b.extent > 1 for b in schedule.blocks if compute.kind(b.first) == columns
    )
    return TOGETHER if along else 1
