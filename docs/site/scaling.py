"""The tables of docs/scaling.md: what ranks receive of each other, from the relation of the convolutions.

Every convolution of a network is sharded over a grid of ranks. ``python -m docs.site.scaling`` writes the
tables anew; nothing is measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from transconv.conv import ConvProblem, ListedLayer, Prop, read, select
from transconv.distributed.halo import SpatialAxis, planned, shards

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scaling.md"
RANKS = (2, 8, 64, 512, 4096)
# Networks of bench/problems: title, list, layers, times the spatial sizes of the list.
NETWORKS = (
    ("3D U-Net, 256x256x256, batch 2", "unet3d", "", 2),
    ("SDXL's decoder, 1024x1024, batch 2", "sdxl", "decoder", 1),
    ("U-Net with valid convolutions, 572x572, batch 1", "unet2d", "", 1),
)
MOST = 64  # ranks along one axis
BYTES = 2  # of an element of bf16


@dataclass(frozen=True)
class Cost:
    """Of one rank in one training step: multiply-adds, and bytes that it receives."""

    macs: int
    received: int


@dataclass(frozen=True)
class Share:
    """Of one rank along one axis: its rows of src and dst, those it needs, and those it receives."""

    src: int
    dst: int
    needs: tuple[int, int]
    receives: tuple[int, int]


@cache
def along(line: SpatialAxis, parts: int) -> tuple[Share, ...]:
    """The different shares of the ranks along one axis."""
    src, dst = shards(line.i, parts), shards(line.o, parts)
    found = []
    for rank in range(parts):
        plans = planned(line, Prop.FWD, parts, rank), planned(line, Prop.BWD_D, parts, rank)
        found.append(
            Share(
                src[rank].size,
                dst[rank].size,
                (plans[0].needed.size, plans[1].needed.size),
                (plans[0].received, plans[1].received),
            )
        )
    return tuple(dict.fromkeys(found))


def cost(p: ConvProblem, grid: tuple[int, ...]) -> Cost:
    """The largest of any rank."""
    lines = [
        SpatialAxis(*sizes) for sizes in zip(p.i, p.o, p.k, p.stride, p.dilation, p.pad_lo, strict=True)
    ]
    shares = [along(line, n) for line, n in zip(lines, grid, strict=True)]
    every = list(itertools.product(*shares))
    macs = max(prod(s.dst for s in rank) for rank in every) * prod(p.k) * p.oc * p.icg * p.mb * 3
    received = max(p.mb * (p.ic * _elements(rank, 0) + p.oc * _elements(rank, 1)) for rank in every)
    return Cost(macs, received * BYTES)


def _elements(rank: tuple[Share, ...], which: int) -> int:
    """Received for each channel of an image: axis after axis, with what came along the ones before."""
    total = 0
    for at, share in enumerate(rank):
        others = [r.needs[which] for r in rank[:at]] + [(r.src, r.dst)[which] for r in rank[at + 1 :]]
        total += share.receives[which] * prod(others)
    return total


def layers(name: str, pattern: str, times: int) -> Iterator[tuple[ConvProblem, int]]:
    """The convolutions of a network, and how often each occurs."""
    for layer in select(read(ROOT / "bench" / "problems" / f"{name}.txt"), pattern):
        yield _larger(layer, times), int(layer.name.partition("*")[2] or 1)


def _larger(layer: ListedLayer, times: int) -> ConvProblem:
    p = layer.shape
    return p if times == 1 else p.at(p.mb, tuple(n * times for n in p.i), tuple(n * times for n in p.o))


def grids(ranks: int, ndims: int) -> Iterator[tuple[int, ...]]:
    """Ways to write the number of ranks as a product of powers of two, none above ``MOST``."""
    if ndims == 1:
        if ranks <= MOST:
            yield (ranks,)
        return
    for first in (2**n for n in range(min(ranks, MOST).bit_length())):
        yield from ((first, *rest) for rest in grids(ranks // first, ndims - 1))


def best(problems: list[tuple[ConvProblem, int]], ranks: int) -> tuple[tuple[int, ...], int, int]:
    """The grid on which the busiest rank receives the fewest bytes; its operations and bytes in a step."""
    found = []
    for grid in grids(ranks, problems[0][0].ndims):
        costs = [(cost(p, grid), n) for p, n in problems]
        found.append((sum(c.received * n for c, n in costs), sum(c.macs * n for c, n in costs), grid))
    received, macs, grid = min(found)
    return grid, 2 * macs, received


def table(name: str, pattern: str, times: int) -> str:
    """One network's table."""
    problems = list(layers(name, pattern, times))
    lines = [
        "| ranks | grid | Gflop a rank | of an even share | MB received a rank | flop a byte |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    one = sum(2 * cost(p, (1,) * p.ndims).macs * n for p, n in problems)
    for ranks in RANKS:
        grid, flops, received = best(problems, ranks)
        digits = 1 if flops < 1e11 else 0
        lines.append(
            f"| {ranks} | {'x'.join(map(str, grid))} | {flops / 1e9:,.{digits}f} | "
            f"{flops * ranks / one:.2f} | {received / 1e6:,.1f} | {flops / received:,.0f} |"
        )
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables made anew, below the headings of their networks."""
    for title, name, pattern, times in NETWORKS:
        head, found, rest = text.partition(f"## {title}\n")
        if not found:
            raise ValueError(f"docs/scaling.md has no heading '{title}'")
        before, _, after = rest.partition("| ranks |")
        below = after.partition("\n\n")
        text = f"{head}{found}{before}{table(name, pattern, times)}\n\n{below[2]}"
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
