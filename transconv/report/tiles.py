"""The points of an output tile: which positions of every axis the first program of a kernel handles."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import numpy as np

from transconv.compute import Compute, Value
from transconv.ir import Array, Evaluator, Expr, Memory, Var, free_vars, substitute
from transconv.schedule import Schedule

LARGEST = 1 << 20  # points to evaluate; the rest is cut off, and the picture says so


@dataclass(frozen=True)
class TiledAxes:
    """Axes that are tiled together. ``at``: a row of positions for each point; ``first``: which of them
    the first step of the sum handles, all where the axes are not summed."""

    axes: tuple[str, ...]
    at: Array
    first: Array

    def onto(self, axes: Collection[str]) -> TiledAxes:
        """The same without the axes that are not needed, each point once; a point that any first step
        handles belongs to it."""
        kept = [i for i, a in enumerate(self.axes) if a in axes]
        at = self.at[:, kept]
        keys = np.ravel_multi_index(tuple(at.T), tuple(at.max(0) + 1))
        keys, index, inverse = np.unique(keys, return_index=True, return_inverse=True)
        first = np.bincount(inverse.ravel(), self.first, len(keys)) > 0
        return TiledAxes(tuple(self.axes[i] for i in kept), at[index], first)


@dataclass(frozen=True)
class AxisPoints:
    """Points over some axes: a column for each, and whether the first step of the sum handles it."""

    at: dict[str, Array]
    first: Array
    cut: bool = False

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class ProgramTile:
    """What one program handles: the product of its groups."""

    compute: Compute
    groups: tuple[TiledAxes, ...]
    cut: bool = False  # whether positions were left out

    def points(self, axes: Collection[str]) -> AxisPoints:
        """The tile's points over some axes, each once."""
        return _product([g.onto(axes) for g in self.groups if {*g.axes} & {*axes}], self.cut)

    def one(self) -> ProgramTile:
        """A single element of the result in the middle of the tile, with all of its sum."""
        groups = []
        for g in self.groups:
            if all(self.compute.kind(a) == "K" for a in g.axes):
                groups.append(g)
            else:
                middle = len(g.at) // 2 if len(g.at) < 3 else _middle(g)
                groups.append(TiledAxes(g.axes, g.at[middle:middle + 1], g.first[middle:middle + 1]))
        return ProgramTile(self.compute, tuple(groups), self.cut)


def first_tile(compute: Compute, schedule: Schedule) -> ProgramTile:
    """The tile of program 0, with every step of its sum."""
    groups, cut = [], False
    blocked = {a for b in schedule.blocks for a in b.axes}
    for axes, extent in [*((b.axes, b.extent) for b in schedule.blocks),
                         *(((x.name,), 1) for x in compute.axes if x.name not in blocked)]:
        axes = tuple(a for a in axes if a in compute.sizes)
        if not axes:
            continue
        sizes = [max(1, compute.size(a)) for a in axes]
        every = prod(sizes) if compute.kind(axes[0]) == "K" else min(extent, prod(sizes))
        count = min(every, LARGEST)
        cut |= count < every
        at = np.stack(np.unravel_index(np.arange(count), sizes), axis=1)
        groups.append(TiledAxes(axes, at, np.arange(count) < extent))
    return ProgramTile(compute, tuple(groups), cut)


def _middle(g: TiledAxes) -> int:
    """The point nearest to the middle of the box that the points fill."""
    centre = (g.at.min(0) + g.at.max(0)) / 2
    return int(np.abs(g.at - centre).sum(1).argmin())


def _product(groups: list[TiledAxes], cut: bool) -> AxisPoints:
    while prod(len(g.at) for g in groups) > LARGEST:
        i = max(range(len(groups)), key=lambda i: len(groups[i].at))
        half = groups[i]
        groups = [*groups]
        groups[i] = TiledAxes(half.axes, half.at[:len(half.at) // 2], half.first[:len(half.at) // 2])
        cut = True
    counts = [len(g.at) for g in groups]
    index = np.indices(counts).reshape(len(counts), -1) if groups else np.zeros((0, 1), int)
    columns: dict[str, Array] = {}
    first = np.ones(index.shape[1], bool)
    for g, rows in zip(groups, index, strict=True):
        columns |= {a: g.at[rows, i] for i, a in enumerate(g.axes)}
        first &= g.first[rows]
    return AxisPoints(columns, first, cut)


def in_axes(e: Expr, compute: Compute) -> Expr | None:
    """An expression over axes alone, with lets replaced by their values; None if it reads a tensor."""
    values = {s.var: s.value for s in compute.steps if isinstance(s, Value)}
    axes = {x.var for x in compute.axes}
    for _ in range(len(values) + 1):
        if free_vars(e) <= axes:
            return e
        e = substitute(e, values)
    return None


def evaluated(e: Expr, points: AxisPoints) -> Array:
    """The values of an expression over axes, at every point."""
    run = Evaluator(Memory({}), {}, 1)
    run.env = {Var(name): np.asarray(at, np.int64) for name, at in points.at.items()}
    return np.broadcast_to(run.compute(e), (len(points),))
