"""Routes whose kernels have a start function, as on a GPU. Torch computes in the kernels' place,
without autograd, and checks that it is given the memory that the plan is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd import forward_ad

import transconv
from tests.torch_ops import samples as s
from transconv.calls import guard, route_cache
from transconv.torch_ops import operators
from transconv.torch_ops.calls import lower_call, route, select_impl
from transconv.torch_ops.calls.call_entries import CALLS
from transconv.torch_ops.fused.fused_route import ACTIVATIONS

KWARGS = {"stride": 2, "padding": 1}
WARM = guard.PATIENCE + 3


class Plan:
    """What the compiler would give; names tell what is what."""

    started: ClassVar[list[str]] = []  # directions, of bound starts
    obeys = frozenset(("deterministic", "precision"))
    steps = ()
    required = None

    def __init__(self, problem: Any, direction: Any, aligned: bool, epilogue: str) -> None:
        self.problem, self.direction, self.aligned = problem, direction, aligned
        self.activation = epilogue.split("+")[-1].replace("bias", "").replace("res", "")

    @torch.no_grad()
    def launch(self, src: Any, wei: Any, dst: Any, bia: Any = None, res: Any = None) -> None:
        p = self.problem
        assert bia is None or (bia.is_contiguous() and not bia.is_neg())
        given = [(src, p.src), (wei, p.wei), (dst, p.dst), *([] if res is None else [(res, p.dst)])]
        for tensor, spec in given:
            assert type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_neg()
            assert tuple(tensor.stride()) == tuple(spec.layout.strides())
            assert lower_call.DTYPES[tensor.dtype] == spec.dtype
            assert not self.aligned or tensor.data_ptr() % 16 == 0
        numbers = (p.stride, p.pad_lo, p.dilation, False, (0,) * p.ndims, p.g)
        if self.direction.value == "fwd":
            y = torch.ops.aten.convolution(src, wei, bia, *numbers)
            dst.copy_(ACTIVATIONS[self.activation](y if res is None else y + res))
            return
        mask = [self.direction.value == "bwd_d", self.direction.value == "bwd_w", False]
        made = torch.ops.aten.convolution_backward(dst, src, wei, None, *numbers, mask)
        if mask[0]:
            src.copy_(made[0] if bia is None else made[0] + bia.view(-1, *[1] * p.ndims))
        else:
            wei.copy_(made[1])

    def starter(self, device: Any, aligned: bool, names: tuple[str, ...]) -> Any:
        assert aligned == self.aligned

        def begin(*given: torch.Tensor) -> None:
            self.started.append(self.direction.value)
            self.launch(**dict(zip(names, given, strict=True)))

        return begin


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lower_call,
        "question",
        lambda problem, direction, _, epilogue, aligned, *__: SimpleNamespace(
            workload=Plan(problem, direction, aligned, epilogue), target=None, deterministic=False
        ),
    )
    monkeypatch.setattr(select_impl, "ready", lambda plan, *_: plan)
    monkeypatch.setattr(lower_call, "proven", lambda plan, *a, **k: plan)
    monkeypatch.setattr(
        route,
        "_empty",
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype).fill_(float("nan")),
    )
    monkeypatch.setattr(route, "current_device", lambda: None)
    transconv.config.cpu = "interpret"
    Plan.started.clear()


def operands(name: str = "conv2d") -> tuple[torch.Tensor, ...]:
    ndims = int(name[-2])
    return tuple(
        torch.randn(*shape, requires_grad=True)
        for shape in ((3, 4, *[6] * ndims), (4, 4, *[3] * ndims), (4,))
    )


def fused_operator(
    x: torch.Tensor, w: torch.Tensor, *, stride: int, padding: int, activation: str | None
) -> torch.Tensor:
    return operators.fused_convolution(
        x, w, None, None, activation or "", [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
    )


def run(f: Any, given: Any, leaves: Any, **kwargs: Any) -> Any:
    y = f(*given, **(kwargs or KWARGS))
    return (y.detach(), *torch.autograd.grad(y.sin().sum(), leaves))


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "conv1d", "conv_transpose3d"])
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_get_their_tensors(name: str, biased: bool) -> None:
    x, w, b = operands(name)
    given = (x, w, b if biased else None)
    leaves = [t for t in given if t is not None]
    wanted = run(s.theirs(name), given, leaves)
    for _ in range(WARM):
        Plan.started.clear()
        torch.testing.assert_close(run(s.ours(name), given, leaves), wanted)
    assert len(Plan.started) == 3  # the last of them all by bound functions
    with torch.no_grad():
        torch.testing.assert_close(s.ours(name)(*given, **KWARGS), wanted[0])
    assert transconv.stats().fallback == {}
    assert sum(transconv.stats().native.values()) == 3 * WARM + 1


def negated(t: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(t.detach()).requires_grad_()


def imaginary(t: torch.Tensor) -> torch.Tensor:
    """A negated view with gaps: a copy of it has none."""
    made = torch.complex(torch.zeros_like(t.detach()), -t.detach()).conj().imag
    assert made.is_neg() and not made.is_contiguous()
    return made.requires_grad_()


def made_up(t: torch.Tensor) -> torch.Tensor:
    """Zeros of torch's that have no memory."""
    return torch._efficientzerotensor(t.shape).requires_grad_()


def shifted(t: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(t.numel() + 1, dtype=t.dtype)
    return memory[1:].view_as(t).copy_(t.detach()).requires_grad_()


def last(t: torch.Tensor) -> torch.Tensor:
    made = t.detach().to(memory_format=torch.channels_last) if t.dim() == 4 else t.detach()
    return made.requires_grad_()


def gaps(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t.detach(), t.detach()], -1)[..., 0].requires_grad_()


def double(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().requires_grad_()


@pytest.mark.every(3)
@pytest.mark.parametrize("change", [negated, imaginary, made_up, shifted, last, gaps, double])
@pytest.mark.parametrize(("which", "biased"), [(0, False), (1, False), (1, True), (2, True)])
def test_tensors_that_differ_get_another_kernel(change: Any, which: int, biased: bool) -> None:
    x, w, b = operands()
    given = [x, w, b if biased else None]
    leaves = [t for t in given if t is not None]
    for _ in range(WARM):
        run(transconv.conv2d, given, leaves)
    changed = [
        t if t is None else change(t) if n == which or change is double else t for n, t in enumerate(given)
    ]
    if changed[1] is not w:  # even under the identity of the old one
        CALLS.entries[id(changed[1])] = CALLS.entries[id(w)]
    leaves = [t for t in changed if t is not None]
    wanted = run(torch.nn.functional.conv2d, changed, leaves)
    for _ in range(WARM):
        torch.testing.assert_close(run(transconv.conv2d, changed, leaves), wanted)


@pytest.mark.parametrize(
    ("number", "value"),
    [("groups", 2), ("stride", 1), ("dilation", 2), ("output_padding", 1), ("padding", 0)],
)
def test_numbers_that_differ_get_another_kernel(number: str, value: int) -> None:
    """A transposed convolution takes the same tensors for other groups."""
    x, w, _ = operands()
    for _ in range(WARM):
        transconv.conv_transpose2d(x, w, **KWARGS)
    kwargs = {**KWARGS, number: value}
    torch.testing.assert_close(
        run(transconv.conv_transpose2d, (x, w), (x, w), **kwargs),
        run(torch.nn.functional.conv_transpose2d, (x, w), (x, w), **kwargs),
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("parts", ["", "b", "r", "br"])
@pytest.mark.parametrize("change", [negated, imaginary, made_up, shifted, gaps, last])
def test_fused_calls_start_their_kernel(parts: str, change: Any) -> None:
    """As soon as it was launched once, with all that its epilogue reads; other tensors are seen."""
    x, w, b = (t.detach() for t in operands())
    res = torch.randn(3, 4, 3, 3)
    given = [x, w, b if "b" in parts else None, res if "r" in parts else None]
    changes = [None if t is None else change(t).detach() for t in given]
    cases = [given, *([*given[:n], t, *given[n + 1 :]] for n, t in enumerate(changes) if t is not None)]
    for case in [*cases, *cases]:
        Plan.started.clear()
        x_, w_, b_, res_ = case
        got = transconv.fused_conv2d(x_, w_, b_, **KWARGS, activation="relu", residual=res_)
        y = torch.nn.functional.conv2d(x_, w_, b_, **KWARGS)
        torch.testing.assert_close(got, (y if res_ is None else y + res_).relu())
    transconv.fused_conv2d(*given[:3], **KWARGS, activation="relu", residual=given[3])
    assert Plan.started[-1:] == ["fwd"] and transconv.stats().fallback == {}


def gradients_of(y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the result in several kinds of memory."""
    one = torch.randn_like(y)
    return {
        "own": one,
        "expanded": torch.ones(()).expand(y.shape),
        "negated": torch._neg_view(one),
        "imaginary": imaginary(one).detach(),
        "made up": made_up(one).detach(),
        "last": last(one).detach(),
        "shifted": shifted(one).detach(),
        "gaps": gaps(one).detach(),
    }


@pytest.mark.parametrize(
    "kind", ["expanded", "negated", "imaginary", "made up", "last", "shifted", "gaps"]
)
def test_gradients_that_differ_get_another_kernel(kind: str) -> None:
    leaves = operands()
    y = transconv.conv2d(*leaves, **KWARGS)
    given = gradients_of(y.detach())
    theirs = torch.nn.functional.conv2d(*leaves, **KWARGS)
    for key in [*["own"] * WARM, *[kind] * WARM, "own"]:
        got = torch.autograd.grad(transconv.conv2d(*leaves, **KWARGS), leaves, given[key])
        wanted = torch.autograd.grad(theirs, leaves, given[key], retain_graph=True)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "obeyed", [(), ("deterministic",), ("precision",), ("deterministic", "precision")], ids=str
)
def test_only_switches_that_matter_are_asked_for(
    obeyed: tuple[str, ...], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switches are read at every repeated call: a kernel that depends on one is not started after it
    has changed."""
    asked: set[str] = set()
    precision = lower_call.read_precision
    monkeypatch.setattr(Plan, "obeys", frozenset(obeyed))
    switch = [False]
    monkeypatch.setattr(guard, "_deterministic", lambda: asked.add("deterministic") or switch[0])
    monkeypatch.setattr(
        lower_call, "read_precision", lambda *which: (asked.add("precision"), precision(*which))[1]
    )
    x, w, b = operands()
    given = (x, w, b if biased else None)
    leaves = [t for t in given if t is not None]
    for _ in range(2 * WARM):  # the gradients of a call that is remembered have their own entry
        asked.clear()
        right = run(transconv.conv2d, given, leaves)
    assert asked == set(obeyed)
    switch[0] = True
    before = set(route_cache.routes)
    torch.testing.assert_close(run(transconv.conv2d, given, leaves), right)
    assert set(route_cache.routes) == before  # the general way asks torch itself, and finds the same


@pytest.mark.parametrize("transposed", ["input", "weight", "gradient"])
def test_gradients_lie_as_input_and_weight_suggest(transposed: str) -> None:
    """Not as the gradient of the result does."""
    x, w, _ = (t.detach() for t in operands())
    grad = torch.randn(3, 4, 3, 3)
    x, w, grad = (
        last(t).detach() if transposed == name else t
        for name, t in (("input", x), ("weight", w), ("gradient", grad))
    )
    given = [t.clone().requires_grad_() for t in (x, w)]
    operator = torch.ops.transconv.convolution_backward
    numbers = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    for made in (
        torch.autograd.grad(transconv.conv2d(*given, **KWARGS), given, grad),
        operator(grad, x, w, *numbers)[:2],
    ):
        assert [t.is_contiguous() for t in made] == [transposed == "gradient"] * 2
        assert [t.is_contiguous(memory_format=torch.channels_last) for t in made] == [
            transposed != "gradient"
        ] * 2
    transconv.config.cpu = "fallback"
    for t in operator(grad, x, w, *numbers)[:2]:
        assert t.is_contiguous() == (transposed == "gradient")


@pytest.mark.parametrize("call", [transconv.fused_conv2d, fused_operator], ids=["eager", "operator"])
def test_another_activation_gets_another_kernel(call: Any) -> None:
    x, w, _ = (t.detach() for t in operands())
    for activation in ("relu", "tanh", "", "relu"):
        wanted = ACTIVATIONS[activation](torch.nn.functional.conv2d(x, w, **KWARGS))
        torch.testing.assert_close(call(x, w, **KWARGS, activation=activation or None), wanted)


def test_what_no_kernel_may_see() -> None:
    """Fakes, modes, dual numbers, and gradients that are differentiated again."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x, w, b = leaves = operands()
    for _ in range(WARM):
        run(transconv.conv2d, leaves, leaves)
        transconv.conv2d(x.detach(), w, b, **KWARGS)
    y = transconv.conv2d(*leaves, **KWARGS)
    one = torch.ones_like(y)
    Plan.started.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(transconv.conv2d(*leaves, **KWARGS), FakeTensor)
        torch.autograd.grad(y, leaves, one, retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(transconv.conv2d(dual, w, b, **KWARGS)).tangent
        torch.testing.assert_close(tangent, torch.nn.functional.conv2d(torch.ones_like(x), w, **KWARGS))
        grad = forward_ad.make_dual(one, torch.full_like(y, 2.0))
        (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        found = forward_ad.unpack_dual(dx)
        torch.testing.assert_close(found.tangent, 2 * found.primal)
    assert not Plan.started
    with Seeing():
        torch.autograd.grad(transconv.conv2d(*leaves, **KWARGS).sum(), leaves)
    assert "transconv.fwd.default" in seen
    assert "transconv.bwd_w.default" in seen
    seen.clear()
    with Seeing():
        torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    assert "transconv.bwd_w.default" in seen
    second = []
    for f in (transconv.conv2d, torch.nn.functional.conv2d):
        y = f(*leaves, **KWARGS)
        first = (
            *torch.autograd.grad(y.sin().sum(), leaves, create_graph=True),
            *torch.autograd.grad(y, leaves[:2], one, create_graph=True),
        )
        second.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)
