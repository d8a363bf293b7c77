"""Repeated fused calls: the warm path gives what the general path and torch give, in every state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, vmap

import transconv
from tests.torch_ops.test_warm import general, heat
from transconv.calls import guard
from transconv.torch_ops.calls import call_entries
from transconv.torch_ops.calls.call_entries import CALLS
from transconv.torch_ops.fused.fused_route import ACTIVATIONS

__all__ = ["general"]

PARTS = ["", "b", "r", "br", "x", "bx"]  # bias; a residual; the input as the residual


def given(parts: str, dtype: torch.dtype = torch.float32, leaves: str = "") -> list[Any]:
    """input, weight, bias, residual; ``leaves`` names those that want gradients."""
    made = {
        name: torch.randn(shape, dtype=dtype, requires_grad=name in leaves)
        for name, shape in {"x": (2, 4, 6, 6), "w": (4, 4, 3, 3), "b": (4,), "r": (2, 4, 6, 6)}.items()
    }
    return [
        made["x"],
        made["w"],
        made["b"] if "b" in parts else None,
        made["r"] if "r" in parts else made["x"] if "x" in parts else None,
    ]


def ours(x: Any, w: Any, b: Any, r: Any, activation: str | None = "relu", **numbers: Any) -> Any:
    return transconv.fused_conv2d(x, w, b, **{"padding": 1, **numbers}, activation=activation, residual=r)


def theirs(x: Any, w: Any, b: Any, r: Any, activation: str | None = "relu", **numbers: Any) -> Any:
    y = F.conv2d(x, w, b, **{"padding": 1, **numbers})
    return ACTIVATIONS[activation or ""](y if r is None else y + r)


def both(call: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """The results of ``call(f)`` by the warm path, the general path and torch."""
    short = call(ours)
    guard.forget()
    return short, call(ours), call(theirs)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("leaves", ["", "xwbr"])
def test_nothing_is_looked_up_again(parts: str, leaves: str, general: list[Any]) -> None:
    args = given(parts, leaves=leaves)
    for activation in (None, *ACTIVATIONS):
        guard.forget()
        with torch.no_grad():
            heat(partial(ours, *args, activation))
            transconv.stats(reset=True)
            general.clear()
            got = ours(*args, activation)
            assert not general
            assert transconv.stats(reset=True).fallback == {"device:cpu": 1}
            guard.forget()
            assert torch.equal(ours(*args, activation), got)
            assert transconv.stats(reset=True).fallback == {"device:cpu": 1}
            torch.testing.assert_close(got, theirs(*args, activation))


@pytest.mark.every(2)
@pytest.mark.parametrize("parts", PARTS)
def test_gradients(parts: str, general: list[Any]) -> None:
    args = given(parts, leaves="xwbr")
    wanted = list({id(t): t for t in args if t is not None}.values())

    def run(f: Any, activation: str | None) -> tuple[torch.Tensor, ...]:
        y = f(*args, activation)
        return y.detach(), *torch.autograd.grad(y.sin().sum(), wanted)

    for activation in (None, *ACTIVATIONS):
        guard.forget()
        heat(partial(run, ours, activation))
        transconv.stats(reset=True)
        general.clear()
        short = run(ours, activation)
        assert not general
        counts = transconv.stats(reset=True)
        guard.forget()
        torch.testing.assert_close(run(ours, activation), short)
        assert transconv.stats() == counts and counts.total == 3
        torch.testing.assert_close(short, run(theirs, activation))


@pytest.mark.parametrize("leaves", ["x", "w", "b", "r", "xr", "wb"])
def test_only_wanted_gradients(leaves: str) -> None:
    args = given("br", leaves=leaves)
    wanted = [t for t in args if t.requires_grad]
    run = lambda f: torch.autograd.grad(f(*args).square().sum(), wanted)  # noqa: E731
    heat(lambda: run(ours))
    transconv.stats(reset=True)
    short, long, right = both(run)
    torch.testing.assert_close(short, long)
    torch.testing.assert_close(short, right)
    each = 1 + ("x" in leaves) + ("w" in leaves)
    assert transconv.stats().total == 2 * each


def changes(x: Any, w: Any, b: Any, r: Any) -> dict[str, Callable[[Any], Any]]:
    """Calls that differ in one thing from the remembered f(x, w, b, r)."""
    shifted = torch.randn(x.numel() + 1)[1:].view_as(x)
    other, four = torch.randn(2, 4, 6, 6), torch.randn(4)
    last = torch.channels_last
    return {
        "activation": lambda f: f(x, w, b, r, "tanh"),
        "none": lambda f: f(x, w, b, r, None),
        "stride": lambda f: f(x, w, b, None if r is None else r[..., ::2, ::2], stride=2),
        "same": lambda f: f(x, w, b, r, padding="same"),
        "dilation": lambda f: f(x, w, b, r, dilation=2, padding=2),
        "no bias": lambda f: f(x, w, None, r),
        "bias": lambda f: f(x, w, four, r),
        "no residual": lambda f: f(x, w, b, None),
        "residual": lambda f: f(x, w, b, other),
        "input": lambda f: f(x, w, b, x),
        "misaligned": lambda f: f(shifted, w, b, r),
        "misaligned residual": lambda f: f(x, w, b, shifted),
        "channels_last": lambda f: f(x.to(memory_format=last), w, b, r),
        "channels_last residual": lambda f: f(x, w, b, shifted.to(memory_format=last)),
        "negated": lambda f: f(torch._neg_view(x), w, b, r),
        "negated residual": lambda f: f(x, w, b, torch._neg_view(x)),
        "expanded residual": lambda f: f(x, w, b, other[:1, :, :1, :1].expand(2, 4, 6, 6)),
        "batch": lambda f: f(x[:1], w, b, None if r is None else r[:1]),
        "unbatched": lambda f: f(x[0], w, b, None if r is None else r[0]),
        "double": lambda f: f(*(None if t is None else t.double() for t in (x, w, b, r))),
        "leaf": lambda f: f(x.clone().requires_grad_(), w, b, r),
        "parameter": lambda f: f(x, torch.nn.Parameter(w), b, r),
        "meta": lambda f: f(*(None if t is None else t.to("meta") for t in (x, w, b, r))).shape,
        "convolution": lambda f: (transconv.conv2d if f is ours else F.conv2d)(x, w, b, 1, 1),
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("what", changes(*given("br")))
def test_whatever_differs_is_seen(what: str) -> None:
    for parts in ("", "b", "r", "br", "bx"):
        args = given(parts)
        heat(partial(ours, *args))
        call = changes(*args)[what]
        for _ in range(guard.PATIENCE + 2):
            got, wanted = call(ours), call(theirs)
            torch.testing.assert_close(got, wanted)
            if isinstance(got, torch.Tensor):
                assert got.requires_grad == wanted.requires_grad
        torch.testing.assert_close(ours(*args), theirs(*args))


def test_wrong_calls_stay_wrong() -> None:
    x, w, b, r = given("br")
    heat(lambda: ours(x, w, b, r))
    for wrong, match in (
        (lambda: ours(x, w, b, r, "swish"), "activation 'swish' is unknown"),
        (lambda: ours(x, w, b, r[:1]), "expected residual of size"),
        (lambda: ours(x, w, b, r.double()), "expected residual of torch.float32"),
        (lambda: ours(x, w, b[:3], r), "expected bias to be"),
    ):
        with pytest.raises(RuntimeError, match=match):
            wrong()
    with pytest.raises(TypeError):
        ours(x, w, b, r, stride=1.0)


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("parts", ["b", "br", "bx"])
@pytest.mark.parametrize("leaves", ["", "xwbr"])
def test_contexts_are_seen(parts: str, leaves: str) -> None:
    x, w, b, r = args = given(parts, leaves=leaves)
    heat(lambda: ours(*args))
    with torch.inference_mode():
        assert ours(*args).is_inference()
    with torch.no_grad():
        assert not ours(*args).requires_grad
    assert ours(*args).requires_grad == bool(leaves)
    inner = lambda f: lambda x: f(x, w, b, None if r is None else x)  # noqa: E731
    for transform in (lambda f: vmap(f)(x[None]), lambda f: grad(lambda x: f(x).sum())(x)):
        torch.testing.assert_close(transform(inner(ours)), transform(inner(theirs)))
    assert "transform:functorch" in transconv.stats().fallback
    with forward_ad.dual_level():
        dual = [None if t is None else forward_ad.make_dual(t, torch.ones_like(t)) for t in args]
        tangents = [forward_ad.unpack_dual(f(*dual)).tangent for f in (ours, theirs)]
        torch.testing.assert_close(*tangents)
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(ours(*args), FakeTensor)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as mode:
        ours(*args)
    assert mode.get_total_flops() > 0
    if not leaves:  # torch takes no others for constants
        traced = torch.jit.trace(inner(ours), x, check_trace=False)
        assert "transconv::fused_convolution" in str(traced.graph)
    compiled = torch.compile(lambda *t: ours(*t), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), theirs(*args))


@pytest.mark.every(3)
@pytest.mark.parametrize("parts", ["", "b", "br", "bx"])
@pytest.mark.parametrize("leaves", ["", "wb", "xwbr"])
def test_autocast(parts: str, leaves: str, general: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    args = given(parts, leaves=leaves)
    wanted = [t for t in args if t is not None and t.requires_grad]
    wanted = list({id(t): t for t in wanted}.values())

    def run(f: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=dtype):
            y = f(*args)
        return y, *(torch.autograd.grad(y.float().sum(), wanted) if wanted else ())

    heat(lambda: run(ours))
    if not leaves and len(parts) < 2:
        general.clear()
        run(ours)
        assert not general
    short, long, right = both(run)
    for a, b, c in zip(short, long, right, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c.to(a.dtype), rtol=3e-2, atol=0.02 * float(c.detach().abs().max()))
    assert run(ours, torch.float16)[0].dtype == torch.float16
    assert ours(*args).dtype == torch.float32
    made: list[Any] = []
    check_of = call_entries.check_of
    monkeypatch.setattr(
        call_entries, "check_of", lambda *t, **free: made.append(t) or check_of(*t, **free)
    )
    for _ in range(40):
        run(ours)
    assert len(made) < 4  # what no entry can take leaves none


def test_function_modes_and_subclasses_see_warm_calls() -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, (kwargs or {}).get("activation")))
            return func(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        pass

    args = given("br")
    heat(lambda: ours(*args))
    for run in (
        lambda: ours(*args),
        lambda: ours(args[0].as_subclass(Own), *args[1:]),
        lambda: ours(*args[:3], args[3].as_subclass(Own)),
    ):
        seen: list[Any] = []
        with Mode():
            run()
        assert (transconv.fused_conv2d, "relu") in seen
    assert isinstance(ours(*args[:3], args[3].as_subclass(Own)), Own)


def test_switches_and_policy_are_seen(general: list[Any]) -> None:
    args = given("br")
    heat(lambda: ours(*args))
    general.clear()
    switch = torch.backends.cudnn.conv
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "ieee" if before == "tf32" else "tf32"
        ours(*args)
        switch.fp32_precision = before
        assert len(general) == 1
        torch.use_deterministic_algorithms(True)
        ours(*args)
    finally:
        switch.fp32_precision = before
        torch.use_deterministic_algorithms(False)
    assert len(general) == 2
    ours(*args)
    assert len(general) == 2
    transconv.config.fallback = "error"
    with pytest.raises(RuntimeError, match="torch would have to"):
        ours(*args)


def test_one_weight_in_plain_and_fused_calls(general: list[Any]) -> None:
    """The last entry of a chain hands on to the general way of the function that was called."""
    x, w, b, r = given("br")
    calls = [
        lambda: (transconv.conv2d(x, w, b, padding=1), F.conv2d(x, w, b, padding=1)),
        lambda: (ours(x, w, b, None), theirs(x, w, b, None)),
        lambda: (ours(x, w, b, r), theirs(x, w, b, r)),
        lambda: (ours(x, w, None, r, "silu"), theirs(x, w, None, r, "silu")),
    ]
    for _ in range(8 * guard.PATIENCE):
        for call in calls:
            torch.testing.assert_close(*call())
    assert len(CALLS.entries) == 1


def test_derivatives_of_derivatives_of_warm_calls() -> None:
    args = given("br", torch.float64, "xwbr")
    for activation in ("relu", "tanh", "silu"):
        call = lambda *t, a=activation: ours(*t, a)  # noqa: E731
        heat(lambda call=call: call(*args).sin().sum().backward())
        assert torch.autograd.gradcheck(call, args, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, args, fast_mode=True)
    wanted = torch.autograd.grad(theirs(*args).sum(), args)
    y = torch.utils.checkpoint.checkpoint(ours, *args, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), args), wanted)
    y = ours(*args)
    with torch.no_grad():
        args[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.every(2)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_compiled_backward_of_a_warm_call(activation: str) -> None:
    args = given("br", leaves="xwbr")
    heat(lambda: ours(*args, activation).sum().backward())
    for t in args:
        t.grad = None
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        ours(*args, activation).sum().backward()
    wanted = torch.autograd.grad(theirs(*args, activation).sum(), args)
    torch.testing.assert_close([t.grad for t in args], list(wanted))


def test_nothing_is_kept_alive() -> None:
    def refs() -> list[weakref.ref[torch.Tensor]]:
        args = given("br", leaves="xwbr")
        heat(lambda: ours(*args).sum().backward())
        y = ours(*args)
        return [weakref.ref(t) for t in (*args, y)]

    gc.disable()
    try:
        assert [ref() for ref in refs()] == [None] * 5
    finally:
        gc.enable()


def test_lists_and_a_torch_without_guards_go_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b, _r = args = given("br")
    stride = [1, 1]
    heat(lambda: ours(*args, stride=stride))
    assert not CALLS.entries
    stride[:] = [2, 2]
    torch.testing.assert_close(ours(x, w, b, None, stride=stride), theirs(x, w, b, None, stride=2))
    monkeypatch.setattr(guard.torch_internals, "TensorGuards", None)
    heat(lambda: ours(*args))
    assert not CALLS.entries
    torch.testing.assert_close(ours(*args), theirs(*args))


class Residual(torch.nn.Module):
    def __init__(self, activation: torch.nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.activation = activation

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return self.activation(self.norm(self.conv(x)) + r)


@pytest.mark.every(2)
@pytest.mark.parametrize("activation", [torch.nn.ReLU(), torch.nn.SiLU()])
def test_folded_modules_take_the_short_way(activation: torch.nn.Module, general: list[Any]) -> None:
    model = Residual(activation).eval()
    torch.nn.init.normal_(model.norm.running_mean)
    folded = transconv.fold(model)
    x, _, _, r = given("br")
    residuals = {"own": r, "input": x, "pixel": r[:, :, :1, :1], "double": r.double(), "image": r[:1]}
    with torch.no_grad():
        for name in ("own", "input"):
            heat(lambda name=name: folded(x, residuals[name]))
            general.clear()
            torch.testing.assert_close(
                folded(x, residuals[name]), model(x, residuals[name]), rtol=1e-4, atol=1e-5
            )
            assert not general
        for res in residuals.values():
            for _ in range(guard.PATIENCE + 2):
                got, wanted = folded(x, res), model(x, res)
                assert got.dtype == wanted.dtype
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded(x, r), model(x, r), rtol=1e-4, atol=1e-5)
    assert folded(x, r).requires_grad
    compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
    for name in ("own", "pixel"):
        torch.testing.assert_close(
            compiled(x, residuals[name]), model(x, residuals[name]), rtol=1e-4, atol=1e-5
        )
