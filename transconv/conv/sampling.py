"""Chooses which elements of a convolution's result to check.

A point of the result is a group, a column in it (a channel) and a row (positions, or channel and taps);
spotcheck.py has the rows and columns of each direction.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from transconv.conv.problem.conv_problem import ConvProblem, Prop

if TYPE_CHECKING:
    import torch

SHORT = 1 << 24  # the most products of independent points
LONG = 1 << 26  # the most elements gathered for batches of rows and columns
WIDEST = 16  # the most rows, and columns, of a batch


@dataclass(frozen=True, slots=True)
class Axes:
    """The sizes of a result: groups, columns in a group, axes of rows; and of the summed axes."""

    groups: int
    columns: int
    rows: tuple[int, ...]
    summed: tuple[int, ...]

    @staticmethod
    def of(p: ConvProblem, prop: Prop) -> Axes:
        if prop is Prop.FWD:
            return Axes(p.g, p.ocg, (p.mb, *p.o), (p.icg, *p.k))
        if prop is Prop.BWD_D:
            return Axes(p.g, p.icg, (p.mb, *p.i), (p.ocg, *p.k))
        return Axes(p.g, p.ocg, (p.icg, *p.k), (p.mb, *p.o))


@dataclass(frozen=True, slots=True)
class SampledBatches:
    """Batches of sampled points, as int64 tensors: ``group`` (batch, 1), ``columns`` (batch, c), and for
    each row axis (batch, r). The points of a batch are all pairs of its rows and columns."""

    group: torch.Tensor
    columns: torch.Tensor
    rows: tuple[torch.Tensor, ...]

    def to(self, device: torch.device) -> SampledBatches:
        return SampledBatches(self.group.to(device), self.columns.to(device),
                      tuple(r.to(device) for r in self.rows))

    def batch(self, at: slice) -> SampledBatches:
        return SampledBatches(self.group[at], self.columns[at], tuple(r[at] for r in self.rows))


def choose(axes: Axes, points: int, wide: bool = True) -> SampledBatches:
    """About ``points`` points, the same ones every time: all of a small result, else corners and random
    points, a quarter of them near the ends of tiles and images. ``wide``: batches may have several rows
    and columns."""
    import torch

    sizes = (axes.groups, axes.columns, *axes.rows)
    terms = max(1, prod(axes.summed))
    count = min(points, prod(sizes))
    if count * terms <= SHORT and count == prod(sizes):
        every = torch.unravel_index(torch.arange(count), sizes)
        return SampledBatches(every[0][:, None], every[1][:, None], tuple(x[:, None] for x in every[2:]))
    generator = torch.Generator().manual_seed(count)
    r = c = 1
    if count * terms > SHORT:
        width = WIDEST if wide else 1
        r, c = min(width, prod(axes.rows)), min(width, axes.columns)
    afford = (LONG if r * c > 1 else SHORT) // ((r + c) * terms if r * c > 1 else terms)
    batches = max(1, min(-(-count // (r * c)), afford), -(-min(16, count) // (r * c)))
    group = _positions(axes.groups, (batches, 1), generator)
    columns = _positions(axes.columns, (batches, c), generator)
    rows = [_positions(n, (batches, r), generator) for n in axes.rows]
    if r * c > 1:
        for size, drawn in zip(sizes[1:], (columns, *rows), strict=True):
            drawn[:, 0], drawn[:, -1] = 0, size - 1
        group[0], group[-1] = 0, axes.groups - 1
    else:
        corners = torch.tensor(list(itertools.product(*(sorted({0, n - 1}) for n in sizes))))
        for drawn, ends in zip((group, columns, *rows), corners.T, strict=True):
            drawn[:len(ends), 0] = ends[:batches]
    return SampledBatches(group, columns, tuple(rows))


def _positions(size: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Random positions below ``size``. Every fourth batch has the first and last two positions and both
    sides of multiples of 16; the others are uniform."""
    import torch

    def below(n: int) -> torch.Tensor:
        return torch.randint(0, n, shape, generator=generator)

    uniform, kind = below(size), below(6)
    near = torch.where(kind < 2, kind, torch.where(kind < 4, size + 1 - kind,
                                                   below(size) // 16 * 16 + kind - 5))
    chosen = torch.where(torch.arange(shape[0])[:, None] % 4 == 0, near, uniform)
    return chosen.clamp(0, size - 1)
