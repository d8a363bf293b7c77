"""Tensors for the GPU tests, and what they are held to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import transconv
from tests.gpu import cases as c

on_gpu = pytest.mark.skipif(not c.HAS_GPU, reason="needs a GPU")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=c.DEVICE, dtype=dtype).requires_grad_(grad)


def integers(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Small integers: every sum of products is exact, so results must agree bit for bit."""
    return torch.randint(-2, 3, shape, device=c.DEVICE).to(dtype).requires_grad_(grad)


def operands(
    make: Callable[..., torch.Tensor] = integers, dtype: torch.dtype = torch.float32, grad: bool = True
) -> tuple[torch.Tensor, ...]:
    return (
        make(2, 16, 9, 10, dtype=dtype, grad=grad),
        make(8, 8, 3, 3, dtype=dtype, grad=grad),
        make(8, dtype=dtype, grad=grad),
    )


def grads(y: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of a loss whose values are small integers if those of y are."""
    weights = torch.arange(y.numel(), device=y.device).view(y.shape) % 3 - 1
    return torch.autograd.grad((y * weights.to(y.dtype)).sum(), leaves)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def native(at_least: int = 1) -> None:
    """Something was computed by generated kernels, and nothing by torch."""
    seen = transconv.stats()
    strange = [r for r in seen.fallback if not c.documented(r)]
    assert not strange, seen
    assert sum(seen.native.values()) >= at_least or c.DEVICE == "cpu", seen
