"""Which element of a window is its largest, as torch has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv import functional as ours

NUMBERS: list[tuple[int, dict[str, Any]]] = [
    (1, {"kernel_size": 3, "stride": 2, "padding": 1}),
    (2, {"kernel_size": 3, "padding": 1, "dilation": 2}),
    (2, {"output_size": 4}),
    (3, {"kernel_size": 2, "stride": 1, "padding": 1}),
]


def same_places(n: int, numbers: dict[str, Any], device: str) -> None:
    """Largest elements, their places and gradients are torch's, where windows have several NaN or -inf
    alone."""
    name = f"{'adaptive_max' if 'output_size' in numbers else 'max'}_pool{n}d"
    x = torch.randint(0, 3, (2, *(4, 7, 9)[-n:])).float()
    x[torch.rand(x.shape) < 0.4] = float("nan")
    x[0] = -float("inf")
    a, b = (x.to(device).requires_grad_() for _ in range(2))
    (y, at), (want, place) = (
        getattr(of, name)(t, **numbers, return_indices=True) for of, t in ((ours, a), (F, b))
    )
    assert torch.equal(at, place)
    torch.testing.assert_close(y, want, equal_nan=True)
    g = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(y, a, g), torch.autograd.grad(want, b, g))
    assert transconv.stats().native == {name: 1, f"{name}_gradient": 1}


@pytest.mark.every(2)
@pytest.mark.parametrize(("n", "numbers"), NUMBERS)
def test_of_several_nan_the_last_is_the_largest(n: int, numbers: dict[str, Any]) -> None:
    """And of a row of -inf the first element, never the padding."""
    same_places(n, numbers, "cpu")
