"""Proposed schedules of warp-specialized kernels (``via=gluon``): tiles that fill shared memory, divided
so that no multiprocessor idles, nor its matrix unit while a tile is stored.

Products read both operands from shared memory, so tiles are large and have as many stages as fit. If whole
tiles would leave multiprocessors idle, the sum is split (split-K), or the steps of all tiles are divided
evenly (stream-K).

Steps of a sum may share boxes: a schedule with ``slide=`` the outermost axis of the window that allows it,
and with as many of its stages as then fit shared memory.

The producer may fetch what the epilogue reads: a schedule with ``behind=box``, and with as many
of its stages as then fit shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

from transconv.compute import Axis, Compute, Read, axis_strides
from transconv.schedule import (
    INTEGERS,
    ROW,
    Block,
    Schedule,
    diagonal,
    fewest_positions,
    k_steps,
    most_sums,
    moves_sums,
    needed,
    programs,
    tiles_along,
    transposed_bytes,
    why_not,
    why_not_behind,
)
from transconv.selection.proposals.tile_shapes import (
    Run,
    extents,
    fewest_parts,
    rows_of_positions,
    run_of,
    runs_of,
    summed_rows,
    tilings,
)
from transconv.target import Target

BARRIERS = 1024  # bytes of shared memory that are not tiles
DEEPEST = 6  # stages; more were not faster in any sweep
FEWEST = 3  # stages: one is read, one is waited for, one is filled
FEWEST_TURNED = 2  # stages of each of two rings, if operands are transposed
SMALL = (64, 64)  # an extra tile if operands are transposed, which then takes longer than the products
SHAPES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128))


def explicit(compute: Compute, target: Target) -> Iterator[Schedule]:
    """Proposals of explicit kernels, legal or not."""
    if "wgmma" not in target.features or compute.b is None:
        return
    if diagonal(compute.b, compute) > 1:  # a block diagonal operand cannot be a box
        return
    wide = {
        kind: tuple(x for x in compute.axes_of(kind) if x.size > 1) or compute.axes_of(kind)[-1:]
        for kind in "MNK"
    }
    if all(x.role == "position" for x in wide["M"]):
        found = also_sharing(_over_positions(compute, target, wide), compute, target)
        yield from also_fetching(found, compute, target)
    elif all(x.role == "position" for x in wide["K"]):
        yield from also_fetching(_summing_positions(compute, target, wide), compute, target)


def _over_positions(
    compute: Compute, target: Target, wide: dict[str, tuple[Axis, ...]]
) -> Iterator[Schedule]:
    runs, row = runs_of(wide["N"], compute), ROW // compute.a.tensor.dtype.bytes
    whole = tuple(x.name for x in wide["M"])
    for columns, summed, (m, n) in itertools.product(runs, _sums(wide["K"], compute), SHAPES):
        if n not in extents(columns):
            continue
        for k in extents(summed, row):
            for tile in [
                (Block(whole, m),),
                *tilings(wide["M"], m, 3),
                *rows_of_positions(wide["M"], m, compute.c, compute),
            ]:
                blocks = (*tile, Block(columns[0], n), Block(summed[0], k))
                for c in ("box", "gather"):
                    yield from _words(blocks, m, n, k, c, compute, target)


def _sums(axes: tuple[Axis, ...], compute: Compute) -> list[Run]:
    """The axes of a block of the sum: a whole contiguous run, of few features also a row of the window,
    or, of operands of 8 bits, the innermost axis alone as well."""
    alone: Run = ((axes[-1].name,), axes[-1].size)
    bytes_ = [alone] if compute.a.tensor.dtype.bits == 8 else []
    return [*dict.fromkeys([*runs_of(axes, compute), *bytes_])]


def _summing_positions(
    compute: Compute, target: Target, wide: dict[str, tuple[Axis, ...]]
) -> Iterator[Schedule]:
    rows, columns = _piles(compute, wide["M"]), run_of(wide["N"], compute)
    whole = tuple(x.name for x in wide["K"])
    row = ROW // compute.a.tensor.dtype.bytes
    shapes = SHAPES if compute.a.tensor.dtype.bits == 16 else (*SHAPES, SMALL)
    lying = axis_strides(compute.a, compute)  # what is summed is innermost in copies
    least = min([x.size for x in wide["K"] if lying[x.name] == 1], default=wide["K"][0].size)
    few = fewest_positions(compute.a.tensor.dtype)
    short = [k for k in (few, 2 * few) if least <= k < row]
    for (m, n), k in itertools.product(shapes, (*short[:1], row, 2 * row)):
        if n not in extents(columns):
            continue
        for left in (r for r in rows if m in extents(r)):
            for tile in [
                (Block(whole, k),),
                *tilings(wide["K"], k, 2),
                *summed_rows(wide["K"], k, compute),
                *rows_of_positions(wide["K"], k, compute.a, compute),
            ]:
                blocks = (Block(left[0], m), Block(columns[0], n), *tile)
                yield from _words(blocks, m, n, k, "gather", compute, target)
                boxed = _words(blocks, m, n, k, "box", compute, target)
                yield from (s for s in boxed if s.transposers == 2)


def _piles(compute: Compute, axes: tuple[Axis, ...]) -> list[Run]:
    """The axes of a block of rows: features alone, or with the window before them, which is a pile of
    boxes (see ``schedule/tiles/boxes.py``)."""
    features, every = axes[-1:], tuple(x.name for x in axes)
    found: list[Run] = [((features[0].name,), features[0].size)]
    if len(axes) > 1 and features[0].role == "feature":
        found.append((every, prod(x.size for x in axes)))
    return [*dict.fromkeys([*runs_of(axes, compute), *found])]


def _words(
    blocks: tuple[Block, ...], m: int, n: int, k: int, c: str, compute: Compute, target: Target
) -> Iterator[Schedule]:
    """The words for a tile: ``swap``, stages, programs, consumers and parts of the sum.

    The wider operand is the right one, which the matrix unit reads once for 64 rows of the left one. For a
    sum over positions the contiguous one is, because that makes the stores contiguous. A product of
    integers has at most ``INTEGERS`` columns."""
    positions = compute.axes_of("K")[-1].role == "position"
    too_wide = compute.acc.kind == "int" and m > INTEGERS
    swap = 1 if positions or (m >= n and not too_wide) else 0
    alone = most_sums(4) if moves_sums(compute) else 128 * 128  # the sums of four warps
    schedule = Schedule(
        blocks, a="box", b="box", c=c, swap=swap, warps=8 if m * n > alone else 4, via="gluon"
    )
    transposed = transposed_bytes(schedule, compute)
    if transposed and schedule.warps == 4 and compute.a.tensor.dtype.bits == 8:
        schedule = schedule.with_words(transposers=2)
    schedule = schedule.with_words(stages=_stages(m, n, k, c, 1, transposed, compute, target))
    if schedule.stages < (FEWEST_TURNED if transposed else FEWEST):
        return
    tiles, steps = programs(schedule, compute), k_steps(schedule, compute)
    waves = tiles / target.sms
    yield from _persistent(schedule, m, n, k, compute, target) if waves > 1 else [schedule]
    if waves < 1:  # then several programs share each tile
        yield schedule.with_words(reduce="stream", programs=target.sms, group_m=1)
    parts = [int(waves * target.sms / tiles) for waves in (0.5, 1, 2, 3, 5)]
    for split in (*parts, fewest_parts(schedule, compute, target)):
        if 1 < split <= steps // 2 and c == "gather":
            made = schedule.with_words(split_k=split)
            fits = tiles * split <= target.sms
            yield from [made] if fits else _persistent(made, m, n, k, compute, target)


def _persistent(
    schedule: Schedule, m: int, n: int, k: int, compute: Compute, target: Target
) -> Iterator[Schedule]:
    """As many programs as are needed; one consumer at each tile, or two in turns; and what all tiles of
    one multiply is kept."""
    made = [schedule.with_words(programs=needed(schedule, compute, target))]
    stages = _stages(m, n, k, schedule.c, 2, 0, compute, target)
    if schedule.warps == 4 and stages >= FEWEST and not transposed_bytes(schedule, compute):
        made.append(made[0].with_words(consumers=2, stages=stages))
    yield from made
    if tiles_along(schedule, compute, "N") == tiles_along(schedule, compute, "B") == schedule.split_k == 1:
        for each in made:
            stays = k_steps(schedule, compute) * k * n * compute.a.tensor.dtype.bytes
            stages = _stages(m, n, k, schedule.c, each.consumers, 0, compute, target, stays)
            if stages >= FEWEST:
                yield each.with_words(keep="b", stages=stages)


def _stages(
    m: int,
    n: int,
    k: int,
    c: str,
    consumers: int,
    transposed: int,
    compute: Compute,
    target: Target,
    kept: int = 0,
) -> int:
    """The number of stages that fit shared memory beside the tiles to be stored. ``transposed``: bytes of
    a step that are transposed; ``kept``: bytes of B if it is resident and thus not part of a stage."""
    waiting = consumers * m * n * compute.c.tensor.dtype.bytes if c == "box" else 0
    stage = k * (m if kept else m + n) * compute.a.tensor.dtype.bytes + transposed
    return min(DEEPEST, (target.shared_bytes - BARRIERS - waiting - kept) // stage)


MOST = 4  # stages: enough for products that read shared memory while others land there


def sharing(schedule: Schedule, compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedule with ``slide=``, if that is legal with enough stages; one or none. Where a swapped
    result of 16 bits is not stored as a box, storing it takes a third of the time (256 positions of 64
    features, on an H100)."""
    if schedule.via != "gluon" or schedule.slide or schedule.split_k > 1 or schedule.keep:
        return
    if schedule.swap and schedule.c != "box" and compute.c.tensor.dtype.bits < 32:
        return
    summed = compute.axes_of("K")
    for axis in summed:
        if axis.role != "window" or axis.size < 2 or schedule.block_of(axis.name) is not None:
            continue
        order = ".".join([*(x.name for x in summed if x is not axis), axis.name])
        for stages in range(min(MOST, schedule.stages), FEWEST - 1, -1):
            made = schedule.with_words(order=order, slide=axis.name, stages=stages)
            if (reason := why_not(made, compute, target)) is None:
                yield made
                return
            if "shared memory" not in reason:
                break


def also_sharing(schedules: Iterator[Schedule], compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedules, each with the one whose steps share boxes."""
    for schedule in schedules:
        yield schedule
        yield from sharing(schedule, compute, target)


def fetching(schedule: Schedule, compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedule with ``behind=box``, if that is legal with enough stages; one or none."""
    if (
        schedule.via != "gluon"
        or schedule.behind == "box"
        or not any(isinstance(s, Read) for s in compute.after)
    ):
        return
    if (
        schedule.merge == 1
        and not schedule.pack
        and why_not_behind(schedule.with_words(behind="box"), compute, target)
    ):
        return  # whatever the other words are: this rule is the last one
    least = min(schedule.stages, FEWEST, max(2, k_steps(schedule, compute)))
    for stages in range(schedule.stages, least - 1, -1):
        made = schedule.with_words(behind="box", stages=stages)
        if (reason := why_not(made, compute, target)) is None:
            yield made
        if reason is None or "shared memory" not in reason:
            return


def also_fetching(schedules: Iterator[Schedule], compute: Compute, target: Target) -> Iterator[Schedule]:
    """The schedules, each with the one that fetches."""
    for schedule in schedules:
        yield schedule
        yield from fetching(schedule, compute, target)
