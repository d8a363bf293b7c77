"""What a training step costs the host, counted: memory that it asks for, and functions of Python."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import faked_launches
from tests.graph.meant import traced
from transconv.functional.calls import compiled_launch
from transconv.graph.regions import region_calls

Tensor = torch.Tensor
SMALL, LAST = torch.bfloat16, torch.channels_last


def forward(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor]:
    """A convolution and a norm with statistics of the batch, whose kernels leave partial sums."""
    x = F.conv2d(x, weight, padding=1)
    return (F.relu(F.batch_norm(x, None, None, scale, shift, training=True)),)


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> list[region_calls.RegionLaunches]:
    """The regions that are compiled."""
    found: list[region_calls.RegionLaunches] = []
    real = region_calls.RegionLaunches.of

    def noted(made: Any) -> region_calls.RegionLaunches:
        found.append(real(made))
        return found[-1]

    monkeypatch.setattr(region_calls.RegionLaunches, "of", noted)
    return found


@pytest.mark.slow
def test_a_training_step(
    regions: list[region_calls.RegionLaunches], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        torch.zeros(32, 64, 56, 56, dtype=SMALL).contiguous(memory_format=LAST),
        torch.zeros(64, 64, 3, 3, dtype=SMALL).contiguous(memory_format=LAST).requires_grad_(),
        *(torch.zeros(64, dtype=SMALL, requires_grad=True) for _ in range(2)),
    ]
    made: list[object] = []
    called: list[str] = []
    empty = faked_launches._empty

    def counted(*memory: Any) -> Tensor:
        made.append(memory)
        return empty(*memory)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = frame.f_globals.get("__name__", "").startswith("transconv")
        if event == "call" and (ours or (code.co_filename == "<string>" and code.co_name == "run")):
            called.append(code.co_name)

    monkeypatch.setattr(faked_launches, "_empty", counted)
    with faked_launches.graphs_as_on_gpu() as launched, torch.autograd.set_multithreading_enabled(False):
        run = traced(forward, given)
        for _ in range(3):
            for noted in (launched, made, called):
                noted.clear()
            sys.setprofile(profile)
            try:
                (out,) = run(*given)
                out.backward(torch.zeros_like(out))
            finally:
                sys.setprofile(None)
        plans = {key[0]: found.plan for key, found in compiled_launch._launches.items()}  # type: ignore[index]
    results, shared, apart = 0, 0, 0
    for region in regions:
        spaces = [Counter(dtype for _, dtype in plans[k.asked].spaces()) for k in region.kernels]
        results += sum(len(k.stored) for k in region.kernels) - sum(map(len, region.over))
        shared += sum(max(s[dtype] for s in spaces) for dtype in {d for s in spaces for d in s})
        apart += sum(s.total() for s in spaces)
    assert len(regions) == 2 and shared < apart, "a forward and a backward pass, with partial sums in both"
    assert len(made) == results + shared, "the results, and memory for the workspaces of all kernels"
    kernels = sum(len(r.kernels) for r in regions)
    assert len(launched) > kernels, "a kernel of partial sums is followed by one that adds them"
    assert len(called) <= len(launched) + kernels + 44, f"of Python: {Counter(called)}"
