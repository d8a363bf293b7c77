"""Microseconds of a kernel on the device."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from transconv.compute import Workload
from transconv.functional.calls.compiled_launch import launch
from transconv.runtime import Wanted
from transconv.tuning.timing import Clock

Tensor = torch.Tensor


def measured(asked: str | Workload, device: torch.device, clock: Clock) -> float | None:
    """The median of a kernel on random data; indices are zeros. None on a CPU, where nothing that is
    measured says anything about a device. Raises Unsupported."""
    if device.type != "cuda":
        return None
    found = launch(asked, device, True, "now")

    operands = found.operands()

    def make(_: int) -> Callable[[], object]:
        tensors = [_made(m, device) for m in operands]
        return lambda: found.start(tensors)
    return clock.one(make, sum(prod(m.shape) * m.elements.itemsize for m in operands)).us


def _made(m: Wanted, device: torch.device) -> Tensor:
    assert m.strides is not None
    t = torch.empty_strided(m.shape, m.strides, dtype=m.elements, device=device)
    return t.normal_() if t.is_floating_point() else t.zero_()
