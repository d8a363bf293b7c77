"""Proposed schedules without the matrix unit: elementwise products, sums of partial sums, and copies.

    n.h.w:32 g:64 | fma | a=gather b=gather | unroll=1 stages=2 warps=4
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from transconv.compute import Axis, Compute, axis_strides
from transconv.schedule import Block, Schedule, k_steps, why_not_early
from transconv.selection.proposals.tile_shapes import fusable, splits
from transconv.target import Target

MOST_UNROLLED = 25  # the most steps of a sum that is unrolled
MOST_PRODUCTS = 4096  # the most products that fit the registers of 4 warps, with their addresses


def elementwise(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Products element by element: lanes along groups (or columns) and along rows."""
    big = target.backend == "interpreter"
    wide = (256, 1024) if big else (32, 64, 128, 256)
    few = (1,) if big else (1, 4, 16)
    lanes = [x.name for x in compute.axes_of("B")] or [x.name for x in compute.axes_of("N")]
    rows = fusable(compute.axes_of("M"), compute) if compute.axes_of("M") else [()]
    if compute.b is None:  # a sum of partial sums: one block along all elements of C, in memory order
        rows = [tuple(x.name for x in compute.axes_of("M"))]
        wide = wide if big else (*wide, 512, 1024)
    sums = fusable(compute.axes_of("K"), compute) if compute.axes_of("K") else [()]
    many = compute.b is None and prod(x.size for x in compute.axes_of("K")) > MOST_UNROLLED
    depths = (16, 64) if compute.sums_positions else (1, 8, 32) if many else (1,)
    for r, s in itertools.product(rows, sums):
        for m, n, k in itertools.product((*few, *wide), (*few, *wide), depths):
            if m * n * k > MOST_PRODUCTS and not big or many and k > 1 and m < min(wide):
                continue
            blocks = []
            if r:
                blocks.append(Block(r, m))
            if lanes:
                blocks.append(Block((lanes[-1],), n))
            if s and k > 1:
                blocks.append(Block(s, k))
            schedule = Schedule(tuple(b for b in blocks if b.extent > 1), "fma", warps=4, stages=2)
            steps = k_steps(schedule, compute)
            unroll = 1 if steps <= MOST_UNROLLED and not big else 0
            for split in splits(schedule, compute, target):
                if k == 1 or not many or big and compute.sums_positions:
                    yield replace(schedule, unroll=unroll, split_k=split)
                if k > 1 and (not big or why_not_early(schedule, compute, target)):
                    yield replace(schedule, split_k=split, late=1, stages=1)


def copy_tiles(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Square tiles of positions and features, with contiguous rows on both sides; for few features, one
    block holds them all; a copy of one axis (contiguous memory) has one block. Positions are those of all
    axes, but of the last one first if its size is an argument, which fused positions are divided by."""
    positions = tuple(x.name for x in compute.axes if x.role == "position")
    ways = (positions, positions[-1:])
    if positions and compute.axis(positions[-1]).extent is not None:
        ways = ways[::-1]
    features = next(x for x in compute.axes if x.role == "feature")
    big = target.backend == "interpreter"
    sides = (128, 256) if big else (32, 64, 128)
    if not positions:
        yield from (Schedule((Block((features.name,), n),), "fma", stages=1) for n in (1024, 2048, 4096))
        return
    tiles = itertools.product(sides, repeat=2)
    if 0 < features.size < sides[0]:
        tiles = itertools.product((128, 256, 512), (1 << (features.size - 1).bit_length(),))
    for m, n in tiles:
        for axes in dict.fromkeys(ways):
            blocks = (Block(axes, m), Block((features.name,), n))
            yield Schedule(blocks, "fma", warps=8 if m * n > 64 * 64 else 4, stages=1)


def transposed_tiles(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Square tiles, as for copies, for partial sums whose order in memory differs from the result's."""
    rows = [x for x in compute.axes_of("M") if x.size > 1]
    if len(rows) < 2 or target.backend == "interpreter":
        return
    first, last = (_innermost(rows, axis_strides(v, compute)) for v in (compute.a, compute.c))
    if first is not last:
        others = tuple(x.name for x in rows if x is not first)
        for m, n in itertools.product((32, 64), repeat=2):
            yield Schedule((Block(others, m), Block((first.name,), n)), "fma", warps=4, stages=2)


def _innermost(axes: list[Axis], strides: dict[str, int]) -> Axis:
    return min(axes, key=lambda x: strides[x.name])
