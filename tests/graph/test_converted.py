"""Convolutions of this package in a graph: their operators have rows, as those of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.graph.meant import by_meaning, near
from transconv.graph import KernelRow, backend, report
from transconv.torch_ops.conversion.aten_replacement import aten

Tensor = torch.Tensor


class Block(torch.nn.Module):
    """A window of even size with two sides of padding, and a transposed layer of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Conv2d(4, 4, 2, padding="same")
        self.up = torch.nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(F.silu(self.down(x)))
        return y.sin()


@pytest.mark.slow
def test_converted_modules() -> None:
    torch.manual_seed(0)
    model = Block().double()
    want = model(x := torch.randn(2, 4, 5, 6, dtype=torch.float64))
    want.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    transconv.convert_(model)
    run = torch.compile(model, backend=backend, options={"rest": "eager"})
    with by_meaning():
        got = run(x)
        got.sum().backward()
    near(got.detach(), want.detach(), 1e-9, "result")
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert p.grad is not None and grad is not None
        near(p.grad, grad, 1e-9, "gradient")
    rows = [r for g in report(run).graphs for r in g.rows]
    assert len(report(run).graphs) == 2 and all(isinstance(r, KernelRow) for r in rows)


def test_first_results_are_held_against_torch() -> None:
    """The operators of converted modules are torch's there, in the checks and while torch answers: no
    kernel of an eager call is built or launched."""
    model = Block().requires_grad_(False)
    x = torch.randn(2, 4, 5, 6)
    want = model(x)
    transconv.convert_(model)
    run = torch.compile(model, backend=backend, options={"rest": "eager"})
    near(run(x), want, 1e-3, "result")
    assert transconv.stats().compared["right"] and set(transconv.stats().native) == {"graph"}

    for operator in (torch.ops.transconv.fwd, torch.ops.transconv.bwd_d, torch.ops.transconv.bwd_w):
        transconv.stats(reset=True)
        w, numbers = torch.randn(4, 4, 3, 3), "stride=1x1 padding=1x1"
        given = (x, w, None, None) if operator is torch.ops.transconv.fwd else (x, x, w)
        own = operator(*given, numbers)
        assert transconv.stats(reset=True).native
        with aten():
            near(operator(*given, numbers), own, 1e-3, "of torch")
        assert not transconv.stats().native


def test_a_fused_call() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
        return transconv.fused_conv2d(x, w, b, padding=1, residual=z, activation="gelu")

    shapes = ((1, 4, 5, 6), (4, 4, 3, 3), (4,), (1, 4, 5, 6))
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes]
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    x, w, b, z = tensors
    with by_meaning():
        near(run(*tensors), F.gelu(F.conv2d(x, w, b, padding=1) + z), 1e-9, "result")
    (row,) = report(run).graphs[0].rows
    assert isinstance(row, KernelRow) and "gelu" in row.operations
