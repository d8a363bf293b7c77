"""Parts of networks: results, buffers and gradients are torch's, in as few kernels as are expected."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from tests.graph import networks
from tests.graph.meant import by_meaning, compare, near
from transconv.compute import parse
from transconv.graph import Report, backend, report

Tensor = torch.Tensor

# Network, inputs, kernels of a call without gradients.
CASES: dict[str, tuple[type[nn.Module], list[tuple[int, ...]], int]] = {
    "residual": (networks.Residual, [(2, 8, 6, 6)], 2),
    "normalized": (networks.Normalized, [(2, 8, 4, 6)], 2),
    "causal": (networks.Causal, [(1, 4, 3, 5, 5), (1, 4, 2, 5, 5)], 2),
    "mlp": (networks.Mlp, [(3, 5, 16)], 3),
    "convnext": (networks.ConvNext, [(2, 8, 5, 5)], 4),
    "unet": (networks.UNet, [(2, 4, 8, 8)], 2),
}


def compiled(f: Any) -> Any:
    return torch.compile(f, backend=backend, options={"rest": "eager"})


def rows(found: Report) -> list[list[str]]:
    return [[type(r).__name__ for r in g.rows] for g in found.graphs]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_inference(name: str) -> None:
    made, shapes, kernels = CASES[name]
    network, inputs = made().eval(), [torch.randn(s) for s in shapes]
    run = compiled(network)
    with by_meaning() as texts, torch.no_grad():
        compare(network, run, inputs, 1e-5)
    assert rows(report(run)) == [["KernelRow"] * kernels]
    assert all(str(parse(str(c))) == str(c) for c in map(parse, texts))
    assert not any(
        "cat" in k.operations and "convolution" not in k.operations for k in report(run).graphs[0].kernels
    ), "a copy that a view would do"


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mlp", "normalized")])
def test_training(name: str) -> None:
    made, shapes, _ = CASES[name]
    torch.manual_seed(0)
    network = made().train()
    other = copy.deepcopy(network)
    parameters = [*network.parameters()]
    run = compiled(network)
    with by_meaning():
        inputs = [torch.randn(s) for s in shapes]
        losses = [_loss(f, inputs) for f in (other, run)]
    near(losses[1].detach(), losses[0].detach(), 1e-4, "loss")
    for one, two in zip(other.parameters(), parameters, strict=True):
        assert one.grad is not None and two.grad is not None
        near(two.grad, one.grad, 1e-4, "gradient")
    for one, two in zip(other.buffers(), network.buffers(), strict=True):
        near(two, one, 1e-5, "buffer")
    phases = [g.phase for g in report(run).graphs]
    assert phases == ["forward", "backward"]


def _loss(f: Any, inputs: list[Tensor]) -> Tensor:
    made = f(*inputs)
    loss: Tensor = (made[0] if isinstance(made, tuple) else made).square().mean()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]  # what the forward graph left is read once more
    return loss


def test_kernels_in_the_interpreter() -> None:
    """What is launched, not only what it means."""
    network = networks.Normalized().eval()
    run = compiled(network)
    with torch.no_grad():
        compare(network, run, [torch.randn(1, 8, 4, 4)], 1e-5)
    assert transconv.stats().native == {"graph": 2} and not transconv.stats().fallback


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    """A chain is computed in f32 and rounded where it is stored: nearer to f64 than torch is."""
    torch.manual_seed(0)
    network = networks.Normalized().eval().to(dtype)
    x = torch.randn(1, 8, 4, 4, dtype=dtype)
    run = compiled(network)
    with by_meaning() as texts, torch.no_grad():
        got = run(x)
        want = copy.deepcopy(network).double()(x.double())
        theirs = network(x)
    assert got.dtype is dtype and "sum(x_1*x_2" in texts[-1]
    ours = (got.double() - want).square().mean()
    assert ours <= (theirs.double() - want).square().mean() * 1.1
