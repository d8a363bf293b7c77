"""Weights of 4 bits, with a scale for every few input channels.

    byte[f, k.., c // 2]     8 + q of the even channel c, and 16 times 8 + q of the odd one; q is -8..7
    weight[f, c, k..]        q * scale[f, c // size], in the type of the input

A kernel makes floats of a whole weight in front of a call (quantization/integer_weights.py): each is
multiplied by many elements of the image, and a product whose kernel made them in its tiles would wait for
them every time.
"""

from __future__ import annotations

from math import prod

import torch

from transconv.errors import TensorError
from transconv.ir import DType
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.fused import helper_kernels

Tensor = torch.Tensor


def packed(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The bytes (oc, *k, ic/groups/2) of a weight (oc, ic/groups, *k), and the scales
    (oc, ic/groups/size), f32. ValueError unless ``size`` is even and divides the channels."""
    channels = weight.shape[1]
    if size < 2 or size % 2 or channels % size:
        raise ValueError(f"groups of {size} of {channels} input channels; expected an even number that "
                         "divides them")
    rows = weight.detach().float().movedim(1, -1)
    each = rows.reshape(*rows.shape[:-1], -1, size)
    tiny = torch.finfo(torch.float32).tiny
    scale = (each.abs().amax(dim=(*range(1, each.dim() - 2), each.dim() - 1)) / 7).clamp(min=tiny)
    along = scale.view(len(scale), *[1] * (each.dim() - 3), -1, 1)
    whole = ((each / along).round().clamp(-8, 7) + 8).to(torch.uint8).reshape(rows.shape)
    return (whole[..., ::2] | whole[..., 1::2] << 4).contiguous(), scale.contiguous()


def unpacked(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (oc, ic/groups, *k) of bytes and scales, rounded once."""
    whole = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).float() - 8
    size = whole.shape[-1] // scale.shape[1]
    along = scale.repeat_interleave(size, 1).view(len(scale), *[1] * (whole.dim() - 2), -1)
    return (whole * along).to(dtype).movedim(-1, 1)


def floats(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``unpacked`` by one kernel where there is one, with channels innermost in memory. TensorError for
    scales that are not those of the weight's channels."""
    rows, channels = len(weight), 2 * weight.shape[-1]
    if scale.dim() != 2 or len(scale) != rows or not scale.shape[1] or channels % scale.shape[1]:
        raise TensorError(f"weight_scale: expected the shape ({rows}, groups of {channels} input "
                          f"channels), got {tuple(scale.shape)}")
    weight, scale = weight.contiguous(), scale.contiguous()
    made = weight.new_empty((*weight.shape[:-1], channels), dtype=dtype)
    taps, groups = prod(weight.shape[1:-1]), scale.shape[1]
    if helper_kernels.served(weight) and helper_kernels.computed(
            "weights of 4 bits", ("four bits", rows, taps, channels, groups, dtype), ("W", "S", "Y"),
            (weight, scale, made), lambda: text(rows, taps, channels, groups, lower_call.DTYPES[dtype])):
        return made.movedim(-1, 1)
    return unpacked(weight, scale, dtype)


def text(rows: int, taps: int, channels: int, groups: int, of: DType) -> str:
    """The computation, whose elements are those in memory."""
    half, size, count = channels // 2, channels // groups, rows * taps * channels
    return "\n".join([
        "compute four_bits", f"    tensor W u8 [n={count // 2}]", f"    tensor S f32 [n={rows * groups}]",
        f"    tensor Y {of} [n={count}]", f"    axes   f={rows} t={taps} c={channels}",
        f"    read   p = W[(f*{taps} + t)*{half} + c // 2]", f"    read   s = S[f*{groups} + c // {size}]",
        "    let    high = floor(p*0.0625)",
        "    let    q = where(c % 2 == 0, p - high*16, high) - 8",
        f"    store  Y[(f*{taps} + t)*{channels} + c] = q*s"])
