"""Stage 3, proposals for depthwise filters: the taps of a row slide over pixels in registers.

    mb.oh:32 ow:8 g:32 kw:7 | regs=ow.kw          14 pixels loaded for 56 products, 8 channels each

Lanes run along channels, as many in a thread as one access takes, and along rows of pixels; a few
pixels of the row and all taps of a row of the filter (or of all rows, when they are few) are written
out. Where pixels are summed, each lane keeps its own sum until the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from transconv.algorithm import Algorithm, Axis
from transconv.config import Block, Config
from transconv.issue import ACCESS
from transconv.legality import MOST_WRITTEN
from transconv.packing import over_copies, rows_of_channels
from transconv.strides import axis_strides
from transconv.target import Target
from transconv.tiling import splits

CHANNELS = (64, 128, 256, 512, 1024, 32, 16)
ALONG = 8  # positions of an axis that are written out at most
LONGEST = 32  # or all of an axis of no more
WASTE = 1.2  # positions with those beyond the end, relative to those that there are


def sliding(alg: Algorithm, target: Target) -> Iterator[Config]:
    """Configs worth asking about, legal or not. Where channels are apart, what slides is copied first;
    a result whose channels are apart is stored as it lies, or copied after."""
    if target.backend == "interpreter" or alg.b is None or not alg.axes_of("B"):
        return
    apart = [x for x, v in (("a", alg.a), ("b", alg.b)) if not rows_of_channels(v.tensor)]
    summed = alg.sums_pixels
    filters = [x for x in apart if x == "b" and not summed]
    after = [] if summed or rows_of_channels(alg.c.tensor) else [".".join((*apart, "c"))]
    for pack in dict.fromkeys(("", *filters, ".".join(apart), *after)):
        seen = over_copies(alg, pack)
        if axis_strides(seen.a, seen)[alg.axes_of("B")[-1].name] == 1:
            yield from (replace(c, pack=pack) for c in _over_rows(seen, summed, target))


def _over_rows(alg: Algorithm, summed: bool, target: Target) -> Iterator[Config]:
    """The configs for tensors whose channels are next to one another."""
    group = alg.axes_of("B")[-1]
    pixels = [x for x in alg.axes_of("K" if summed else "M") if x.role == "pixel"]
    taps = [x for x in alg.axes_of("M" if summed else "K") if x.role == "tap"]
    if not pixels or not taps:
        return
    for channels, held in product(CHANNELS, (1, 2)):
        if channels > CHANNELS[-1] and -(-group.size // channels) * channels > WASTE * group.size:
            continue
        deep = ACCESS // alg.a.tensor.dtype.bytes // held
        for blocks, regs in _written(pixels[-1], taps):
            for other, rows in _rows(pixels[:-1], taps, regs, summed, 128 * deep // channels):
                config = Config((*other, *rows, *blocks, Block((group.name,), channels)), "fma",
                                regs=".".join(regs), late=int(summed and bool(rows)), stages=1)
                for split in splits(config, alg, target)[-2:]:
                    yield replace(config, split_k=split)


def _written(pixel: Axis, taps: list[Axis]) -> Iterator[tuple[tuple[Block, ...], list[str]]]:
    """Blocks of a row's pixels and of the taps that slide over them, and the axes they are of."""
    rows = [[taps[-1]], [*taps[-2:]]] if len(taps) > 1 and taps[-2].size > 1 else [[taps[-1]]]
    for along, axes in product(_even(pixel.size), rows):
        for last in _even(taps[-1].size) if len(axes) == 1 else [taps[-1].size]:
            named = [(pixel, along), *((x, x.size) for x in axes[:-1]), (axes[-1], last)]
            if prod(n for _, n in named) > MOST_WRITTEN:
                continue
            blocks = tuple(Block((x.name,), n) for x, n in named if n > 1)
            yield blocks, [b.axes[0] for b in blocks]


def _even(size: int) -> list[int]:
    """Extents that divide an axis with little waste: the two largest, all of a short axis, and half."""
    found = [n for n in range(min(ALONG, size), 0, -1) if -(-size // n) * n <= WASTE * size]
    whole = [size] if ALONG < size <= LONGEST else []
    return [*whole, *found[:2], *(n for n in found[2:] if n == ALONG // 2)]


def _rows(pixels: list[Axis], taps: list[Axis], written: list[str], summed: bool,
          count: int) -> Iterator[tuple[tuple[Block, ...], tuple[Block, ...]]]:
    """Lanes along ``count`` rows; also along rows of the filter, where each has its own sums."""
    names = tuple(x.name for x in pixels if x.size > 1) or tuple(x.name for x in pixels[-1:])

    def lanes(n: int) -> tuple[Block, ...]:
        return (Block(names, n),) if names and n > 1 else ()

    if count >= 1:
        yield (), lanes(count)
    if summed and len(taps) > 1 and taps[-2].name not in written:
        down = 1 << (taps[-2].size - 1).bit_length()
        for rows in dict.fromkeys((min(down, 8), min(down, 4), 2)):
            if 1 < rows <= count:
                yield (Block((taps[-2].name,), rows),), lanes(count // rows)
