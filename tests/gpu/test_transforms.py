"""Transforms of torch and edges of gradients on a GPU."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

import transconv
from transconv import functional

pytestmark = pytest.mark.gpu


def test_a_text_under_transforms() -> None:
    f = transconv.computation("compute squares ;; axes i=3 ;; read x = X[i] ;; store Y[i] = x*x")
    x, v = torch.tensor([1.0, 2, 3], device="cuda"), torch.tensor([1.0, 1, 2], device="cuda")
    assert torch.func.jvp(f, (x,), (v,))[1].tolist() == [2, 4, 12]
    assert torch.func.grad(lambda x: f(x).sum())(x).tolist() == [2, 4, 6]
    assert torch.vmap(f)(torch.stack([x, x * 2])).tolist() == [[1, 4, 9], [4, 16, 36]]
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(leaf), leaf, torch.eye(3, device="cuda"), is_grads_batched=True)
    assert torch.equal(found, torch.diag(2 * x))
    assert not transconv.stats().fallback


def test_operands_that_depend_on_one_another() -> None:
    x = torch.tensor([[1.0, 2], [3, 4]], device="cuda", requires_grad=True)
    (found,) = torch.autograd.grad(functional.matmul(x, x.T).sum(), x, create_graph=True)
    assert found.tolist() == [[8, 12], [8, 12]]
    x = torch.tensor([[[1.0, 2, 3]]], device="cuda", requires_grad=True)
    one = torch.ones(1, 1, 1, device="cuda")
    y = transconv.fused_conv1d(x, one, epilogue=lambda a, g: a * g, operands=(x,))
    assert torch.autograd.grad(y.sum(), x, create_graph=True)[0].tolist() == [[[2, 4, 6]]]


def test_edges() -> None:
    rows = [[inf, -inf, 1, 0], [0, inf, 2, 1], [0, nan, 2, 1], [2, 0, 3, 4], [2, 2, 1, 2]]
    for ours, theirs in (
        (lambda x: functional.prod(x, 1), lambda x: torch.prod(x, 1)),
        (lambda x: functional.var(x, 1, correction=9), lambda x: torch.var(x, 1, correction=9)),
    ):
        found = []
        for f in (ours, theirs):
            x = torch.tensor(rows, device="cuda").requires_grad_()
            found.append(torch.autograd.grad(f(x).sum(), x))
        torch.testing.assert_close(*found, equal_nan=True)
    x = torch.full((1, 2), 1e4, device="cuda", requires_grad=True)
    loss = functional.cross_entropy(x, torch.tensor([0], device="cuda"))
    torch.testing.assert_close(loss, torch.tensor(2.0, device="cuda").log())
    assert not transconv.stats().fallback
