"""The counts that the cost model uses. ``Work`` has the tiles and steps of a schedule, the bytes and
accesses of each, and the programs that fit a multiprocessor. No constant is fitted here.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from transconv.compute import Compute, axis_strides, touched
from transconv.cost.behind import Behind, read_behind
from transconv.cost.issue import ACCESS, LINE, SECTOR
from transconv.cost.tile_rows import WIDEST, Row, aligned, row_along, runs_of, straddling, together
from transconv.ir import View, f32
from transconv.schedule import (
    INTEGERS,
    ROWS,
    WARP_GROUP,
    Block,
    Box,
    Schedule,
    Scheduled,
    behind_bytes,
    box_of,
    by_tile,
    diagonal,
    in_registers,
    k_steps,
    moves_sums,
    product_columns,
    programs,
    result_bytes,
    shared_bytes,
    sides,
    tile,
    tiles_of_a_stage,
    transposed_bytes,
    wants_rounding,
)
from transconv.target import Target

NEAR = 1 << 16  # bytes of a filter, which all programs read, that the L1 cache keeps
ASYNC = 4  # bytes: the smallest asynchronous copy, which does not go through registers
ASYNCHRONOUS = {"wgmma", "tcgen05"}
"""The features of chips whose matrix unit reads operands from shared memory."""
HELD_TWICE = 192  # registers of a thread for both sums; with more, ptxas waits after each product
OLDER_TURNS = 3  # times as fast where ``mma.sync`` takes bytes from shared memory as it needs them


class Fetch(NamedTuple):
    """Counts of moving a tile once."""

    bytes: float  # in whole sectors
    accesses: float  # of single lanes
    row: float  # contiguous bytes in memory
    ahead: bool = True  # whether it can be in flight while earlier tiles are multiplied
    alone: bool = False  # whether each access has one element
    through: bool = False  # whether it goes through registers, to be transposed or rounded
    stepped: bool = False  # whether the copy engine takes every so many-th position
    near: bool = False  # whether it is not ahead, and of a filter that stays in the L1 cache
    ends: bool = False  # whether a box reaches beyond the part of the tensor's rows that is its group's
    common: bool = False  # whether steps share boxes, and all programs read these: they have no positions


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
    fetched: tuple[Fetch, ...]
    stored: Fetch
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
    behind: Behind = Behind()  # what the maps behind the sum read
    small: bool = False  # whether the older matrix unit multiplies f32, because warps or rows are too few
    shared: int = 1  # steps that share boxes, which are fetched together
    bytewise: int = 0  # bytes of a step that Triton transposes one by one, for a product of 8-bit operands


def count(schedule: Schedule, compute: Compute, target: Target) -> Work:
    """The counts of a schedule's main kernel."""
    compute = Scheduled(compute, schedule, target).main
    extents = sides(schedule, compute)
    m, n, k, group = extents["M"], extents["N"], extents["K"], extents["B"]
    views = [v for v in (compute.a, compute.b) if v is not None]
    words, wide = (schedule.a, schedule.b), in_registers(schedule.pack)
    along = _only_along(schedule, compute, target)
    small = (along and compute.a.tensor.dtype.memory is f32 and "wgmma" in target.features
             and is_small(schedule, compute))
    fetched = tuple(fetch(v, schedule, compute, word, along and not small)
                    for v, word in zip(views, words, strict=False))
    if schedule.slide:  # the bytes of a step, of which a group shares rows
        fetched = tuple(f._replace(bytes=f.bytes * tiles_of_a_stage(v, schedule, compute)
                                   / compute.size(schedule.slide), common=_is_common(v, compute))
                        for f, v in zip(fetched, views, strict=True))
    if wide:
        fetched = tuple(f._replace(through=True) for f in fetched)
    kept, steps = 0.0, k_steps(schedule, compute)
    if schedule.keep:
        at = "ab".index(schedule.keep)
        kept = fetched[at].bytes * steps
        fetched = (*fetched[:at], fetched[at]._replace(bytes=0), *fetched[at + 1:])
    results = prod(x.size for kind in "BMN" for x in compute.axes_of(kind))
    blocks = [b for b in schedule.blocks if compute.kind(b.first) == "K"]
    sums = m * n * group
    moved = schedule.unit == "mma" and moves_sums(compute)
    whole = compute.acc.kind == "int" and compute.c.tensor.dtype is not compute.acc
    behind = read_behind(schedule, compute)
    return Work(
        tiles=programs(schedule, compute), steps=-(-steps // schedule.split_k),
        m=m, n=n, k=k, group=group,
        left=n if schedule.swap else m,
        right=min(product_columns(schedule, compute),
                  INTEGERS if compute.acc.kind == "int" else m * n),
        boxed="box" in (schedule.a, schedule.b),
        positions_summed=any(compute.axis(b.first).role == "position" for b in blocks),
        fetched=fetched, stored=_stored(schedule, compute),
        resident=1 if schedule.programs else _resident(schedule, compute, target),
        traffic=sum([touched(v, compute) for v in (*views, compute.c)]) + behind.traffic,
        partial=2 * compute.acc.bytes * _partials(schedule, compute, results, m * n * group),
        bits=16 if wide else compute.a.tensor.dtype.bits, transposed=transposed_bytes(schedule, compute),
        kept=kept, shared=compute.size(schedule.slide) if schedule.slide else 1,
        moved=sums * moved, whole=sums * (whole and schedule.split_k == 1),
        divided=any(compute.axis(a).extent is not None for b in blocks for a in b.axes[1:]),
        behind=behind, small=small, bytewise=_bytewise(schedule, compute, target),
        serial=moved and schedule.via == "tl" and 2 * sums > HELD_TWICE * 32 * schedule.warps)


def _is_common(view: View, compute: Compute) -> bool:
    """Whether no position of a view depends on the program's."""
    seen = compute.seen_by(view)
    return not any(x.name in seen for x in compute.axes if x.role == "position")


def _only_along(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether the matrix unit needs K innermost in shared memory, so that other operands go through
    registers to be transposed. Asynchronous units need that of operands of 32 bits, and of 8 bits, which
    ``_bytewise`` counts."""
    return (schedule.unit == "mma" and schedule.via == "tl" and compute.a.tensor.dtype.memory is f32
            and compute.math != "ieee" and bool(ASYNCHRONOUS & target.features))


def _bytewise(schedule: Schedule, compute: Compute, target: Target) -> int:
    """Bytes of a step that go through registers, to lie in shared memory with K innermost: those of tiles
    of 8 bits that lie otherwise in memory."""
    if in_registers(schedule.pack) or not (
            schedule.unit == "mma" and schedule.via == "tl" and ASYNCHRONOUS & target.features):
        return 0
    found = sum(_elements(schedule.blocks, compute, v) for v in (compute.a, compute.b)
                if v is not None and v.tensor.dtype.bits == 8 and not along_sum(v, compute))
    return found // OLDER_TURNS if is_small(schedule, compute) else found


def is_small(schedule: Schedule, compute: Compute) -> bool:
    """Whether there are too few warps or rows for an asynchronous product. Triton then uses ``mma.sync``,
    whose operands are in registers. (It is not much slower on Hopper; on Blackwell it is not measured.)"""
    left = tile(schedule, compute, "N" if schedule.swap else "M")
    return schedule.warps < WARP_GROUP or left < ROWS


def _partials(schedule: Schedule, compute: Compute, results: int, tile_of_c: int) -> int:
    """Elements of the partial sums."""
    if schedule.reduce == "atomic":  # they meet in the result
        return 0
    if schedule.reduce == "stream":  # a program begins and ends within tiles
        return tile_of_c * min(2 * schedule.programs, programs(schedule, compute) + schedule.programs)
    return results * schedule.split_k if schedule.split_k > 1 else 0


def _resident(schedule: Schedule, compute: Compute, target: Target) -> int:
    """Programs that fit one multiprocessor: by its registers, its threads and its shared memory."""
    threads = schedule.warps * target.warp_size
    registers = _registers(schedule, compute, target)
    fit = [target.regs / (threads * min(registers, 255)), 2048 / threads]
    if schedule.unit == "mma" and compute.b is not None:
        shared = shared_bytes(schedule, compute) + 1024
        shared += result_bytes(schedule, compute)
        shared += behind_bytes(schedule, compute)
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
    return own + m * n * depth * group * each / (schedule.warps * target.warp_size)


# -- how a tile lies in memory --------------------------------------------------------------------

def along_sum(view: View, compute: Compute) -> bool:
    """Whether a view has stride 1 along a summed axis."""
    strides = axis_strides(view, compute)
    return any(strides[x.name] == 1 for x in compute.axes_of("K") if x.size > 1)


def in_rows(copy: Compute) -> int:
    """How many elements along the rows that a copy reads and writes alike always begin at a multiple of
    their number, a power of two."""
    rows = [x.name for x in copy.axes if all(axis_strides(v, copy)[x.name] == 1 for v in (copy.a, copy.c))]
    if not rows:
        return WIDEST
    return min(aligned(v, tuple(rows), copy) for v in (copy.a, copy.c))


def fetch(view: View, schedule: Schedule, compute: Compute, word: str, only_along: bool = False) -> Fetch:
    """The counts of moving a view's tile once; ``word`` is ``gather`` or ``box``."""
    elements = _elements(schedule.blocks, compute, view)
    widest = min(ACCESS // view.tensor.dtype.bytes, max(1, elements // (schedule.warps * 32)))
    found = _fetched(schedule.blocks, compute, view, widest, word, only_along)
    if word != "box" or not (view.tensor.extents or compute.axes_of("B")):
        return found
    box = box_of(view, schedule, compute)
    if not isinstance(box, Box):
        return found
    own = box.tensor.shape[-1]
    ends = own < box.extents[-1] and own < view.tensor.layout.blocks[-1].size
    return found._replace(stepped=bool(box.tensor.every), ends=ends)


def within_groups(schedule: Schedule, compute: Compute) -> bool:
    """Whether boxes end within rows of their tensor, with a group; they are slower than others."""
    return any(fetch(v, schedule, compute, word).ends for v, word in (
        (compute.a, schedule.a), (compute.b, schedule.b)) if v is not None)


@by_tile
def _fetched(blocks: tuple[Block, ...], compute: Compute, view: View, widest: int, word: str,
             only_along: bool) -> Fetch:
    """``fetch`` in accesses of at most so many elements."""
    elements = _elements(blocks, compute, view)
    size = view.tensor.dtype.bytes
    found = _row_of(blocks, compute, view)
    if only_along and not along_sum(view, compute):
        return Fetch(elements * max(size, found.each), elements * size / ASYNC, found.bytes, through=True)
    if word == "box":  # the rates of wider types were fitted without the lines that rows straddle
        lines = straddling(view, found, LINE, compute) if size == 1 else 1.0
        return Fetch(elements * size * lines, 0, found.bytes)
    vector = min(aligned(view, found.axes, compute), 1 << (min(found.run, widest).bit_length() - 1))
    there = elements / diagonal(view, compute)  # elements off the diagonal are masked
    ahead = vector * size >= ASYNC
    near = (not ahead and view is compute.b and not compute.sums_positions and not view.tensor.extents
            and 0 < touched(view, compute) <= NEAR)
    if near:
        there *= _within(blocks, compute, view)
    row = found.bytes  # the rates of wider types were fitted without the lines that rows share
    if size == 1:
        row *= together(view, found, blocks, compute)
    return Fetch(there * max(size, found.each), elements / vector, row, ahead,
                 found.run == 1 and elements > 1, only_along and wants_rounding(view, compute), near=near)


@by_tile
def _elements(tiles: tuple[Block, ...], compute: Compute, view: View) -> int:
    """How many elements a view's tile has."""
    strides = axis_strides(view, compute)
    return prod(b.extent for b in tiles if any(strides[a] for a in b.axes))


@by_tile
def _within(tiles: tuple[Block, ...], compute: Compute, view: View) -> float:
    """The fraction of a view's tile that is not masked: 3 / 16 if a block of 16 features has 3."""
    strides = axis_strides(view, compute)
    return prod(min(1.0, prod(compute.size(a) for a in b.axes) / b.extent) for b in tiles
                if any(strides[a] for a in b.axes))


@by_tile
def _row_of(tiles: tuple[Block, ...], compute: Compute, view: View) -> Row:
    """The row of a view's tile that moves the fewest bytes for each element."""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    runs = runs_of(view, compute) if compute.merge > 1 else compute.sizes
    return min((row_along(strides, b, runs, size) for b in tiles
                if any(strides[a] for a in b.axes)), default=Row(SECTOR, SECTOR))


def _stored(schedule: Schedule, compute: Compute) -> Fetch:
    """The counts of storing a tile. If no two elements are contiguous, Triton lays out the lanes of a warp
    along the first dimension of the tile; with ``swap`` each lane then stores to a sector of its own. An
    explicit kernel stores sums as the matrix unit leaves them, parts of 8 rows at a time, and pairs of a
    thread one by one where rows begin anywhere."""
    stored = fetch(compute.c, schedule, compute, schedule.c)
    if schedule.c == "box":
        return stored
    if schedule.swap and stored.alone:
        return stored._replace(bytes=stored.accesses * SECTOR)
    row = _row_of(schedule.blocks, compute, compute.c)
    single = schedule.via == "gluon" and aligned(compute.c, row.axes, compute) == 1
    return stored._replace(bytes=stored.bytes * straddling(compute.c, row, SECTOR, compute),
                           alone=stored.alone or single)
