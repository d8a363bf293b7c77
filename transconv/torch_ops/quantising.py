"""Inputs quantised by one kernel: the elements of a dense tensor in their order in memory.

torch needs a kernel for each of the operations (quantized_kinds.py), which here are the meaning, and what
computes where no kernel does: tensors with gaps between elements, tensors on a CPU, traced calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import torch

from transconv.compute import Alone, parse
from transconv.errors import ProblemError, ScheduleError, StageError, Unsupported
from transconv.ir import DType
from transconv.runtime import COMPILING, NEVER, Plan, ready, trust
from transconv.torch_ops import dispatch, execute
from transconv.torch_ops.quantized_kinds import quantised
from transconv.torch_ops.route import ALIGNMENT, current_device
from transconv.torch_ops.settings import settings

Tensor = torch.Tensor

LIMIT = 1024  # kinds of tensors kept
_compiling = torch.compiler.is_dynamo_compiling


class _Kernel:
    """The plan of one kind of tensor, and what starts it once it has run."""

    __slots__ = ("aligned", "begin", "device", "names", "plan")

    def __init__(self, plan: Plan, aligned: bool, device: int, zero: bool) -> None:
        self.plan, self.aligned, self.device = plan, aligned, device
        self.names = ("x", "scale", *["zero"] * zero, "y")
        self.begin: Callable[..., None] | None = None

    def run(self, *tensors: Tensor) -> None:
        """Raises Unsupported where no kernel gives the right result."""
        if self.begin is not None and current_device() == self.device:
            self.begin(*tensors)
            return
        x = tensors[0]
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            flat = [t.as_strided((t.numel(),), (1,), t.storage_offset()) for t in tensors]
            self.plan = trust.run(self.plan, dict(zip(self.names, flat, strict=True)))
            if x.is_cuda:
                self.begin = self.plan.starter(self.device, self.aligned, self.names)


_kernels: dict[Hashable, _Kernel | None] = {}
settings.on_change(_kernels.clear)


def quantise(x: Tensor, scale: Tensor, zero: Tensor | None, held: DType) -> Tensor:
    """``quantized_kinds.quantised`` of a tensor and a scale () for all of it, f32; ``zero``: (1,), s32."""
    if _compiling() or not dispatch.is_plain(x) or not x.numel() or not (
            x.is_cuda or settings.cpu == "interpret") or not _dense(x):
        return quantised(x, scale, zero, held)
    y = torch.empty_like(x, dtype=getattr(torch, held.torch), memory_format=torch.preserve_format)
    tensors = (x, scale, y) if zero is None else (x, scale, zero, y)
    aligned = not (x.data_ptr() | y.data_ptr() | scale.data_ptr() | tensors[-2].data_ptr()) & ALIGNMENT
    key = (x.dtype, x.numel(), x.device, held, zero is None, aligned)
    try:
        kernel = _kernels[key] if key in _kernels else _made(key, x, zero is not None, held, aligned)
        if kernel is not None:
            kernel.run(*tensors)
            return y
    except Unsupported as error:
        if error.reason not in (COMPILING, NEVER):  # the next call may find it
            _kernels[key] = None
    return quantised(x, scale, zero, held)


def _dense(x: Tensor) -> bool:
    return x.is_contiguous() or any(
        x.dim() == dims and x.is_contiguous(memory_format=layout)
        for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)))


def _made(key: Hashable, x: Tensor, zero: bool, held: DType, aligned: bool) -> _Kernel | None:
    if x.dtype not in execute.DTYPES or x.dtype is torch.float64 or execute.capturing(x.device):
        return None
    if len(_kernels) >= LIMIT:
        _kernels.clear()
    target: Any = execute.target_of(x.device)
    compute = parse(text(x.numel(), execute.DTYPES[x.dtype], zero, held))
    try:
        plan = ready(Alone(compute), target, None, False, Plan, aligned, settings.mode)
    except (ScheduleError, ProblemError, StageError) as error:
        raise Unsupported("schedule:refused", str(error)) from error
    found = _kernels[key] = _Kernel(plan, aligned, -1 if x.device.index is None else x.device.index, zero)
    return found


def text(count: int, of: DType, zero: bool, held: DType) -> str:
    """The computation, whose elements are those in memory."""
    value = "q" if held.kind == "float" else "round(q) + z" if zero else "round(q)"
    low, high = (f"{n:g}" for n in held.range)
    return "\n".join([
        "compute quantise",
        f"    tensor x {of} [n={count}]", "    tensor scale f32 [one=1]",
        *["    tensor zero i32 [one=1]"] * zero, f"    tensor y {held} [n={count}]",
        f"    axes   n={count}", "    read   a = x[n]", "    read   s = scale[0]",
        *["    read   z = zero[0]"] * zero, "    let    q = a/s",
        f"    store  y[n] = {held}(min(max({value}, {low}), {high}))"])
