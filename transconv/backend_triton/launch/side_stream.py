"""A stream of its own, for a thread that works on a GPU beside the program.

What the thread launches neither waits for the program's stream nor is waited for by it. It may load kernels
and allocate memory while another thread captures a CUDA graph: CUDA forbids that to all threads, unless one
says that only its own captures concern it. torch's streams come from a pool that is soon used again, and
the program may capture one of them: this stream is the driver's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from transconv.backend_triton.launch.bound_start import torch_module

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the default stream does not wait for it
LOWEST = 0  # priority, that of streams without one
OWN_CAPTURES = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextmanager
def aside(device: Any) -> Iterator[None]:
    """Within ``with``, the thread works on a GPU's own stream for such threads, and records no gradients.
    RuntimeError where the driver does not allow it."""
    torch = torch_module()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.mem_get_info(device)  # binds the GPU's context to the thread
            stack.enter_context(torch.cuda.stream(_stream(device)))
            stack.enter_context(_capturing_alone())
        yield


@cache
def _stream(device: Any) -> Any:
    made = ctypes.c_void_p()
    _call("cuStreamCreateWithPriority", ctypes.byref(made), NON_BLOCKING, LOWEST)
    return torch_module().cuda.ExternalStream(made.value, device=device)


@contextmanager
def _capturing_alone() -> Iterator[None]:
    """Captures of other threads do not concern this one."""
    mode = ctypes.c_int(OWN_CAPTURES)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:  # what it was before
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _call(name: str, *given: Any) -> None:
    """A function of the driver's library. RuntimeError for what is not there, or fails."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{name}: {error}") from error
    if code := function(*given):
        raise RuntimeError(f"{name} returned {code}")
