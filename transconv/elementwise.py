"""Stage 3, proposals without the matrix unit: products element by element, sums of parts, and copies.

    mb.oh.ow:32 g:64 | fma | a=gather b=gather | unroll=1 stages=2 warps=4
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from transconv.algorithm import Algorithm, Axis
from transconv.config import Block, Config
from transconv.counts import k_steps
from transconv.strides import axis_strides
from transconv.target import Target
from transconv.tiling import fusable, splits

MOST_UNROLLED = 25  # steps of a sum element by element
MOST_PRODUCTS = 4096  # that a program of 4 warps keeps in registers, with their addresses


def elementwise(alg: Algorithm, target: Target) -> Iterator[Config]:
    """Products element by element: lanes along groups (or columns) and along pixels."""
    big = target.backend == "interpreter"
    wide = (256, 1024) if big else (32, 64, 128, 256)
    few = (1,) if big else (1, 4, 16)
    lanes = [x.name for x in alg.axes_of("B")] or [x.name for x in alg.axes_of("N")]
    rows = fusable(alg.axes_of("M"), alg) if alg.axes_of("M") else [()]
    if alg.b is None:  # a sum of parts: every element of C is alike, in memory order
        rows = [tuple(x.name for x in alg.axes_of("M"))]
        wide = wide if big else (*wide, 512, 1024)
    sums = fusable(alg.axes_of("K"), alg) if alg.axes_of("K") else [()]
    many = alg.b is None and prod(x.size for x in alg.axes_of("K")) > MOST_UNROLLED
    depths = (16, 64) if alg.sums_pixels else (1, 8, 32) if many else (1,)
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
            config = Config(tuple(b for b in blocks if b.extent > 1), "fma", warps=4, stages=2)
            steps = k_steps(config, alg)
            unroll = 1 if steps <= MOST_UNROLLED and not big else 0
            for split in splits(config, alg, target):
                if k == 1 or not many:
                    yield replace(config, unroll=unroll, split_k=split)
                if k > 1 and not big:
                    yield replace(config, split_k=split, late=1, stages=1)


def copy_tiles(alg: Algorithm, target: Target) -> Iterator[Config]:
    """Square tiles of pixels and channels: rows of 128 bytes on either side. Few channels are rows of
    their own, and what is one run of memory is cut into pieces of it."""
    pixels = tuple(x.name for x in alg.axes if x.role == "pixel")
    channels = next(x for x in alg.axes if x.role == "channel")
    big = target.backend == "interpreter"
    sides = (128, 256) if big else (32, 64, 128)
    if not pixels:
        yield from (Config((Block((channels.name,), n),), "fma", stages=1) for n in (1024, 2048, 4096))
        return
    tiles = itertools.product(sides, repeat=2)
    if 0 < channels.size < sides[0]:
        tiles = itertools.product((128, 256, 512), (1 << (channels.size - 1).bit_length(),))
    for m, n in tiles:
        for axes in dict.fromkeys((pixels, pixels[-1:])):
            blocks = (Block(axes, m), Block((channels.name,), n))
            yield Config(blocks, "fma", warps=8 if m * n > 64 * 64 else 4, stages=1)


def turned_tiles(alg: Algorithm, target: Target) -> Iterator[Config]:
    """Sums of parts that lie in another order than the result: square tiles, as for copies."""
    rows = [x for x in alg.axes_of("M") if x.size > 1]
    if len(rows) < 2 or target.backend == "interpreter":
        return
    first, last = (_innermost(rows, axis_strides(v, alg)) for v in (alg.a, alg.c))
    if first is not last:
        others = tuple(x.name for x in rows if x is not first)
        for m, n in itertools.product((32, 64), repeat=2):
            yield Config((Block(others, m), Block((first.name,), n)), "fma", warps=4, stages=2)


def _innermost(axes: list[Axis], strides: dict[str, int]) -> Axis:
    return min(axes, key=lambda x: strides[x.name])
