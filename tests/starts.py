"""The written start of one kernel, for tests of what it passes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transconv.backend_triton import Launcher
from transconv.runtime.launch_codegen import StartWriter, StepStart


def start_of(launcher: Launcher, order: tuple[int, ...], aligned: bool = True,
             count: int = 6) -> Callable[..., Any] | None:
    """A function of ``count`` tensors that starts the kernel on device 0 with those of these numbers; None
    before it is loaded there."""
    begun = launcher.begun(0, aligned)
    if begun is None:
        return None
    return StartWriter(launcher.numbers, 0, count).starter([StepStart(begun, order)])(())
