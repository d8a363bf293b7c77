"""Steps recorded as CUDA graphs: what is called when, what is refused; on two GPUs bits of eager steps.

On a CPU the device's part is played by a graph that runs its step again at each replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import transconv
from tests.distributed import processes
from transconv.distributed import step_capture
from transconv.distributed.step_capture import Captured

pytestmark = pytest.mark.usefixtures("own_garbage")  # a recording looks for cycles


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.InstanceNorm2d(16, affine=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Upsample(scale_factor=2.0),
        nn.SiLU(),
        nn.Conv2d(16, 8, 3, 2, 1),
        nn.AvgPool2d(3, 1, 1),
    )


class Steps:
    """A network's training step, recorded or not."""

    def __init__(self, mesh: Any, device: str, recorded: bool) -> None:
        with torch.device(device):
            self.model = transconv.distributed.parallelize(network(), mesh, {"h": 0})
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, foreach=False)
        self.run: Any = transconv.distributed.captured(self.step, mesh) if recorded else self.step

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def numbers(self) -> list[torch.Tensor]:
        found = [*self.model.parameters(), *(p.grad for p in self.model.parameters())]
        return [t.to_local().detach().clone() for t in found if isinstance(t, DTensor)]


def both_ways(device: str, calls: int) -> dict[str, Any]:
    """What differs between steps that run as they are and recorded ones; the numbers of calls."""
    transconv.config.fallback = "silent"
    torch.backends.cudnn.deterministic = True  # no sums in the order of atomic additions
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    plain, recorded = (Steps(mesh, device, r) for r in (False, True))
    wrong = []
    for call in range(calls):
        torch.manual_seed(call)
        x = distribute_tensor(torch.randn(2, 8, 32, 24).to(device), mesh, [Shard(2)])
        want, got = plain.run(x), recorded.run(x)
        pairs = zip(
            [want.full_tensor(), *plain.numbers()], [got.full_tensor(), *recorded.numbers()], strict=True
        )
        wrong += [f"call {call}, tensor {at}" for at, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    run = recorded.run
    found = {"wrong": wrong, "recorded": run.is_recorded, "why_not": run.why_not, "refused": ""}
    if run.is_recorded:
        try:
            run(distribute_tensor(torch.randn(2, 8, 16, 24).to(device), mesh, [Shard(2)]))
        except ValueError as error:
            found["refused"] = str(error)
    run.close()
    return found | {"closed": not run.is_recorded}


@pytest.mark.slow
def test_without_gpus_steps_run_as_they_are() -> None:
    for found in processes.run(2, both_ways, "cpu", 4):
        assert found == {
            "wrong": [],
            "recorded": False,
            "refused": "",
            "closed": True,
            "why_not": "a mesh of cpu devices has none",
        }, found


def inference(device: str) -> dict[str, Any]:
    """What differs between a convolution and recorded calls of it; seconds until each call was over."""
    transconv.config.fallback = "silent"
    began, took = time.time(), []
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    with torch.device(device):
        model = transconv.distributed.parallelize(nn.Conv2d(8, 8, 3, padding=1), mesh, {"h": 0})
    wrong = []
    with torch.no_grad(), transconv.distributed.captured(model, mesh) as run:
        for call in range(6):
            x = distribute_tensor(torch.randn(1, 8, 64, 16).to(device), mesh, [Shard(2)])
            want, got = (f(x).to_local().clone() for f in (model, run))
            wrong += [] if torch.equal(want, got) else [call]
            took.append(round(time.time() - began, 1))
        return {"wrong": wrong, "recorded": run.is_recorded, "seconds": took}


@pytest.mark.slow
def test_calls_of_a_model() -> None:
    for found in processes.run(2, inference, "cpu"):
        assert found["wrong"] == [] and not found["recorded"], found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_recorded_calls_have_each_bit_of_eager_ones() -> None:
    """One kernel and one exchange: what hangs here ends in less than a minute."""
    for found in processes.run(2, inference, "cuda", timeout=25, limit=50):
        print(found, flush=True)
        assert isinstance(found, dict) and found["wrong"] == [] and found["recorded"], found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_recorded_steps_have_each_bit_of_eager_ones() -> None:
    for found in processes.run(2, both_ways, "cuda", 6, timeout=40, limit=100):
        print(found, flush=True)
        assert isinstance(found, dict), found
        assert found.pop("refused").startswith("a recorded step was called with float32[2, 8, 16, 24]")
        assert found == {"wrong": [], "recorded": True, "closed": True, "why_not": ""}, found


# -- the order of things, without a device ---------------------------------------------------------


class Graph:
    """Runs what was recorded again, in place of a device."""

    again: Any = None

    def replay(self) -> None:
        self.again()

    def reset(self) -> None:
        self.again = None


class Stream:
    def wait_stream(self, _: Any) -> None:
        pass


class Mesh:
    device_type, ndim = "cpu", 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    made: list[Graph] = []

    @contextmanager
    def graph(given: Graph, **_: Any) -> Iterator[None]:
        made.append(given)
        yield

    for name, fake in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(step_capture, "_why_not", lambda _: "")
    monkeypatch.setattr(step_capture, "gathered", lambda _, what: [(0, what)])
    return made


def test_calls_are_one_step_each(device: list[Graph]) -> None:
    """Two as they are, one recorded and replayed, then replays, which read what they are given."""
    seen: list[list[float]] = []
    result = torch.zeros(3)

    def step(x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        seen.append(x.tolist())
        if device:
            device[0].again = lambda: result.copy_(x * scale)
            return {"y": result}
        return {"y": x * scale}

    run = Captured(step, Mesh())
    for call in range(5):
        x = torch.full((3,), float(call))
        assert run(x, 2.0)["y"].tolist() == [2.0 * call] * 3
        assert run.is_recorded is (call > 1)
        x.fill_(-1)  # the graph has a copy
    assert seen == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    for args in ((torch.ones(4), 2.0), (torch.ones(3), 3.0), (torch.ones(3).double(), 2.0), (None, 2.0)):
        with pytest.raises(ValueError, match=r"recorded with float32\[3\] on cpu, 2.0"):
            run(*args)
    run.close()
    assert not run.is_recorded and device[0].again is None


def test_what_cannot_be_recorded_is_said(device: list[Graph]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if device:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x + 1

    run = Captured(step, Mesh())
    for _ in range(2):
        run(torch.ones(2))
    with pytest.raises(RuntimeError, match="rank 0: RuntimeError: operation not permitted .* at values"):
        run(torch.ones(2))
    device.clear()
    assert run(torch.ones(2)).tolist() == [2.0, 2.0] and "not permitted" in run.why_not


def test_kernels_that_are_compiled_are_waited_for(
    device: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([0, 1, 1, 3, 3, 3, 0, 0])  # before and behind each eager call, then of the recording
    monkeypatch.setattr(step_capture, "_torchs", lambda _: next(counts))

    def step() -> None:
        if device:
            device[0].again = lambda: None

    run = Captured(step, Mesh())
    for call in range(4):
        run()
        assert run.is_recorded is (call == 3)


def test_a_line_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "transconv.distributed"):
        assert transconv.distributed.captured(lambda: 3, Mesh())() == 3
    assert "runs without a CUDA graph: a mesh of cpu devices has none" in caplog.text
