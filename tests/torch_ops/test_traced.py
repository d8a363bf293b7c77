"""Epilogues that are functions of Python: traced, fused, differentiated, compiled, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import transconv
from transconv.compute import parse
from transconv.errors import ComputeError
from transconv.functional import epilogue_derivatives
from transconv.ir import f16, f32
from transconv.support import knobs
from transconv.torch_ops.fused.tracing import epilogue

Tensor = torch.Tensor


def gated(acc: Tensor, res: Tensor, gate: Tensor) -> Tensor:
    return F.silu(acc + res) * gate


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(s, dtype=dtype, requires_grad=True)
        for s in ((2, 4, 5, 5), (6, 4, 3, 3), (6,), (2, 6, 5, 5), (6, 1, 1))
    )


def call(
    x: Tensor, w: Tensor, b: Tensor, *operands: Tensor, function: Callable[..., Any] = gated
) -> Tensor:
    return transconv.fused_conv2d(x, w, b, padding=1, epilogue=function, operands=operands)


def reference(x: Tensor, w: Tensor, b: Tensor, *operands: Tensor) -> Tensor:
    return gated(F.conv2d(x, w, b, padding=1), *operands)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (gated, "mul(silu(add(acc, arg0)), arg1)"),
        (
            lambda acc, s: torch.where(acc > s, acc, F.leaky_relu(acc * s, 0.2)).clamp(min=0) ** 2 / 3,
            "div(pow(clamp(where(gt(acc, arg0), acc, leaky_relu(mul(acc, arg0), 0.2)), 0), 2), 3)",
        ),
        (lambda acc: F.gelu(acc, approximate="tanh") + F.gelu(acc), "add(gelu_tanh(acc), gelu(acc))"),
        (
            lambda acc: 2 - F.elu(-acc, alpha=0.5) + torch.maximum(acc, abs(acc)),
            "add(sub(2, elu(neg(acc), 0.5)), max(acc, abs(acc)))",
        ),
        (
            lambda acc: torch.square(acc.sigmoid()) - F.softplus(acc, beta=2) + 1 / acc,
            "value_0 = sigmoid(acc); add(sub(mul(value_0, value_0), softplus(acc, 2)), div(1, acc))",
        ),
    ],
)
def test_what_is_traced(function: Callable[..., Any], text: str) -> None:
    made = epilogue(function)
    assert made.text == text and repr(made) == f"transconv.epilogue({text})"
    values = [torch.randn(7, dtype=torch.float64) for _ in range(1 + len(made.names))]
    from transconv.compute import in_torch, pointwise

    names = ("acc", *(f"arg{i}" for i in range(len(made.names))))
    got = in_torch(pointwise(text), dict(zip(names, values, strict=True)))
    torch.testing.assert_close(got, made(*values))


KEPT = torch.ones(3)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda acc: torch.cumsum(acc, 0), "cumsum() is no operation of epilogues; expected arithmetic"),
        (lambda acc: acc if acc > 0 else -acc, "expected torch.where"),
        (lambda acc: acc + KEPT, "a tensor is an operand"),
        (lambda acc: 3, "it returns int"),
        (lambda acc: acc > 0, "it returns a condition"),
        (lambda *a: a[0], "a function of acc and then one tensor"),
        (lambda acc: torch.add(acc, acc, alpha=2), "add(alpha=...)"),
        (lambda acc, e: acc**e, "pow of 2 arguments"),
        (lambda acc: (acc > 0) * acc, "is a condition"),
    ],
)
def test_what_cannot_be_traced(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ComputeError) as error:
        epilogue(function)
    assert reason in str(error.value) and "test_traced.py" in str(error.value)


def test_results_and_gradients() -> None:
    tensors = given()
    torch.testing.assert_close(call(*tensors), reference(*tensors))
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)
    some = (tensors[0], *(t.detach() for t in tensors[1:]))
    (wanted,) = torch.autograd.grad(reference(*some).sum(), some[0])
    torch.testing.assert_close(torch.autograd.grad(call(*some).sum(), some[0])[0], wanted)
    over_x = torch.func.grad(lambda x: call(x, *some[1:]).sum())(some[0].detach())
    torch.testing.assert_close(over_x, wanted)


def test_the_operator() -> None:
    x, w, b, *operands = given()
    numbers = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    opcheck(
        torch.ops.transconv.traced_convolution.default, (x, w, b, operands, epilogue(gated).text, *numbers)
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("function", [gated, epilogue(gated)])
def test_compiled_graphs_hold_one_operator(function: Any) -> None:
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(
            str(n.target)
            for n in graph.graph.nodes
            if n.op == "call_function" and "are_functorch_transforms_active" not in str(n.target)
        )
        return graph

    torch._dynamo.reset()
    tensors = tuple(t.detach() for t in given())
    made = torch.compile(lambda *t: call(*t, function=function), backend=backend, fullgraph=True)(*tensors)
    torch.testing.assert_close(made, reference(*tensors))
    assert found == ["transconv.traced_convolution.default"]


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        ((torch.ones(2, 6, 5, 5),), "takes 2 tensors behind acc; operands are 1"),
        ((torch.ones(2, 6, 5, 5), 3), "Tensor, int"),
        ((torch.ones(2, 6, 5, 5), torch.ones(5, 1, 1)), "operand 1 of the epilogue: expected a size that"),
        ((torch.ones(2, 6, 5, 5), torch.ones(6, 1, 1, dtype=torch.complex64)), "but got complex64"),
    ],
)
def test_operands_that_do_not_fit(operands: Any, reason: str) -> None:
    with pytest.raises(RuntimeError) as error:
        call(torch.ones(2, 4, 5, 5), torch.ones(6, 4, 3, 3), torch.ones(6), *operands)
    assert reason in str(error.value)


def test_an_epilogue_says_all() -> None:
    with pytest.raises(RuntimeError, match="no activation and no residual"):
        transconv.fused_conv2d(*given()[:3], activation="relu", epilogue=lambda acc: acc)


def test_other_ranks_images_without_a_batch_and_autocast() -> None:
    x, w = torch.randn(2, 4, 9), torch.randn(6, 4, 3)
    torch.testing.assert_close(
        transconv.fused_conv1d(x, w, epilogue=lambda a: a.relu() * 2), F.conv1d(x, w).relu() * 2
    )
    made = transconv.fused_conv1d(x[0], w, epilogue=torch.tanh)
    torch.testing.assert_close(made, F.conv1d(x[0], w).tanh())
    with torch.autocast("cpu", torch.bfloat16):
        made = transconv.fused_conv1d(x, w, epilogue=lambda a, r: a + r, operands=[torch.ones(6, 1)])
    assert made.dtype is torch.bfloat16


@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1: see test_interpreted.py")
def test_kernels() -> None:
    """One kernel forward, one of the derivative, those of the gradients; any layout and type of
    operands."""
    transconv.config.cpu = "interpret"
    for dtype, memory in ((torch.float32, torch.channels_last), (torch.float64, torch.contiguous_format)):
        tensors = [t.detach().to(dtype) for t in given()]
        tensors[0] = tensors[0].to(memory_format=memory)
        tensors = [t.requires_grad_() for t in tensors]
        wide = [t.detach().double().requires_grad_() for t in tensors]
        transconv.stats(reset=True)
        y, want = call(*tensors), reference(*wide)
        grad = torch.randn_like(y)
        made = torch.autograd.grad(y, tensors, grad)
        rights = torch.autograd.grad(want, wide, grad.double())
        for got, right in zip((y, *made), (want, *rights), strict=True):
            torch.testing.assert_close(got.double(), right, rtol=2e-3, atol=2e-3)
        counted = str(transconv.stats())
        assert "epilogue_gradient" in counted and "100.0% native" in counted, counted
    whole = torch.randint(0, 9, (1, 6, 1, 1), dtype=torch.uint8)
    got = transconv.fused_conv2d(
        *(t.detach() for t in tensors[:3]), padding=1, epilogue=lambda acc, n: acc * n, operands=[whole]
    )
    torch.testing.assert_close(got, F.conv2d(*tensors[:3], padding=1) * whole)


def test_the_derivative_is_a_computation() -> None:
    from transconv.ir import f32

    place = ((2, 6, 4, 4), (96, 16, 4, 1), f32)
    text, reads, stores = epilogue_derivatives._compute(
        "mul(silu(add(acc, arg0)), arg1)",
        (place, place, ((1, 6, 1, 1), (6, 1, 1, 1), f32), place),
        (True, False, True),
    )
    assert reads == (0, 1, 2, 3) and stores == (0, 2)
    assert "store  DACC[d0, d1, d2, d3] = grad_0" in text and "ARG1[0, d1, 0, 0]" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_bias_of_another_type_is_refused_as_torch_does(dtype: torch.dtype) -> None:
    x, w, *_ = given(torch.float16)
    with pytest.raises(RuntimeError, match="bias|type") as ours:
        transconv.fused_conv2d(x, w, torch.zeros(6, dtype=dtype), epilogue=lambda acc: acc * 2)
    assert "float16" in str(ours.value).lower() or "half" in str(ours.value).lower()


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_of_operands_have_their_types_and_lose_nothing_on_the_way(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an operand of one value for each feature it is a sum, whose terms are not rounded first."""
    monkeypatch.setattr(transconv.config, "cpu", "interpret")

    def both(acc: Tensor, res: Tensor, gate: Tensor) -> Tensor:
        return (acc + res) * gate

    x, w, b, res, gate = given(dtype)
    y = transconv.fused_conv2d(x, w, b, padding=1, epilogue=both, operands=(res, gate))
    g = torch.randn_like(y)
    found = torch.autograd.grad(y, (res, gate), g)
    wide = [t.detach().double() for t in (x, w, b, res, gate, g)]
    acc = F.conv2d(wide[0], wide[1], wide[2], padding=1)
    want = (wide[5] * wide[4], (wide[5] * (acc + wide[3])).sum((0, 2, 3))[:, None, None])
    for a, c, near in zip(found, want, (2e-3, 1e-2), strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), c, rtol=near, atol=near * float(c.abs().max()))
    assert any("epilogue" in n for n in transconv.stats().native) and not transconv.stats().fallback


def test_terms_of_sums_over_short_operands_are_stored_wide() -> None:
    """The gradient of an operand that is spread out is a sum: its terms are f32, others the operand's."""
    whole, row = ((2, 3), (3, 1), f16), ((1, 3), (3, 1), f16)
    places, wanted = (whole, row, whole, whole), (True, True, True)
    text, _, stores = epilogue_derivatives._compute("acc*arg0*arg1", places, wanted)
    made = {t.name: t.dtype for t in parse(text.replace(" ;; ", "\n")).tensors}
    assert stores == (0, 1, 2)
    assert (made["DACC"], made["DARG0"], made["DARG1"]) == (f16, f32, f16)
