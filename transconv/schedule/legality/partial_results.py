"""When a schedule may leave parts of statistics (tiles/partial_results.py)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from transconv.compute import Compute, Write
from transconv.compute.analysis import statistics as stat
from transconv.schedule.tiles.partial_results import blocks_of_sides, is_mixed, is_within
from transconv.target import Target

if TYPE_CHECKING:
    from transconv.schedule.schedule import Schedule

FEWEST = 8  # values that a tile combines into a part, if there are as many


def why_not_partials(c: Schedule, compute: Compute, target: Target) -> str | None:
    """The rule of statistics: tiles must hold whole results, and those of products reduce something."""
    for w in compute.statistics:
        name = f"{w.view.tensor.name} {w.op}="
        if c.split_k > 1 or c.reduce == "stream":
            return f"{name} reduces whole results, a program has a part of the sum; expected split_k=1"
        if c.regs:
            return f"{name} reduces lanes, regs={c.regs} writes positions out"
        if compute.factors is not None and (reason := _why_not_smaller(w, c, compute)):
            return f"{name} {reason}"
    return None


def _why_not_smaller(write: Write, c: Schedule, compute: Compute) -> str | None:
    """The reason if tiles leave nearly as many parts as they have values."""
    kept = stat.kept(write) or {}
    groups = blocks_of_sides(compute, c)
    crossing = [next((b for b in blocks if not is_within(b, kept, compute)), None) for blocks in groups]
    combined = prod(b.extent for blocks, bad in zip(groups, crossing, strict=True) if bad is None
                    for b in blocks)
    free = [x for x in compute.axes if x.name not in kept and compute.kind(x.name) != "K"]
    if combined >= min(FEWEST, prod(x.size for x in free)):
        return None
    for blocks, block in zip(groups, crossing, strict=True):
        if block is not None and is_mixed(blocks, kept):
            crossed = next(a for a in block.axes if a in kept)
            return (f"keeps {crossed}, and block {block} crosses its positions; expected a block within "
                    f"one position of {crossed}")
    return (f"has {combined} value{'s' * (combined > 1)} in a tile; expected larger blocks of "
            f"{' '.join(x.name for x in free)}")
