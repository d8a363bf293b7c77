"""Shapes of tiles: which axes can share a block, which extents divide them well, and into how many parts
a sum is split: so that the matrix unit's accumulator does not take too many additions in a row.

NVIDIA's matrix units truncate additions to an f32 accumulator instead of rounding them (Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). Errors of n additions that round to
nearest are a random walk of some 2^-24 sqrt(n) of the sum. Truncations all go towards zero: each loses
half a unit in the last place on average, 0.36 * 2^-23 of the sum, and because a sum of random terms grows
over the whole chain, n additions lose half of n times that. Measured on an H200
(bench/results/h200_check.csv, relative error in the 2-norm without that of rounding the result to f16):
2.04e-4 for 10,900 additions, 3.07e-4 for 16,600, 5.5e-4 for 29,600, which is 1.86e-8 = 0.16 * 2^-23 for
each addition.

2^15 additions thus lose 6e-4, twice the error of rounding the operands to tf32; 16 million terms in six
parts would lose 6e-3. Longer chains are split, and another kernel, which rounds to nearest, adds the
parts. The schedules tuned for layers of networks have at most 18,800 additions."""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import prod

from transconv.compute import Axis, Compute, axis_strides
from transconv.ir import View
from transconv.schedule import Block, Schedule, chain, k_steps, programs, row_of, rows_of_features
from transconv.target import Target


def fusable(axes: tuple[Axis, ...], compute: Compute) -> list[tuple[str, ...]]:
    """Ways to fuse the axes of one kind: all positions; window and features together if they are
    contiguous in memory; else features alone, or with window axes before them if there are fewer than 16
    features; of patches also in the order of memory."""
    axes = tuple(x for x in axes if x.size > 1) or axes[-1:]
    positions = tuple(x.name for x in axes if x.role == "position")
    if positions and len(positions) == len(axes):
        return [positions]
    if len(axes) > 1 and _one_run(axes, compute):
        return [tuple(x.name for x in axes)]
    ways: list[tuple[str, ...]] = []
    for start in range(len(axes) - 1, -1, -1):
        ways.append(tuple(x.name for x in axes[start:]))
        if prod(x.size for x in axes[start:]) >= 16:
            break
    return [*dict.fromkeys([*ways[-1:], *_of_patches(axes, compute)])]


PATCH_ROW = 8  # bytes of a row of a window, from which on threads load it as a whole


def _of_patches(axes: tuple[Axis, ...], compute: Compute) -> list[tuple[str, ...]]:
    """Features and window as the weights have them in memory, rows of the window last, where windows share
    no element and the image has its columns innermost: what neighbouring threads load then follows one
    another, while neighbouring positions are a window apart."""
    window = [x for x in axes if x.role == "window"]
    strides = [axis_strides(v, compute) for v in (compute.a, compute.b, compute.c) if v is not None]
    strides = [s for s in strides if any(s[x.name] for x in axes)]
    if not window or any(s[window[-1].name] != 1 for s in strides):
        return []
    row, positions = window[-1], [x.name for x in compute.axes if x.role == "position" and x.size > 1]
    steps = [[abs(s[p]) for p in positions if s[p]] for s in strides]
    image = [min(found) for found in steps if found]  # the weights lie along no position
    dtype = compute.a.tensor.dtype.memory
    if not image or min(image) < row.size or row.size * dtype.bits < PATCH_ROW * 8:
        return []
    weights = next((s for s, found in zip(strides, steps, strict=True) if not found), strides[0])
    return [tuple(x.name for x in sorted(axes, key=lambda x: -abs(weights[x.name])))]


def _one_run(axes: tuple[Axis, ...], compute: Compute, stored: bool = True) -> bool:
    """Whether the axes are contiguous, in row-major order, in each tensor that varies along them; in the
    result, too, if ``stored``."""
    for view in (compute.a, compute.b, compute.c if stored else None):
        if view is None:
            continue
        strides = axis_strides(view, compute)
        if any(strides[x.name] for x in axes) and any(
            strides[outer.name] != strides[inner.name] * inner.size
            for outer, inner in itertools.pairwise(axes)
        ):
            return False
    return True


MORE = 2  # shapes of tiles where sizes are arguments


@lru_cache(maxsize=1024)
def tilings(
    axes: tuple[Axis, ...], volume: int, few: int = 3, row: int = 1
) -> tuple[tuple[Block, ...], ...]:
    """Blocks of ``volume`` positions over some axes, the ``few`` with the least waste: 14x14 images of a
    batch of 128 are tiled without waste by 32 images x 2 rows x 2 columns. Of an axis whose size is an
    argument half a block is wasted, whatever the example's size is; there are more of these, since one
    may be better for some sizes and one for others. ``row``: the smallest extent of the last axis."""
    steps = range(volume.bit_length())
    shapes = [
        e
        for e in itertools.product(*([2**s for s in steps] for _ in axes))
        if prod(e) == volume and all(n <= 256 for n in e) and e[-1] >= row
    ]

    def overhang(extents: tuple[int, ...]) -> tuple[float, float]:
        over = prod(
            (-(-x.size // e) * e if x.extent is None else x.size + (e - 1) / 2) / max(1, x.size)
            for x, e in zip(axes, extents, strict=True)
        )
        return over, -prod(min(e, 8) for e in extents[1:])

    shapes.sort(key=overhang)
    few += any(x.extent is not None for x in axes) * MORE
    return tuple(
        tuple(Block((x.name,), e) for x, e in zip(axes, extents, strict=True) if e > 1)
        for extents in shapes[:few]
    )


def rows_of_positions(
    axes: tuple[Axis, ...], volume: int, view: View, compute: Compute
) -> list[tuple[Block, ...]]:
    """Long rows of positions, for a tensor that has positions innermost; also one block of all axes but
    the first."""
    if len(axes) < 2 or rows_of_features(view.tensor, row_of(view, compute)):
        return []
    image = [(Block(tuple(x.name for x in axes[1:]), volume),)] if len(axes) > 2 else []
    return [*image, *tilings(axes, volume, 1, 16), *tilings(axes, volume, 1, 64)]


def summed_rows(axes: tuple[Axis, ...], extent: int, compute: Compute) -> list[tuple[Block, ...]]:
    """A block of each summed axis that has stride 1 in both operands."""
    views = [v for v in (compute.a, compute.b) if v is not None]
    return [
        (Block((x.name,), extent),)
        for x in axes
        if len(axes) > 1 and all(axis_strides(v, compute)[x.name] == 1 for v in views)
    ]


Run = tuple[tuple[str, ...], int]  # fused axes, and the number of their positions


def run_of(axes: tuple[Axis, ...], compute: Compute) -> Run:
    """All axes if they are contiguous in memory, else the innermost one."""
    run = axes if _one_run(axes, compute) else axes[-1:]
    return tuple(x.name for x in run), prod(x.size for x in run)


SHORT_ROW = 32  # bytes of features, of which a box would take the engine as long as a row


def runs_of(axes: tuple[Axis, ...], compute: Compute) -> list[Run]:
    """``run_of``, and a row of the window with its features, where these are few and both follow one
    another in the operands."""
    wide, found = tuple(x for x in axes if x.size > 1)[-2:], [run_of(axes, compute)]
    few = len(wide) == 2 and wide[1].size * compute.a.tensor.dtype.bytes <= SHORT_ROW
    if few and wide[0].role == "window" and _one_run(wide, compute, stored=False):
        found.append((tuple(x.name for x in wide), prod(x.size for x in wide)))
    return [*dict.fromkeys(found)]


def extents(run: Run, most: int = 256) -> tuple[int, ...]:
    """Extents along a run of features, without those that would be mostly padding."""
    least = min(most, 32) if most <= 64 else 64
    return tuple(e for e in (256, 128, 64, 32) if least <= e <= most and (e == least or e < 2 * run[1]))


MOST_TRIED = 1 << 12  # numbers of parts tried to find one that divides the steps


def splits(schedule: Schedule, compute: Compute, target: Target) -> list[int]:
    """Values of ``split_k``: 1, more parts if whole tiles leave multiprocessors idle, so that the programs
    fill whole waves, and more if an accumulator would take too many additions
    (proposals/accumulation_chains.py). Boxes need a number that divides the steps; others are faster with
    one."""
    if target.backend == "interpreter" or compute.b is None:
        return [1]
    tiles, steps = programs(schedule, compute), k_steps(schedule, compute)
    found = {1}
    for waves in (0.5, 1, 2, 3):
        split = min(int(waves * target.sms / tiles), steps // 4)
        if split < 2 or tiles > target.sms * 2:
            continue
        even = -(-steps // -(-steps // split))  # the fewest parts of the same length
        divisor = next(s for s in range(split, 0, -1) if steps % s == 0)
        found |= {divisor} if "box" in (schedule.a, schedule.b) else {even}
        found |= {divisor} if divisor * 4 >= split * 3 else set()
    if (least := fewest_parts(schedule, compute, target)) > 1:
        near = range(least, min(2 * least, least + MOST_TRIED))
        found.add(next((s for s in near if steps % s == 0), least))
    return sorted(found)


LONGEST = 1 << 15  # additions to one accumulator


def too_long(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether a schedule adds more than ``LONGEST`` products to one accumulator, on a CUDA target."""
    return target.backend == "cuda" and chain(schedule, compute) > LONGEST


def fewest_parts(schedule: Schedule, compute: Compute, target: Target) -> int:
    """The smallest ``split_k`` whose parts are not too long; 1 if the whole sum is not."""
    return -(-chain(schedule, compute) // LONGEST) if too_long(schedule, compute, target) else 1
