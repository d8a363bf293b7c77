"""Stage 3, the choice. Legal configs for an algorithm on a target, the most promising first.

Candidates are built from what the axes count (pixels, taps, channels), filtered by ``why_not`` and
ranked by one estimate of their time: waves of programs times the cost of one. No tree of special
cases: a shape gets another tile because the estimate says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from transconv.algorithm import Algorithm, Axis
from transconv.config import Block, Config, k_steps, tile, why_not
from transconv.errors import ConfigError
from transconv.target import Target


def candidates(algorithm: Algorithm, target: Target) -> list[Config]:
    """Legal configs, best estimate first. Never empty for a legal algorithm."""
    legal = {c: estimate(c, algorithm, target) for c in _proposals(algorithm, target)
             if why_not(c, algorithm, target) is None}
    if not legal:
        raise ConfigError(f"no config is legal for {algorithm.name} on {target.name}")
    return sorted(legal, key=lambda c: (legal[c], str(c)))


def default(algorithm: Algorithm, target: Target) -> Config:
    """The config that is used when nobody says otherwise."""
    return candidates(algorithm, target)[0]


def _proposals(alg: Algorithm, target: Target) -> Iterator[Config]:
    batch, rows, columns, summed = (alg.axes_of(kind) for kind in "BMNK")
    matrix = (alg.b is not None and alg.acc.name != "f64" and "mma" in target.features
              and rows and columns and summed and _worth_the_matrix_unit(alg))
    if matrix:
        yield from _matrix(alg, target)
        if "box" in target.features and alg.a.tensor.dtype.bits == 16:
            yield from _boxes(alg, target)
    else:
        yield from _elementwise(alg, target)


def _worth_the_matrix_unit(alg: Algorithm) -> bool:
    """Depthwise and near-depthwise groups have too few columns to fill a 16-wide tile."""
    rows, columns, summed = (prod(x.size for x in alg.axes_of(kind)) for kind in "MNK")
    return not alg.axes_of("B") or min(rows, columns, summed) > 2


def fusable(axes: tuple[Axis, ...]) -> list[tuple[str, ...]]:
    """Ways to fuse the axes of one kind: pixels all together; channels alone, or with taps before
    them when there are fewer than 16."""
    pixels = tuple(x.name for x in axes if x.role == "pixel")
    if pixels and len(pixels) == len(axes):
        return [pixels]
    ways: list[tuple[str, ...]] = []
    for start in range(len(axes) - 1, -1, -1):
        ways.append(tuple(x.name for x in axes[start:]))
        if prod(x.size for x in axes[start:]) >= 16:
            break
    return ways[-1:]


def _matrix(alg: Algorithm, target: Target) -> Iterator[Config]:
    big = target.backend == "interpreter"
    extents = (16, 32, 64, 128, 256, 512) if big else (16, 32, 64, 128, 256)
    depths = (16, 32, 64, 128, 256, 512) if big else (16, 32, 64)
    shapes = [(m, n, k) for m in fusable(alg.axes_of("M")) for n in fusable(alg.axes_of("N"))
              for k in fusable(alg.axes_of("K"))]
    for m_axes, n_axes, k_axes in shapes:
        sizes = [prod(alg.size(a) for a in axes) for axes in (m_axes, n_axes, k_axes)]
        for m, n, k in itertools.product(extents, extents, depths):
            if any(e > 16 and e >= 2 * s for e, s in zip((m, n, k), sizes, strict=True)):
                continue
            warps = 8 if m * n >= 128 * 128 else 4
            config = Config((Block(m_axes, m), Block(n_axes, n), Block(k_axes, k)),
                            warps=warps, stages=4 if m * n <= 128 * 64 else 3)
            for split in _splits(config, alg, target):
                yield replace(config, split_k=split)


def tilings(axes: tuple[Axis, ...], volume: int, few: int = 3) -> list[tuple[Block, ...]]:
    """Boxes of ``volume`` positions over some axes, least overhang first: 14x14 images of 128 are
    tiled without loss by 32 images x 2 rows x 2 columns."""
    steps = range(volume.bit_length())
    shapes = [e for e in itertools.product(*([2**s for s in steps] for _ in axes))
              if prod(e) == volume and all(n <= 256 for n in e)]

    def overhang(extents: tuple[int, ...]) -> tuple[float, float]:
        over = prod(-(-x.size // e) * e / x.size for x, e in zip(axes, extents, strict=True))
        return over, -prod(min(e, 8) for e in extents[1:])

    shapes.sort(key=overhang)
    return [tuple(Block((x.name,), e) for x, e in zip(axes, extents, strict=True) if e > 1)
            for extents in shapes[:few]]


def _boxes(alg: Algorithm, target: Target) -> Iterator[Config]:
    """Pixels as boxes on the right side of the product, the other operand as its left side."""
    sides = {kind: alg.axes_of(kind) for kind in "MNK"}
    channel = {kind: (sides[kind][-1].name,) for kind in "MNK"}
    pixels = {kind: tuple(x for x in sides[kind] if x.role == "pixel") for kind in "MNK"}
    if pixels["M"] and len(pixels["M"]) == len(sides["M"]):
        whole = tuple(x.name for x in pixels["M"])
        for m, n, k in itertools.product((64, 128, 256), (64, 128, 256), (64, 32)):
            fused = (Block(whole, m),)
            for tiling in [fused, *tilings(pixels["M"], m, 2)]:
                blocks = (*tiling, Block(channel["N"], n), Block(channel["K"], k))
                yield from _box_words(blocks, m, n, alg, target, swap=1)
    elif pixels["K"] and len(pixels["K"]) == len(sides["K"]):
        whole = tuple(x.name for x in pixels["K"])
        for m, n, k in itertools.product((64, 128, 256), (64, 128, 256), (64,)):
            for tiling in [(Block(whole, k),), *tilings(pixels["K"], k, 2)]:
                blocks = (Block(channel["M"], m), Block(channel["N"], n), *tiling)
                yield from _box_words(blocks, m, n, alg, target, swap=1)


def _box_words(blocks: tuple[Block, ...], m: int, n: int, alg: Algorithm, target: Target,
               swap: int) -> Iterator[Config]:
    """The words that go with a tile: where the result goes, how many programs, warps and stages."""
    warps = 8 if m * n > 128 * 128 else 4
    config = Config(blocks, a="box", b="box", c="box", swap=swap, warps=warps,
                    stages=3 if m * n > 128 * 128 else 4)
    if why_not(config, alg, target):
        config = replace(config, c="gather")
        if why_not(config, alg, target):
            return
    if programs(config, alg) > target.sms:
        yield replace(config, programs=target.sms)
    for split in _splits(config, alg, target):
        yield replace(config, split_k=split, c=config.c if split == 1 else "gather")


def _elementwise(alg: Algorithm, target: Target) -> Iterator[Config]:
    """Products element by element: lanes along groups (or columns) and along pixels."""
    wide = (256, 1024) if target.backend == "interpreter" else (32, 64, 128, 256)
    lanes = [x.name for x in alg.axes_of("B")] or [x.name for x in alg.axes_of("N")]
    rows = fusable(alg.axes_of("M")) if alg.axes_of("M") else [()]
    if alg.b is None:  # a sum of parts: every element of C is alike, in memory order
        rows = [tuple(x.name for x in alg.axes_of("M"))]
    sums = fusable(alg.axes_of("K")) if alg.axes_of("K") else [()]
    pixels_summed = any(x.role in ("pixel",) for x in alg.axes_of("K"))
    for r, s in itertools.product(rows, sums):
        for m, n, k in itertools.product((1, *wide), (1, *wide), (16, 64) if pixels_summed else (1,)):
            blocks = []
            if r:
                blocks.append(Block(r, m))
            if lanes:
                blocks.append(Block((lanes[-1],), n))
            if s and k > 1:
                blocks.append(Block(s, k))
            config = Config(tuple(b for b in blocks if b.extent > 1), "fma", warps=4, stages=2)
            steps = k_steps(config, alg)
            unroll = 1 if steps <= 25 and target.backend != "interpreter" else 0
            for split in _splits(config, alg, target):
                yield replace(config, unroll=unroll, split_k=split)


def programs(config: Config, alg: Algorithm) -> int:
    """How many programs the kernel has."""
    count = config.split_k
    for kind in "BMN":
        for b in config.blocks:
            if alg.kind(b.axes[0]) == kind:
                count *= -(-prod(alg.size(a) for a in b.axes) // b.extent)
        count *= prod(x.size for x in alg.axes_of(kind) if config.block_of(x.name) is None)
    return max(1, count)


def _splits(config: Config, alg: Algorithm, target: Target) -> list[int]:
    """Split the sum only where whole tiles leave multiprocessors idle."""
    if target.backend == "interpreter" or alg.b is None:
        return [1]
    free = target.sms / programs(config, alg)
    steps = k_steps(config, alg)
    return [1] + [s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
                  if s <= 2 * free and s * 4 <= steps]


# Cycles, fitted to sweeps of the gather kernels on sm_90 (16-bit operands).
MACS_PER_CYCLE = {"mma": 4096.0, "fma": 96.0}
ADDRESS_CYCLES = 0.0085  # per gathered element
STEP_CYCLES = 40.0
PROGRAM_CYCLES = 1800.0
STORE_CYCLES = 0.05  # per element of the result


def estimate(config: Config, alg: Algorithm, target: Target) -> float:
    """Estimated cycles: waves of programs x (steps x cost of a step + start and store)."""
    m, n, k = (tile(config, alg, kind) for kind in "MNK")
    group = tile(config, alg, "B")
    count = programs(config, alg)
    steps = -(-k_steps(config, alg) // config.split_k)
    fetched = (m * k + k * n) * group
    if target.backend == "interpreter":  # a step costs the same whatever its size, up to a point
        return count * (steps * (1 + fetched / 2**17 + m * n * group * k / 2**24) + 2)
    macs = m * n * k * group / MACS_PER_CYCLE[config.unit]
    if config.unit == "mma":
        macs *= 1.0 if m >= 64 else 2.0
        macs *= 1.0 + 16.0 / n
    boxed = config.a == "box" and config.b == "box"
    step = macs + (0.0 if boxed else fetched * ADDRESS_CYCLES) + STEP_CYCLES
    result = m * n * group
    finish = result * STORE_CYCLES * (1 if config.split_k == 1 else 3)
    if config.programs:  # the next tile's loads run behind the store
        finish /= 2
    resident = max(1, min(4, 8 // config.warps))
    sms = target.sms or 100
    waves = count / (sms * resident)
    whole = max(1.0, -(-count // (sms * resident)))
    busy = 0.6 * whole + 0.4 * max(1.0, waves)
    one = (steps * step + finish) * resident + PROGRAM_CYCLES
    second = 4000.0 if config.split_k > 1 else 0.0
    total = prod(x.size for x in alg.axes if alg.kind(x.name) != "K")
    return busy * one + second + (total * config.split_k / sms * 0.02 if config.split_k > 1 else 0.0)
