"""Counts of a schedule and a computation: tiles, steps and programs.

The computation is ``Scheduled.main``, or ``grouped``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from math import gcd, lcm, prod
from typing import Any, TypeVar

from transconv import ir
from transconv.compute import Compute, Write, axis_facts, axis_steps, axis_strides
from transconv.schedule.schedule import Block, Schedule
from transconv.simplify import multiple_of, simplify
from transconv.target import Target

Made = TypeVar("Made")
MOST_TILES = 1 << 13  # whose counts a cache keeps
WARP_GROUP = 4
"""Warps that make an asynchronous product together."""
ROWS = 64
"""Rows of the left side of the smallest asynchronous product."""
QUAD = 4
"""Bytes of integers that are multiplied at once, on chips that can."""
LONGEST = 64
"""Steps of a sum that are written out at most: a longer one stays a loop."""
SUMS = (ir.Add, ir.Sub, ir.Neg, ir.Mul, ir.Const)
FEW_ROUNDS = 8  # with more rounds of tiles, idle multiprocessors in the last one matter little


def by_tile(f: Callable[..., Made]) -> Callable[..., Made]:
    """A cache of a function of blocks, a computation and more. Proposals differ in their words more often
    than in their blocks: the last ones are known without a look at what they are."""

    @lru_cache(maxsize=MOST_TILES)
    def values(blocks: tuple[Block, ...], compute: Compute) -> dict[tuple[Any, ...], Made]:
        return {}

    last: tuple[Any, Any, dict[tuple[Any, ...], Made]] = (None, None, {})

    @wraps(f)
    def cached(blocks: tuple[Block, ...], compute: Compute, *rest: Any) -> Made:
        nonlocal last
        before, of, known = last
        if blocks is not before or compute is not of:
            known = values(blocks, compute)
            last = blocks, compute, known
        found = known.get(rest)
        if found is None:
            found = known[rest] = f(blocks, compute, *rest)
        return found

    return cached


def moves_sums(compute: Compute) -> bool:
    """Whether sums move out of the matrix unit, which keeps too few bits of those of 8-bit floats."""
    factors = compute.factors
    return compute.math == "ieee" and factors is not None and all(f.var.type.is_short for f in factors)


def tile(c: Schedule, compute: Compute, kind: str) -> int:
    """The extent of the tile along a kind (B, M, N or K): the product of its blocks."""
    return _extents(c.blocks, compute)[kind]


def sides(c: Schedule, compute: Compute) -> dict[str, int]:
    """``tile`` along every kind."""
    return _extents(c.blocks, compute)


def product_columns(c: Schedule, compute: Compute) -> int:
    """The columns of one product: those of the tile's right side, which the groups of warps of an explicit
    kernel divide where there are fewer rows than they could take."""
    left, right = (tile(c, compute, kind) for kind in ("NM" if c.swap else "MN"))
    groups = c.warps // WARP_GROUP if c.via == "gluon" else 1
    return right // max(1, groups // max(1, left // ROWS))


@by_tile
def _extents(blocks: tuple[Block, ...], compute: Compute) -> dict[str, int]:
    found = dict.fromkeys("BMNK", 1)
    for b in blocks:
        found[compute.kind(b.first)] *= b.extent
    return found


def lanes(c: Schedule, compute: Compute, kind: str) -> int:
    """``tile`` without the blocks that ``regs`` writes out."""
    if not c.regs:
        return tile(c, compute, kind)
    return prod(b.extent for b in c.blocks if compute.kind(b.first) == kind and not c.in_registers(b))


def has_quads(c: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a chip can multiply bytes four at a time, and threads hold four neighbouring elements of
    each operand. What is interpreted cannot."""
    blocks = [b for b in c.blocks if b.extent > 1 and not c.in_registers(b)]
    shared = [b for b in blocks if compute.kind(b.first) == "B"]  # along which both operands have elements
    return (
        target.backend == "cuda"
        and not target.upcast16
        and not any(b.extent % QUAD for b in shared or blocks)
    )


def k_steps(c: Schedule, compute: Compute) -> int:
    """The number of steps of the sum: the blocks of K axes, times the sizes of K axes without a block."""
    return tiles_along(c, compute, "K")


def holds_rows(c: Schedule, compute: Compute) -> bool:
    """Whether the elements of a row stay in registers for all sweeps: a tile covers it, or its steps are
    written out, whose loads are then shared, unless the kernel stores to the same tensor."""
    steps = k_steps(c, compute)
    written = bool(c.unroll) and c.split_k == 1 and steps <= LONGEST
    stored = {s.view.tensor for s in compute.steps if isinstance(s, Write)} if written else set()
    return steps == 1 or (written and not any(r.view.tensor in stored for r in compute.reads))


def ahead(c: Schedule, compute: Compute) -> int:
    """The stages of the loop over the tiles of a persistent program: those of the schedule if a tile is
    loaded at once, so that the loads of the next tiles can be in flight; else 0."""
    once = compute.factors is None and k_steps(c, compute) == 1
    return c.stages if once and c.stages > 1 else 0


def ahead_bytes(c: Schedule, compute: Compute) -> int:
    """Bytes of shared memory for the tiles whose loads are in flight, without what all tiles of a program
    read and is loaded once."""
    found = 0
    for view in {r.view for r in compute.reads} if ahead(c, compute) else ():
        strides = axis_strides(view, compute)
        if any(strides[x.name] for x in compute.axes_of("M")):
            tile = prod(b.extent for b in c.blocks if any(strides[a] for a in b.axes))
            found += tile * view.tensor.dtype.bytes * (c.stages - 1)
    return found


def chain(c: Schedule, compute: Compute) -> int:
    """How many products of the matrix unit are added to one accumulator, each of 32 bytes of a row. 0 for
    other units, for 64-bit operands and for f32 with precision ``ieee``, whose sums round to nearest."""
    dtype = compute.a.tensor.dtype
    if c.unit != "mma" or dtype.bits > 32 or (dtype.bits == 32 and compute.math == "ieee"):
        return 0
    steps = -(-k_steps(c, compute) // c.split_k)
    if c.reduce == "stream":  # the steps of all tiles are divided evenly among the programs
        steps = min(steps, -(-steps * programs(c, compute) // max(1, c.programs)))
    return steps * max(1, tile(c, compute, "K") * dtype.bytes // 32)


def programs(schedule: Schedule, compute: Compute) -> int:
    """The number of tiles, parts of a split sum counted separately: the programs of the kernel, or what
    its persistent programs share."""
    found = _tiles(schedule.blocks, compute)
    return max(1, schedule.split_k * found["B"] * found["M"] * found["N"])


def needed(schedule: Schedule, compute: Compute, target: Target) -> int:
    """The fewest persistent programs that need no more rounds than one program per multiprocessor would.
    More programs would idle in the last round and share power and cache with the others. One for each
    multiprocessor where sizes are arguments."""
    if compute.named:
        return target.sms
    tiles = programs(schedule, compute)
    rounds = -(-tiles // target.sms)
    return -(-tiles // rounds) if rounds <= FEW_ROUNDS else target.sms


def tiles_along(c: Schedule, compute: Compute, kind: str) -> int:
    """The number of tiles along a kind (B, M, N or K)."""
    return _tiles(c.blocks, compute)[kind]


@by_tile
def _tiles(blocks: tuple[Block, ...], compute: Compute) -> dict[str, int]:
    within = {a for b in blocks for a in b.axes}
    found = dict.fromkeys("BMNK", 1)
    for axis, size in compute.sizes.items():
        found[compute.kind(axis)] *= 1 if axis in within else size
    for b in blocks:
        found[compute.kind(b.first)] *= -(-prod(map(compute.size, b.axes)) // b.extent)
    return found


WIDEST = 1 << 10
"""More elements than one access takes."""


@lru_cache(maxsize=512)
def aligned(view: ir.View, row: tuple[str, ...], compute: Compute) -> int:
    """The alignment of all rows of the tensor along these axes: elements, a power of two."""
    steps = [
        s
        for a, s in axis_strides(view, compute).items()
        if a not in row and (not a or compute.size(a) > 1)
    ]
    common = gcd(WIDEST, *steps, *steps_of_any_size(view, row, compute))
    return common & -common


def steps_of_any_size(view: ir.View, row: tuple[str, ...], compute: Compute) -> Iterator[int]:
    """What the strides of dimensions that other axes move along are known to be multiples of, where these
    strides are sizes that are arguments."""
    for seen, step in zip(view.dims, view.tensor.steps if view.tensor.extents else (), strict=False):
        if ir.free_vars(step) and not {v.name for v in ir.free_vars(seen.coord)} <= {*row}:
            yield multiple_of(simplify(step), axis_facts(compute))


def footprint(c: Schedule, compute: Compute, view: ir.View) -> tuple[int, ...]:
    """The extents, along each dimension of a tensor, of the box that holds what one program reads or
    writes of it in all steps of the sum, with what lies between and around the elements: of 16 rows at
    stride 2 under a window of 7 there are 37. A coordinate that is no sum of axes may be anywhere."""
    reach = {x.name: x.size if compute.kind(x.name) == "K" else 1 for x in compute.axes}
    for b in c.blocks:
        if compute.kind(b.first) != "K":
            reach |= _spread(b, compute)
    axes = {x.var for x in compute.axes}
    seen = [ir.ViewDim(simplify(dim.coord)) for dim in view.dims]
    return tuple(
        1 + sum(abs(step) * (reach[a] - 1) for a, step in axis_steps(dim, compute).items())
        if all(e in axes or isinstance(e, SUMS) for e in ir.walk(dim.coord))
        else size
        for dim, size in zip(seen, view.tensor.shape, strict=True)
    )


def _spread(block: Block, compute: Compute) -> dict[str, int]:
    """How far apart the coordinates of a tile of fused axes may be along each of them: all that there are
    where a tile begins in one row, image, and ends in the next one."""
    found, below = {}, 1
    total, extent = prod(map(compute.size, block.axes)), block.extent
    for axis in reversed(block.axes):
        size = compute.size(axis)
        if (whole := below * size) % extent and whole < total:
            found[axis] = size
        else:  # in rows of so many points tiles begin at as many places
            starts = range(0, min(total, lcm(extent, below)), extent)
            found[axis] = max((min(s + extent, total) - 1) // below - s // below + 1 for s in starts)
        below = whole
    return {axis: min(n, compute.size(axis)) for axis, n in found.items()}
