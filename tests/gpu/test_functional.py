"""transconv.functional on a GPU: kernels of every function, 16 bits, autocast, graphs of torch and of
CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.functional.test_pools import NUMBERS, same_places
from tests.gpu import cases as c
from tests.gpu.operands import on_gpu
from transconv import functional as ours

pytestmark = pytest.mark.gpu

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (lambda x, w: ours.softmax(x, 1), lambda x, w: F.softmax(x, 1)),
    "layer_norm": (
        lambda x, w: ours.layer_norm(x, (96,), w, w),
        lambda x, w: F.layer_norm(x, (96,), w, w),
    ),
    "batch_norm": (
        lambda x, w: ours.batch_norm(x, None, None, w, w, True),
        lambda x, w: F.batch_norm(x, None, None, w, w, True),
    ),
    "group_norm": (lambda x, w: ours.group_norm(x, 8, w, w), lambda x, w: F.group_norm(x, 8, w, w)),
    "sum": (lambda x, w: ours.sum(x, 0), lambda x, w: x.sum(0)),
    "amax": (lambda x, w: ours.amax(x, 1), lambda x, w: x.amax(1)),
    "linear": (
        lambda x, w: ours.linear(x, w[None] * x, w[:64], "gelu"),
        lambda x, w: F.gelu(F.linear(x, w[None] * x, w[:64])),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 96, device=c.DEVICE, dtype=dtype, requires_grad=True)
    w = torch.randn(96, device=c.DEVICE, dtype=dtype, requires_grad=True)
    mine, theirs = CALLS[name]
    wide = [t.detach().float().requires_grad_() for t in (x, w)]
    for _ in range(3):  # first call: checked; second: launched; third: by the warm path
        got, want = mine(x, w), theirs(*wide)
        near(got, want)
        g = torch.randn_like(want).to(dtype)
        pairs = zip(
            torch.autograd.grad(got, (x, w), g, allow_unused=True),
            torch.autograd.grad(want, wide, g.float(), allow_unused=True),
            strict=True,
        )
        for a, b in pairs:
            assert (a is None) is (b is None)
            if b is not None:
                near(a, b)
    assert not transconv.stats().fallback


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Up to some roundings of the largest element."""
    allowed = 2.0**-6 if got.dtype is torch.bfloat16 else 2.0**-10
    assert (got.float() - want).abs().max() <= allowed * want.abs().max()


@on_gpu
def test_autocast_casts_as_torch_does() -> None:
    x, w = torch.randn(8, 32, device="cuda"), torch.randn(16, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        torch.testing.assert_close(ours.linear(x, w), F.linear(x, w), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(ours.softmax(x.half(), 1), F.softmax(x.half(), 1))
        torch.testing.assert_close(ours.layer_norm(x.half(), (32,)), F.layer_norm(x.half(), (32,)))


@on_gpu
def test_compiled_and_captured() -> None:
    x = torch.randn(64, 96, device="cuda")
    compiled = torch.compile(lambda x: ours.softmax(x.relu(), 1) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x), F.softmax(x.relu(), 1) * 2)
    for _ in range(3):
        y = ours.softmax(x, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours.softmax(x, 1)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, F.softmax(x, 1))


@pytest.mark.parametrize(("n", "numbers"), NUMBERS)
def test_places_of_nan(n: int, numbers: dict[str, Any]) -> None:
    transconv.stats(reset=True)
    same_places(n, numbers, c.DEVICE)
