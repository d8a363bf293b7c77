"""Zeros around an image are the padding of the convolution that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import by_meaning, compare, traced
from transconv.graph.lowerings import products

Tensor = torch.Tensor


@pytest.fixture
def paddings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of the convolutions that are described."""
    found: list[tuple[int, ...]] = []
    real = products.describe

    def noted(*given: Any) -> Any:
        found.append(given[4].padding)
        return real(*given)

    monkeypatch.setattr(products, "describe", noted)
    return found


def causal(x: Tensor) -> Tensor:
    return F.pad(F.pad(x, (0, 0, 0, 0, 2, 0)), (1, 1, 1, 1, 0, 0))


@pytest.mark.parametrize(
    ("pad", "padding", "want"),
    [
        (lambda x: F.pad(x, (0, 1, 0, 1)), 1, (1, 1, 2, 2)),
        (lambda x: F.pad(x, (1, 1)), 0, (0, 1)),
        (causal, 0, (2, 1, 1, 0, 1, 1)),
        (lambda x: F.pad(x, (1, 1, 1, 1), value=2.0), 0, (0, 0)),
        (lambda x: F.pad(x, (1, -1, 0, 0)), 1, (1, 1)),
        (lambda x: F.pad(x, (1, 1, 0, 0, 0, 1)), 1, (1, 1)),
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), 0, (0, 0)),
    ],
    ids=["behind", "one dim", "causal", "another number", "cut", "features", "no zeros"],
)
def test_the_convolution_has_it(
    pad: Callable[[Tensor], Tensor], padding: int, want: tuple[int, ...], paddings: list[tuple[int, ...]]
) -> None:
    spatial = 3 if pad is causal else 2
    x = torch.randn(1, 2, *(4, 5, 3)[:spatial], dtype=torch.float64)
    w = torch.randn(2, pad(x).shape[1], *(3,) * spatial, dtype=torch.float64)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return ((F.conv3d if spatial == 3 else F.conv2d)(pad(x), w, padding=padding),)

    with torch.no_grad(), by_meaning():
        compare(f, traced(f, [x, w]), [x, w], 1e-12)
    assert paddings == [want]
