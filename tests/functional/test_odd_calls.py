"""Odd calls of transconv.functional end as torch's do; what is written to ``out`` is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import transconv
from transconv import functional as ours
from transconv.errors import TensorError

X = torch.arange(24.0).view(2, 3, 4)
OUT: dict[str, tuple[Any, ...]] = {
    "sum": (1,),
    "mean": (1,),
    "prod": (1,),
    "amax": (1,),
    "amin": (1,),
    "logsumexp": (1,),
    "var": (1,),
    "std": (1,),
    "any": (1,),
    "all": (1,),
    "argmax": (1,),
    "argmin": (1,),
    "matmul": (X[0].T,),
    "bmm": (X.mT,),
    "index_select": (0, torch.tensor([1])),
    "gather": (0, torch.tensor([[[1, 0]]])),
    "avg_pool2d": (2,),
    "avg_pool3d": ((1, 2, 2),),
}


doubled = transconv.computation("""compute doubled
    axes   n=3 m=4
    read   x = X[n, m]
    let    y = x + x
    store  Y[n, m] = y""")


@pytest.mark.parametrize("name", OUT)
def test_a_result_is_written_where_the_caller_says(name: str) -> None:
    x, theirs = (X[None], getattr(F, name)) if "pool" in name else (X, getattr(torch, name))
    wanted = theirs(x, *OUT[name])
    out = torch.empty(0, dtype=wanted.dtype)
    assert getattr(ours, name)(x, *OUT[name], out=out) is out
    assert torch.equal(out, wanted)
    assert transconv.stats(reset=True).fallback == {"form:out": 1}


def test_several_results_and_several_operands_are_written_too() -> None:
    out = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert ours.max(X, 1, out=out).indices is out[1]
    assert torch.equal(out[0], X.amax(1))
    joined = torch.empty(0)
    assert ours.cat([X, X], out=joined) is joined
    assert torch.equal(joined, torch.cat([X, X]))
    relu = torch.empty(0)
    assert ours.matmul(X, -X[0].T, "relu", out=relu) is relu
    assert torch.equal(relu, F.relu(X @ -X[0].T))
    short = torch.empty(0)
    assert ours.normalize(X, out=short) is short and torch.equal(short, F.normalize(X))
    assert F.linear(X, X[0]).equal(ours.linear(X, X[0], out=torch.empty(0)))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: ours.amax(X, 1, out=torch.empty(0, dtype=torch.float16)), RuntimeError),
        (lambda: ours.sum(X, out=torch.empty(0)), TypeError),
        (lambda: ours.flip(X, 1), TypeError),
        (lambda: ours.min(X, keepdim=True), TypeError),
        (lambda: ours.max(X, X, keepdim=True), TypeError),
        (lambda: ours.unfold(X[None], (1,)), RuntimeError),
        (lambda: ours.fold(X, (4, 5), b"same"), RuntimeError),
        (lambda: ours.interpolate(torch.nested.nested_tensor([X, X])), ValueError),
        (lambda: ours.linear(X, X[0].double()), RuntimeError),
        (lambda: ours.cat([X[0, 0, 0], X[0, 0, 1]]), RuntimeError),
        (lambda: ours.pixel_unshuffle(X, 0), RuntimeError),
        (lambda: make_fx(lambda t: ours.pixel_shuffle(t, 0))(X[None]), RuntimeError),
        (lambda: ours.linear(X, X[0], X[0, :, 0].double()), RuntimeError),
        (lambda: ours.matmul(X, X[0].T.half()), RuntimeError),
        (lambda: doubled(X[0].to_sparse()), TensorError),
        (lambda: doubled(torch.nested.nested_tensor([X[0]])), TensorError),
        (lambda: make_fx(lambda t: ours.pixel_unshuffle(t, 1.0))(X), TypeError),
        (lambda: make_fx(lambda t: ours.var(t, keepdim=torch.int32))(X), TypeError),
        (lambda: make_fx(lambda t: t + ours.pixel_shuffle(None, 1))(X), TypeError),
    ],
    ids=range(19),
)
def test_the_class_of_an_error_is_torchs(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        wrong()


def test_results_that_a_mode_sees_are_a_tuple_too() -> None:
    with FakeTensorMode() as mode:
        made = ours.max_pool2d(mode.from_tensor(X), 2, return_indices=True)
    assert type(made) is tuple and [t.dtype for t in made] == [torch.float32, torch.int64]


def test_a_graph_holds_a_number_that_is_none() -> None:
    def padded(t: torch.Tensor) -> torch.Tensor:
        return ours.pad(t, (1, 1), value=float("nan"))

    torch.testing.assert_close(make_fx(padded)(X)(X), padded(X), equal_nan=True)


def test_interpreted_kernels_round_to_the_nearest_as_chips_do() -> None:
    values = torch.randn(4096)
    values[:4] = torch.tensor([float("nan"), float("inf"), 3.4e38, 1.00390625])
    cast = transconv.computation("""compute cast
    axes   n=4096
    read   x = X[n]
    store  Y[n] = bf16(x)""")
    torch.testing.assert_close(cast(values), values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_gradient_that_can_be_differentiated_again_is_as_precise(name: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 64).bfloat16(), torch.rand(8, 64).bfloat16()

    def gradient(t: torch.Tensor, again: bool) -> torch.Tensor:
        t = t.requires_grad_()
        (found,) = torch.autograd.grad(getattr(ours, name)(t, 1), t, w.to(t.dtype), create_graph=again)
        return found.detach().double()

    exact = gradient(x.double(), False)
    once, again = ((gradient(x, a) - exact).abs().max() for a in (False, True))
    assert again <= 1.5 * once


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("activation", [None, "relu"])
def test_products_in_graphs_of_others(activation: str | None) -> None:
    """torch.compile's other backends see one operator, with or without an activation."""
    run = torch.compile(
        lambda x, w: ours.linear(x, w, activation=activation) * 2, backend="eager", fullgraph=True
    )
    right = F.linear(X, X[0])
    assert torch.equal(run(X, X[0]), (right if activation is None else right.relu()) * 2)


def test_linear_functions_keep_no_values_for_their_gradients() -> None:
    """What is looked up, summed or moved is not saved: its gradient does not read it."""
    saved: list[Any] = []
    index = torch.tensor([[1, 0]])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        for f in (
            lambda x: ours.embedding(index, x),
            lambda x: ours.sum(x, 0),
            lambda x: ours.mean(x, 1),
            lambda x: ours.index_select(x, 0, index[0]),
            lambda x: ours.gather(x, 0, index),
        ):
            f(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert [t for t in saved if t.dtype.is_floating_point] == []
    assert not transconv.stats(reset=True).fallback
