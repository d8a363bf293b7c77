"""Microseconds of a kernel: the cost room's estimate of the launches that it becomes, and its time on the
device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

import torch

from transconv.compute import Compute, Workload
from transconv.cost import estimate
from transconv.functional.launches import Memory, launch
from transconv.runtime import plan_steps
from transconv.schedule import Schedule
from transconv.selection import shortlist
from transconv.target import Target
from transconv.tuning.timing import Clock

Tensor = torch.Tensor


@lru_cache(maxsize=4096)
def estimated(workload: Workload, target: Target) -> float:
    """Of all launches of a workload, with the schedules that it would get. Raises ScheduleError."""
    def first(compute: Compute, target: Target) -> Schedule:
        return shortlist(1, compute, target, workload)[0].schedule
    return sum(estimate(s, c, target) for c, s in plan_steps(workload, target, choose=first))


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


def _made(m: Memory, device: torch.device) -> Tensor:
    t = torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=device)
    return t.normal_() if m.dtype.is_floating_point else t.zero_()
