"""Reductions over tiles: the parts that tiles leave of statistics, the kernels that combine them, and how
a schedule divides the rows that are reduced.

    tile n, h:8 w:16, o:64                  parts[n, h_part, w_part, o] = sum of y over the rows of a tile
    store M[n, o//8] sum= y         ->      second kernel: M[n, o] = sum of parts over h_part w_part o_in

A side of the tile whose blocks have one place of a statistic is reduced in registers; a part is the number
of a block. Along the other side the workspace has the axes themselves, and the second kernel reduces what
is not kept of them. If all tiles have the same places, each persistent program adds up those of its tiles
and leaves one part (``carried``). Squared deviations are combined with those of the parts' means, which
the partial sums tell. Parts are combined in a fixed order, so results are the same in every run.

Statistics at the same coordinates share a kernel that combines their parts.

Rows that are reduced are divided, and stay in registers or do not:

    red=lane     one thread reduces a row
    red=warp     threads of one warp share a row and combine their results by shuffles
    red=block    threads of several warps share a row and combine their results in shared memory
    red=split    several programs share a row and combine their results in memory (see ``reduce=``)

    row=held     a tile covers the row, or its steps are written out (``unroll=1``): its elements are
                 loaded once for all sweeps
    row=again    neither: every sweep loads them again

Both follow from the blocks, the warps and ``split_k``; a schedule whose words contradict them is illegal.
Triton lays out the threads of a program along the innermost block first, each with 16 bytes of it, or
with as many as every row is a multiple of, then along the next one: 64 numbers of 2 bytes, of rows of 49,
take two warps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transconv import ir
from transconv.compute import (
    Axis,
    Compute,
    Read,
    Reduction,
    Step,
    Value,
    Write,
    axis_strides,
    fresh,
    touched,
    with_roles,
)
from transconv.compute.analysis import statistics as stat
from transconv.schedule.counts import aligned, by_tile, holds_rows, k_steps, programs, tile
from transconv.schedule.schedule import Block, Schedule
from transconv.target import Target


@dataclass(frozen=True, slots=True)
class WorkspaceDim:
    """A dimension of the workspace. ``tile``: where a tile stores, of the product's axes; ``axes``: those
    of the second kernel, ``at``: where it reads. A part is of ``extent`` of the ``whole`` positions."""

    name: str
    size: int
    tile: ir.Expr
    axes: tuple[Axis, ...]
    at: ir.Expr
    whole: int = 1
    extent: int = 1

    def count(self, at: ir.Expr) -> ir.Expr:
        """How many positions the part at a place is of."""
        if self.whole % self.extent == 0:
            return ir.Const(self.extent)
        return ir.minimum(ir.Const(self.whole) - at * self.extent, self.extent)


def counted(counts: Iterable[ir.Expr], dtype: ir.DType) -> ir.Expr:
    """A product of counts as a number of a type."""
    known, total = 1, None
    for count in counts:
        if isinstance(count, ir.Const):
            known *= int(count.value)
        else:
            total = count if total is None else total * count
    if total is None:
        return ir.Const(float(known), dtype)
    return ir.Cast(total * known if known > 1 else total, dtype)


PROGRAM = ir.Var("program")
"""The number of a persistent program, which carries its statistics from tile to tile."""


def carried(compute: Compute, schedule: Schedule) -> bool:
    """Whether persistent programs carry the statistics from tile to tile: those of rows or of a map, whose
    tiles hold every position that is kept."""
    return (
        compute.factors is None
        and bool(compute.statistics)
        and 0 < schedule.programs < programs(schedule, compute)
        and _holds_every(compute, schedule)
    )


@lru_cache(maxsize=1024)
def _holds_every(compute: Compute, schedule: Schedule) -> bool:
    """Whether each tile has all places of all statistics."""
    return all(w.op != "squares" and _holds_all(w, compute, schedule) for w in compute.statistics)


def _holds_all(write: Write, compute: Compute, schedule: Schedule) -> bool:
    """Whether each tile has all places of a statistic."""
    kept = [a for a in stat.kept(write) or () if compute.size(a) > 1]
    blocks = {b for a in kept if (b := schedule.block_of(a)) is not None}
    return len([a for b in blocks for a in b.axes]) == len(kept) and all(
        b.extent >= prod(map(compute.size, b.axes)) for b in blocks
    )


def along(write: Write, compute: Compute, schedule: Schedule) -> tuple[WorkspaceDim, ...]:
    """The dimensions of a statistic's workspace: axes of which a tile has one position, parts, the axes of
    the tile that are not reduced in registers."""
    kept = stat.kept(write) or {}
    if carried(compute, schedule):
        count = schedule.programs
        own = Axis(fresh("carried", compute.names.all), count, "")
        lanes = [_of_axis(compute.axis(a), kept) for a, n in compute.sizes.items() if a in kept and n > 1]
        return WorkspaceDim(own.name, count, PROGRAM, (own,), own.var), *lanes
    return _of_tile(write, compute, schedule.blocks)


@lru_cache(maxsize=4096)  # many schedules have the same blocks
def _of_tile(write: Write, compute: Compute, tile: tuple[Block, ...]) -> tuple[WorkspaceDim, ...]:
    """``along``, where no program carries anything from one tile to the next."""
    kept, points = stat.kept(write) or {}, stat.points(compute)
    wide = {a for b in tile if b.extent != 1 for a in b.axes}
    lone = [compute.axis(a) for a, n in points.items() if n > 1 and a not in wide]
    lone.sort(key=lambda x: x.name not in kept)
    parts: list[WorkspaceDim] = []
    lanes = []
    for blocks in _sides(compute, tile):
        if all(is_within(b, kept, compute) for b in blocks):
            parts += [_of_block(b, kept, compute) for b in blocks]
        else:
            lanes += [_of_axis(compute.axis(a), kept) for b in blocks for a in b.axes]
    return (*(_of_axis(x, kept) for x in lone), *parts, *lanes)


def blocks_of_sides(compute: Compute, schedule: Schedule) -> list[list[Block]]:
    """The blocks of each side of the tile, which are lanes of one dimension: without a product each."""
    return _sides(compute, schedule.blocks)


def _sides(compute: Compute, tile: tuple[Block, ...]) -> list[list[Block]]:
    if compute.factors is None:
        return [[b] for b in tile if b.extent > 1]
    every = [[b for b in tile if compute.kind(b.first) == kind and b.extent > 1] for kind in "BMN"]
    return [blocks for blocks in every if blocks]


def reduced_sides(write: Write, compute: Compute, schedule: Schedule) -> str:
    """The sides of a product's tile that a statistic reduces in registers: of B, M and N."""
    return _reduced(schedule.blocks, compute, write)


@by_tile
def _reduced(tile: tuple[Block, ...], compute: Compute, write: Write) -> str:
    kept = stat.kept(write) or {}
    return "".join(
        compute.kind(blocks[0].first)
        for blocks in _sides(compute, tile)
        if all(is_within(b, kept, compute) for b in blocks)
    )


def is_within(block: Block, kept: dict[str, int], compute: Compute) -> bool:
    """Whether the positions of a block have one place in a statistic."""
    own = [a for a in block.axes if a in kept and compute.size(a) > 1]
    if not own:
        return True
    outer = [a for a in block.axes if compute.size(a) > 1][:1]
    rest = prod(compute.size(a) for a in block.axes) // compute.size(own[0])
    return own == outer and kept[own[0]] == 1 and rest % block.extent == 0


def _of_axis(x: Axis, kept: dict[str, int]) -> WorkspaceDim:
    """Every position of an axis has a part."""
    by = kept.get(x.name, 0)
    if by in (0, 1):
        return WorkspaceDim(x.name, x.size, x.var, (Axis(x.name, x.size, ""),), x.var)
    inner = Axis(f"{x.name}_in", by, "")
    return WorkspaceDim(
        x.name, x.size, x.var, (Axis(x.name, x.size // by, ""), inner), x.var * by + inner.var
    )


def _of_block(block: Block, kept: dict[str, int], compute: Compute) -> WorkspaceDim:
    """Every tile along a block has a part; a kept axis outside has some of them at each position."""
    name = "_".join(block.axes)
    whole = prod(compute.size(a) for a in block.axes)
    size = -(-whole // block.extent)
    part = Axis(fresh(f"{name}_part", compute.names.all), size, "")
    axes: tuple[Axis, ...] = (part,)
    at: ir.Expr = part.var
    outer = next((a for a in block.axes if a in kept and compute.size(a) > 1), None)
    if outer is not None:
        each = size // compute.size(outer)
        part = replace(part, size=each)
        axes, at = (Axis(outer, compute.size(outer), ""), part), ir.Var(outer) * each + part.var
    return WorkspaceDim(part.name, size, ir.Var(name) // block.extent, axes, at, whole, block.extent)


def workspace(write: Write, compute: Compute, schedule: Schedule) -> ir.Tensor:
    """The tensor of the parts."""
    dims = along(write, compute, schedule)
    taken = {*(t.name for t in compute.tensors), *compute.names.all}
    shape = tuple(d.size for d in dims) or (1,)
    name = fresh(f"{write.view.tensor.name}_parts", taken)
    return ir.Tensor(
        name,
        tuple(d.name for d in dims) or ("one",),
        shape,
        ir.Layout.dense(write.view.tensor.dtype, shape),
    )


def left_bytes(compute: Compute, schedule: Schedule) -> int:
    """The bytes of all parts."""
    if carried(compute, schedule):
        return sum(_bytes(w, along(w, compute, schedule)) for w in compute.statistics)
    return _left(schedule.blocks, compute)


@by_tile
def _left(tile: tuple[Block, ...], compute: Compute) -> int:
    return sum(_bytes(w, _of_tile(w, compute, tile)) for w in compute.statistics)


def _bytes(write: Write, dims: Sequence[WorkspaceDim]) -> int:
    return prod(d.size for d in dims) * write.view.tensor.dtype.bytes


def part_spaces(compute: Compute, schedule: Schedule) -> list[ir.Tensor]:
    """Those of all statistics."""
    return [workspace(w, compute, schedule) for w in compute.statistics]


def parts_of(write: Write, compute: Compute, schedule: Schedule) -> tuple[ir.View, ir.Expr]:
    """Where a tile leaves its part, and how many values it is of. A block's variable stands for any
    position in it."""
    dims = along(write, compute, schedule)
    at = tuple(ir.ViewDim(d.tile) for d in dims) or (ir.ViewDim(ir.ZERO),)
    return (
        ir.View(workspace(write, compute, schedule), at),
        counted((d.count(d.tile) for d in dims), write.view.tensor.dtype),
    )


def is_mixed(blocks: Sequence[Block], kept: dict[str, int]) -> bool:
    """Whether a side has axes that a statistic does not keep."""
    return any(a not in kept for b in blocks for a in b.axes)


def within_places(schedule: Schedule, compute: Compute) -> Schedule:
    """The schedule with blocks that cross no kept position of a statistic: of its axes those inside, or
    else outside of what is kept."""
    for w in compute.statistics:
        kept = stat.kept(w) or {}
        for blocks in blocks_of_sides(compute, schedule):
            for b in blocks if is_mixed(blocks, kept) else ():
                if not is_within(b, kept, compute):
                    own = [i for i, a in enumerate(b.axes) if a in kept]
                    axes = b.axes[own[-1] + 1 :] or b.axes[: own[0]]
                    made = [replace(b, axes=axes)] if axes else []
                    at = schedule.blocks.index(b)
                    schedule = replace(
                        schedule, blocks=(*schedule.blocks[:at], *made, *schedule.blocks[at + 1 :])
                    )
    return schedule


@lru_cache(maxsize=256)
def finishes(compute: Compute, schedule: Schedule) -> tuple[Compute, ...]:
    """The computations of the second kernels: one for statistics at the same coordinates."""
    return tuple(_finish(group, compute, schedule) for group in groups(compute))


@lru_cache(maxsize=64)
def groups(compute: Compute) -> tuple[list[Write], ...]:
    """The statistics, those at the same coordinates together."""
    alike: dict[tuple[ir.Expr, ...], list[Write]] = {}
    for w in compute.statistics:
        alike.setdefault(tuple(d.coord for d in w.view.dims), []).append(w)
    return tuple(alike.values())


def _finish(group: list[Write], compute: Compute, schedule: Schedule) -> Compute:
    dims = along(group[0], compute, schedule)
    kept = stat.kept(group[0]) or {}
    axes = {x.name: x for d in dims for x in d.axes}
    summed = tuple(n for n in axes if n not in kept)
    total = prod(stat.points(compute).values())
    places = prod(axes[n].size for n in kept if n in axes)
    steps: list[Step] = []
    sums: dict[Write, tuple[Read, ir.Var]] = {}
    for i, w in enumerate(group):
        at = tuple(ir.ViewDim(d.at) for d in dims) or (ir.ViewDim(ir.ZERO),)
        read = Read(f"part_{i}", ir.View(workspace(w, compute, schedule), at))
        steps.append(read)
        value: ir.Expr = read.var
        if w.op == "squares":
            of, whole = sums[stat.sum_of(compute, w) or w]
            value = _between(i, steps, read, of, whole, dims, total // places)
        op = "sum" if w.op == "squares" else w.op
        made = Reduction(f"whole_{i}", op, value, summed) if summed else Value(f"whole_{i}", value)
        steps.append(made)
        sums[w] = (read, made.var)
        steps.append(Write(_finished(w, axes), made.var))
    order = [*(x for n, x in axes.items() if n in kept), *(axes[n] for n in summed)]
    shape = "x".join(str(d.size) for d in dims) or "1"
    names = "_".join(w.view.tensor.name for w in group)
    finish = with_roles(
        Compute(
            f"{compute.name}_{names}_of_{shape}",
            tuple(order) or (Axis("one", 1, ""),),
            tuple(steps),
            compute.math,
        )
    )
    parts = {axes[n] for n in summed} or {*order}  # none is there before there are tiles
    return replace(
        finish,
        axes=tuple(replace(x, role="part") if replace(x, role="") in parts else x for x in finish.axes),
    )


def _between(
    i: int,
    steps: list[Step],
    read: Read,
    of: Read,
    whole: ir.Var,
    dims: tuple[WorkspaceDim, ...],
    values: int,
) -> ir.Expr:
    """The squared deviations of a part from the mean of all: those from its own mean, and its mean's."""
    dtype = read.var.type
    number = counted((d.count(d.at) for d in dims), dtype)
    mean = Value(f"mean_{i}", whole / ir.Const(float(values), dtype))
    off = Value(f"off_{i}", of.var / number - mean.var)
    steps += [mean, off]
    return read.var + number * (off.var * off.var)


def _finished(write: Write, axes: Mapping[str, Axis]) -> ir.View:
    """The view of a statistic over the second kernel's axes, which has none of one position."""
    coords = [d.coord.a if isinstance(d.coord, ir.FloorDiv) else d.coord for d in write.view.dims]
    return ir.View(
        write.view.tensor,
        tuple(ir.ViewDim(e if not isinstance(e, ir.Var) or axes.get(e.name) else ir.ZERO) for e in coords),
    )


VECTOR = 16  # bytes that a thread loads at once
NOWHERE = 1 << 40  # the stride along a block that the tensor does not vary along

MEANS = {
    "lane": "a thread has pieces of a row to itself",
    "warp": "threads of one warp share a row",
    "block": "threads of several warps share a row",
    "split": "several programs share a row",
}
EXPECTED = {
    "lane": "no block of what is reduced, or one of 16 bytes",
    "warp": "a smaller block of what is reduced, or fewer warps",
    "block": "a larger block of what is reduced, and more warps",
    "split": "split_k=2 or more, and a smaller block of what is reduced",
}


def divided(c: Schedule, compute: Compute, target: Target) -> str:
    """How rows are divided: ``lane``, ``warp``, ``block`` or ``split``; empty if nothing is reduced, and
    for products."""
    if not compute.streams or compute.sum is None:
        return ""
    if c.split_k > 1:
        return "split"
    return within(c.blocks, c.warps, tile(c, compute, "K"), compute, target.warp_size)


def within(blocks: tuple[Block, ...], warps: int, length: int, compute: Compute, warp: int) -> str:
    """How the threads of one program divide rows, if a tile has ``length`` elements of each: ``lane``,
    ``warp`` or ``block``. ``warp``: threads of a warp."""
    sharing, reach = sharers(blocks, warps, length, compute, warp)
    return "lane" if sharing <= 1 else "warp" if reach <= warp else "block"


def sharers(
    blocks: tuple[Block, ...], warps: int, length: int, compute: Compute, warp: int
) -> tuple[int, int]:
    """How many threads share a row, and among how many neighbouring ones these are."""
    view, reduced = _read_most(compute)
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    threads = warps * warp
    inner = min(blocks, key=lambda b: abs(strides[b.last]) or NOWHERE, default=None)
    if inner is None:
        return 1, 1
    once = max(1, VECTOR // size)  # elements of a thread that are loaded at once
    if strides[inner.last] == 1:
        once = min(once, aligned(view, inner.axes, compute))
    along = min(threads, max(1, inner.extent // once))
    if inner.first in reduced:
        return along, along
    sharing = min(threads // along, length)
    return sharing, along * sharing


@lru_cache(maxsize=256)
def _read_most(compute: Compute) -> tuple[ir.View, frozenset[str]]:
    """The largest input, and the reduced axes."""
    view = max((r.view for r in compute.reads), key=lambda v: touched(v, compute), default=compute.c)
    reduced = frozenset(x.name for x in compute.axes_of("K"))
    return view, reduced


def kept(c: Schedule, compute: Compute) -> str:
    """``held`` or ``again``; empty if there is only one sweep."""
    if len(compute.sweeps.each) < 2:
        return ""
    return "held" if holds_rows(c, compute) else "again"


def told(c: Schedule, compute: Compute, target: Target) -> str:
    """The values of ``red`` and ``row`` that a schedule implies, as text: ``red=warp row=held``; empty if
    nothing is reduced."""
    found = {"red": divided(c, compute, target), "row": kept(c, compute)}
    return " ".join(f"{word}={value}" for word, value in found.items() if value)


def why_not_red(c: Schedule, compute: Compute, target: Target) -> str | None:
    """Relies on the rule of ``split_k``."""
    if not c.red:
        return None
    found = divided(c, compute, target)
    if not found:
        why = "reduces nothing" if compute.sum is None else "is a product, whose sum split_k divides"
        return f"red={c.red}: {compute.name} {why}"
    if found != c.red:
        blocks = " ".join(map(str, c.blocks)) or "one element a step"
        return (
            f"red={c.red}: with {blocks} warps={c.warps} split_k={c.split_k} {MEANS[found]} "
            f"(red={found}); expected {EXPECTED[c.red]}"
        )
    return None


def why_not_row(c: Schedule, compute: Compute, target: Target) -> str | None:
    if not c.row:
        return None
    found = kept(c, compute)
    if not found:
        return f"row={c.row}: {compute.name} needs every element of a row in one sweep alone"
    if found == c.row:
        return None
    axes = compute.axes_of("K")
    length = prod(x.size for x in axes)
    block = f"{'.'.join(x.name for x in axes)}:{1 << max(0, length - 1).bit_length()}"
    if c.row == "held":
        return (
            f"row=held: a tile has {tile(c, compute, 'K')} of the {length} elements of a row; "
            f"expected a tile that covers it, such as {block}"
        )
    covers = "the tile covers" if k_steps(c, compute) == 1 else "steps that are written out cover"
    return (
        f"row=again: {covers} the row of {length} elements, which is loaded once; expected "
        f"a tile that does not, smaller than {block}, and unroll=0"
    )


def why_not_turn(c: Schedule, compute: Compute, target: Target) -> str | None:
    if not c.turn:
        return None
    found = kept(c, compute)
    if found and k_steps(c, compute) > 1 and c.via == "tl":
        return None
    why = {
        "": f"{compute.name} needs every element of a row in one sweep alone",
        "held": "the tile covers the row, which is loaded once",
        "again": "an explicit kernel (via=gluon) has one sweep",
    }[found]
    return f"turn=1: {why}; expected several sweeps over rows longer than the tile (row=again)"
