"""Partial values: what tiles leave of statistics, and the kernel that combines them.

    tile n, h:8 w:16, o:64                  parts[n, h_part, w_part, o] = sum of y over the rows of a tile
    store M[n, o//8] sum= y         ->      second kernel: M[n, o] = sum of parts over h_part w_part o_in

A side of the tile whose blocks have one place of a statistic is reduced in registers; a part is the number
of a block. Along the other side the workspace has the axes themselves, and the second kernel reduces what
is not kept of them. If all tiles have the same places, each persistent program adds up those of its tiles
and leaves one part (``carried``). Squared deviations are combined with those of the parts' means, which
the partial sums tell. Parts are combined in a fixed order, so results are the same in every run.

Also here: the kernels that combine the parts of statistics (tiles/partial_results.py), as computations.

    parts[n, h_part, w_part, o]     ->     M[n, o] = sum of parts over h_part w_part o_in

Statistics at the same coordinates share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transconv.compute import Axis, Compute, Read, Reduction, Step, Value, Write, fresh, with_roles
from transconv.compute.analysis import statistics as stat
from transconv.ir import (
    ZERO,
    Cast,
    Const,
    DType,
    Expr,
    FloorDiv,
    Layout,
    Tensor,
    Var,
    View,
    ViewDim,
    minimum,
)
from transconv.schedule.counts import programs
from transconv.schedule.schedule import Block, Schedule


@dataclass(frozen=True, slots=True)
class WorkspaceDim:
    """A dimension of the workspace. ``tile``: where a tile stores, of the product's axes; ``axes``: those
    of the second kernel, ``at``: where it reads. A part is of ``extent`` of the ``whole`` positions."""

    name: str
    size: int
    tile: Expr
    axes: tuple[Axis, ...]
    at: Expr
    whole: int = 1
    extent: int = 1

    def count(self, at: Expr) -> Expr:
        """How many positions the part at a place is of."""
        if self.whole % self.extent == 0:
            return Const(self.extent)
        return minimum(Const(self.whole) - at * self.extent, self.extent)


def counted(counts: Iterable[Expr], dtype: DType) -> Expr:
    """A product of counts as a number of a type."""
    known, total = 1, None
    for count in counts:
        if isinstance(count, Const):
            known *= int(count.value)
        else:
            total = count if total is None else total * count
    if total is None:
        return Const(float(known), dtype)
    return Cast(total * known if known > 1 else total, dtype)


PROGRAM = Var("program")
"""The number of a persistent program, which carries its statistics from tile to tile."""


@lru_cache(maxsize=1024)
def carried(compute: Compute, schedule: Schedule) -> bool:
    """Whether persistent programs carry the statistics from tile to tile: those of rows or of a map, whose
    tiles hold every position that is kept."""
    if compute.factors is not None or not compute.statistics or not (
            0 < schedule.programs < programs(schedule, compute)):
        return False
    return all(w.op != "squares" and _holds_all(w, compute, schedule) for w in compute.statistics)


def _holds_all(write: Write, compute: Compute, schedule: Schedule) -> bool:
    """Whether each tile has all places of a statistic."""
    kept = [a for a in stat.kept(write) or () if compute.size(a) > 1]
    blocks = {b for a in kept if (b := schedule.block_of(a)) is not None}
    return len([a for b in blocks for a in b.axes]) == len(kept) and all(
        b.extent >= prod(map(compute.size, b.axes)) for b in blocks)


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
    every = [[b for b in tile if compute.kind(b.first) == kind and b.extent > 1]
             for kind in "BMN"]
    return [blocks for blocks in every if blocks]


def reduced_sides(write: Write, compute: Compute, schedule: Schedule) -> str:
    """The sides of a product's tile that a statistic reduces in registers: of B, M and N."""
    kept = stat.kept(write) or {}
    sides = blocks_of_sides(compute, schedule)
    return "".join(compute.kind(blocks[0].first) for blocks in sides
                   if all(is_within(b, kept, compute) for b in blocks))


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
    at: Expr = part.var
    outer = next((a for a in block.axes if a in kept and compute.size(a) > 1), None)
    if outer is not None:
        each = size // compute.size(outer)
        part = replace(part, size=each)
        axes, at = (Axis(outer, compute.size(outer), ""), part), Var(outer) * each + part.var
    return WorkspaceDim(part.name, size, Var(name) // block.extent, axes, at, whole, block.extent)


def workspace(write: Write, compute: Compute, schedule: Schedule) -> Tensor:
    """The tensor of the parts."""
    dims = along(write, compute, schedule)
    taken = {*(t.name for t in compute.tensors), *compute.names.all}
    shape = tuple(d.size for d in dims) or (1,)
    name = fresh(f"{write.view.tensor.name}_parts", taken)
    return Tensor(name, tuple(d.name for d in dims) or ("one",), shape,
                  Layout.dense(write.view.tensor.dtype, shape))


def left_bytes(compute: Compute, schedule: Schedule) -> int:
    """The bytes of all parts."""
    return sum(prod(d.size for d in along(w, compute, schedule)) * w.view.tensor.dtype.bytes
               for w in compute.statistics)


def part_spaces(compute: Compute, schedule: Schedule) -> list[Tensor]:
    """Those of all statistics."""
    return [workspace(w, compute, schedule) for w in compute.statistics]


def parts_of(write: Write, compute: Compute, schedule: Schedule) -> tuple[View, Expr]:
    """Where a tile leaves its part, and how many values it is of. A block's variable stands for any
    position in it."""
    dims = along(write, compute, schedule)
    at = tuple(ViewDim(d.tile) for d in dims) or (ViewDim(ZERO),)
    return (View(workspace(write, compute, schedule), at),
            counted((d.count(d.tile) for d in dims), write.view.tensor.dtype))


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
                    axes = b.axes[own[-1] + 1:] or b.axes[:own[0]]
                    made = [replace(b, axes=axes)] if axes else []
                    at = schedule.blocks.index(b)
                    schedule = replace(schedule, blocks=(
                        *schedule.blocks[:at], *made, *schedule.blocks[at + 1:]))
    return schedule


@lru_cache(maxsize=256)
def finishes(compute: Compute, schedule: Schedule) -> tuple[Compute, ...]:
    """The computations of the second kernels: one for statistics at the same coordinates."""
    return tuple(_finish(group, compute, schedule) for group in groups(compute))


@lru_cache(maxsize=64)
def groups(compute: Compute) -> tuple[list[Write], ...]:
    """The statistics, those at the same coordinates together."""
    alike: dict[tuple[Expr, ...], list[Write]] = {}
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
    sums: dict[Write, tuple[Read, Var]] = {}
    for i, w in enumerate(group):
        at = tuple(ViewDim(d.at) for d in dims) or (ViewDim(ZERO),)
        read = Read(f"part_{i}", View(workspace(w, compute, schedule), at))
        steps.append(read)
        value: Expr = read.var
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
    finish = with_roles(Compute(f"{compute.name}_{names}_of_{shape}",
                                tuple(order) or (Axis("one", 1, ""),), tuple(steps), compute.math))
    parts = {axes[n] for n in summed} or {*order}  # none is there before there are tiles
    return replace(finish, axes=tuple(
        replace(x, role="part") if replace(x, role="") in parts else x for x in finish.axes))


def _between(i: int, steps: list[Step], read: Read, of: Read, whole: Var, dims: tuple[WorkspaceDim, ...],
             values: int) -> Expr:
    """The squared deviations of a part from the mean of all: those from its own mean, and its mean's."""
    dtype = read.var.type
    number = counted((d.count(d.at) for d in dims), dtype)
    mean = Value(f"mean_{i}", whole / Const(float(values), dtype))
    off = Value(f"off_{i}", of.var / number - mean.var)
    steps += [mean, off]
    return read.var + number * (off.var * off.var)


def _finished(write: Write, axes: Mapping[str, Axis]) -> View:
    """The view of a statistic over the second kernel's axes, which has none of one position."""
    coords = [d.coord.a if isinstance(d.coord, FloorDiv) else d.coord for d in write.view.dims]
    return View(write.view.tensor, tuple(
        ViewDim(e if not isinstance(e, Var) or axes.get(e.name) else ZERO) for e in coords))
