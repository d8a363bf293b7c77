"""Sine and cosine behind a product, where one number of a tile sends its program the slow way."""

from __future__ import annotations

import pytest
import torch

import transconv

TEXT = """compute wave
    tensor x f32 [m=40, k=16]
    tensor w f32 [n=24, k=16]
    axes   m=40 n=24 | k=16
    read   u = x[m, k]
    read   v = w[n, k]
    let    s = sum(u*v; k)
    let    z = s*0.5 + {name}(s)
    store  y[m, n] = z"""


@pytest.mark.parametrize("given", [1.0, 70_000.0, 3e7, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_numbers_of_any_size(name: str, given: float) -> None:
    """Sums of whole numbers are exact. What is no number is none, and its neighbours are what they are."""
    transconv.config.cpu = "interpret"
    x = torch.randint(-4, 5, (40, 16), generator=torch.Generator().manual_seed(2)).float()
    w = torch.eye(24, 16) * 3
    x[7, 5], x[0, 0] = given, -0.0
    found = transconv.computation(TEXT.format(name=name))(x, w)
    s = x.double() @ w.double().t()
    torch.testing.assert_close(
        found.double(), s * 0.5 + getattr(torch, name)(s), rtol=3e-7, atol=3e-7, equal_nan=True
    )
    assert transconv.stats().native
