"""Kernels as operators of torch: opcheck, torch.compile, gradients, and names that do not fit."""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
import pytest
import torch

from transconv.kernel import Group, KernelError, kernel

ROWS = 4


@kernel
def scaled_silu(group, X, scale: float, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))
    group.store(Y[i:], scale * x / (1.0 + np.exp(-x)))


@kernel
def scaled_silu_backward(group, X, scale: float, grad_Y, grad_X):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))
    s = 1.0 / (1.0 + np.exp(-x))
    above = group.load(grad_Y[i:], shape=(group.shape[0], X.shape[1]))
    group.store(grad_X[i:], scale * above * (s + x * s * (1.0 - s)))


@kernel
def extremes(group, X, L, H):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))
    group.store(L[i:], x.min(axis=1))
    group.store(H[i:], x.max(axis=1))


def rows(X):
    return Group(X.shape[0], ROWS)


silu = scaled_silu.as_operator(
    "transconv_test::silu", group=rows, results="Y", backward=scaled_silu_backward
)
ends = extremes.as_operator(
    "transconv_test::ends",
    group=rows,
    results={"H": lambda X: X.new_empty(X.shape[0]), "L": lambda X: X.new_empty(X.shape[0])},
)


def check(device: str, quick: bool = False) -> None:
    x = torch.randn(6, 10, device=device, requires_grad=True)
    wanted = 1.5 * torch.nn.functional.silu(x)
    (expected,) = torch.autograd.grad(wanted.sin().sum(), x)
    torch.testing.assert_close(silu(x, 1.5), wanted)
    compiled = torch.compile(lambda x: silu(x, 1.5).sin().sum(), backend="aot_eager", fullgraph=True)
    for function in (lambda x: silu(x, 1.5).sin().sum(), compiled)[: 1 if quick else 2]:
        (found,) = torch.autograd.grad(function(x), x)
        torch.testing.assert_close(found, expected)
    low, high = ends(x)
    torch.testing.assert_close(torch.stack([low, high]), torch.stack([x.amin(1), x.amax(1)]))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(silu, (x, 0.5), test_utils=tests[: 3 if quick else 4])
    torch.library.opcheck(ends, (x.detach(),), test_utils=tests[: 3 if quick else 4])


def test_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check("cpu", quick=True)


def test_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and examples are the kernels'; a tangent is refused, with and without a gradient."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, several = torch.randn(4, 6), torch.randn(2, 4, 6)
    f = torch.nn.functional.silu
    torch.testing.assert_close(
        torch.func.grad(lambda x: silu(x, 1.0).sum())(x), torch.func.grad(lambda x: f(x).sum())(x)
    )
    torch.testing.assert_close(torch.vmap(lambda x: silu(x, 1.0))(several), f(several))
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(silu(leaf, 1.0), leaf, torch.stack([x, x * 2]), is_grads_batched=True)
    (want,) = torch.autograd.grad(f(leaf), leaf, torch.stack([x, x * 2]), is_grads_batched=True)
    torch.testing.assert_close(found, want)
    for given in (x, leaf):
        with (
            pytest.raises(RuntimeError, match="transconv_test::silu has no derivative in forward mode"),
            torch.autograd.forward_ad.dual_level(),
        ):
            silu(torch.autograd.forward_ad.make_dual(given, x), 1.0)
    with pytest.raises(RuntimeError, match="transconv_test::silu has no derivative in forward mode"):
        torch.func.jvp(lambda x: silu(x, 1.0), (x,), (x,))
    with pytest.raises(KernelError, match="transconv_test::ends has no backward kernel"):
        ends(leaf)[0].sum().backward()


@pytest.mark.slow
def test_an_operator_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check("cpu")


@kernel
def in_place(group, X, Y):
    (i,) = group.work_offset()
    group.store(X[i:], group.load(Y[i:], shape=group.shape))


@kernel
def without_gradients(group, X, grad_Y, Z):
    pass


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: scaled_silu.as_operator("silu", group=rows, results="Y"),
            "expected a name with a namespace",
        ),
        (lambda: scaled_silu.as_operator("a::b", group=rows, results="Z"), "expected some of X scale Y"),
        (lambda: scaled_silu.as_operator("a::c", group=rows, results=()), "results of a::c are none"),
        (
            lambda: scaled_silu.as_operator("a::d", group=rows, results="Y", backward=without_gradients),
            "has a parameter Z; expected some of X Y grad_Y scale",
        ),
        (
            lambda: scaled_silu.as_operator("a::e", group=lambda W: rows(W), results="Y")(
                torch.ones(2, 2), 1.0
            ),
            "group asks for W; expected some of X scale",
        ),
        (
            lambda: in_place.as_operator("a::f", group=lambda X: Group(4), results="Y")(torch.ones(4)),
            "writes to its argument X",
        ),
    ],
)
def test_what_does_not_fit(call, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelError, match=said):
        call()
