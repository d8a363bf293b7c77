"""Gradients of texts: those of operations are torch's, all others those of numerical differences."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

import transconv
from tests.functional.gradients import TEXTS, operands
from transconv.__main__ import main
from transconv.compute import OPS, Op, differentiate, parse, register, unregister
from transconv.errors import ComputeError
from transconv.functional.computation import Computation
from transconv.ir import Const, Mod
from transconv.verify.computation import wide, wrong_slope
from transconv.verify.fuzz import compute_texts

POINTS = (-100.0, -6.0, -3.0, -1.5, -1.0, -0.5, 0.0, 1e-9, 0.3, 1.0, 2.5, 3.0, 4.0, 6.0, 7.0, 100.0)
POSITIVE = {"log", "log2", "sqrt", "rsqrt"}
ONCE = {
    "layer_norm",
    "linear",
    "statistics",
    "max_pool",
    "replicate",
    "gather",
    "upsample",
    "prod",
    "concatenation",
    "two_views",
    "reshape",
    "conditions",
}  # the others: make check-all
TWICE = {"prod", "gather", "upsample", "two_views"}
DIFFERENTIABLE = [op for op in OPS.values() if op.derivative is not None]


def in_f64(name: str) -> Computation:
    return transconv.computation(wide(parse(f"compute {name} ;; {TEXTS[name]}")))


@pytest.fixture(autouse=True)
def by_meaning(interpreted: None) -> None:
    transconv.config.cpu = "fallback"


@pytest.mark.every(2)
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_operations_have_torchs_derivatives(op: Op) -> None:
    """Also where a function has none, such as relu at 0, and where both operands are equal."""
    points = [p for p in POINTS if op.name not in POSITIVE or p > 0]
    x = torch.tensor(points, dtype=torch.float64)
    grid = [t.flatten() for t in torch.meshgrid(*[x] * (2 if op.arity > 1 else 1), indexing="ij")]
    names = "abc"[: len(grid)]
    value = f"{op.name}({', '.join(names)})" if op.arity < 3 else "where(a > 0.3, a, b)"
    text = " ;; ".join(
        [
            f"compute {op.name}_",
            f"axes i={len(grid[0])}",
            *(f"tensor {n.upper()} f64 [{len(grid[0])}]" for n in names),
            *(f"read {n} = {n.upper()}[i]" for n in names),
            f"store Y[i] = {value}",
        ]
    )
    leaves = [t.clone().requires_grad_() for t in grid]
    theirs: Callable[..., Any] = (
        op.function() if op.arity < 3 else (lambda a, b: torch.where(a > 0.3, a, b))
    )
    g = torch.linspace(0.5, 2.0, len(grid[0]), dtype=torch.float64)
    want = torch.autograd.grad(theirs(*leaves), leaves, g)
    got = torch.autograd.grad(transconv.computation(text)(*leaves), leaves, g)
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", [name if name in ONCE else pytest.param(name, marks=pytest.mark.slow) for name in TEXTS]
)
def test_gradients_are_slopes(name: str) -> None:
    f = in_f64(name)
    assert torch.autograd.gradcheck(f, operands(f), fast_mode=True)


@pytest.mark.parametrize(
    "name", [name if name in TWICE else pytest.param(name, marks=pytest.mark.slow) for name in TEXTS]
)
def test_gradients_of_gradients(name: str) -> None:
    """A text's gradients are texts, and have gradients."""
    f = in_f64(name)
    assert torch.autograd.gradgradcheck(f, operands(f), fast_mode=True)


@pytest.mark.parametrize("count", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_drawn(count: int) -> None:
    found = 0
    for n in range(count):
        compute = parse(compute_texts.text(Random(f"gradients {n}")))
        try:
            assert not (said := wrong_slope(compute, n)), f"{said}\n{compute}"
        except ComputeError as error:
            assert "= has no derivative; expected let m =" in str(error)
        else:
            found += 1
    assert found > 0.8 * count


def test_a_product_with_zeros() -> None:
    x = torch.tensor([[2.0, 3, 4], [2, 0, 4], [0, 3, 0]], requires_grad=True)
    y = transconv.computation(
        "compute prods ;; axes n=3 k=3 ;; read x = X[n, k] ;; store Y[n] = prod(x; k)"
    )(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[12.0, 8, 6], [0, 8, 0], [0, 0, 0]]))


def test_equal_extremes_share_the_gradient_evenly() -> None:
    x = torch.tensor([[1.0, 4, 4, 2]], requires_grad=True)
    y = transconv.computation(
        "compute tops ;; axes n=1 k=4 ;; read x = X[n, k] ;; store Y[n] = max(x; k)"
    )(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(x.amax(1).sum(), x)[0])


def test_types() -> None:
    """A gradient has the type of its tensor; it is summed in f32."""
    f = transconv.computation(
        "compute scaled ;; tensor X f16 [4096, 2] ;; tensor W bf16 [2] ;; "
        "axes n=4096 k=2 ;; read x = X[n, k] ;; read w = W[k] ;; "
        "store Y[n, k] = x*w"
    )
    x, w = torch.ones(4096, 2).half().requires_grad_(), torch.ones(2).bfloat16().requires_grad_()
    f(x, w).sum().backward()
    assert x.grad.dtype is torch.float16 and w.grad.dtype is torch.bfloat16
    assert w.grad.tolist() == [4096, 4096]


def test_what_has_no_derivative() -> None:
    """Places of extremes and conditions have none, as in torch; steps have zeros."""
    f = transconv.computation("""compute several
        tensor I i64 [6]
        axes   n=6 | k=7
        read   x = X[n, k]
        read   w = W[n]
        store  I[n] = argmax(x; k)
        store  C[n] = where(max(x; k) > 0, 1.0, 0.0)
        store  Z[n] = w*2
        store  F[n] = floor(w)""")
    x, w = torch.randn(6, 7, requires_grad=True), torch.randn(6, requires_grad=True)
    assert [t.requires_grad for t in f(x, w)] == [False, False, True, True]
    assert not any(t.requires_grad for t in f(x, w.detach()))
    found = torch.autograd.grad(f(x, w)[3].sum(), [w, x], allow_unused=True)
    assert torch.equal(found[0], torch.zeros(6)) and found[1] is None


def test_an_operation_without_a_derivative_is_named_when_one_is_asked_for() -> None:
    register(Op("rest", 2, Mod, "torch.remainder"))
    try:
        f = transconv.computation(
            "compute rests ;; axes n=6 ;; read x = X[n] ;; read w = W[n] ;; "
            "let r = rest(x, w)*2 ;; store Y[n] = r ;; store Z[n] = x*w"
        )
    finally:
        unregister("rest")
    x, w = torch.randn(6, requires_grad=True), torch.rand(6) + 1
    y, z = f(x, w)
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], w)
    with pytest.raises(RuntimeError, match=r"rests: mod has no derivative, in the line: let r = \(x"):
        y.sum().backward()
    with pytest.raises(ComputeError, match="has no gradient of V; expected X W"):
        differentiate(f.compute, ("V",))


def test_kernels_compute_gradients() -> None:
    """In Triton's interpreter: those of a product, of a view behind a reduction, of indices."""
    for name in ("max", "replicate", "gather"):
        f = transconv.computation(f"compute {name} ;; {TEXTS[name]}")
        given = operands(f)
        leaves, found = [t for t in given if t.requires_grad], []
        for cpu in ("fallback", "interpret"):
            transconv.config.cpu = cpu
            transconv.stats(reset=True)
            made = f(*given)
            made = made if isinstance(made, tuple) else (made,)
            found.append(torch.autograd.grad([t.sum() for t in made], leaves))
            assert bool(transconv.stats().fallback) is (cpu == "fallback")
        torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)  # the interpreter rounds products to tf32


@pytest.mark.slow
def test_the_operator_keeps_torchs_rules() -> None:
    for name in ("softmax", "linear", "gather"):
        f = transconv.computation(f"compute {name} ;; {TEXTS[name]}")
        torch.library.opcheck(torch.ops.transconv.compute.default, (f.text, operands(f)))


def test_check_finds_a_wrong_derivative(capsys: pytest.CaptureFixture[str]) -> None:
    register(
        Op(
            "thrice",
            1,
            lambda x: x * Const(3.0, x.dtype) + x * x,
            "torch.square",
            derivative=lambda x: (x,),
        )
    )
    text = "compute wrongly ;; axes n=4 ;; read wrong = X[n] ;; store Y[n] = thrice(wrong)"
    try:
        said = wrong_slope(parse(text))
    finally:
        unregister("thrice")
    assert "the slope along X is" in said
    text = "compute rightly ;; axes n=4 ;; read x = X[n] ;; store Y[n] = x*x"
    assert main(["check", text, "--target=sm_90", "--gradient=X"]) == 0
    assert "gradients of rightly, in f64\n  right" in capsys.readouterr().out


def test_show_prints_the_texts_of_a_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"compute rows ;; {TEXTS['sum']}"
    assert main(["show", text, "--gradient", "W", "--stage", "problem"]) == 0
    said = capsys.readouterr().out
    assert "compute rows_gradient" in said and "store  dW[k] = w_sum" in said
    assert main(["show", text, "--gradient", "V"]) == 2
    assert "rows has no gradient of V; expected X W" in capsys.readouterr().err
