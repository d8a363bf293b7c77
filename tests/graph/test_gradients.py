"""Gradients of pools and pads, which gather, for given sizes and for any; those of activations, which are
within the bounds of the table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.bounds import bound_of, excess, points
from tests.graph.meant import by_meaning, compare
from transconv.compute import OPS
from transconv.graph import KernelRow, backend, report
from transconv.ir import DType, bf16, f16, f32, f64

Tensor = torch.Tensor

CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # whether sizes are names
    "max pool": (lambda x: F.max_pool2d(x.sin(), 3, 2, 1), True),
    "max pool with gaps": (lambda x: F.max_pool2d(x, 2, 1, 0, 2), False),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1).sin(), False),
    "average pool 3d": (lambda x: F.avg_pool3d(x[:, None], (1, 2, 2)).sin(), True),
    "replicate": (lambda x: F.pad(x, (1, 2, 2, 0), mode="replicate").exp(), True),
    "replicate 3d": (lambda x: F.pad(x[:, None], (0, 2, 1, 1, 2, 0), mode="replicate").exp(), False),
    "reflect": (lambda x: F.pad(x, (1, 2, 2, 0), mode="reflect").exp(), False),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    f, named = CASES[name]
    run = torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=named)
    with by_meaning():
        for shape in ((2, 3, 7, 8), (3, 2, 9, 5)) if named else ((2, 3, 7, 8),):
            compare(f, run, [torch.randn(shape, dtype=torch.float64, requires_grad=True)], 1e-9)
    rows = [row for graph in report(run).graphs for row in graph.rows]
    assert len(rows) >= 2 and all(isinstance(row, KernelRow) and not row.numbers for row in rows)


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_largest_is(dtype: torch.dtype) -> None:
    """What is compared with the stored largest value is rounded as it was: evaluated again in another
    kernel it would equal none, and the gradient be divided by no places."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + x * 2.1
        return y.amax((1, 3)), y.logsumexp(0).sum(0).reshape(-1).roll(1)

    torch.manual_seed(0)
    x = torch.randn(4, 4, 6, 4, dtype=dtype, requires_grad=True)

    def gradient(run: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        return torch.autograd.grad([made.float().sum() for made in run(x)], x)[0].float()

    with by_meaning():
        got = gradient(torch.compile(f, backend=backend, options={"rest": "eager"}))
    assert (got - gradient(f)).abs().max() <= (1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", [f32, bf16, f64, f16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "hardswish", "elu"])
def test_activations_of_every_exponent(name: str, dtype: DType) -> None:
    """Neither a tail nor a number whose square overflows is lost, in the type that torch gives or f32."""
    bound, held = bound_of(f"{name}'", dtype), getattr(torch, dtype.torch)
    x = points(bound, dtype)
    given = torch.from_numpy(x).to(held).requires_grad_()
    run = torch.compile(OPS[name].function(), backend=backend, options={"rest": "eager"})
    with by_meaning():
        (found,) = torch.autograd.grad(run(given).sum(), given)
    assert all(isinstance(row, KernelRow) for graph in report(run).graphs for row in graph.rows)
    off = excess(bound, x, found.to(torch.float64 if dtype is f64 else torch.float32).numpy(), dtype)
    at = int(np.argmax(off))
    assert off[at] <= 1, f"the gradient of {name} at {x[at]!r} in {dtype}: {off[at]} times its bound"
