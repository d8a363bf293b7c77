"""Inputs quantised by one kernel: the elements of a dense tensor in their order in memory.

torch needs a kernel for each of the operations (quantization/schemes.py), which here are the meaning, and
what computes where no kernel does: tensors on a CPU, traced calls. Tensors with gaps in memory are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from transconv.calls import stats
from transconv.ir import DType
from transconv.torch_ops.calls import dispatch, lower_call
from transconv.torch_ops.fused import helper_kernels
from transconv.torch_ops.quantization.schemes import quantised

Tensor = torch.Tensor

WHAT = "the quantising of inputs"
WITH_ZERO, SYMMETRIC = ("x", "scale", "zero", "y"), ("x", "scale", "y")  # the tensors of the text


def quantise(x: Tensor, scale: Tensor, zero: Tensor | None, held: DType) -> Tensor:
    """``quantized_kinds.quantised`` of a tensor and a scale () for all of it, f32; ``zero``: (1,), s32."""
    if not helper_kernels.served(x) or not dispatch.is_plain(x) or not x.numel():
        return quantised(x, scale, zero, held)
    of = lower_call.DTYPES.get(x.dtype)
    if of is None or of.bits == 64:
        stats.announce(f"dtype:{str(x.dtype).removeprefix('torch.')}", what=WHAT)
        return quantised(x, scale, zero, held)
    y = torch.empty_like(x, dtype=getattr(torch, held.torch), memory_format=torch.preserve_format)
    if x.stride() != y.stride():  # there are gaps
        x = torch.empty_like(x).copy_(x)
    names, tensors = (SYMMETRIC, (x, scale, y)) if zero is None else (WITH_ZERO, (x, scale, zero, y))
    count = x.numel()
    if not helper_kernels.computed(WHAT, _key(x, zero, held), names, tensors,
                          lambda: text(count, of, zero is not None, held)):
        return quantised(x, scale, zero, held)
    return y


def starter(x: Tensor, zero: Tensor | None, held: DType) -> Callable[..., None] | None:
    """What starts the kernel for aligned tensors like these: a function of the tensor, the scale, the zero
    point unless that is None, and the result, which lies as the tensor does; None if none has run."""
    return helper_kernels.begun(_key(x, zero, held), x) if _takes(x) else None


def _key(x: Tensor, zero: Tensor | None, held: DType) -> tuple[Hashable, ...]:
    return x.dtype, x.numel(), held, zero is None


def _takes(x: Tensor) -> bool:
    """Whether a kernel may read a tensor in the order of its memory."""
    return (
        helper_kernels.served(x)
        and dispatch.is_plain(x)
        and x.numel() > 0
        and (
            x.is_contiguous()
            or any(
                x.dim() == dims and x.is_contiguous(memory_format=layout)
                for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
            )
        )
    )


def text(count: int, of: DType, zero: bool, held: DType) -> str:
    """The computation, whose elements are those in memory."""
    low, high = (f"{n:g}.0" for n in held.range)
    value = f"min(max(q, {low}), {high})"
    if held.kind == "int":  # the zero point is whole: it is added behind the rounding
        value = (f"nearest_small(min(max(q, {low} - f32(z)), {high} - f32(z))) + z" if zero else
                 f"nearest_small({value})")
    return "\n".join([
        "compute quantise",
        f"    tensor x {of} [n={count}]", "    tensor scale f32 [one=1]",
        *["    tensor zero i32 [one=1]"] * zero, f"    tensor y {held} [n={count}]",
        f"    axes   n={count}", "    read   a = x[n]", "    read   s = scale[0]",
        *["    read   z = zero[0]"] * zero, "    let    r = 1/s", "    let    q = a*r",
        f"    store  y[n] = {held}({value})"])
