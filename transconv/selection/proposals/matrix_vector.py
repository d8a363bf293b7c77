"""Proposed schedules of products of a matrix and a vector: those with one row, or with one column.

    n:8 k:512 | late=1                      lanes along the sum, which lies in rows
    n:4 w:8 kw:7 c:32 | regs=w.kw late=1    a window's row slides over positions in registers

Each lane has a sum of its own until the end. With lanes along the kept axis each would read a row of its
own: neighbours far apart in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from transconv.compute import Axis, Compute, axis_strides
from transconv.ir import View
from transconv.schedule import Block, Schedule
from transconv.selection.proposals.tile_shapes import fusable, splits
from transconv.target import Target

LANES = (32, 64, 128, 256, 512, 1024)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST, LEAST = 4096, 128  # products of a step: for the registers of four warps, and for all lanes of one
ALONG = (4, 8, 16)  # positions that are written out
LONGEST = 16  # a row of a window that is written out


def matrix_vector(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals, legal or not; none for sums of positions, or if the matrix lies along its kept axes."""
    rows, columns, summed = (compute.axes_of(kind) for kind in "MNK")
    if compute.b is None or compute.prologue or compute.sums_positions or bool(rows) == bool(columns):
        return
    if target.backend == "interpreter":
        return
    matrix = compute.a if rows else compute.b
    inner = _innermost(matrix, compute)
    if inner is None:
        return
    kept = rows or columns
    for axes in dict.fromkeys(((inner.name,), *fusable(summed, compute))):
        if axes[-1] == inner.name:
            yield from _in_rows(axes, kept, compute, target)
    positions = [x for x in kept if x.role == "position" and x.size > 1]
    window = [x for x in summed if x.role == "window" and 1 < x.size <= LONGEST]
    if positions and window:
        yield from _sliding(inner, positions, window[-1], kept, compute)


def _innermost(matrix: View, compute: Compute) -> Axis | None:
    """The summed axis whose elements are next to one another in the matrix, if there are some."""
    strides = axis_strides(matrix, compute)
    found = [x for x in compute.axes_of("K") if strides[x.name] == 1 and x.size >= LANES[0] // 2]
    return found[-1] if found else None


def _in_rows(
    summed: tuple[str, ...], kept: tuple[Axis, ...], compute: Compute, target: Target
) -> Iterator[Schedule]:
    """Lanes along the sum, and some rows beside one another."""
    size = prod(map(compute.size, summed))
    for lanes, (axes, n) in product(LANES, product(fusable(kept, compute), ROWS)):
        if lanes >= 2 * size or not LEAST <= lanes * n <= MOST:
            continue
        blocks = (*((Block(axes, n),) if n > 1 else ()), Block(summed, lanes))
        schedule = Schedule(blocks, "fma", late=1, stages=1, warps=1 if lanes * n <= 4 * LEAST else 4)
        for split in splits(schedule, compute, target):
            yield schedule.with_words(split_k=split)


def _sliding(
    inner: Axis, positions: list[Axis], window: Axis, kept: tuple[Axis, ...], compute: Compute
) -> Iterator[Schedule]:
    """A window's row over positions in registers, each of whose elements is loaded once."""
    last, others = positions[-1], [x for x in kept if x is not positions[-1] and x.size > 1]
    for lanes, along, n in product(LANES[:3], ALONG, (1, 2, 4, 8, 16)):
        if lanes >= 2 * inner.size or (n > 1 and not others) or along >= 2 * last.size:
            continue
        outer = (Block((others[-1].name,), n),) if n > 1 else ()
        blocks = (*outer, Block((last.name,), along), Block((window.name,), window.size))
        for warps in (1, 4):
            if 32 * warps <= lanes * n:
                yield Schedule(
                    (*blocks, Block((inner.name,), lanes)),
                    "fma",
                    regs=f"{last.name}.{window.name}",
                    late=1,
                    stages=1,
                    warps=warps,
                )
