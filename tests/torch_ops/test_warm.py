"""Repeated calls take the warm path, and calls that differ in anything relevant do not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, vmap

import transconv
from tests.torch_ops import samples as s
from transconv.calls import guard, route_cache
from transconv.torch_ops import functional
from transconv.torch_ops.calls import call_entries
from transconv.torch_ops.calls.call_entries import CALLS

KWARGS = {"stride": 2, "padding": 1}
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(name: str = "conv2d", requires_grad: bool = False) -> Tensors:
    ndims = int(name[-2])
    made = (torch.randn(3, 4, *[6] * ndims), torch.randn(4, 4, *[3] * ndims), torch.randn(4))
    return tuple(t.requires_grad_(requires_grad) for t in made)  # type: ignore[return-value]


def heat(call: Callable[[], Any]) -> None:
    """As many calls as it takes to be remembered, and one more."""
    for _ in range(guard.PATIENCE + 2):
        call()


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was looked up the general way, by key."""
    seen: list[Any] = []
    find = route_cache.find

    def found(key: Any) -> Any:
        seen.append(key)
        return find(key)

    monkeypatch.setattr(route_cache, "find", found)
    return seen


@pytest.mark.every(5)
@pytest.mark.parametrize("name", s.FUNCTIONS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
def test_the_short_way_gives_the_same(
    name: str, biased: bool, differentiated: bool, general: list[Any]
) -> None:
    x, w, b = operands(name, differentiated)
    given = (x, w, b if biased else None)
    leaves = [t for t in given if t is not None]

    def run(f: Any) -> Any:
        y = f(*given, **KWARGS)
        return (y, *torch.autograd.grad(y.sin().sum(), leaves)) if differentiated else y

    heat(lambda: run(s.ours(name)))
    transconv.stats(reset=True)
    general.clear()
    torch.testing.assert_close(run(s.ours(name)), run(s.theirs(name)))
    assert not general
    assert transconv.stats().fallback == {"device:cpu": 3 if differentiated else 1}


def different(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[Any], Any]]:
    """Calls that differ in one thing from the remembered f(x, w, **KWARGS)."""
    flat = torch.randn(x.numel() + 1)
    return {
        "stride": lambda f: f(x, w, stride=1, padding=1),
        "padding": lambda f: f(x, w, stride=2, padding=0),
        "pair": lambda f: f(x, w, stride=(2, 1), padding=1),
        "same": lambda f: f(x, w, padding="same"),
        "groups": lambda f: f(torch.cat([x, x], 1), w, None, 2, 1, groups=2),
        "dilation": lambda f: f(x, w, **KWARGS, dilation=2),
        "bias": lambda f: f(x, w, torch.ones(4), **KWARGS),
        "batch": lambda f: f(x[:2], w, **KWARGS),
        "unbatched": lambda f: f(x[0], w, **KWARGS),
        "size": lambda f: f(x[..., 1:], w, **KWARGS),
        "layout": lambda f: f(x.to(memory_format=torch.channels_last), w, **KWARGS),
        "gaps": lambda f: f(x.expand(3, 4, 6, 6).repeat(2, 1, 1, 1)[::2], w, **KWARGS),
        "dtype": lambda f: f(x.double(), w.double(), **KWARGS),
        "offset": lambda f: f(flat[1:].view_as(x), w, **KWARGS),
        "negated": lambda f: f(torch._neg_view(x), w, **KWARGS),
        "parameter": lambda f: f(x, torch.nn.Parameter(w), **KWARGS).detach(),
        "leaf": lambda f: f(x.clone().requires_grad_(), w, **KWARGS),
        "meta": lambda f: f(x.to("meta"), w.to("meta"), **KWARGS).shape,
        "twice": lambda f: f(w.expand(4, 4, 3, 3), w, **KWARGS),
    }


@pytest.mark.parametrize("what", different(torch.randn(3, 4, 6, 6), torch.randn(4, 4, 3, 3)))
def test_whatever_differs_is_seen(what: str) -> None:
    x, w, _ = operands()
    heat(lambda: transconv.conv2d(x, w, **KWARGS))
    call = different(x, w)[what]
    for _ in range(guard.PATIENCE + 2):
        got, wanted = call(transconv.conv2d), call(F.conv2d)
        torch.testing.assert_close(got, wanted)
        if isinstance(got, torch.Tensor):
            assert got.stride() == wanted.stride()
            assert got.requires_grad == wanted.requires_grad
    torch.testing.assert_close(transconv.conv2d(x, w, **KWARGS), F.conv2d(x, w, **KWARGS))


def test_the_same_weight_in_another_function() -> None:
    x, w, _ = operands()
    for name in ("conv2d", "conv_transpose2d", "conv2d"):
        heat(lambda name=name: s.ours(name)(x, w, None, 2, 1))
        torch.testing.assert_close(s.ours(name)(x, w, None, 2, 1), s.theirs(name)(x, w, None, 2, 1))


def test_contexts_are_seen() -> None:
    x, w, _ = operands()
    call = lambda f: f(x, w, **KWARGS)  # noqa: E731
    heat(lambda: call(transconv.conv2d))
    with torch.autocast("cpu", torch.bfloat16):
        assert call(transconv.conv2d).dtype == torch.bfloat16
    with torch.inference_mode():
        assert call(transconv.conv2d).is_inference()
    mapped = vmap(lambda x: transconv.conv2d(x, w, **KWARGS))(x[None])
    torch.testing.assert_close(mapped[0], call(F.conv2d))
    torch.testing.assert_close(
        grad(lambda w: transconv.conv2d(x, w, **KWARGS).sum())(w),
        grad(lambda w: F.conv2d(x, w, **KWARGS).sum())(w),
    )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        got = forward_ad.unpack_dual(transconv.conv2d(dual, w, **KWARGS)).tangent
        torch.testing.assert_close(got, F.conv2d(torch.ones_like(x), w, **KWARGS))
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(transconv.conv2d), FakeTensor)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as mode:
        call(transconv.conv2d)
    assert mode.get_total_flops() > 0
    assert "transconv::convolution" in str(
        torch.jit.trace(lambda x: transconv.conv2d(x, w, **KWARGS), x).graph
    )


@pytest.mark.slow
def test_compilers_see_the_operator_after_warm_calls() -> None:
    x, w, _ = operands(requires_grad=True)
    f = lambda x: transconv.conv2d(x, w, **KWARGS)  # noqa: E731
    heat(lambda: f(x).sum().backward())
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, f(x))
    x.grad = w.grad = None
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        f(x).sum().backward()
    wanted = torch.autograd.grad(F.conv2d(x, w, **KWARGS).sum(), (x, w))
    torch.testing.assert_close((x.grad, w.grad), wanted)


def test_a_function_mode_and_a_subclass_see_warm_calls() -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x, w, _ = operands()
    heat(lambda: transconv.conv2d(x, w, **KWARGS))
    with Mode():
        transconv.conv2d(x, w, **KWARGS)
    assert transconv.conv2d in seen


def test_switches_are_seen(general: list[Any]) -> None:
    x, w, _ = operands()
    heat(lambda: transconv.conv2d(x, w, **KWARGS))
    general.clear()
    switch = torch.backends.cudnn.conv
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "ieee" if before == "tf32" else "tf32"
        transconv.conv2d(x, w, **KWARGS)
        switch.fp32_precision = before
        assert len(general) == 1
        torch.use_deterministic_algorithms(True)
        transconv.conv2d(x, w, **KWARGS)
    finally:
        switch.fp32_precision = before
        torch.use_deterministic_algorithms(False)
    assert len(general) == 2
    transconv.conv2d(x, w, **KWARGS)
    assert len(general) == 2


def test_the_policy_is_seen() -> None:
    x, w, _ = operands(requires_grad=True)
    y = transconv.conv2d(x, w, **KWARGS)
    heat(lambda: transconv.conv2d(x, w, **KWARGS).sum().backward())
    transconv.config.fallback = "error"
    with pytest.raises(RuntimeError, match="torch would have to"):
        transconv.conv2d(x, w, **KWARGS)
    with pytest.raises(RuntimeError, match="torch would have to"):
        y.sum().backward()


def test_numbers_that_only_equal_the_remembered_ones() -> None:
    x, w, _ = operands()
    heat(lambda: transconv.conv2d(x, w, stride=1))
    for odd in (1.0, "1"):
        with pytest.raises(TypeError):
            transconv.conv2d(x, w, stride=odd)
    stride = [1, 1]
    heat(lambda: transconv.conv2d(x, w, stride=stride))
    stride[0] = 2  # a list is the same object afterwards
    torch.testing.assert_close(transconv.conv2d(x, w, stride=stride), F.conv2d(x, w, stride=(2, 1)))


def test_an_address_that_is_another_weight_now() -> None:
    x, w, _ = operands()
    heat(lambda: transconv.conv2d(x, w, **KWARGS))
    entry = CALLS.entries.pop(id(w))
    for other in (
        torch.randn(4, 4, 3, 3),
        torch.randn(5, 4, 3, 3),
        torch.randn(4, 4, 2, 2),
        torch.randn(3, 3, 4, 4).permute(2, 3, 0, 1),
    ):
        CALLS.entries[id(other)] = entry
        torch.testing.assert_close(transconv.conv2d(x, other, **KWARGS), F.conv2d(x, other, **KWARGS))


def test_a_weight_that_changes_under_its_identity() -> None:
    x, w, _ = operands()
    heat(lambda: transconv.conv2d(x, w, **KWARGS))
    w.data = torch.randn(6, 4, 3, 3)
    torch.testing.assert_close(transconv.conv2d(x, w, **KWARGS), F.conv2d(x, w, **KWARGS))
    w.transpose_(2, 3)
    torch.testing.assert_close(transconv.conv2d(x, w, **KWARGS), F.conv2d(x, w, **KWARGS))


def test_sizes_in_turn_are_all_remembered(general: list[Any]) -> None:
    x, w, _ = operands()
    sizes = [x, x[:2], x[..., 1:]]
    for _ in range(3 * guard.PATIENCE * guard.CHAIN):
        for given in sizes:
            transconv.conv2d(given, w, **KWARGS)
    general.clear()
    for given in sizes:
        torch.testing.assert_close(transconv.conv2d(given, w, **KWARGS), F.conv2d(given, w, **KWARGS))
    assert not general


def test_sizes_that_never_come_back_earn_few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    check_of = call_entries.check_of
    monkeypatch.setattr(call_entries, "check_of", lambda *t: made.append(t) or check_of(*t))
    _, w, _ = operands()
    for n in range(200):
        for _ in range(2):
            transconv.conv2d(torch.randn(1, 4, 5, 5 + n), w)
    assert 1 <= len(made) < 40
    assert len(CALLS.entries) == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "KINDS", 8)
    x, _, _ = operands()
    weights = [torch.randn(4, 4, 3, 3) for _ in range(30)]
    for w in weights:
        heat(lambda w=w: transconv.conv2d(x, w))
    assert len(CALLS.entries) <= 8
    assert transconv.stats().total == 30 * (guard.PATIENCE + 2)


@pytest.mark.usefixtures("own_garbage")
def test_nothing_keeps_a_weight_alive() -> None:
    def weight() -> weakref.ref[torch.Tensor]:
        x, w, _ = operands(requires_grad=True)
        heat(lambda: transconv.conv2d(x, w, **KWARGS).sum().backward())
        return weakref.ref(w)

    gone = weight()
    gc.collect()
    assert gone() is None


def test_without_the_guard_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.torch_internals, "TensorGuards", None)
    x, w, b = operands(requires_grad=True)
    heat(lambda: transconv.conv2d(x, w, b).sum().backward())
    assert not CALLS.entries
    torch.testing.assert_close(transconv.conv2d(x, w, b), F.conv2d(x, w, b))


@pytest.mark.parametrize("mask", range(1, 8))
def test_gradients_the_short_way(mask: int) -> None:
    leaves = [t.detach().requires_grad_(bool(mask >> at & 1)) for at, t in enumerate(operands())]
    wanted_of = [t for t in leaves if t.requires_grad]

    def run(f: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return torch.autograd.grad(make(f(*leaves, **KWARGS)), wanted_of)

    heat(lambda: run(transconv.conv2d, lambda y: y.square().sum()))
    for make in (
        lambda y: y.square().sum(),
        torch.sum,
        lambda y: y.double().sin().sum(),
        lambda y: y.permute(3, 2, 1, 0).contiguous().square().sum(),
    ):
        torch.testing.assert_close(run(transconv.conv2d, make), run(F.conv2d, make))


def test_double_backward_hooks_and_checkpoints_of_warm_calls() -> None:
    x, w, b = (t.detach().double().requires_grad_() for t in operands())
    f = lambda x, w, b: transconv.conv2d(x, w, b, **KWARGS)  # noqa: E731
    heat(lambda: f(x, w, b).sin().sum().backward())
    assert torch.autograd.gradcheck(f, (x, w, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (x, w, b), fast_mode=True)
    wanted = torch.autograd.grad(F.conv2d(x, w, b, **KWARGS).sum(), (x, w, b))
    y = torch.utils.checkpoint.checkpoint(f, x, w, b, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w, b)), wanted)
    seen: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append("pack") or t.clone(), lambda t: seen.append("unpack") or t
    ):
        y = f(x, w, b)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w, b)), wanted)
    assert seen == ["pack", "pack", "unpack", "unpack"]
    with torch.no_grad():
        y = None or f(x, w, b)
    assert y.grad_fn is None
    y = f(x, w, b)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("enabled", ["never", "before", "now"])
def test_a_dual_gradient_of_a_warm_call_keeps_its_tangent(enabled: str) -> None:
    """Also where `enable` keeps the kernels that torch had, which know nothing of tangents."""
    if enabled != "never":
        transconv.enable(("cpu",))
    try:
        if enabled == "before":
            transconv.disable()
        x, w, _ = operands(requires_grad=True)
        heat(lambda: transconv.conv2d(x, w, **KWARGS).sum().backward())
        y = transconv.conv2d(x, w, **KWARGS)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones_like(y), torch.full_like(y, 2.0))
            (dx,) = torch.autograd.grad(y, x, dual)
            primal, tangent = forward_ad.unpack_dual(dx)
        torch.testing.assert_close(tangent, 2 * primal)
    finally:
        if enabled == "now":
            transconv.disable()


def test_the_node_has_its_name() -> None:
    x, w, b = operands(requires_grad=True)
    heat(lambda: transconv.conv2d(x, w, b))
    assert transconv.conv2d(x, w, b).grad_fn.name() == "ConvolutionFunctionBackward"


def test_threads_share_entries() -> None:
    x, w, b = operands(requires_grad=True)
    wanted = F.conv2d(x, w, b, **KWARGS)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                got = transconv.conv2d(x, w, b, **KWARGS)
                assert torch.equal(got, wanted)
                torch.autograd.grad(got.sum(), (x, w, b))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert transconv.stats().total == 4 * 40 * 3


def test_the_entry_leads_to_the_general_way(general: list[Any]) -> None:
    x, w, _ = operands()
    heat(lambda: transconv.conv2d(x, w, **KWARGS))
    assert CALLS.find(id(w)) is not None
    assert CALLS.find(id(x), functional.dispatch) is functional.dispatch
    guard.forget()
    general.clear()
    transconv.conv2d(x, w, **KWARGS)
    assert len(general) == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("leaves", ["weight", "input", "all", "none"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_takes_the_short_way(
    biased: bool, leaves: str, given: torch.dtype, general: list[Any]
) -> None:
    x, w, b = operands()
    x = x.to(given).requires_grad_(leaves in ("input", "all"))
    w.requires_grad_(leaves in ("weight", "all"))
    b.requires_grad_(leaves in ("weight", "all"))
    args = (x, w, b if biased else None)
    wanted = [t for t in args if t is not None and t.requires_grad]

    def run(f: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=dtype):
            y = f(*args, **KWARGS)
        return y, *(torch.autograd.grad(y.sin().sum(), wanted) if wanted else ())

    heat(lambda: run(transconv.conv2d, torch.bfloat16))
    general.clear()
    found = run(transconv.conv2d, torch.bfloat16)
    assert not general
    for got, right in zip(found, run(F.conv2d, torch.bfloat16), strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2)
    assert run(transconv.conv2d, torch.float16)[0].dtype == torch.float16
    if given is torch.float32:
        assert transconv.conv2d(*args, **KWARGS).dtype == torch.float32


def test_autocast_can_be_differentiated_twice() -> None:
    x, w, _ = operands(requires_grad=True)

    def twice(f: Any) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y = f(x, w, **KWARGS)
        dx, dw = torch.autograd.grad(y.float().square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad(dx.sum() + dw.sin().sum(), (x, w))

    for _ in range(guard.PATIENCE + 2):
        for got, right in zip(twice(transconv.conv2d), twice(F.conv2d), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, right, rtol=5e-2, atol=0.05 * float(right.abs().max()))


def test_autocast_saves_the_same_cold_and_warm() -> None:
    """Checkpointing compares what a forward saves with what its repetition saves."""
    x, w, b = operands(requires_grad=True)

    def saved(run: Callable[[], Any]) -> list[tuple[torch.dtype, torch.Size]]:
        seen: list[tuple[torch.dtype, torch.Size]] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            seen.append((t.dtype, t.shape))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run()
        return seen

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            transconv.conv2d(x, w, b, **KWARGS)

    cold = saved(run)
    heat(run)
    assert saved(run) == cold


def test_autocast_gradients_of_frozen_double_weights() -> None:
    """float64 is left as it is by autocast."""
    x, w, _ = (t.double() for t in operands())
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(guard.PATIENCE + 2):
            got = transconv.conv2d(x, w, **KWARGS)
            assert got.dtype == torch.float64
            torch.testing.assert_close(
                torch.autograd.grad(got.sum(), x), torch.autograd.grad(F.conv2d(x, w, **KWARGS).sum(), x)
            )
