"""The routes of a call: transforms, dual numbers, autocast, modes, subclasses, numeric switches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import transconv
from tests.torch_ops import samples as s
from transconv.calls import guard
from transconv.torch_ops.calls import lower_call


def problem(ndims: int = 2, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(3, 4, *[6] * ndims, dtype=dtype, requires_grad=True),
        torch.randn(6, 2, *[3] * ndims, dtype=dtype, requires_grad=True),
        torch.randn(6, dtype=dtype, requires_grad=True),
    )


def both(x: Any, w: Any, b: Any = None) -> tuple[Any, Any]:
    kwargs = {"stride": 2, "padding": 1, "groups": 2}
    return (lambda *t: transconv.conv2d(*t, **kwargs)), (lambda *t: F.conv2d(*t, **kwargs))


def test_vmap_over_inputs_and_weights() -> None:
    x, w, _ = problem()
    xs, ws = torch.stack([x, 2 * x]), torch.stack([w, w.flip(0)])
    ours, theirs = both(x, w)
    for dims in ((0, None), (None, 0), (0, 0)):
        given = (xs if dims[0] == 0 else x, ws if dims[1] == 0 else w)
        torch.testing.assert_close(vmap(ours, dims)(*given), vmap(theirs, dims)(*given))
    assert transconv.stats().fallback["transform:functorch"] == 3


def test_per_sample_gradients() -> None:
    x, w, b = problem()

    def loss(call: Any) -> Any:
        return lambda w, b, one: call(one.unsqueeze(0), w, b).square().sum()

    found = [vmap(grad(loss(call), (0, 1)), (None, None, 0))(w, b, x) for call in both(x, w)]
    torch.testing.assert_close(*found)
    module = transconv.nn.Conv2d(4, 6, 3).double()
    params = dict(module.named_parameters())
    one_loss = grad(lambda p, one: functional_call(module, p, (one[None],)).sum())
    per_sample = vmap(one_loss, (None, 0))
    assert per_sample(params, x.detach())["weight"].shape == (3, 6, 4, 3, 3)


def test_functorch_derivatives() -> None:
    x, w, b = (t.detach() for t in problem())
    ours, theirs = both(x, w)
    for transform in (
        lambda f: grad(lambda x: f(x, w, b).square().sum())(x),
        lambda f: jacrev(lambda w: f(x, w, b).sum(0))(w),
        lambda f: jvp(lambda x, w: f(x, w, b), (x, w), (x, w))[1],
        lambda f: vmap(lambda t: jvp(lambda x: f(x, w, b), (x,), (t,))[1])(torch.stack([x, x])),
        lambda f: hessian(lambda b: f(x, w, b).square().sum())(b),
    ):
        got, wanted = transform(ours), transform(theirs)
        torch.testing.assert_close(got, wanted)
        assert wanted.abs().sum() > 0  # a dropped tangent would be zero


def test_forward_mode() -> None:
    x, w, b = problem()
    ours, theirs = both(x, w)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.randn_like(x))
        got, wanted = (forward_ad.unpack_dual(f(dual, w, b)) for f in (ours, theirs))
        torch.testing.assert_close(got.tangent, wanted.tangent)
        assert got.tangent.abs().sum() > 0
    assert torch.autograd.gradcheck(ours, (x, w, b), check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("name", s.FUNCTIONS)
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    ndims = int(name[-2])
    x = torch.randn(2, 4, *[4] * ndims, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 2, *[2] * ndims, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(*t: torch.Tensor) -> torch.Tensor:
        return s.ours(name)(*t, stride=2, padding=1, groups=2)

    assert torch.autograd.gradcheck(call, (x, w, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, w, b), fast_mode=True)


@pytest.mark.parametrize("mask", range(1, 8))
def test_every_subset_of_gradients(mask: int) -> None:
    leaves = [t.detach().requires_grad_(bool(mask >> at & 1)) for at, t in enumerate(problem())]
    wanted_of = [t for t in leaves if t.requires_grad]
    ours, theirs = both(*leaves)
    got, wanted = (torch.autograd.grad(f(*leaves).square().sum(), wanted_of) for f in (ours, theirs))
    torch.testing.assert_close(got, wanted)


def test_double_backward_and_retained_graphs() -> None:
    x, w, b = problem()
    results = []
    for f in both(x, w):
        y = f(x, w, b)
        (gx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        (gw,) = torch.autograd.grad(y.cos().sum(), w, retain_graph=True)
        results.append((gw, *torch.autograd.grad(gx.square().sum(), (x, w, b))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "ours", [transconv.conv2d, partial(transconv.fused_conv2d, activation="")], ids=["plain", "fused"]
)
@pytest.mark.parametrize("again", [False, True])
def test_many_gradients_at_once(ours: Any, again: bool) -> None:
    """`is_grads_batched`, which vectorized jacobians are made of, shows backward a batch of gradients
    as one that has no memory."""
    x, w, b = problem()
    results = []
    for f in (ours, F.conv2d):
        for _ in range(guard.PATIENCE + 2):
            y = f(x, w, b, groups=2)
            grads = torch.arange(3 * y.numel(), dtype=y.dtype).sin().view(3, *y.shape)
            found = torch.autograd.grad(y, (x, w, b), grads, is_grads_batched=True, create_graph=again)
        if again:
            found += torch.autograd.grad(found[0].square().sum() + found[1].square().sum(), (x, w))
        results.append(found)
    torch.testing.assert_close(*results)


def test_saved_tensors_notice_in_place_changes() -> None:
    x, w, b = problem()
    y = transconv.conv2d(x, w, b, groups=2)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_may_be_changed_in_place() -> None:
    x, w, b = problem()
    y = transconv.conv2d(x, w, b, groups=2).relu_()
    wanted = F.conv2d(x, w, b, groups=2).relu_()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), w), torch.autograd.grad(wanted.sum(), w))


def test_tensor_hooks_and_saved_tensor_hooks() -> None:
    x, w, b = problem()
    seen: list[str] = []
    x.register_hook(lambda g: seen.append("x"))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append("pack") or t, lambda t: t):
        y = transconv.conv2d(x, w, b, groups=2)
    y.sum().backward()
    assert seen == ["pack", "pack", "x"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    x, w, b = problem()
    ours, theirs = both(x, w)
    got = torch.utils.checkpoint.checkpoint(ours, x, w, b, use_reentrant=reentrant)
    wanted = theirs(x, w, b)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), (x, w, b)) if not reentrant else _backward(got, (x, w, b)),
        torch.autograd.grad(wanted.sum(), (x, w, b)),
    )


def _backward(y: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    y.sum().backward()
    return tuple(t.grad for t in leaves)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_follows_the_region(dtype: torch.dtype) -> None:
    x, w, b = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        got, wanted = transconv.conv2d(x, w, b, groups=2), F.conv2d(x, w, b, groups=2)
        mixed = transconv.conv2d(x.to(dtype), w, b, groups=2)
        untouched = transconv.conv2d(x.double(), w.double(), groups=2)
        with torch.autocast("cpu", enabled=False):
            assert transconv.conv2d(x, w, groups=2).dtype == torch.float32
    assert got.dtype == wanted.dtype == mixed.dtype == dtype
    assert untouched.dtype == torch.float64
    torch.testing.assert_close(got, wanted)
    got.sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32


def test_torch_function_sees_the_call() -> None:
    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    calls: list[Any] = []
    x, w, b = (t.detach() for t in problem())
    y = transconv.conv2d(x.as_subclass(Seen), w, b, groups=2)
    assert calls[0] is transconv.conv2d
    assert type(y) is Seen
    assert torch.equal(y.as_subclass(torch.Tensor), F.conv2d(x, w, b, groups=2))
    y = transconv.conv_transpose2d(x.as_subclass(Seen), torch.randn(4, 2, 3, 3).double(), None, 2, 1, 1)
    assert y.shape == (3, 2, 12, 12)


def test_a_function_mode_does_not_change_the_way() -> None:
    x, w, b = problem()
    with torch.device("cpu"):  # a TorchFunctionMode of torch's own
        transconv.conv2d(x, w, b, groups=2)
    assert transconv.stats().fallback == {"device:cpu": 1}


def test_a_subclass_is_left_to_torch() -> None:
    class Wrapped(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    x, w, b = (t.detach() for t in problem())
    assert torch.equal(
        transconv.conv2d(x.as_subclass(Wrapped), w, b, groups=2), F.conv2d(x, w, b, groups=2)
    )
    assert "subclass:Wrapped" in transconv.stats().fallback


def test_negated_views_and_inference_mode() -> None:
    z = torch.randn(2, 4, 6, 6, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    w = torch.randn(3, 4, 3, 3)
    torch.testing.assert_close(transconv.conv2d(x, w), F.conv2d(-z.imag, w))
    with torch.inference_mode():
        assert transconv.conv2d(z.real, w).is_inference()


def test_nan_and_infinity_reach_what_torch_says() -> None:
    x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)
    w[0, 0, 0, 0] = float("inf")
    x[0, 0, 2, 2] = float("nan")
    got, wanted = transconv.conv2d(x, w, padding=1), F.conv2d(x, w, padding=1)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())


def test_precision_switch() -> None:
    switch = torch.backends.cudnn.conv
    before = switch.fp32_precision
    try:
        for word, math in (("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")):
            switch.fp32_precision = word
            assert lower_call.flags(torch.float32).math == math
            assert lower_call.flags(torch.bfloat16).math == "ieee"  # not a question for other types
            assert switch.fp32_precision == lower_call._precision()
    finally:
        switch.fp32_precision = before


def test_deterministic_switch() -> None:
    x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)
    assert not lower_call.flags(torch.float32).deterministic
    torch.use_deterministic_algorithms(True)  # this also fills fresh memory with NaN
    try:
        assert lower_call.flags(torch.float32).deterministic
        assert not transconv.conv2d(x, w).isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


def test_jit_trace_records_the_operator() -> None:
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    traced = torch.jit.trace(lambda x: transconv.conv2d(x, w, padding=1), x)
    assert "transconv::convolution" in str(traced.graph)
    other = torch.randn(1, 2, 5, 5)
    torch.testing.assert_close(traced(other), F.conv2d(other, w, padding=1))


def test_fx_tracing_keeps_the_call() -> None:
    graph = torch.fx.symbolic_trace(lambda x, w: transconv.conv2d(x, w, padding=1))
    assert any(n.target is transconv.conv2d for n in graph.graph.nodes)
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    assert torch.equal(graph(x, w), F.conv2d(x, w, padding=1))
