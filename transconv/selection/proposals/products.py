"""Proposed schedules of products: for the matrix unit, whose factors are gathered, moved in boxes or
copied first, and element by element where it does not serve.

Depthwise windows have schedules in which a window's row slides over positions in registers.

    n.h:32 w:8 g:32 kw:7 | regs=w.kw          14 elements loaded for 56 products, 8 of g in a thread

Lanes run along g, as many in a thread as one access takes, and along rows of positions. A few positions of
the row and a whole row of the window (or all of its rows, if they are few) are written out. If positions
are summed, each lane keeps a sum of its own until the end (``late``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from transconv.compute import Axis, Compute, Value, axis_strides, block_factors
from transconv.cost import ACCESS, ASYNCHRONOUS, along_sum, is_small, within_groups
from transconv.ir import DType, View, f32, f64, free_vars, multiplied_as
from transconv.schedule import (
    FEATURES,
    MOST_WRITTEN,
    ROW,
    Block,
    Schedule,
    Scheduled,
    block_mma,
    diagonal,
    innermost,
    programs,
    row_of,
    rows_of_features,
    wants_rounding,
    why_not,
    why_not_copied,
    why_not_framed,
    why_not_rows,
)
from transconv.selection.proposals.maps import elementwise, matrix_vector, transposed_tiles
from transconv.selection.proposals.tile_shapes import (
    extents,
    fusable,
    rows_of_positions,
    run_of,
    runs_of,
    splits,
    summed_rows,
    tilings,
)
from transconv.selection.proposals.warp_specialization import explicit
from transconv.target import Target

FEW_FEATURES, SHORT = 16, 64
WGMMA_BITS = 256  # of a row that a product of wgmma sums


def _both_sum(compute: Compute) -> bool:
    """Whether both factors vary along all summed axes, as the matrix unit requires; along one of them, if
    each has one position."""
    seen = [
        {v for d in view.dims for e in (d.coord, d.mask) for v in free_vars(e)}
        for view in (compute.a, compute.b)
        if view is not None
    ]
    summed = [x for x in compute.axes_of("K") if x.size != 1]
    if not summed:
        return all(any(x.var in names for x in compute.axes_of("K")) for names in seen)
    return all(x.var in names for x in summed for names in seen)


def _types(compute: Compute) -> tuple[DType, DType]:
    """The types that a product multiplies."""
    assert compute.factors is not None
    left, right = compute.factors
    return left.var.type, right.var.type


def _alike(left: DType, right: DType) -> bool:
    """Whether a matrix unit multiplies these types: one type, or any two of 8 bits."""
    return left.memory is right.memory or left.bits == right.bits == 8


def products(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals for a product or a sum, without merging groups."""
    if compute.b is None:
        yield from transposed_tiles(compute, target)
    _, rows, columns, summed = (compute.axes_of(kind) for kind in "BMNK")
    matrix = (
        compute.b is not None
        and compute.acc is not f64
        and compute.acc.bits >= 32
        and "mma" in target.features
        and rows
        and columns
        and summed
        and not target.lacks(*_types(compute), compute.acc)
        and _alike(*_types(compute))
        and _worth_the_matrix_unit(compute)
        and _both_sum(compute)
    )
    if matrix:
        yield from sliding_down(compute, target)
        yield from _matrix(compute, target)
        yield from _in_blocks(compute, target)
        yield from _rounded(compute, target)
        if "box" in target.features and (
            compute.a.tensor.dtype.bits <= 16 or multiplied_as(compute.a.tensor.dtype, compute.math).within
        ):
            yield from _boxes(compute, target)
            yield from explicit(compute, target)
            yield from _packed(compute, target)
            yield from _widened(compute, target)
            yield from _in_rows(compute, target)
            yield from _framed(compute, target)
    else:
        yield from elementwise(compute, target)
        yield from sliding(compute, target)
        yield from matrix_vector(compute, target)


def _worth_the_matrix_unit(compute: Compute) -> bool:
    """Depthwise and near-depthwise groups have too few columns to fill a 16-wide tile. What is computed
    before it is multiplied needs tiles that divide the sum."""
    if compute.nonzero and all(
        prod(map(compute.size, axes)) % 16 for axes in fusable(compute.axes_of("K"), compute)
    ):
        return False
    rows, columns, summed = (prod(x.size for x in compute.axes_of(kind)) for kind in "MNK")
    return not compute.axes_of("B") or min(rows, columns, summed) > 2


def _matrix(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Gathered operands: one address per element, any layout, any chip. None where a copy of one factor
    has another type than the other factor, which is computed: that is no product of matrices."""
    if compute.factors is None:
        return
    big = target.backend == "interpreter"
    extents = (16, 32, 64, 128, 256, 512) if big else (16, 32, 64, 128, 256)
    depths = (16, 32, 64, 128, 256, 512) if big else (64, 32, 16)
    m_ways, n_ways, k_ways = (fusable(compute.axes_of(kind), compute) for kind in "MNK")
    least = (16, 16, target.least_steps(*_types(compute)))
    for m_axes, n_axes, k_axes in itertools.product(m_ways, n_ways, k_ways):
        sizes = [prod(compute.size(a) for a in axes) for axes in (m_axes, n_axes, k_axes)]
        for m, n, k in itertools.product(extents, extents, depths):
            if any(e > few and e >= 2 * s for e, s, few in zip((m, n, k), sizes, least, strict=True)):
                continue
            m_block, n_block = Block(m_axes, m), Block(n_axes, n)
            for k_blocks in _summed(compute, k_axes, k, target):
                yield from _gathered((m_block, n_block, *k_blocks), m * n, compute, target)


def _in_blocks(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Elements and scales of blocks for a matrix unit that takes both (``scaled=1``)."""
    factors = block_factors(compute)
    if isinstance(factors, str):
        return
    m_ways, n_ways = (fusable(compute.axes_of(kind), compute) for kind in "MN")
    extents = (16, 32, 64, 128, 256)
    for swap, m_axes, n_axes in itertools.product((0, 1), m_ways, n_ways):
        if (unit := block_mma(compute, target, swap)) is None:
            continue
        least = [min(row[i] for row in unit.least) for i in ((1, 0, 2) if swap else (0, 1, 2))]
        axes = (m_axes, n_axes, (factors[0].axis,))
        sizes = [prod(compute.size(a) for a in names) for names in axes]
        for tile in itertools.product(extents, extents, (32, 64, 128, 256)):
            if any(
                e < few or (e > few and e >= 2 * s) for e, s, few in zip(tile, sizes, least, strict=True)
            ):
                continue
            blocks = tuple(Block(names, e) for names, e in zip(axes, tile, strict=True))
            for schedule in _gathered(blocks, tile[0] * tile[1], compute, target):
                yield schedule.with_words(scaled=1, swap=swap)


def _rounded(compute: Compute, target: Target) -> Iterator[Schedule]:
    """``_matrix`` over copies that are rounded to tf32. An asynchronous unit then reads operands from
    shared memory; otherwise they go through registers to be rounded. (Sums over positions do so
    anyway.)"""
    if (
        ASYNCHRONOUS & target.features
        and wants_rounding(compute.a, compute)
        and not compute.sums_positions
        and not any(why_not_copied(compute, letter, gathered=True) for letter in "ab")
    ):
        over = Scheduled(compute, Schedule(pack="a.b"), target).main
        yield from (c.with_words(pack="a.b") for c in _matrix(over, target) if not is_small(c, over))


def _summed(
    compute: Compute, axes: tuple[str, ...], extent: int, target: Target
) -> Iterator[tuple[Block, ...]]:
    """Blocks for the sum: the fused axes; for positions also one block per axis, which needs no division
    to unpack them."""
    yield (Block(axes, extent),)
    positions = compute.axes_of("K")
    if len(axes) > 1 and positions[-1].role == "position" and target.backend != "interpreter":
        yield from tilings(positions, extent, 2)


def _gathered(
    blocks: tuple[Block, ...], results: int, compute: Compute, target: Target
) -> Iterator[Schedule]:
    """The words for a tile of gathered operands, those that were fastest in sweeps first."""
    if target.backend == "interpreter":
        yield Schedule(
            blocks, warps=8 if results >= 128 * 128 else 4, stages=4 if results <= 128 * 64 else 3
        )
        return
    ways = {(8, 3): True, (8, 4): False, (4, 3): results == 128 * 128}
    if results < 128 * 128:
        ways = {(4, 4): True, (4, 3): results >= 64 * 64}
    if compute.a.tensor.dtype.memory is f32 and compute.math != "ieee" and "wgmma" in target.features:
        ways[2, 3 if results > 64 * 64 else 4] = results <= 64 * 128  # for ``mma.sync``
    if "async_copy" not in target.features:  # stages then take registers
        ways = {(warps, 2): True for warps, _ in ways}
    for (warps, stages), wanted in ways.items():
        if wanted:
            for schedule in _sides(Schedule(blocks, warps=warps, stages=stages), compute, target):
                for split in splits(schedule, compute, target):
                    yield schedule.with_words(split_k=split)


def _sides(schedule: Schedule, compute: Compute, target: Target) -> Iterator[Schedule]:
    """A factor that is computed as the right side of a ``wgmma``, which is read from shared memory. The
    left side stays in registers: of several products of a step, Triton lets the next step overwrite them
    before they are read (see ``backend_triton/miscompiles.py``), unless there is one stage.
    ``mma.sync``, of few warps or rows, has both sides in registers and no such products."""
    left, right = (isinstance(f, Value) for f in compute.factors or (None, None))
    turned, small = schedule.with_words(swap=1), is_small(schedule, compute)
    if "wgmma" not in target.features or not left or (small and is_small(turned, compute)):
        yield schedule
        return
    yield schedule.with_words(stages=1) if right else turned
    depth = prod(b.extent for b in schedule.blocks if compute.kind(b.axes[0]) == "K")
    if small or depth * _types(compute)[0].bits <= WGMMA_BITS:
        yield schedule


def _boxes(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Positions as boxes on the right side of the product, the other operand as its left side."""
    bits = compute.a.tensor.dtype.bits
    if bits > 16 and not all(along_sum(v, compute) for v in (compute.a, compute.b) if v is not None):
        return  # Triton would transpose them through registers, in every step of the sum
    wide = {
        kind: tuple(x for x in compute.axes_of(kind) if x.size > 1) or compute.axes_of(kind)[-1:]
        for kind in "MNK"
    }
    depth = ROW * 8 // bits
    positions = {kind: all(x.role == "position" for x in wide[kind]) for kind in "MNK"}
    runs = {kind: runs_of(wide[kind], compute) for kind in "MNK"}
    if positions["M"]:
        whole = tuple(x.name for x in wide["M"])
        innermost = ((wide["K"][-1].name,), wide["K"][-1].size)
        for summed, columns in itertools.product(dict.fromkeys((*runs["K"], innermost)), runs["N"]):
            for m, n, k in itertools.product((64, 128, 256), extents(columns), extents(summed, depth)):
                for tiling in [
                    (Block(whole, m),),
                    *tilings(wide["M"], m, 3),
                    *rows_of_positions(wide["M"], m, compute.c, compute),
                ]:
                    blocks = (*tiling, Block(columns[0], n), Block(summed[0], k))
                    yield from _box_words(blocks, m, n, compute, target)
    elif positions["K"]:
        whole = tuple(x.name for x in wide["K"])
        for rows, columns in itertools.product(runs["M"], runs["N"]):
            most = 64 if len(rows[0]) > 1 else 256  # a row of a window may fill no more than 32
            for m, n, tiling in itertools.product(
                extents(rows, most),
                extents(columns),
                [
                    (Block(whole, depth),),
                    *tilings(wide["K"], depth, 2),
                    *summed_rows(wide["K"], depth, compute),
                    *rows_of_positions(wide["K"], depth, compute.a, compute),
                ],
            ):
                blocks = (Block(rows[0], m), Block(columns[0], n), *tiling)
                yield from _box_words(blocks, m, n, compute, target)


def _box_words(
    blocks: tuple[Block, ...], m: int, n: int, compute: Compute, target: Target
) -> Iterator[Schedule]:
    """The words for a tile of boxes: how the result is stored, programs, warps and stages. A block
    diagonal operand cannot be a box, but its copy can."""
    b = "box" if compute.b is not None and diagonal(compute.b, compute) == 1 else "gather"
    schedule = Schedule(
        blocks,
        a="box",
        b=b,
        c="box",
        swap=1,
        warps=8 if m * n > 128 * 128 else 4,
        stages=3 if m * n > 128 * 128 else 4,
    )
    if why_not(schedule, compute, target):
        schedule = schedule.with_words(c="gather")
        if any(len(b.axes) > 1 and compute.axis(b.first).role == "window" for b in blocks):
            schedule = schedule.with_words(b="gather")  # rows of windows alone suit the engine
        if why_not(schedule, compute, target):
            return
    ways = [schedule]
    if m * n == 128 * 128:
        ways.append(schedule.with_words(warps=8))
    if m * n <= 128 * 64:  # a stage less may make room for another program
        ways.append(schedule.with_words(stages=3))
    if schedule.c == "box":  # a stage less makes room for the result
        ways.append(schedule.with_words(c="gather", stages=schedule.stages + 1))
    if programs(schedule, compute) > target.sms and not compute.sums_positions:
        yield from (c.with_words(programs=target.sms) for c in ways)
    yield from ways
    for split in splits(schedule, compute, target)[1:]:
        yield schedule.with_words(split_k=split, c="gather")


def _packed(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Boxes over copies with features innermost, of tensors that have another order."""
    views = (("a", compute.a), ("b", compute.b), ("c", compute.c))
    apart = [letter for letter, view in views if view is not None and not why_not_copied(compute, letter)]
    along = [letter for letter in apart if letter != "c" and innermost(compute, letter) != FEATURES]
    own = [
        view
        for letter, view in views
        if view is not None and letter not in along and (letter != "c" or not along)
    ]
    if any(
        len(view.tensor.shape) < 2 or view.tensor.shape[1] * diagonal(view, compute) < FEW_FEATURES
        for view in own
    ):
        return  # rows of so few features are mostly padding
    before = ".".join(x for x in apart if x != "c")
    small = "c" if compute.sums_positions else "b"  # the smallest tensor; others may work without a copy
    ways = [*filter(None, dict.fromkeys([small if small in apart else "", before, ".".join(apart)]))]
    # Boxes of summed positions are often illegal for 16-bit operands, seldom for f32, which is transposed.
    half = compute.sums_positions and compute.a.tensor.dtype.bits == 16
    found = half or not before  # whether a legal one is known, or it does not matter
    for pack in ways:
        packed = Scheduled(compute, Schedule(pack=pack), target).main
        if any(_rows_along(letter, packed) < FEW_FEATURES for letter in along if letter in pack):
            continue
        for schedule in itertools.chain(_boxes(packed, target), explicit(packed, target)):
            found = found or (
                why_not(schedule, packed, target) is None and not within_groups(schedule, packed)
            )
            yield schedule.with_words(pack=pack)
    short = _sums_short_rows(compute)  # which boxes fetch a quarter of a line at a time
    if before and (half or short or not found):
        for pack in ways[-1:] if half else ways[:1] if found else ways:
            for schedule in _matrix(Scheduled(compute, Schedule(pack=pack), target).main, target):
                yield schedule.with_words(pack=pack)


def _sums_short_rows(compute: Compute) -> bool:
    """Whether fewer than SHORT features of 8 bits are summed, at each of some positions of a window."""
    features = prod(x.size for x in compute.axes_of("K") if x.role == "feature")
    return compute.a.tensor.dtype.bits == 8 and not compute.sums_positions and features < SHORT


def _rows_along(letter: str, packed: Compute) -> int:
    """How many rows of the copy of an operand of 8 bits a block can run along: a box of fewer is mostly
    padding, whose rows take the copy engine as long as others."""
    axes = packed.axes_of("M" if letter == "a" else "N")
    wide = tuple(x for x in axes if x.size > 1) or axes[-1:]
    return run_of(wide, packed)[1] if packed.a.tensor.dtype.bits == 8 else FEW_FEATURES


def _widened(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Products of f16 over copies of 8-bit floats that do not lie along the sum, or whose sums the matrix
    unit would have to move to f32."""
    views = [v for v in (compute.a, compute.b) if v is not None]
    if not all(v.tensor.dtype.is_short and len(v.tensor.shape) > 1 for v in views) or (
        compute.math != "ieee" and all(along_sum(v, compute) for v in views)
    ):
        return
    pack = "a.b.f16"
    over = Scheduled(compute, Schedule(pack=pack), target).main
    for schedule in itertools.chain(_matrix(over, target), _boxes(over, target), explicit(over, target)):
        yield schedule.with_words(pack=pack)


def _in_rows(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Products of bytes over copies whose rows are summed positions."""
    pack, views = "a.b.rows", [v for v in (compute.a, compute.b) if v is not None]
    if any(why_not_rows(view, compute) for view in views):
        return
    over = Scheduled(compute, Schedule(pack=pack), target).main
    ways = explicit if "wgmma" in target.features else _boxes
    yield from (schedule.with_words(pack=pack) for schedule in ways(over, target))


def _framed(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Products over a copy of images of few features, with zeros around them. The copy is worth it where
    its rows are read at many positions of a window. Bytes do not lie along the sum in it."""
    pack, view = "a.frame", compute.a
    if not compute.sums_positions or view.tensor.dtype.bits == 8 or why_not_framed(view, compute):
        return
    over = Scheduled(compute, Schedule(pack=pack), target).main
    for ways in (_matrix, _boxes, explicit):
        yield from (schedule.with_words(pack=pack) for schedule in ways(over, target))


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
    apart = [x for x, v in (("a", compute.a), ("b", compute.b)) if not _lies_in_rows(v, compute)]
    summed = compute.sums_positions
    small = [x for x in apart if x == "b" and not summed]
    after = [] if summed or _lies_in_rows(compute.c, compute) else [".".join((*apart, "c"))]
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
    if (
        target.backend == "interpreter"
        or compute.b is None
        or compute.axes_of("B")
        or columns > 2
        or summed > 2
        or len(positions) < 2
        or len(window) < 2
    ):
        return
    down, rows = positions[-2], window[-2]
    across = tuple(x.name for x in (*positions[:-2], positions[-1]) if x.size > 1)
    for along in _even(down.size) if across and rows.size > 1 else []:
        parts = -(-rows.size * along // MOST_WRITTEN)
        blocks = (Block((down.name,), along), Block((rows.name,), -(-rows.size // parts)))
        if along > 1:
            yield from (
                Schedule((Block(across, lanes), *blocks), "fma", stages=1, regs=f"{down.name}.{rows.name}")
                for lanes in (128, 256)
            )


def _lies_in_rows(view: View, compute: Compute) -> bool:
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
                schedule = Schedule(
                    (*other, *rows, *blocks, Block((group.name,), lanes)),
                    "fma",
                    regs=".".join(regs),
                    late=int(summed and bool(rows)),
                    stages=1,
                )
                # Sums over positions wait for their loads, unless these are ahead or more warps run.
                words = [(1, 4), (2, 4), (1, 8)] if schedule.late else [(1, 4)]
                for split, (stages, warps) in product(splits(schedule, compute, target)[-2:], words):
                    yield replace(schedule, split_k=split, stages=stages, warps=warps)


def _written(
    position: Axis, window: list[Axis], is_small: bool
) -> Iterator[tuple[tuple[Block, ...], list[str]]]:
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


def _rows(
    positions: list[Axis], window: list[Axis], written: list[str], summed: bool, count: int
) -> Iterator[tuple[tuple[Block, ...], tuple[Block, ...]]]:
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
