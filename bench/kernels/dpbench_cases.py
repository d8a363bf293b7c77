"""The kernels of IntelPython/dpbench: what they compute, in torch, and their data."""

from __future__ import annotations

import torch

from bench.kernels.cases import FAR, Arguments, Draw, KernelCase


def _options(draw: Draw, n: int) -> Arguments:
    return 10 + 40 * draw(n), 10 + 40 * draw(n), 1 + draw(n)


def _priced(price: torch.Tensor, strike: torch.Tensor, years: torch.Tensor) -> tuple[torch.Tensor, ...]:
    spread = 0.2 * years.sqrt()
    d = ((price / strike).log() + 0.12 * years) / spread
    one, two = (0.5 + 0.5 * torch.erf(x * 0.5**0.5) for x in (d, d - spread))
    now = strike * (-0.1 * years).exp()
    call = price * one - now * two
    return call, call - price + now


def _apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def _all_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As torch.compile fuses it; torch.cdist without products of matrices takes a second."""
    return ((a[:, None] - b[None]) ** 2).sum(2).sqrt()


def _step(points: torch.Tensor, centres: torch.Tensor, steps: int) -> tuple[torch.Tensor, ...]:
    near = torch.zeros(len(points))
    for _ in range(steps):
        near = ((points[:, None] - centres[None]) ** 2).sum(2).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, near, points)
        counts = torch.zeros_like(centres[:, 0]).index_add_(0, near, torch.ones_like(points[:, 0]))
        centres = sums / counts.clamp_min(1)[:, None]
    return centres, near


def _galaxies(draw: Draw, n: int, bins: int) -> Arguments:
    radii = torch.logspace(-1, 1.7, bins, device=draw(1).device) ** 2
    return draw(n, 3) * 50, draw(n), draw(n, 3) * 50, draw(n), radii


def _weighed(
    a: torch.Tensor, wa: torch.Tensor, b: torch.Tensor, wb: torch.Tensor, radii: torch.Tensor
) -> torch.Tensor:
    apart = ((a[:, None] - b[None]) ** 2).sum(2)
    weights = wa[:, None] * wb[None]
    return torch.stack([torch.where(apart <= r, weights, 0.0).sum() for r in radii])


def _momenta(cosines: torch.Tensor, angles: torch.Tensor, energies: torch.Tensor) -> torch.Tensor:
    c, f, e = 2 * cosines - 1, 2 * torch.pi * angles, -energies.log()
    s = (1 - c * c).sqrt()
    return torch.stack([e, e * s * f.sin(), e * s * f.cos(), e * c], 2)


def _neighbours(draw: Draw, points: int, known: int, dims: int) -> Arguments:
    return draw(known, dims), (draw(known) * 3).int(), draw(points, dims), 5, 3


def _voted(
    known: torch.Tensor, classes: torch.Tensor, points: torch.Tensor, k: int, kinds: int
) -> torch.Tensor:
    found = []
    for some in points.split(1 << 18):  # distances of all at once are large
        near = torch.cdist(some, known).topk(k, largest=False).indices
        votes = (classes[near][:, :, None] == torch.arange(kinds, device=points.device)).sum(1)
        found.append(votes.argmax(1))
    return torch.cat(found)


def _blobs(draw: Draw, n: int, dims: int) -> Arguments:
    centres = draw(10, dims) * 20
    kinds = (draw(n) * 10).long().clamp_max(9)
    return (centres[kinds] + (draw(n, dims) + draw(n, dims) - 1)).contiguous(), 1.8, 20


def _labels(x: torch.Tensor, radius: float, least: int) -> torch.Tensor:
    close = _apart(x, x) <= radius
    found = close.sum(1)
    core, places = found >= least, torch.arange(len(x), dtype=torch.int32, device=x.device)
    labels, before = torch.where(core, places, FAR), None
    while before is None or not torch.equal(labels, before):
        before = labels
        reached = torch.where(close & core[None], labels[None], FAR).amin(1)
        labels = torch.minimum(labels, reached)
    return labels


DPBENCH = (
    KernelCase("Black-Scholes", "black_scholes", (1 << 27,), (700,), _options, _priced, True),
    KernelCase(
        "pairwise distance",
        "pairwise_distance",
        (32768, 3),
        (70, 3),
        lambda draw, n, d: (draw(n, d), draw(n, d)),
        _all_apart,
        True,
        exact=lambda a, b: _apart(a[:2048], b),
        part=lambda t: t[:2048],
    ),
    KernelCase(
        "l2 norm",
        "l2_norm",
        (1 << 28, 3),
        (700, 3),
        lambda draw, n, d: (draw(n, d) - 0.5,),
        lambda x: (x * x).sum(1).sqrt(),
        True,
        part=lambda t: t[: 1 << 24],
    ),
    KernelCase(
        "k-means, a step",
        "k_means",
        (1 << 20, 10, 2),
        (700, 5, 2),
        lambda draw, n, c, d: (draw(n, d), draw(c, d), 1),
        _step,
        True,
    ),
    KernelCase("GPairs", "gpairs", (8192, 20), (70, 5), _galaxies, _weighed, True),
    KernelCase(
        "Rambo",
        "rambo",
        (1 << 23, 4),
        (70, 4),
        lambda draw, n, k: tuple(draw(n, k).clamp(1e-6, 1 - 1e-6) for _ in "cfe"),
        _momenta,
        True,
    ),
    KernelCase(
        "nearest neighbours", "nearest_neighbours", (1 << 20, 1024, 16), (40, 30, 4), _neighbours, _voted
    ),
    KernelCase("DBSCAN", "dbscan", (8192, 10), (100, 3), _blobs, _labels),
)
"""dpbench's sizes M (for GPairs and DBSCAN 8192 points, L has 524,288 and 16,384). Of nearest neighbours
there are 2^20 points instead of 2^23. Of Black-Scholes, rates and volatility are 0.1 and 0.2."""
