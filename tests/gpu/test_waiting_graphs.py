"""``compile="background"`` on a GPU: steps of a compiled graph wait for no kernel, and kernels take them
over. By default they wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from tests.gpu.test_auto_sizes import auto  # noqa: F401  (a fixture of each test)
from transconv.graph.regions.region_calls import RegionLaunches
from transconv.graph.regions.region_kernel import compile_mode
from transconv.runtime import rehearsal_thread

pytestmark = pytest.mark.gpu

LIMIT_S = 150.0


@pytest.fixture(autouse=True)
def background(auto: None) -> None:  # noqa: F811
    assert compile_mode() == "now"
    transconv.config.compile = "background"


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each first call of a region's kernels, whether the thread made it."""
    real, found = RegionLaunches.first, list[bool]()

    def noted(self: Any, *given: Any) -> Any:
        found.append(threading.current_thread().name == rehearsal_thread.NAME)
        return real(self, *given)

    monkeypatch.setattr(RegionLaunches, "first", noted)
    return found


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = [
        m for _ in range(3) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU())
    ]
    made: nn.Module = nn.Sequential(*layers, nn.Dropout(0.1), nn.Conv2d(32, 8, 1))
    return made.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)


def image(side: int = 40) -> torch.Tensor:
    x = torch.randn(8, 32, side, side, device="cuda", dtype=torch.bfloat16)
    return x.to(memory_format=torch.channels_last)


def step(run: Any, model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], float]:
    """The result and the gradients of one seed, and the seconds that they took."""
    torch.manual_seed(5)
    model.zero_grad()
    torch.cuda.synchronize()
    start = time.perf_counter()
    y = run(x)
    y.float().square().mean().backward()
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    return [y.detach(), *[p.grad for p in model.parameters() if p.grad is not None]], took


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_training_waits_for_nothing(first: list[bool], cudagraphs: bool) -> None:
    """Each step's numbers are those of a step whose kernels were there, within its rounding."""
    model, x = net(), image()
    run = torch.compile(
        model, backend=transconv.graph.backend, options={"rest": "eager", "cudagraphs": cudagraphs}
    )
    want, _ = step(run, model, x)
    assert transconv.stats(reset=True).waiting and not first
    took, end = [], time.monotonic() + LIMIT_S
    while True:
        found, seconds = step(run, model, x)
        for ours, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=0.05 * theirs.abs().max().item())
        seen = transconv.stats(reset=True)
        assert not seen.fallback
        if not seen.waiting:
            break
        took.append(seconds)
        assert time.monotonic() < end
        time.sleep(0.02)
    assert all(first) and len(first) == 2, "forward and backward, by the thread"
    for _ in range(4):
        found, seconds = step(run, model, x)
        took.append(seconds)
        assert transconv.stats(reset=True).waiting == 0
    assert max(took) < 1.0 or cudagraphs, "which are recorded"
    assert all(graph.compared == 1 for graph in transconv.graph.report(run).graphs)


def test_sizes_that_change(first: list[bool]) -> None:
    model = net().eval()
    run = torch.compile(model, backend=transconv.graph.backend, options={"rest": "eager"}, dynamic=True)
    end, waiting, n = time.monotonic() + LIMIT_S, 1, 0
    with torch.no_grad():
        while waiting:
            x, n = image(24 + 8 * (n % 5)), n + 1
            found, want = run(x), model(x)
            torch.testing.assert_close(found, want, rtol=5e-2, atol=0.05 * want.abs().max().item())
            waiting = transconv.stats(reset=True).waiting
            assert time.monotonic() < end
            time.sleep(0.02)
    assert first[0], "the first results of any size are looked at by the thread"
