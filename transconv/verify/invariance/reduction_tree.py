"""The tree of a sum: which terms a schedule adds to which, and when, as expressions of the summed axes.

    ic:64 oc:128 mb.oh.ow:64 | split_k=14 deal=1

    step = (mb*3136 + oh*56 + ow) // 64      a block of consecutive terms
    lane = (mb*3136 + oh*56 + ow) % 64       a term's place in it
    part = step % 14, turn = step // 14      the program that adds the step, and after how many others

Terms of one step are added by the matrix unit or by lanes in a way that the tile alone decides, steps of
one part one after another, parts by a second kernel, one after another. So two sums of which all terms
have the same part, turn and lane are grouped alike. An expression without a size is the same at all values
of that size: a name that occurs in none of them changes no grouping. Where terms end it may say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transconv.compute import Compute
from transconv.ir import ONE, ZERO, Expr, Var, as_expr, free_vars, readable
from transconv.schedule import Block, Schedule, programs
from transconv.simplify import simplify


@dataclass(frozen=True, slots=True)
class ReductionTree:
    """The tree of a computation's sums over ``axes``: of a term its part, its turn in it, and the lanes of
    the step. ``unit``: what adds the terms of a step."""

    axes: tuple[str, ...]
    part: Expr
    turn: Expr
    lanes: tuple[Expr, ...]
    unit: str

    def depends(self, name: str) -> list[str]:
        """What of it depends on a size, in words; empty if the size changes no grouping."""
        own = {"part": (self.part,), "turn": (self.turn,), "lane": self.lanes}
        return [
            f"{what} = {readable(e)}"
            for what, each in own.items()
            for e in each
            if Var(name) in free_vars(e)
        ]

    def __str__(self) -> str:
        lanes = ", ".join(readable(e) for e in self.lanes) or "0"
        return (
            f"over {' '.join(self.axes)}: part = {readable(self.part)}, turn = {readable(self.turn)}, "
            f"lane = {lanes}; {self.unit}"
        )


def reduction_tree(compute: Compute, schedule: Schedule) -> ReductionTree | None:
    """The tree of the sums of a computation over its copies, groups merged; None if it sums nothing."""
    summed = [x.name for x in compute.axes_of("K")]
    if not summed:
        return None
    order = [a for a in schedule.order.split(".") if a] or summed
    step: Expr = ZERO
    total: Expr = ONE
    lanes: list[Expr] = []
    for block in _loops(order, schedule):
        place, size = _linear(block.axes, compute)
        step = step * _ceiling(size, block.extent) + place // block.extent
        total = total * _ceiling(size, block.extent)
        if block.extent > 1:
            lanes.append(simplify(place % block.extent))
    part, turn = _dealt(simplify(step), simplify(total), schedule, compute)
    dtype = compute.a.tensor.dtype
    unit = f"a step by {schedule.unit} of {dtype}, {schedule.warps} warps, swap={schedule.swap}"
    return ReductionTree(tuple(order), simplify(part), simplify(turn), tuple(lanes), unit)


def _loops(order: list[str], schedule: Schedule) -> Iterator[Block]:
    """The loops of the sum, outermost first, an axis without a block as a block of one position."""
    for axis in order:
        block = schedule.block_of(axis)
        if block is None or block.extent == 1:
            yield Block((axis,), 1)
        elif block.first == axis:
            yield block


def _linear(axes: tuple[str, ...], compute: Compute) -> tuple[Expr, Expr]:
    """The place of a position of fused axes, the last one fastest, and how many there are."""
    place: Expr = ZERO
    size: Expr = ONE
    for name in axes:
        own = _size(compute, name)
        place, size = place * own + Var(name), size * own
    return place, size


def _size(compute: Compute, axis: str) -> Expr:
    """How many positions an axis has."""
    extent = compute.axis(axis).extent
    return as_expr(compute.size(axis)) if extent is None else extent


def _ceiling(size: Expr, extent: int) -> Expr:
    return simplify((size + (extent - 1)) // extent) if extent > 1 else size


def _dealt(step: Expr, total: Expr, schedule: Schedule, compute: Compute) -> tuple[Expr, Expr]:
    """The part and the turn of a step, of ``total``."""
    if schedule.reduce == "stream":  # ranges of the steps of all tiles, which end where tiles do
        tiles = _tiles(schedule, compute)
        chunk = _ceiling_by(total * tiles, schedule.programs)
        at = Var("tile") * total + step
        return at // chunk, at % chunk
    if schedule.split_k == 1:
        return ZERO, step
    if schedule.deal:
        return step % schedule.split_k, step // schedule.split_k
    chunk = _ceiling_by(total, schedule.split_k)
    return step // chunk, step % chunk


def _ceiling_by(number: Expr, parts: int) -> Expr:
    return simplify((number + (parts - 1)) // parts)


def _tiles(schedule: Schedule, compute: Compute) -> Expr:
    """The number of tiles of a result, as an expression of sizes that are arguments."""
    if compute.named is None:
        return as_expr(programs(schedule, compute))
    found: Expr = ONE
    within = {a for b in schedule.blocks for a in b.axes}
    free = [x for x in compute.axes if compute.kind(x.name) != "K"]
    for x in free:
        if x.name not in within:
            found = found * _size(compute, x.name)
    for block in schedule.blocks:
        if compute.kind(block.first) != "K":
            found = found * _ceiling(_linear(block.axes, compute)[1], block.extent)
    return found
