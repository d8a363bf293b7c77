"""Proposed schedules of depthwise windows: a window's row slides over positions in registers.

    n.h:32 w:8 g:32 kw:7 | regs=w.kw          14 elements loaded for 56 products, 8 of g in a thread

Lanes run along g, as many in a thread as one access takes, and along rows of positions. A few positions of
the row and a whole row of the window (or all of its rows, if they are few) are written out. If positions
are summed, each lane keeps a sum of its own until the end (``late``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from transconv.compute import Axis, Compute, axis_strides
from transconv.cost import ACCESS
from transconv.ir import View
from transconv.schedule import MOST_WRITTEN, Block, Schedule, Scheduled, row_of, rows_of_features
from transconv.selection.proposals.tile_shapes import splits
from transconv.target import Target

LANES = (64, 128, 256, 512, 1024, 32, 16)
ALONG = 8  # the most positions of an axis that are written out
LONGEST = 32  # an axis of at most this size may be written out whole
SUMS = 72  # of a thread, at most, of elements of 8 bits; with more, kernels spill or have too few warps
WASTE = 1.2  # the most computed positions, relative to the size of an axis


def sliding(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals, legal or not. Operands that are not contiguous along g are copied first; such a result is
    stored to its own layout, or copied afterwards."""
    if compute.b is None or compute.prologue or not compute.axes_of("B"):
        return
    if target.backend == "interpreter":
        return
    apart = [x for x, v in (("a", compute.a), ("b", compute.b)) if not _in_rows(v, compute)]
    summed = compute.sums_positions
    small = [x for x in apart if x == "b" and not summed]
    after = [] if summed or _in_rows(compute.c, compute) else [".".join((*apart, "c"))]
    for pack in dict.fromkeys(("", *small, ".".join(apart), *after)):
        seen = Scheduled(compute, Schedule(pack=pack), target).main
        if axis_strides(seen.a, seen)[compute.axes_of("B")[-1].name] == 1:
            yield from (replace(c, pack=pack) for c in _over_rows(seen, summed, target))


def sliding_down(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals for a window of one or two features, which cannot fill a matrix unit: lanes run along the
    last positions, and the positions before them slide over the window's rows in registers.

        n.w:256 h:6 s:17 | regs=h.s               22 elements loaded for 102 products
    """
    columns, summed = (prod(x.size for x in compute.axes_of(k) if x.role == "feature") for k in "NK")
    positions = [x for x in compute.axes_of("M") if x.role == "position"]
    window = [x for x in compute.axes_of("K") if x.role == "window"]
    if (target.backend == "interpreter" or compute.b is None or compute.axes_of("B")
            or columns > 2 or summed > 2 or len(positions) < 2 or len(window) < 2):
        return
    down, rows = positions[-2], window[-2]
    across = tuple(x.name for x in (*positions[:-2], positions[-1]) if x.size > 1)
    for along in _even(down.size) if across and rows.size > 1 else []:
        parts = -(-rows.size * along // MOST_WRITTEN)
        blocks = (Block((down.name,), along), Block((rows.name,), -(-rows.size // parts)))
        if along > 1:
            yield from (Schedule((Block(across, lanes), *blocks), "fma", stages=1,
                                 regs=f"{down.name}.{rows.name}") for lanes in (128, 256))


def _in_rows(view: View, compute: Compute) -> bool:
    return rows_of_features(view.tensor, row_of(view, compute))


def _over_rows(compute: Compute, summed: bool, target: Target) -> Iterator[Schedule]:
    """Proposals for tensors that are contiguous along g."""
    group = compute.axes_of("B")[-1]
    positions = [x for x in compute.axes_of("K" if summed else "M") if x.role == "position"]
    window = [x for x in compute.axes_of("M" if summed else "K") if x.role == "window"]
    if not positions or not window:
        return
    is_small = compute.a.tensor.dtype.bits == 8
    wide = ACCESS // max(2, compute.a.tensor.dtype.bytes)  # of 8 bits as many as of 16
    for lanes, deep in product(LANES, (wide, wide // 2)):
        if lanes > LANES[-1] and -(-group.size // lanes) * lanes > WASTE * group.size:
            continue
        for blocks, regs in _written(positions[-1], window, is_small):
            kept = [b.extent for b in blocks if (b.first == positions[-1].name) != summed]
            if is_small and deep * prod(kept) > SUMS:
                continue
            for other, rows in _rows(positions[:-1], window, regs, summed, 128 * deep // lanes):
                schedule = Schedule((*other, *rows, *blocks, Block((group.name,), lanes)), "fma",
                                regs=".".join(regs), late=int(summed and bool(rows)), stages=1)
                for split in splits(schedule, compute, target)[-2:]:
                    yield replace(schedule, split_k=split)


def _written(position: Axis, window: list[Axis], is_small: bool) -> Iterator[
        tuple[tuple[Block, ...], list[str]]]:
    """Blocks of a row's positions and of the window that slides over them, and their axes. Loaded elements
    of 8 bits leave registers for the sums of more positions, which share those of a long row."""
    many = is_small and position.size > LONGEST and window[-1].size > ALONG // 2
    more = [_least_waste(position.size)] if many else []
    rows = [[window[-1]], [*window[-2:]]] if len(window) > 1 and window[-2].size > 1 else [[window[-1]]]
    for along, axes in product(dict.fromkeys((*more, *_even(position.size))), rows):
        for last in _even(window[-1].size) if len(axes) == 1 else [window[-1].size]:
            named = [(position, along), *((x, x.size) for x in axes[:-1]), (axes[-1], last)]
            if prod(n for _, n in named) > MOST_WRITTEN:
                continue
            blocks = tuple(Block((x.name,), n) for x, n in named if n > 1)
            yield blocks, [b.first for b in blocks]


def _even(size: int) -> list[int]:
    """Extents that cover an axis with little waste: the two largest up to ``ALONG``, half of ``ALONG``,
    and the whole of a short axis."""
    found = [n for n in range(min(ALONG, size), 0, -1) if -(-size // n) * n <= WASTE * size]
    whole = [size] if ALONG < size <= LONGEST else []
    return [*whole, *found[:2], *(n for n in found[2:] if n == ALONG // 2)]


def _least_waste(size: int) -> int:
    """The extent between ``ALONG`` and twice as many that covers an axis with the least waste."""
    return min(range(2 * ALONG, ALONG, -1), key=lambda n: -(-size // n) * n)


def _rows(positions: list[Axis], window: list[Axis], written: list[str], summed: bool,
          count: int) -> Iterator[tuple[tuple[Block, ...], tuple[Block, ...]]]:
    """Lanes along ``count`` rows of positions; if positions are summed, also along rows of the window."""
    names = tuple(x.name for x in positions if x.size > 1) or tuple(x.name for x in positions[-1:])

    def lanes(n: int) -> tuple[Block, ...]:
        return (Block(names, n),) if names and n > 1 else ()

    if count >= 1:
        yield (), lanes(count)
    if summed and len(window) > 1 and window[-2].name not in written:
        down = 1 << (window[-2].size - 1).bit_length()
        for rows in dict.fromkeys((min(down, 8), min(down, 4), 2)):
            if 1 < rows <= count:
                yield (Block((window[-2].name,), rows),), lanes(count // rows)
