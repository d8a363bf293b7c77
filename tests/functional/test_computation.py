"""transconv.computation: a text as a function of tensors."""

from __future__ import annotations

import pytest
import torch

import transconv
from transconv.errors import ComputeError, TensorError

TEXT = """compute rows
    axes   m=8 k=20
    read   x = X[m, k]
    read   w = W[k]
    let    s = sum(x*w; k)
    store  Y[m] = s
    store  Z[m, k] = x - s"""


@pytest.mark.parametrize("cpu", ["interpret", "fallback"])
def test_tensors_by_name_and_in_order(cpu: str) -> None:
    transconv.config.cpu = cpu
    rows = transconv.computation(TEXT)
    x, w = torch.randn(20, 8).T, torch.randn(20)
    for y, z in (rows(x, w), rows(W=w, X=x), rows(x, W=w)):
        torch.testing.assert_close(y, x @ w)
        torch.testing.assert_close(z, x - (x @ w)[:, None], check_stride=False)
    assert repr(rows) == "transconv.computation(rows: X, W -> Y, Z)"
    assert transconv.computation(rows.compute).compute == rows.compute


def test_what_does_not_fit_is_told_in_one_line() -> None:
    rows = transconv.computation(TEXT)
    x, w = torch.randn(8, 20), torch.randn(20)
    with pytest.raises(TensorError, match="rows: W: expected a tensor, got NoneType"):
        rows(x)
    with pytest.raises(TensorError, match=r"rows: X: expected torch.float32 of shape \(8, 20\), got"):
        rows(x.double(), w)
    with pytest.raises(TypeError, match="rows: X was given already"):
        rows(x, w, X=x)
    with pytest.raises(TypeError, match=r"rows reads 2 tensors \(X, W\), got 3"):
        rows(x, w, w)
    with pytest.raises(TypeError, match="rows: V is not read; expected X, W"):
        rows(x, V=w)
    with pytest.raises(ComputeError, match="line 1"):
        transconv.computation("nothing")


def test_a_text_has_no_derivative_and_says_so() -> None:
    x, w = torch.randn(8, 20, requires_grad=True), torch.randn(20)
    y, _ = transconv.computation(TEXT)(x, w)
    with pytest.raises(RuntimeError, match="the computation rows has no derivative"):
        y.sum().backward()


def test_graphs_hold_it_as_one_operator() -> None:
    rows = transconv.computation(TEXT)
    x, w = torch.randn(8, 20), torch.randn(20)
    compiled = torch.compile(lambda x, w: rows(x, w)[0] + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), x @ w + 1)
