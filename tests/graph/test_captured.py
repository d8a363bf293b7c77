"""CUDA graphs: what is handed to torch's recorder, and what is left as it is, with the reason."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import transconv
from tests.graph.meant import Meant, by_meaning
from transconv.errors import Unsupported
from transconv.graph import backend
from transconv.graph.regions import cudagraphs as captured_graphs

pytestmark = pytest.mark.usefixtures("own_garbage")  # a first call looks for cycles


class Net(nn.Module):
    """With a buffer that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.relu(self.norm(self.conv(x)))
        return y


Asked = list[dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the recorder was asked for, in the order of the graphs; it records nothing."""
    from torch._dynamo.backends import cudagraphs
    from torch._inductor import cudagraph_trees

    found: Asked = []

    def impl(run: Callable[..., Any], inputs: Sequence[Any], static: Sequence[int], **about: Any) -> Any:
        found.append(about | {"static": [*static], "inputs": len(inputs)})
        return run

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", impl)
    monkeypatch.setattr(cudagraphs, "check_for_skip", lambda graph, fixed: None)  # CPU tensors
    monkeypatch.setattr(captured_graphs, "_why_not", lambda inputs: "")
    return found


def compiled(model: nn.Module, **words: Any) -> Any:
    words.setdefault("options", {"rest": "eager", "cudagraphs": True})
    return torch.compile(model, backend=backend, **words)


def test_parameters_stay_where_they_are(asked: Asked) -> None:
    """The input alone is copied; results are those without recording."""
    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    with by_meaning(), torch.no_grad():
        torch.testing.assert_close(compiled(net)(x), net(x), atol=1e-4, rtol=1e-4)
    (one,) = asked
    assert (one["is_inference"], one["is_backward"]) == (True, False)
    assert len(one["static"]) == one["inputs"] - 1 == len([*net.parameters(), *net.buffers()]) - 1


def test_a_step_of_training(asked: Asked) -> None:
    net, x = Net().train(), torch.randn(2, 3, 6, 6)
    with by_meaning():
        compiled(net)(x).sum().backward()
    forward, backward = asked
    assert not forward["is_backward"] and backward["is_backward"]
    assert len(backward["static"]) < backward["inputs"]  # saved values; the incoming gradient is copied
    assert net.conv.weight.grad is not None


class Made(TorchDispatchMode):
    """The memory that operations make, each with the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[int, tuple[str, StorageWeakRef]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor):
                self.all[t.untyped_storage()._cdata] = str(func), StorageWeakRef(t.untyped_storage())
        return made


def place(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


@pytest.mark.every(2)
@pytest.mark.parametrize("refused", ["", "weight_gradient", "convolution"])
def test_results_are_made_in_a_call_and_nothing_else_outlives_it(
    refused: str, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch demands of a function whose memory is in a pool. It looks before Python has collected
    cycles, such as that of a frame and the error that it raises from a variable, as Triton does."""
    from torch._inductor import cudagraph_trees

    start, calls, found = Meant.start, list[str](), list[str]()

    def planted(self: Meant, tensors: Sequence[torch.Tensor]) -> None:
        if refused and any(refused in text.split()[1] for text in self.texts):
            error = Unsupported("miscompiled", "planted")
            raise error
        start(self, tensors)

    def impl(run: Callable[..., Any], inputs: Sequence[Any], static: Sequence[int], **about: Any) -> Any:
        def call(given: list[Any]) -> list[Any]:
            before = {place(t) for t in given}
            with Made() as noted:
                results: list[Any] = run(given)
            calls.append("backward" if about["is_backward"] else "forward")
            own = {k: v for k, v in noted.all.items() if k not in before}
            ends = {place(t) for t in results if t is not None}
            found.extend(f"{calls[-1]}: a result is from elsewhere" for _ in ends - before - own.keys())
            found.extend(
                f"{calls[-1]}: of {name}"
                for k, (name, left) in own.items()
                if k not in ends and not left.expired()
            )
            return results

        return call

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", impl)
    monkeypatch.setattr(Meant, "start", planted)
    transconv.config.fallback = "silent"
    net = Net().train()
    run = compiled(net)
    gc.collect()
    gc.disable()
    try:
        with by_meaning():
            for _ in range(2):
                run(torch.randn(2, 3, 6, 6)).sum().backward()
    finally:
        gc.enable()
    assert calls == ["forward", "backward"] * 2 and found == []
    regions = [
        r
        for g in transconv.graph.report(run).graphs
        for r in g.rows
        if isinstance(r, transconv.graph.TorchRow)
    ]
    assert bool(regions) == bool(refused)


@pytest.mark.every(2)
@pytest.mark.parametrize("words", [{}, {"mode": "reduce-overhead", "options": None}])
def test_what_is_not_on_a_gpu_runs_as_before(
    words: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    with by_meaning(), torch.no_grad(), caplog.at_level(logging.WARNING, "transconv.graph"):
        torch.testing.assert_close(compiled(net, **words)(x), net(x), atol=1e-4, rtol=1e-4)
    assert "without CUDA graphs: its tensors are not all on a GPU" in caplog.text


def test_an_unknown_option_names_the_known_ones() -> None:
    with pytest.raises(Exception, match="cudagraphs"):
        compiled(Net(), options={"cuda_graphs": True})(torch.randn(1, 3, 6, 6))


@pytest.mark.gpu
def test_on_the_device() -> None:
    """Inference and a step of training have the results that they have without CUDA graphs, at every call
    and on other inputs."""
    for train in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = (
            nn.Sequential(
                nn.Conv2d(16, 32, 3, padding=1),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, 16, 3, padding=1),
            )
            .cuda()
            .to(memory_format=torch.channels_last)
        )
        net = net.train(train)
        plain, recorded = torch.compile(net, backend=backend), compiled(net)
        for call in range(5):
            x = torch.randn(4, 16, 32, 32, device="cuda").to(memory_format=torch.channels_last)
            found = []
            for run in (plain, recorded):
                net.zero_grad(set_to_none=True)
                with torch.set_grad_enabled(train):
                    torch.compiler.cudagraph_mark_step_begin()
                    made = run(x)
                    if train:
                        made.square().mean().backward()
                grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
                found.append([made.detach().clone(), *grads])
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=f"train {train}, call {call}")
