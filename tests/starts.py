"""The written start of one kernel, for tests of what it passes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transconv.backend_triton import TritonKernel
from transconv.runtime.plans import StartWriter, StepStart


def start_of(
    kernel: TritonKernel, order: tuple[int, ...], aligned: bool = True, count: int = 6
) -> Callable[..., Any] | None:
    """A function of ``count`` tensors that starts the kernel on device 0 with those of these numbers; None
    before it is loaded there."""
    begun = kernel.begun(0, aligned)
    if begun is None:
        return None
    return StartWriter(kernel.numbers, 0, count).starter([StepStart(begun, order)])(())
