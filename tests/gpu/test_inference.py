"""Weights of frozen models are copied to the kernels' layout once, on a GPU: launches, results, graphs
and times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.gpu.operands import on_gpu
from transconv.torch_ops.conversion import inference

pytestmark = pytest.mark.gpu
SHAPES = [(64, 56, 1), (256, 14, 1), (32, 28, 8)]  # channels, extent, groups


@pytest.fixture(autouse=True)
def _copies_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, every use of a copy makes a second copy to compare with."""
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")


def layer(channels: int, groups: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    made = transconv.nn.Conv2d(channels, channels, 3, padding=1, groups=groups, device="cuda", dtype=dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    return made.requires_grad_(False)


def given(channels: int, extent: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-2, 3, (8, channels, extent, extent), device="cuda").to(dtype)


def answer(conv: Any, x: torch.Tensor) -> torch.Tensor:
    """Rounded once: torch adds the bias to what it has rounded already."""
    operands = (t.detach().double() for t in (x, conv.weight, conv.bias))
    return F.conv2d(*operands, padding=1, groups=conv.groups).to(x.dtype)


def right(conv: Any, x: torch.Tensor) -> bool:
    return torch.equal(conv(x), answer(conv, x))


def kernels(conv: Any, x: torch.Tensor) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        conv(x)
        torch.cuda.synchronize()
    return [e.name for e in seen.events() if "pack_" in e.name and "wei" in e.name]


@on_gpu
@pytest.mark.parametrize(("channels", "extent", "groups"), SHAPES)
def test_a_weight_is_copied_once(channels: int, extent: int, groups: int) -> None:
    conv, x = layer(channels, groups), given(channels, extent)
    for _ in range(4):
        assert right(conv, x)
    copies = len(kernels(conv, x))
    with transconv.inference(conv) as handle:
        for _ in range(6):
            assert right(conv, x)
        assert kernels(conv, x) == [] and (handle.bytes > 0) is (copies > 0)
        conv.weight.mul_(-1)
        assert right(conv, x) and right(conv, x) and kernels(conv, x) == []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert right(conv, x)
    assert right(conv, x) and len(kernels(conv, x)) == copies


@on_gpu
def test_graphs_copy_at_every_replay() -> None:
    conv, x = layer(64, 1), given(64, 56)
    transconv.inference(conv)
    for _ in range(4):
        assert right(conv, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv(x)
    for _ in range(2):
        conv.weight.add_(1)
        graph.replay()
        assert torch.equal(y, answer(conv, x))
    assert right(conv, x) and right(conv, x)


@on_gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_see_new_weights(mode: str) -> None:
    conv, x = layer(64, 1), given(64, 56)
    transconv.inference(conv)
    assert right(conv, x) and right(conv, x)
    compiled = torch.compile(conv, mode=mode)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(compiled(x), answer(conv, x))
            conv.weight.add_(1)
            assert right(conv, x)


@on_gpu
@pytest.mark.parametrize(("channels", "extent", "groups"), SHAPES)
def test_times(channels: int, extent: int, groups: int, record_property: Any) -> None:
    """Records both times: a frozen model launches one kernel fewer, and is not slower by more than
    noise."""
    conv, x = layer(channels, groups), given(channels, extent)

    def us() -> float:
        for _ in range(20):
            conv(x)
        times = []
        for _ in range(20):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(20):
                conv(x)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 50)
        return sorted(times)[10]

    before = us()
    with transconv.inference(conv) as handle:
        after = us()
        copied = bool(inference.copied(conv.weight)[0])
        size = handle.bytes
    record_property("microseconds", f"{channels}x{extent}: {before:.1f} -> {after:.1f} ({size} bytes)")
    assert not copied or after < 1.1 * before
