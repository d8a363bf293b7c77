"""Microseconds of a kernel on the device."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from transconv.compute import Workload
from transconv.functional.calls.compiled_launch import TensorMemory, launch
from transconv.tuning.timing import Clock

Tensor = torch.Tensor


def measured(asked: str | Workload, device: torch.device, clock: Clock) -> float | None:
    """The median of a kernel on random data; indices are zeros. None on a CPU, where nothing that is
    measured says anything about a device. Raises Unsupported."""
    if device.type != "cuda":
        return None
    found = launch(asked, device, True, "now")

    def make(_: int) -> Callable[[], object]:
        tensors = [_made(m, device) for m in found.memory]
        return lambda: found.start(tensors)
    return clock.one(make, sum(prod(m.shape) * m.dtype.itemsize for m in found.memory)).us


def _made(m: TensorMemory, device: torch.device) -> Tensor:
    t = torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=device)
    return t.normal_() if m.dtype.is_floating_point else t.zero_()
