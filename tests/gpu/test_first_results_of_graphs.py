"""First results of compiled graphs are held against torch's operators, on a GPU: before a CUDA graph is
captured, without a stall at further sizes, and without false alarms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv.calls import stats
from transconv.graph import backend, report
from transconv.graph.lowerings.table import ROWS, NodeCall
from transconv.graph.verification import eager_check, fx_reference

Tensor = torch.Tensor
aten = torch.ops.aten
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def warned(fresh: None) -> Iterator[None]:
    """Behind the defaults of this folder: fallbacks warn."""
    transconv.config.fallback = "warn"
    yield
    torch._dynamo.reset()


def remarks(run: Any) -> list[str]:
    return [r for g in report(run).graphs for r in g.remarks]


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sub take its operands in the other order."""
    right = ROWS[aten.sub.Tensor]

    def swap(call: NodeCall) -> Any:
        return right(replace(call, args=(*call.args[1::-1], *call.args[2:])))

    monkeypatch.setitem(ROWS, aten.sub.Tensor, swap)


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_a_mistake_is_seen(cudagraphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped(monkeypatch)
    f = lambda x, w: F.relu((x * 2).sin() - x) @ w  # noqa: E731
    x, w = (torch.randn(256, 256, device="cuda") for _ in range(2))
    run = torch.compile(f, backend=backend, options={"rest": "eager", "cudagraphs": cudagraphs})
    with pytest.warns(stats.FallbackWarning, match=r"sub\.Tensor"):
        first = run(x, w).clone()
    for made in (first, run(x, w).clone(), run(x, w).clone()):
        torch.testing.assert_close(made, f(x, w), rtol=1e-2, atol=1e-1)
    assert remarks(run) and transconv.stats().fallback["wrong"] == 1


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "conv": lambda: torch.nn.Sequential(
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.BatchNorm2d(64),
        torch.nn.SiLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(64, 64, 3, stride=2, padding=1),
        torch.nn.GroupNorm(8, 64),
    ),
    "mixer": lambda: torch.nn.Sequential(
        torch.nn.Linear(32, 64),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 32),
        torch.nn.Softmax(-1),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_no_false_alarm(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    transconv.config.fallback = "error"
    model = MODELS[name]().cuda().to(dtype)
    x = torch.randn(4, 32, 32, 32, device="cuda", dtype=dtype, requires_grad=True)
    run = torch.compile(model, backend=backend, options={"rest": "eager"})
    torch.cuda.manual_seed(1)
    run(x).float().square().mean().backward()
    after = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(1)
    run(x).float().square().mean().backward()
    assert torch.equal(after, torch.cuda.get_rng_state())
    found = transconv.stats()
    assert found.native["graph"] and found.compared["right"] >= 4 and {*found.compared} == {"right"}
    assert not remarks(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norms_of_operands_that_are_not_dense(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own kernel takes none of these: it is asked again, with dense ones, and every result is
    compared."""
    asked: list[bool] = []
    real = fx_reference.call_operator

    def taken(target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.native_group_norm.default:
            asked.append(args[0].is_contiguous())
        return real(target, args, kwargs)

    monkeypatch.setattr(fx_reference, "call_operator", taken)
    transconv.config.fallback = "error"
    w, b = (torch.randn(64, device="cuda", dtype=dtype) for _ in range(2))
    x = torch.randn(4, 64, 16, 16, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)

    def norm(x: torch.Tensor) -> torch.Tensor:  # F.group_norm would make it dense
        return aten.native_group_norm.default(x, w, b, 4, 64, 256, 8, 1e-5)[0]

    run = torch.compile(norm, backend=backend, options={"rest": "eager"})
    torch.testing.assert_close(run(x), F.group_norm(x, 8, w, b), rtol=2e-2, atol=2e-2)
    found = transconv.stats()
    assert found.native["graph"] and found.compared["right"] and {*found.compared} == {"right"}
    assert False in asked and not remarks(run)


def test_further_sizes_do_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []
    real = eager_check.WatchedCall.difference

    def timed(*given: Any) -> str:
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = real(*given)
        spent[-1] += time.perf_counter() - began
        return found

    monkeypatch.setattr(eager_check.WatchedCall, "difference", timed)

    def f(x: Tensor) -> Tensor:
        for _ in range(12):
            x = torch.softmax(x * 2, 1) + x.mean(0)
        return x

    run = torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=True)
    for n in (512, 768, 1024, 1280, 1536, 1792, 2048):
        spent.append(0.0)
        run(torch.randn(n, n, device="cuda"))
    assert spent[0] > 0 and any(spent[1:]) and max(spent[1:]) < 1.5 * eager_check.STALL, spent
    assert not remarks(run)


def test_where_memory_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_check, "room", lambda device: 1000)
    monkeypatch.setattr(eager_check, "FEW", 0)
    run = torch.compile(lambda x: x.relu() + 1, backend=backend)
    x = torch.randn(4096, device="cuda")
    torch.testing.assert_close(run(x), x.relu() + 1)
    assert transconv.stats().compared == {"left out": 1} and "no memory" in remarks(run)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paths_that_are_dropped(dtype: torch.dtype) -> None:
    """A mask that Inductor draws in the type of what it multiplies, in training."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        kept = torch.empty(64, 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(0.5).div_(0.5)
        return F.gelu(F.conv2d(x, w)) * kept + x

    x, w = (
        torch.randn(s, device="cuda", dtype=dtype, requires_grad=True)
        for s in ((64, 16, 8, 8), (16, 16, 1, 1))
    )
    made = torch.compile(f, backend=backend)(x, w)
    made.sum().backward()
    path = (made - x).detach().flatten(1)
    full = 2 * F.gelu(F.conv2d(x, w)).detach().flatten(1)
    dropped = path.abs().amax(1) < 0.02 * full.abs().amax(1)
    assert 8 < int(dropped.sum()) < 56  # of 64, each by half a chance
    torch.testing.assert_close(path[~dropped], full[~dropped], rtol=2e-2, atol=5e-2)
    assert x.grad is not None and bool(x.grad.isfinite().all()) and not transconv.stats().fallback


ACTIVATIONS = (
    F.relu6,
    F.elu,
    F.selu,
    F.celu,
    F.gelu,
    F.silu,
    F.mish,
    F.softplus,
    F.hardswish,
    F.hardsigmoid,
    F.hardtanh,
    F.leaky_relu,
    F.logsigmoid,
    F.softsign,
    F.tanhshrink,
    F.hardshrink,
    F.softshrink,
    torch.tanh,
    torch.sigmoid,
    torch.erf,
    torch.expm1,
    torch.log1p,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_activations_are_no_alarm(dtype: torch.dtype) -> None:
    """Where torch's own kernel is less exact than its type, as its sixth in f32 is for f64, a kernel that
    is more exact is right; gradients, too."""
    transconv.config.fallback = "error"
    x = torch.linspace(-9, 9, 1001, device="cuda", dtype=dtype).requires_grad_()

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [a(x.abs() if a is torch.log1p else x) for a in ACTIVATIONS]

    made = torch.compile(f, backend=backend)(x)
    torch.autograd.backward(made, [torch.ones_like(y) for y in made])
    assert not transconv.stats().compared.get("wrong")
