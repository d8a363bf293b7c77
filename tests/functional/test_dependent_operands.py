"""Gradients of gradients, of operands that are made of one another: each is counted once."""

from __future__ import annotations

import pytest
import torch

import transconv
from tests.functional.dependent import CASES, Case
from tests.functional.gradients import TEXTS, operands
from transconv import functional
from transconv.compute import parse
from transconv.verify.computation import wide

Tensor = torch.Tensor
QUICK = {
    "matmul",
    "matmul_of_one",
    "bmm",
    "linear",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
    "batch_norm_of_running",
    "instance_norm",
    "cat",
    "var",
    "cross_entropy",
    "conv1d",
    "fused_sigmoid",
    "epilogue",
    "epilogue_of_two",
}  # of several operands; the others: make check-all


def made(case: Case) -> Tensor:
    torch.manual_seed(0)
    return (torch.rand(case.shape, dtype=torch.float64) + 0.3).requires_grad_()


def test_the_smallest() -> None:
    x = torch.tensor([[1.0, 2], [3, 4]], requires_grad=True)
    (first,) = torch.autograd.grad(functional.matmul(x, x.T).sum(), x, create_graph=True)
    assert first.tolist() == [[8, 12], [8, 12]]
    assert torch.autograd.grad(first.sum(), x)[0].tolist() == [[4, 4], [4, 4]]
    x = torch.tensor([[[1.0, 2, 3]]], requires_grad=True)
    y = transconv.fused_conv1d(x, torch.ones(1, 1, 1), epilogue=lambda a, g: a * g, operands=(x,))
    assert torch.autograd.grad(y.sum(), x, create_graph=True)[0].tolist() == [[[2, 4, 6]]]
    assert {*transconv.stats().native} >= {"matmul", "fwd"} and not transconv.stats().fallback


@pytest.mark.every(22)
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_second_derivatives_are_torchs(name: str) -> None:
    case = CASES[name]
    x = made(case)
    y, want = case.ours(x), case.theirs(x)
    assert transconv.stats().native and not transconv.stats().fallback
    torch.testing.assert_close(y, want)
    g = torch.randn_like(y)
    first, torchs = (torch.autograd.grad(t, x, g, create_graph=True)[0] for t in (y, want))
    torch.testing.assert_close(first, torchs)
    g = torch.randn_like(first)
    torch.testing.assert_close(*(torch.autograd.grad(t, x, g) for t in (first, torchs)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients_are_slopes(name: str) -> None:
    assert torch.autograd.gradgradcheck(CASES[name].ours, (made(CASES[name]),), fast_mode=True)


@pytest.mark.every(11)
@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    """All operands of a text are made of one tensor."""
    transconv.config.cpu = "fallback"
    f = transconv.computation(wide(parse(f"compute {name} ;; {TEXTS[name]}")))
    given = [t.detach() for t in operands(f)]

    def of(x: Tensor) -> tuple[Tensor, ...]:
        own = [
            t + (x * (at + 1)).sin().sum() * t if t.is_floating_point() else t
            for at, t in enumerate(given)
        ]
        y = f(*own)
        return y if isinstance(y, tuple) else (y,)

    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(of, (x,), fast_mode=True)
