"""The counts that the cost model uses. ``Work`` has the tiles and steps of a schedule, the bytes and
accesses of each, and the programs that fit a multiprocessor. No constant is fitted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from transconv.compute import Compute, axis_strides, touched
from transconv.cost.issue import ACCESS, SECTOR
from transconv.ir import View, f32
from transconv.schedule import (
    Block,
    Schedule,
    Scheduled,
    diagonal,
    inner_feature,
    k_steps,
    programs,
    shared_bytes,
    tile,
    transposed_bytes,
    wants_rounding,
)
from transconv.target import Target

ASYNC = 4  # bytes: the least that is copied past the registers, and so ahead of time
ASYNCHRONOUS = {"wgmma", "tcgen05"}  # matrix units that read shared memory
"""The features of chips whose matrix unit reads shared memory by itself."""
WIDEST = 1 << 10  # more elements than one access takes
WARP_GROUP, ROWS = 4, 64  # what one of their products takes at least: warps, rows of its left side


@dataclass(frozen=True, slots=True)
class Fetch:
    """What an operand's tile costs to move once: bytes (whole sectors), lane accesses."""

    bytes: float
    accesses: float
    row: float  # bytes that follow one another in memory
    ahead: bool = True  # whether it can be under way while earlier ones are multiplied
    alone: bool = False  # whether every element has gaps on both sides
    through: bool = False  # whether it goes through registers, to be transposed or rounded


@dataclass(frozen=True, slots=True)
class Work:
    """The counts of a schedule. Extents in elements, of one program."""

    tiles: int  # programs' worth of results, parts of a sum counted one by one
    steps: int  # of one part of the sum
    m: int
    n: int
    k: int
    group: int
    left: int  # the extents of the left operand's rows and the right one's columns
    right: int
    boxed: bool
    positions_summed: bool
    fetched: tuple[Fetch, ...]
    stored: Fetch
    resident: int  # programs that a multiprocessor holds at once
    traffic: int  # bytes that cross the memory's pins at least
    partial: int  # bytes of the partial sums, written and read again
    bits: int  # of an operand's element
    transposed: int = 0  # bytes of a step that an explicit kernel writes to shared memory once more
    kept: float = 0.0  # bytes that a program fetches before its first tile, for all of them
    small: bool = False  # whether f32 is multiplied by the older unit, for want of warps or rows


def count(schedule: Schedule, compute: Compute, target: Target) -> Work:
    """Everything about a schedule that can be counted, of the main kernel."""
    compute = Scheduled(compute, schedule, target).main
    m, n, k, group = (tile(schedule, compute, kind) for kind in "MNKB")
    views = [v for v in (compute.a, compute.b) if v is not None]
    words = (schedule.a, schedule.b)
    along = _only_along(schedule, compute, target)
    small = along and "wgmma" in target.features and is_small(schedule, compute)
    fetched = tuple(fetch(v, schedule, compute, word, along and not small)
                    for v, word in zip(views, words, strict=False))
    kept = 0.0
    if schedule.keep:
        at = "ab".index(schedule.keep)
        kept = fetched[at].bytes * k_steps(schedule, compute)
        fetched = (*fetched[:at], replace(fetched[at], bytes=0), *fetched[at + 1:])
    results = prod(x.size for x in compute.axes if compute.kind(x.name) != "K")
    blocks = [b for b in schedule.blocks if compute.kind(b.axes[0]) == "K"]
    return Work(
        tiles=programs(schedule, compute), steps=-(-k_steps(schedule, compute) // schedule.split_k),
        m=m, n=n, k=k, group=group,
        left=n if schedule.swap else m, right=m if schedule.swap else n,
        boxed="box" in (schedule.a, schedule.b),
        positions_summed=any(_role(b, compute) == "position" for b in blocks),
        fetched=fetched, stored=_stored(schedule, compute),
        resident=1 if schedule.programs else _resident(schedule, compute, target, m * n * group),
        traffic=sum(touched(v, compute) for v in (*views, compute.c)),
        partial=2 * compute.acc.bytes * _partials(schedule, compute, results, m * n * group),
        bits=compute.a.tensor.dtype.bits, transposed=transposed_bytes(schedule, compute),
        kept=kept, small=small)


def _only_along(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether the matrix unit reads shared memory along K only, and nobody but the fetching threads
    can see to that. Asynchronous units do so with operands of more than 16 bits."""
    return (schedule.unit == "mma" and schedule.via == "tl" and compute.a.tensor.dtype.memory is f32
            and compute.math != "ieee" and bool(ASYNCHRONOUS & target.features))


def is_small(schedule: Schedule, compute: Compute) -> bool:
    """Whether there are too few warps or rows for an asynchronous product: Triton then takes the older
    one, whose operands are in registers in any case. (It is not much slower on Hopper; beside tcgen05
    nobody has measured it.)"""
    left = tile(schedule, compute, "N" if schedule.swap else "M")
    return schedule.warps < WARP_GROUP or left < ROWS


def _partials(schedule: Schedule, compute: Compute, results: int, tile_of_c: int) -> int:
    """Elements of the partial sums."""
    if schedule.reduce == "atomic":  # they meet in the result
        return 0
    if schedule.reduce == "stream":  # a program begins and ends within tiles
        return tile_of_c * min(2 * schedule.programs, programs(schedule, compute) + schedule.programs)
    return results * schedule.split_k if schedule.split_k > 1 else 0


def _role(block: Block, compute: Compute) -> str:
    return next(x.role for x in compute.axes if x.name == block.axes[0])


def _resident(schedule: Schedule, compute: Compute, target: Target, results: int) -> int:
    """Programs that fit a multiprocessor together: its shared memory, its registers, its slots."""
    threads = schedule.warps * target.warp_size
    registers = _registers(schedule, compute, target)
    fit = [target.regs / (threads * min(registers, 255)), 2048 / threads]
    if schedule.unit == "mma" and compute.b is not None:
        shared = shared_bytes(schedule, compute) + 1024
        shared += results * compute.c.tensor.dtype.bytes if schedule.c == "box" else 0
        fit.append(target.shared_bytes / shared)
    return max(1, int(min(fit)))


def _registers(schedule: Schedule, compute: Compute, target: Target) -> float:
    """Registers of a thread. On the matrix unit, its share of the accumulator; element by element,
    also where each element lies, whether it exists, and its factors."""
    m, n, k, group = (tile(schedule, compute, kind) for kind in "MNKB")
    words = compute.acc.bytes / 4
    own, each = (48, words) if schedule.unit == "mma" else (32, words + 3)
    depth = 1 if schedule.unit == "mma" else k
    return own + m * n * depth * group * each / (schedule.warps * target.warp_size)


# -- how a tile lies in memory --------------------------------------------------------------------

def along_sum(view: View, compute: Compute) -> bool:
    """Whether neighbours in memory are neighbours in the sum."""
    strides = axis_strides(view, compute)
    return any(strides[x.name] == 1 for x in compute.axes_of("K") if x.size > 1)


def fetch(view: View, schedule: Schedule, compute: Compute, word: str, only_along: bool = False) -> Fetch:
    """What it takes to move a view's tile once."""
    strides = axis_strides(view, compute)
    blocks = [b for b in schedule.blocks if any(strides[a] for a in b.axes)]
    elements = prod(b.extent for b in blocks)
    size = view.tensor.dtype.bytes
    found = _row_of(view, schedule.blocks, compute)
    if only_along and not along_sum(view, compute):
        return Fetch(elements * max(size, found.each), elements, found.bytes, through=True)
    if word == "box":
        return Fetch(elements * size, 0, found.bytes)
    widest = min(ACCESS // size, max(1, elements // (schedule.warps * 32)))
    vector = min(_aligned(view, found.axes, compute), 1 << (min(found.run, widest).bit_length() - 1))
    there = elements / diagonal(view, compute)  # off the diagonal nothing is moved
    return Fetch(there * max(size, found.each), elements / vector, found.bytes,
                 vector * size >= ASYNC, found.run == 1 and elements > 1,
                 only_along and wants_rounding(view, compute))


@lru_cache(maxsize=1024)  # many schedules have the same blocks
def _row_of(view: View, tiles: tuple[Block, ...], compute: Compute) -> _Row:
    """The row of a view's tile that takes the fewest bytes for each of its elements."""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    runs = _runs(view, compute) if compute.merge > 1 else compute.sizes
    return min((_row(strides, b, runs, size) for b in tiles
                if any(strides[a] for a in b.axes)), default=_Row(SECTOR, SECTOR))


def _stored(schedule: Schedule, compute: Compute) -> Fetch:
    """What it takes to store a tile. Where no two elements are neighbours, Triton deals the lanes of a
    warp along the first side of the tile; swapped, these are columns, each in a sector of its own."""
    stored = fetch(compute.c, schedule, compute, schedule.c)
    if schedule.c == "box":
        return stored
    if schedule.swap and stored.alone:
        return replace(stored, bytes=stored.accesses * SECTOR)
    row = _row_of(compute.c, schedule.blocks, compute)
    return replace(stored, bytes=stored.bytes * _straddling(row, compute))


def _straddling(row: _Row, compute: Compute) -> float:
    """How many more sectors the rows of a result touch than they would if each began with one: runs
    of 16 bytes in images of 65 x 65 elements of 2 bytes begin anywhere, 7 of 16 end in the next one."""
    size, strides = compute.c.tensor.dtype.bytes, axis_strides(compute.c, compute)
    steps = [s * size for a, s in strides.items() if a not in row.axes and (not a or compute.size(a) > 1)]
    length = row.run * size
    aligned = gcd(SECTOR, length, *steps)
    return (length + SECTOR - aligned) / SECTOR / -(-length // SECTOR)


@dataclass(frozen=True, slots=True, order=True)
class _Row:
    """Neighbours of a tile in memory: the bytes that are moved for each element and for all of
    them, how many follow one another without a gap, and along which axes."""

    each: float
    bytes: float
    run: int = 1
    axes: tuple[str, ...] = ()


def _runs(view: View, compute: Compute) -> dict[str, int]:
    """How many neighbours along each axis are equally far apart: all, or the features of one of
    several groups on a diagonal."""
    across = inner_feature(view, compute)
    return compute.sizes | {across.name: across.size // compute.merge} if across else compute.sizes


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


@lru_cache(maxsize=512)
def _aligned(view: View, row: tuple[str, ...], compute: Compute) -> int:
    """How many elements all rows of the tensor along these axes are aligned to, as a power of two."""
    steps = [s for a, s in axis_strides(view, compute).items()
             if a not in row and (not a or compute.size(a) > 1)]
    common = gcd(WIDEST, *steps)
    return common & -common
