"""Edges of values and gradients in compiled graphs, against torch: rows of functional's table at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.functional.test_edges import ROWS

Tensor = torch.Tensor
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: torch.prod(x * 1.0, 1),
    "var": lambda x: torch.var(x * 1.0, 1, correction=9),
    "cross_entropy": lambda x: F.cross_entropy(
        x * 1.0, torch.arange(len(x)) % 4, ignore_index=2, reduction="sum"
    ),
    "maximum": lambda x: torch.maximum(x, x.flip(1) * 1.5),
    "std": lambda x: torch.std(x * 1.0, 1, correction=4),
    "amax": lambda x: (x * 2).amax(1),
    "normalize": lambda x: F.normalize(x * 1.0, dim=1),
    "relu": lambda x: torch.relu(x) * 2,
    "div": lambda x: x / (x.flip(1) * 2),
    "rsqrt": lambda x: x.rsqrt() * 2,
}


@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_graphs(name: str) -> None:
    call = CALLS[name]
    rows = torch.tensor([row for name, row in ROWS.items() if name not in ("huge", "near")])
    found = []
    for f in (torch.compile(call, backend="transconv", dynamic=False), call):
        x = rows.clone().requires_grad_()
        y = f(x)
        found.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))))
    assert transconv.stats().native["graph"] and not transconv.stats().fallback
    torch.testing.assert_close(*found, equal_nan=True, rtol=1e-4, atol=1e-5)
