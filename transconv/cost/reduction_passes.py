"""What a program of a map or reduction does in each sweep over its row: the bytes that it moves, where it
finds them, and the instructions of a thread.

In: blocks, warps, a computation without a product. Out: a ``SweepCost`` for each sweep. How long that
takes is in maps.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from transconv.compute import Compute, Read, Reduction, Step, Write, axis_strides, touched
from transconv.cost.cache_reloads import NEAR
from transconv.cost.fetches import FetchCost, fetch
from transconv.cost.issue import SECTOR
from transconv.ir import Call, Expr, View, find
from transconv.schedule import Block, Schedule, k_steps, programs, tile
from transconv.target import Target

WINDOW = 64  # elements of a row up to which lanes beyond its end cost as much as others: as in trials
HEAVY = 6  # instructions of exp and the like
SMALL = 1 / 16  # tensors below this fraction of the L2 cache and of the largest tensor stay in the cache
SHORT, LINE = 0.04, 128  # extra time of runs of half a cache line; bytes of a cache line


@dataclass(frozen=True, slots=True)
class SweepCost:
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
    return SweepFacts(sizes, frozenset(small), sum(sizes.values()), _live(compute, small),
                  sum(_words(v) for v in {r.view for r in compute.reads} if not any(
                      axis_strides(v, compute)[x.name] for x in compute.axes_of("M"))),
                  tuple(s.steps for s in compute.sweeps.each) or (compute.sweeps.behind,))


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
    return Tiled(prod(tile(schedule, compute, kind) for kind in "BMNK"), tile(schedule, compute, "K"),
                  k_steps(schedule, compute), programs(schedule, compute))


@lru_cache(maxsize=4096)
def sweeps(blocks: tuple[Block, ...], warps: int, compute: Compute, held: bool,
            target: Target) -> list[SweepCost]:
    """The sweeps of a program; a map is one sweep. It takes blocks and warps instead of a schedule, so
    that the cache hits for schedules that differ in other words."""
    facts = facts_of(compute, target)
    schedule = Schedule(blocks, "fma", warps=warps)
    threads = warps * target.warp_size
    lanes = tiled_by(blocks, compute).elements / threads
    moved = {v: fetch(v, schedule, compute, "gather") for v in facts.sizes}
    windows = not held and prod(x.size for x in compute.axes_of("K")) <= WINDOW
    bytes_of = {v: min(_bytes(f) * (1.0 if windows else _present(v, blocks, compute)),
                       _distinct(v, blocks, compute) * SECTOR,
                       facts.sizes[v] if v in facts.small else 1 << 60) for v, f in moved.items()}
    if windows:  # elements of overlapping windows are near, and what a mask excludes is not loaded
        tiled = tiled_by(blocks, compute)
        for v in (r.view for r in compute.reads if r.view not in facts.small):
            each = facts.sizes[v] / max(1, tiled.programs * tiled.steps)  # a sum over nothing has none
            bytes_of[v] = min(bytes_of[v], each + (bytes_of[v] - each) / NEAR)
    return [SweepCost(sum([bytes_of[v] for v in r.first]),
                   sum([bytes_of[v] for v in r.again if v not in facts.small]),
                   sum([bytes_of[v] for v in r.again if v in facts.small]),
                   lanes * r.instructions + 6 * (sum([moved[v].accesses for v in r.all]) / threads),
                   r.reads, r.fresh, r.exchanges) for r in _roles(compute, held, target)]


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
        found.append(_SweepRole((*first, *stored), tuple(again), (*reads, *stored),
                           _instructions(inner), bool(reads), bool(first),
                           sum(isinstance(s, Reduction) for s in inner)))
    return tuple(found)


def _bytes(moved: FetchCost) -> float:
    """Bytes of a view's tile, increased for runs shorter than a cache line."""
    return moved.bytes * (1 + SHORT * max(0.0, LINE / moved.row - 1))


@lru_cache(maxsize=4096)
def _present(view: View, blocks: tuple[Block, ...], compute: Compute) -> float:
    """The fraction of a tile's lanes that a view has elements for, on average: lanes beyond the end of an
    axis load nothing."""
    return prod(n / (ceil(n / b.extent) * b.extent) for b in blocks if moves(view, b, compute)
                for n in [prod(map(compute.size, b.axes))] if n)


@lru_cache(maxsize=4096)
def _distinct(view: View, blocks: tuple[Block, ...], compute: Compute) -> int:
    """The most different elements of a view in a tile. Along the innermost axes of a block, neighbouring
    lanes may read the same one."""
    strides, count = axis_strides(view, compute), 1
    for block in blocks:
        if moves(view, block, compute):
            last = max(i for i, a in enumerate(block.axes) if strides[a])
            alike = prod(map(compute.size, block.axes[last + 1:]))
            count *= ceil(block.extent / max(1, alike))
    return count


def moves(view: View, block: Block, compute: Compute) -> bool:
    strides = axis_strides(view, compute)
    return any(strides[a] for a in block.axes)


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
