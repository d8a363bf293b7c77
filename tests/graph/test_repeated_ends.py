"""Concatenations of a value with repetitions of its first or last elements are views of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import by_meaning, compare
from transconv.graph import backend, report
from transconv.graph.regions import region_kernels

Tensor = torch.Tensor
W = torch.randn(8, 8, 3, 3, 3) / 15


def frames(x: Tensor, at: int, count: int) -> Tensor:
    return x[:, :, at : at + 1 or None].expand(-1, -1, count, -1, -1)


def causal(x: Tensor) -> Tensor:
    """A convolution before whose first frame that frame stands, as in video autoencoders."""
    y = F.silu(x)
    return F.conv3d(F.pad(torch.cat([frames(y, 0, 2), y], 2), (1, 1, 1, 1, 0, 0)), W)


def both(x: Tensor) -> Tensor:
    return torch.cat([frames(x, 0, 2), x, frames(x, -1, 1)], 2) * 2


def second(x: Tensor) -> Tensor:
    """Not the first frame: parts as before."""
    return torch.cat([frames(x, 1, 2), x], 2) * 2


@pytest.mark.parametrize(
    ("f", "seen", "kernels"), [(causal, "max(", 2), (both, "min(", 1), (second, "where(", 1)]
)
def test_no_copy(f: Callable[[Tensor], Tensor], seen: str, kernels: int) -> None:
    x = torch.randn(1, 8, 3, 4, 5)
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        compare(f, run, [x], 1e-5, gradients=False)
    (graph,) = report(run).graphs
    assert len(graph.kernels) == kernels and any(seen in k.text for k in graph.kernels), graph


def test_a_copy_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that one kernel needs, and a copy of it that another one needs."""
    monkeypatch.setattr(
        region_kernels, "why_again", lambda kernel, rates: "read again" if kernel.group.statistics else ""
    )

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv3d(x, W, padding=1) + x
        z = y.clone()
        return (z - z.mean((2, 3, 4), True)) * 2, F.conv3d(y, W, padding=1)

    x = torch.randn(1, 8, 3, 4, 5)
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        compare(f, run, [x], 1e-5, gradients=False)
    (graph,) = report(run).graphs
    assert [k.text.count("store  ") for k in graph.kernels] == [1, 1, 1], graph


def test_gradients() -> None:
    x = torch.randn(1, 8, 3, 4, 5)
    run = torch.compile(causal, backend=backend, options={"rest": "eager"})
    with by_meaning():
        compare(causal, run, [x], 1e-4)
