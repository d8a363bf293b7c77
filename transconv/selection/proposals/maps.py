"""Proposed schedules without the matrix unit: maps, reductions, rows swept several times, elementwise
products, sums of partial sums, copies; products of a matrix and a vector.

    n.h.w:1024 | fma | stages=1                 a map: lanes along contiguous memory
    h.w:32 c:64 | fma | stages=1                a map that transposes: loads and stores contiguous;
                                                or with a tensor that is broadcast along h.w
    n:4 k:512 | fma | stages=1                  contiguous rows, held if the block covers them
    c:64 h.w:16 | fma | late=1 stages=1         rows with a stride: lanes along contiguous c
    n:16 k:8 | fma | late=1 unroll=1 stages=1   short rows at odd addresses, in registers: see ``_written``
    n.h.w.c:512 | fma | unroll=1                windows of a few elements, written out
    n.h.w:32 g:64 | fma | a=gather b=gather | unroll=1 stages=2 warps=4
    n:8 k:512 | late=1                          a vector: lanes along the sum, which lies in rows
    n:4 w:8 kw:7 c:32 | regs=w.kw late=1        a vector: a window's row slides over positions in registers

In products with a vector each lane has a sum of its own until the end. With lanes along the kept axis each
would read a row of its own, far from its neighbour's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import product
from math import log2, prod

from transconv.compute import Axis, Compute, axis_strides, touched
from transconv.ir import View
from transconv.schedule import (
    Block,
    Schedule,
    ahead,
    aligned,
    carried,
    divided,
    holds_rows,
    k_steps,
    programs,
    tile,
    why_not_early,
)
from transconv.selection.proposals.tile_shapes import fusable, splits
from transconv.target import Target

FEWEST, MOST = 128, 32768  # elements of a tile
LANES = (32, 64, 128, 256, 512, 1024)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_PRODUCTS, LEAST_PRODUCTS = 4096, 128  # of a step: for registers of four warps, for all lanes of one
ALONG = (4, 8, 16)  # positions that are written out
LONGEST = 16  # a row of a window that is written out
EACH = (2, 64)  # elements of a thread, at least and at most
ACROSS = (32, 64, 128, 256, 512, 1024)  # lanes along the axes that a broadcast tensor has
WARPS = (1, 2, 4, 8, 16, 32)
ALIKE, USUAL = 1.04, 16  # estimates within this factor count as equal; the preferred elements of a thread
RUN = 128  # elements of a run of memory from which on it is long
BRIEF_US = 3.5  # kernels that take less are waits, which more threads share: half as many elements of each
WINDOW = 64  # the most elements of a row for which unrolling is proposed
PIECES = 16  # steps of a row at odd addresses that are written out, at most
FEW, TURNS = 4, 16  # reduced positions along each axis and in all, up to which the sum is always unrolled
LOADED = 16  # bytes that a thread loads at once
ROUNDS = (1, 2, 4, 8)  # persistent programs of a multiprocessor
AHEAD = (1, 3)  # stages of persistent programs: with 3 the next tile is loaded while one is computed
BESIDE_EACH = 4  # programs whose rows must fill the L1 cache for turns to be proposed
BESIDE = 1 / 16  # tensors of at least this fraction of the largest one also propose orders of lanes


def maps(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals with lanes along contiguous memory, legal or not."""
    for schedule in _each(compute, target):
        yield schedule
        if compute.statistics and carried(compute, schedule.with_words(programs=1)):
            yield from _persistent(schedule, compute, target)


def _persistent(schedule: Schedule, compute: Compute, target: Target) -> Iterator[Schedule]:
    """Programs that carry statistics through several tiles, whose loads may be ahead, and which may add up
    the rows of tiles behind the last one."""
    stages = AHEAD if "async_copy" in target.features else AHEAD[:1]
    rows = tile(schedule, compute, "M") > 1
    for number, deep, late in itertools.product(ROUNDS, stages, (0, 1) if rows else (0,)):
        made = schedule.with_words(programs=number * target.sms, stages=deep, late=late or schedule.late)
        if carried(compute, made) and (deep == 1 or ahead(made, compute)):
            yield made


def _each(compute: Compute, target: Target) -> Iterator[Schedule]:
    free, reduced = ([x for x in compute.axes_of(kind) if x.size > 1] for kind in "MK")
    large = _largest(compute)
    if not reduced:
        yield from _mapped(free, large, compute)
        return
    if prod(x.size for x in reduced) <= WINDOW:
        for schedule in _mapped(free, [*large, compute.c], compute):
            yield schedule.with_words(unroll=int(compute.named is None))
    rows = _along(free, large[0], compute)
    row = _along(reduced, large[0], compute)
    for schedule in _tiled(rows, row, compute):
        yield schedule
        if k_steps(schedule, compute) > 1:
            yield schedule.with_words(late=1)
            if len(compute.sweeps.each) > 1 and _long(schedule, large[0], compute, target):
                yield schedule.with_words(late=1, turn=1)
            if k_steps(schedule, compute) <= PIECES and _is_narrow(large[0], row, compute):
                yield from _written(schedule, compute)
            if not compute.again:
                yield from (
                    schedule.with_words(late=1, split_k=parts)
                    for parts in _splits(schedule, compute, target)
                )


def _is_narrow(view: View, row: tuple[str, ...], compute: Compute) -> bool:
    """Whether rows begin at odd addresses, so that a thread loads less than it could at once."""
    return (
        compute.named is None
        and axis_strides(view, compute)[row[-1]] == 1
        and aligned(view, row, compute) * view.tensor.dtype.bytes < LOADED
    )


def _written(schedule: Schedule, compute: Compute) -> Iterator[Schedule]:
    """The steps of short rows at odd addresses written out, so that their elements stay in registers:

        49 numbers in one tile      a warp has a row, and reduces it by 5 shuffles
        n:16 k:8, seven steps       it has four, of which 8 threads each reduce one, by 3 shuffles

    Triton gives a thread as many neighbours as it loads at once. If rows begin anywhere that is one, and a
    row of a single tile takes all threads of a warp, or of several, which meet in shared memory."""
    elements = prod(b.extent for b in schedule.blocks) * k_steps(schedule, compute)
    if elements / (32 * schedule.warps) <= 2 * EACH[1]:
        yield schedule.with_words(late=1, unroll=1)


def _long(schedule: Schedule, view: View, compute: Compute, target: Target) -> bool:
    """Whether the rows of a few programs fill a cache as large as the shared memory."""
    rows = tile(schedule, compute, "M") * prod(x.size for x in compute.axes_of("K"))
    return rows * view.tensor.dtype.bytes > target.shared_bytes / BESIDE_EACH


def with_whole_rows(compute: Compute) -> Iterator[Schedule]:
    """Proposals in which one thread reduces a row, a few of its elements a step."""
    view = _largest(compute)[0]
    rows, row = (_along([x for x in compute.axes_of(kind) if x.size > 1], view, compute) for kind in "MK")
    count = prod(compute.size(a) for a in rows)
    pieces = {1, max(1, LOADED // view.tensor.dtype.bytes)}
    for m, k, warps in itertools.product([2**e for e in range(11)], sorted(pieces), WARPS[:4]):
        if row and min(32 * warps, count) <= m < 2 * count:
            blocks = tuple(Block(axes, n) for axes, n in ((rows, m), (row, k)) if n > 1)
            yield Schedule(blocks, "fma", warps=warps, stages=1)


def even(
    ranked: list[Schedule], us: dict[Schedule, float], compute: Compute, target: Target
) -> list[Schedule]:
    """Ranked schedules, reordered where the estimate is not precise enough. Of those within ``ALIKE`` of
    the best, schedules that hold rows come first, then those that load tiles ahead, then those in which
    one thread, or at least one warp, adds up all steps of a row, then sweeps in one direction, then those
    whose threads have close to ``USUAL`` elements (twice as many if rows have several steps, so that there
    are fewer), then long runs of memory. A sum of few elements is unrolled whatever the estimate:
    its coordinates are then constants, while a loop computes masks for each iteration."""
    if _few(compute) and 0 < sum(s.unroll for s in ranked) < len(ranked):
        written, rolled = ([s for s in ranked if bool(s.unroll) is on] for on in (True, False))
        return [*even(written, us, compute, target), *rolled]
    first = [s for s in ranked if us[s] <= ALIKE * us[ranked[0]]]

    usual = USUAL if us[ranked[0]] > BRIEF_US else USUAL / 2
    free = [x for x in compute.axes if x.size > 1]
    inner = {order[-1] for v in _largest(compute) if (order := _along(free, v, compute))}

    def odd(s: Schedule) -> tuple[float, ...]:
        elements, steps = prod(b.extent for b in s.blocks), k_steps(s, compute)
        if compute.again and holds_rows(s, compute):
            elements, steps = elements * steps, 1
        loops = steps > 1
        again = compute.again and loops
        waits = bool(s.programs) and not ahead(s, compute)
        among = divided(s, compute, target) if loops else ""
        meets = among in ("warp", "block")
        early = loops and not meets and not s.late
        few = (loops and among != "block") or (again and len(s.blocks) == 1)  # steps, of more elements
        wanted = 2 * usual if few else usual
        lanes = abs(log2(elements / (s.warps * target.warp_size * wanted)))
        short = max((1 / min(b.extent, RUN) for b in s.blocks if inner & {*b.axes}), default=0.0)
        short = short if len(s.blocks) > 1 and not loops else 0.0
        return again, waits, meets, among == "block", s.turn, lanes, early, short

    return [*sorted(first, key=odd), *ranked[len(first) :]]


def _few(compute: Compute) -> bool:
    """Whether each result reduces so few elements that the sum is unrolled."""
    sizes = [x.size for x in compute.axes_of("K") if x.size > 1]
    return 0 < len(sizes) and max(sizes) <= FEW and prod(sizes) <= TURNS


def _largest(compute: Compute) -> list[View]:
    """The view that moves the most bytes, and others that move at least ``BESIDE`` times as many."""
    views = list(compute.views())
    sizes = [touched(v, compute) for v in views]
    most = max(range(len(views)), key=lambda i: sizes[i])
    return [
        views[most],
        *(
            v
            for v, n in zip(views, sizes, strict=True)
            if n >= BESIDE * sizes[most] and v is not views[most]
        ),
    ]


def _along(axes: list[Axis], view: View, compute: Compute) -> tuple[str, ...]:
    """Axes in the order of a view's strides, the smallest last; axes that it does not vary along first."""
    strides = axis_strides(view, compute)
    return tuple(x.name for x in sorted(axes, key=lambda x: -abs(strides[x.name]) or float("-inf")))


def _mapped(free: list[Axis], large: list[View], compute: Compute) -> Iterator[Schedule]:
    """One block of lanes; two if tensors are contiguous along different axes, or if one is broadcast."""
    orders = dict.fromkeys(_along(free, v, compute) for v in large)
    inner = list(dict.fromkeys(order[-1] for order in orders if order))
    for order in orders:
        sizes = [2**e for e in range(7, 14)]
        for extent, warps in itertools.product(sizes, (2, 4, 8)):
            if EACH[0] <= extent / (32 * warps) <= EACH[1]:
                yield Schedule((Block(order, extent),) if order else (), "fma", warps=warps, stages=1)
        for at in _shared(order, compute):
            wide = [n for n in ACROSS if n < 2 * prod(map(compute.size, order[at:]))]
            for m, n, warps in itertools.product((1, 2, 4, 8, 16, 32), wide, (4, 8)):
                if EACH[0] <= m * n / (32 * warps) <= EACH[1]:
                    both = (Block(order[:at], m), Block(order[at:], n))
                    yield Schedule(tuple(b for b in both if b.extent > 1), "fma", warps=warps, stages=1)
        for other in inner:
            if order and other != order[-1]:
                rest = tuple(a for a in order if a != other)
                for m, n, warps in itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8)):
                    if EACH[0] <= m * n / (32 * warps) <= EACH[1]:
                        yield Schedule((Block(rest, m), Block((other,), n)), "fma", warps=warps, stages=1)


def _shared(order: tuple[str, ...], compute: Compute) -> list[int]:
    """Where to divide an order of axes in two blocks: a tensor that is broadcast varies only along the
    axes of the second."""
    found = set()
    for view in compute.views():
        strides = axis_strides(view, compute)
        first = next((i for i, a in enumerate(order) if strides[a]), 0)
        found |= {first} - {0}
    return sorted(found)


def _tiled(rows: tuple[str, ...], row: tuple[str, ...], compute: Compute) -> Iterator[Schedule]:
    """Tiles of rows and their elements."""
    count, length = (prod(compute.size(a) for a in axes) for axes in (rows, row))
    for m, k in itertools.product([2**e for e in range(11)], [2**e for e in range(16)]):
        if m >= 2 * count or k >= 2 * length or not FEWEST <= m * k <= MOST:
            continue
        blocks = tuple(Block(axes, n) for axes, n in ((rows, m), (row, k)) if n > 1)
        for warps in WARPS:
            if EACH[0] <= m * k / (32 * warps) <= EACH[1]:
                yield Schedule(blocks, "fma", warps=warps, stages=1)


def _splits(schedule: Schedule, compute: Compute, target: Target) -> Iterator[int]:
    """Values of ``split_k`` that divide the steps, if whole rows leave multiprocessors idle."""
    steps, tiles = k_steps(schedule, compute), programs(schedule, compute)
    for waves in (1, 2, 4, 8):
        parts = min(steps, waves * target.sms // tiles)
        while parts > 1 and steps % parts:
            parts -= 1
        if parts > 1:
            yield parts


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
            if (m * n * k > MOST_PRODUCTS and not big) or (many and k > 1 and m < min(wide)):
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
                if k == 1 or not many or (big and compute.sums_positions):
                    yield schedule.with_words(unroll=unroll, split_k=split)
                if k > 1 and (not big or why_not_early(schedule, compute, target)):
                    yield schedule.with_words(split_k=split, late=1, stages=1)


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


def matrix_vector(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals, legal or not; none for sums of positions, or if the matrix lies along its kept axes."""
    rows, columns, summed = (compute.axes_of(kind) for kind in "MNK")
    if compute.b is None or compute.prologue or compute.sums_positions or bool(rows) == bool(columns):
        return
    if target.backend == "interpreter":
        return
    matrix = compute.a if rows else compute.b
    inner = _innermost_summed(matrix, compute)
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


def _innermost_summed(matrix: View, compute: Compute) -> Axis | None:
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
        if lanes >= 2 * size or not LEAST_PRODUCTS <= lanes * n <= MOST_PRODUCTS:
            continue
        blocks = (*((Block(axes, n),) if n > 1 else ()), Block(summed, lanes))
        schedule = Schedule(
            blocks, "fma", late=1, stages=1, warps=1 if lanes * n <= 4 * LEAST_PRODUCTS else 4
        )
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
