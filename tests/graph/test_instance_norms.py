"""Instance norms are group norms with a group for each feature; deciding what is written first ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.graph.meant import by_meaning, compare
from transconv.graph import backend, report
from transconv.graph.regions import region_kernels

Tensor = torch.Tensor


def test_between_convolutions() -> None:
    w, scale = torch.randn(8, 8, 1, 1) / 8, torch.rand(8).requires_grad_()

    def f(x: Tensor, scale: Tensor) -> Tensor:
        y = F.leaky_relu(F.instance_norm(F.conv2d(x, w), None, None, scale, eps=1e-3))
        return F.conv2d(y, w)

    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning():
        compare(f, run, [torch.randn(2, 8, 2, 3, requires_grad=True), scale], 1e-3)
    assert "norm" in {label for g in report(run).graphs for k in g.kernels for label in k.operations}


def test_weights_of_a_wider_type() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.instance_norm(x, weight=w)

    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    x = torch.randn(2, 3, 4, 5)
    with torch.no_grad(), by_meaning():
        got = run(x, torch.full((3,), 2.0, dtype=torch.float64))
    assert got.dtype is x.dtype and torch.allclose(got, 2 * F.instance_norm(x), atol=1e-5)


@pytest.mark.slow
def test_deciding_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is said of each product, each time, that its factors should be written."""

    def dear(*_: Any) -> str:
        return "is dear"

    monkeypatch.setattr(region_kernels, "why_apart", dear)
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3))

    def f(x: Tensor) -> Tensor:
        return model(x.exp().view(2, 8, 4, 4).sin().flip(2))

    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning():
        compare(f, run, [torch.randn(1, 16, 4, 4, requires_grad=True)], 1e-3)
