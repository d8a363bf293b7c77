"""One call for convolution, bias, residual and activation; and folding models into such calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import transconv
from transconv.calls import guard
from transconv.torch_ops import operators
from transconv.torch_ops.fused import fused_functional


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(s, dtype=dtype, requires_grad=True)
        for s in ((2, 4, 6, 6), (6, 2, 3, 3), (6,), (2, 6, 6, 6))
    )


def reference(x: Any, w: Any, b: Any, res: Any, activation: str | None) -> torch.Tensor:
    y = F.conv2d(x, w, b, padding=1, groups=2)
    return fused_functional.ACTIVATIONS[activation or ""](y if res is None else y + res)


def call(x: Any, w: Any, b: Any, res: Any, activation: str | None) -> torch.Tensor:
    return transconv.fused_conv2d(x, w, b, padding=1, groups=2, activation=activation, residual=res)


@pytest.mark.parametrize("activation", [None, *filter(None, fused_functional.ACTIVATIONS)])
@pytest.mark.parametrize("parts", ["", "b", "r", "br"])
def test_results_and_gradients(activation: str | None, parts: str) -> None:
    x, w, b, res = problem()
    given = (x, w, b if "b" in parts else None, res if "r" in parts else None)
    leaves = [t for t in given if t is not None]
    with torch.no_grad():
        torch.testing.assert_close(call(*given, activation), reference(*given, activation))
    got, wanted = call(*given, activation), reference(*given, activation)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got.sin().sum(), leaves), torch.autograd.grad(wanted.sin().sum(), leaves)
    )


@pytest.mark.parametrize("activation", fused_functional.GRAD_FROM_RESULT)
def test_derivatives_of_derivatives(activation: str) -> None:
    given = problem()
    assert torch.autograd.gradcheck(lambda *t: call(*t, activation), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: call(*t, activation), given, fast_mode=True)


def test_opcheck() -> None:
    x, w, b, res = problem()
    found = opcheck(
        operators.fused_convolution, (x, w, b, res, "relu", [1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    )
    assert set(found.values()) == {"SUCCESS"}


def test_compile_autocast_transforms_and_unbatched() -> None:
    x, w, b, res = (t.detach() for t in problem(torch.float32))
    f = torch.compile(lambda x: call(x, w, b, res, "silu"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(f(x), reference(x, w, b, res, "silu"))
    with torch.autocast("cpu"):
        got = call(x, w, b, res, "relu")
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, reference(x, w, b, res, "relu").bfloat16(), rtol=0.02, atol=0.02)
    found = torch.func.vmap(lambda x: transconv.fused_conv2d(x, w, b, groups=2, activation="relu"))(x)
    torch.testing.assert_close(found, F.conv2d(x, w, b, groups=2).relu())
    torch.testing.assert_close(call(x[0], w, b, res[0], "tanh"), reference(x[0], w, b, res[0], "tanh"))


def test_other_ranks() -> None:
    for f, g, sizes in (
        (transconv.fused_conv1d, F.conv1d, (5,)),
        (transconv.fused_conv3d, F.conv3d, (4, 5, 6)),
    ):
        x, w = torch.randn(2, 4, *sizes), torch.randn(4, 4, *[3] * len(sizes))
        assert torch.equal(f(x, w, padding="same", activation="relu"), g(x, w, padding="same").relu())


def test_wrong_calls() -> None:
    x, w, b, res = problem()
    with pytest.raises(RuntimeError, match="activation 'swish' is unknown; expected one of: relu"):
        call(x, w, b, res, "swish")
    with pytest.raises(RuntimeError, match=r"expected residual of size \[2, 6, 6, 6\]"):
        call(x, w, b, res[:, :, :1], "relu")
    with pytest.raises(RuntimeError, match="expected residual of torch.float64"):
        call(x, w, b, res.float(), "relu")
    with pytest.raises(TypeError):
        transconv.fused_conv2d(x, w, stride=1.5)


@pytest.mark.parametrize("activation", [None, *filter(None, fused_functional.ACTIVATIONS)])
@pytest.mark.parametrize("trained", [False, True])
def test_the_residual_has_the_type_and_size_of_the_result(activation: str | None, trained: bool) -> None:
    """In one kernel or composed of the calls that it stands for."""
    x, w, res = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(2, 4, 4, 4)
    w.requires_grad_(trained)

    def run(residual: torch.Tensor) -> torch.Tensor:
        return transconv.fused_conv2d(x, w, activation=activation, residual=residual)

    for wrong in (res[:1], res[0, :, :1, :1], res.double()):
        with pytest.raises(RuntimeError, match="expected residual of"):
            run(wrong)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(res).dtype == torch.bfloat16


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_results_without_activation_may_be_written_to(compiled: bool, adds: bool) -> None:
    """Their gradient does not read them."""
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3, requires_grad=True)
    res = torch.randn(2, 4, 4, 4) if adds else None

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return transconv.fused_conv2d(x, w, residual=res).mul_(3)

    call = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    for _ in range(guard.PATIENCE + 2):
        (found,) = torch.autograd.grad(call(x, w).sum(), w)
    torch.testing.assert_close(found, torch.autograd.grad(3 * F.conv2d(x, w).sum(), w)[0])


class Block(torch.nn.Module):
    """A residual block as networks write it, with a projection."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, out, 3, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(out)
        self.conv2 = torch.nn.Conv2d(out, out, 3, padding=1)
        self.norm2 = torch.nn.BatchNorm2d(out)
        self.down = torch.nn.Sequential(torch.nn.Conv2d(channels, out, 1), torch.nn.BatchNorm2d(out))
        self.act = torch.nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.down(x)
        return self.act(y)


def net() -> torch.nn.Sequential:
    model = torch.nn.Sequential(
        Block(3, 8),
        torch.nn.Conv2d(8, 8, 3, stride=2, groups=8),
        torch.nn.BatchNorm2d(8),
        torch.nn.Hardswish(),
        torch.nn.Conv2d(8, 4, 1),
        torch.nn.GELU(),
        torch.nn.Flatten(),
    )
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("converted", [False, True])
def test_fold(converted: bool) -> None:
    model = net()
    x = torch.randn(2, 3, 8, 8)
    wanted = model(x)
    if converted:
        transconv.convert_(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    folded = transconv.fold(model)
    torch.testing.assert_close(folded(x), wanted, rtol=1e-4, atol=1e-5)
    kinds = [type(m).__name__ for m in folded.modules() if not list(m.children())]
    assert kinds.count("FusedConv2d") == 5
    assert "BatchNorm2d" not in kinds and "ReLU" not in kinds and "GELU" not in kinds
    calls = [n for n in folded.graph.nodes if n.op == "call_module"]
    assert max(len(n.args) for n in calls) == 2  # the residual went in
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert "activation=relu" in repr(folded)


def test_fold_leaves_what_it_must() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 2, 1)
            self.norm = torch.nn.BatchNorm2d(2)
            self.twice = torch.nn.Conv2d(2, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)  # two users: the norm cannot go into the weights
            z = self.norm(y) + y
            x = x * 1.0
            kept = x
            x.add_(self.twice(self.twice(z)))  # in place into something else, seen through `kept`
            return kept * 2

    model = Shared().eval()
    torch.nn.init.normal_(model.norm.running_mean)
    x = torch.randn(2, 2, 4, 4)
    torch.testing.assert_close(transconv.fold(model)(x), model(x))


def test_fold_with_a_broadcast_addition() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.conv(x) + x.mean((1, 2, 3), keepdim=True))

    model = Gate().eval()
    x = torch.randn(2, 2, 4, 4)
    torch.testing.assert_close(transconv.fold(model)(x), model(x))


def test_fold_wants_eval_mode() -> None:
    with pytest.raises(RuntimeError, match="eval mode"):
        transconv.fold(net().train())


@pytest.mark.parametrize("activation", [a for a in fused_functional.GRAD_FROM_RESULT if a])
def test_gradients_where_no_number_is_finite(activation: str) -> None:
    """An infinite gradient where the activation is flat gives no contribution, as in torch."""
    x, w = torch.randn(1, 2, 4, 4, requires_grad=True), torch.ones(2, 1, 1, 1)
    grads = torch.tensor([float("inf"), float("nan"), 1.0, 0.0]).expand(1, 2, 4, 4)
    with torch.no_grad():
        x.view(-1)[:4] = torch.tensor([float("nan"), 7.0, -7.0, 0.0])
    y = transconv.fused_conv2d(x, w, groups=2, activation=activation)
    wanted = fused_functional.ACTIVATIONS[activation](F.conv2d(x, w, groups=2))
    torch.testing.assert_close(*(torch.autograd.grad(t, x, grads)[0] for t in (y, wanted)), equal_nan=True)


@pytest.mark.parametrize("activation", ["", "relu"])
def test_the_residuals_gradient_of_the_operator_has_memory_of_its_own(activation: str) -> None:
    x, w, res, grad = (
        torch.randn(1, 4, 5, 5),
        torch.randn(4, 4, 1, 1),
        torch.randn(1, 4, 5, 5),
        torch.randn(1, 4, 5, 5),
    )
    res.requires_grad_()
    y = operators.fused_convolution(x, w, None, res, activation, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    (made,) = torch.autograd.grad(y, res, grad)
    before = grad.clone()
    assert made.data_ptr() != grad.data_ptr()
    made.zero_()
    assert torch.equal(grad, before)
