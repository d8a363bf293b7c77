"""Computations of a text beside those of convolutions: what quantises inputs, and makes weights floats.

A kind of call is compiled once; its kernel starts without being asked again once a result of it was right.
What has no kernel is computed by torch, as far as ``transconv.config.fallback`` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import reduce
from operator import or_
from typing import Any

import torch

from transconv.calls import stats
from transconv.calls.guard import ALIGNMENT, current_device
from transconv.calls.settings import settings
from transconv.compute import Alone, parse
from transconv.errors import ProblemError, ScheduleError, StageError, Unsupported
from transconv.runtime import NEVER, Plan, first_run_check, ready
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.select_impl import PASSING

Tensor = torch.Tensor

LIMIT = 1024  # kinds of calls kept


def served(x: Tensor) -> bool:
    """Whether kernels compute on a tensor's device, and now: compilers see torch's operations."""
    return (x.is_cuda or settings.cpu == "interpret") and not torch.compiler.is_dynamo_compiling()


class _Kernel:
    """The plan of one kind of call, and what starts it once it has run."""

    __slots__ = ("aligned", "begin", "device", "names", "plan")

    def __init__(self, plan: Plan, aligned: bool, device: int, names: tuple[str, ...]) -> None:
        self.plan, self.aligned, self.device, self.names = plan, aligned, device, names
        self.begin: Callable[..., None] | None = None

    def run(self, tensors: tuple[Tensor, ...]) -> None:
        """Raises Unsupported where no kernel gives the right result."""
        if self.begin is not None and current_device() == self.device:
            self.begin(*tensors)
            return
        x = tensors[0]
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            flat = [t.as_strided((t.numel(),), (1,), t.storage_offset()) for t in tensors]
            self.plan = first_run_check.run(self.plan, dict(zip(self.names, flat, strict=True)))
            if x.is_cuda:
                self.begin = self.plan.starter(self.device, self.aligned, self.names)


_kernels: dict[Hashable, _Kernel | Unsupported] = {}


def begun(key: tuple[Hashable, ...], x: Tensor) -> Callable[..., None] | None:
    """What starts the kernel of ``computed`` on aligned tensors, the first like ``x``, on its device as
    the current one; None if it has not run there."""
    kernel = _kernels.get((*key, x.device, True))
    return kernel.begin if isinstance(kernel, _Kernel) else None


settings.on_change(_kernels.clear)


def computed(what: str, key: tuple[Hashable, ...], names: tuple[str, ...], tensors: tuple[Tensor, ...],
             text: Callable[[], str]) -> bool:
    """Compute the text on the tensors of these names, dense and with elements, in the text as they lie in
    memory; the last one is the result. ``key``: tells the text, whose tensors have one dimension. False
    where no kernel does, or none yet, and torch may compute ``what``: that is told as the policy says.
    Unsupported where it may not."""
    x = tensors[0]
    aligned = not reduce(or_, map(Tensor.data_ptr, tensors)) & ALIGNMENT
    key = (*key, x.device, aligned)
    try:
        kernel = _kernels[key] if key in _kernels else _made(key, names, x.device, aligned, text)
        if isinstance(kernel, Unsupported):
            raise kernel
        kernel.run(tensors)
        return True
    except Unsupported as error:
        if error.reason not in (*PASSING, NEVER):  # the next call may find it
            _kernels[key] = error.with_traceback(None)
        stats.announce(error.reason, error.message, what)
        return False


def _made(key: Hashable, names: tuple[str, ...], device: torch.device, aligned: bool,
          text: Callable[[], str]) -> _Kernel:
    if lower_call.capturing(device):
        raise Unsupported("capture:cold", "a kernel cannot be built while a CUDA graph is captured;"
                          " call once before capturing")
    if len(_kernels) >= LIMIT:
        _kernels.clear()
    target: Any = lower_call.target_of(device)
    try:
        plan = ready(Alone(parse(text())), target, None, False, Plan, aligned, settings.mode)
    except (ScheduleError, ProblemError, StageError) as error:
        raise Unsupported("schedule:refused", str(error)) from error
    made = _kernels[key] = _Kernel(plan, aligned, -1 if device.index is None else device.index, names)
    return made
