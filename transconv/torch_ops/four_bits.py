"""Convolutions with weights of 4 bits, for inputs in floats: a scale for every few input channels.

    byte[f, k.., c // 2]     8 + q of the even channel c, and 16 times 8 + q of the odd one; q is -8..7
    weight[f, c, k..]        q * scale[f, c // size], in the type of the input

A kernel loads bytes and makes weights of them in registers, in front of the product; the weights are never
in memory. Where no kernel does, torch multiplies by unpacked weights.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch

from transconv.compute import Alone, parse
from transconv.errors import (
    ComputeError,
    ProblemError,
    ScheduleError,
    StageError,
    TensorError,
    Unsupported,
)
from transconv.runtime import COMPILING, NEVER, Plan, ready, trust
from transconv.torch_ops import arguments, dispatch, execute, shapes, stats
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.route import ALIGNMENT
from transconv.torch_ops.settings import settings

Tensor = torch.Tensor

LIMIT = 1024  # kinds of calls kept
LETTERS = "dhw"
_compiling = torch.compiler.is_dynamo_compiling
_plans: dict[Hashable, Plan | None] = {}
settings.on_change(_plans.clear)


# -- weights ---------------------------------------------------------------------------------------


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


# -- calls -----------------------------------------------------------------------------------------


def convolve(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, stride: Any, padding: Any,
             dilation: Any, groups: int) -> Tensor:
    """The convolution of (mb, ic, *i) and a packed weight, in the input's type. TensorError for scales
    that are not those of the weight's channels, RuntimeError as torch's for shapes that do not fit."""
    channels = 2 * weight.shape[-1]
    if scale.dim() != 2 or len(scale) != len(weight) or not scale.shape[1] or channels % scale.shape[1]:
        raise TensorError(f"weight_scale: expected the shape ({len(weight)}, groups of {channels} input "
                          f"channels), got {tuple(scale.shape)}")
    logical = (len(weight), channels, *weight.shape[1:-1])
    padding = (padding,) if isinstance(padding, int) else padding
    params = arguments.resolve(input.shape, logical, None if bias is None else bias.shape, stride, padding,
                               dilation, False, (0,), groups)
    if not _compiling() and dispatch.is_plain(input):
        try:
            return _by_kernel(input, weight, scale, bias, params)
        except Unsupported as error:
            stats.handed_over(error.reason, "convolution with weights of 4 bits")
    bias = None if bias is None else bias.to(input.dtype)
    made = execute.aten_forward(input, unpacked(weight, scale, input.dtype), bias, params)
    return shapes.with_result_strides(made, _is_last(input))


def _is_last(input: Tensor) -> bool:
    """Whether channels are innermost, in images and volumes."""
    return input.dim() in (4, 5) and input.stride(1) == 1 and input.shape[1] > 1


def _by_kernel(input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
               params: Params) -> Tensor:
    if not (input.is_cuda or settings.cpu == "interpret"):
        raise Unsupported("device:cpu")
    if input.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"dtype:{str(input.dtype).removeprefix('torch.')}")
    logical = (len(weight), 2 * weight.shape[-1], *weight.shape[1:-1])
    made = shapes.output_shape(input.shape, logical, params)
    if not all(made):
        raise Unsupported("shape:empty")
    last = _is_last(input)
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[input.dim()] if last else (
        torch.contiguous_format)
    x, y = input.contiguous(memory_format=layout), input.new_empty(made).contiguous(memory_format=layout)
    tensors = {"X": x, "W": weight, "S": scale, "Y": y}
    tensors |= {} if bias is None else {"B": bias.contiguous()}
    aligned = not any(t.data_ptr() & ALIGNMENT for t in tensors.values())
    key = (params, last, aligned, input.device, *((n, t.shape, t.dtype) for n, t in tensors.items()))
    plan = _plans[key] if key in _plans else _made(key, tensors, params, last, aligned)
    if plan is None:
        raise Unsupported("schedule:refused")
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _plans[key] = trust.run(plan, tensors)
    stats.add(True, "fwd", 1)
    return y


def _made(key: Hashable, tensors: dict[str, Tensor], params: Params, last: bool, aligned: bool) -> Plan:
    device = tensors["X"].device
    if execute.capturing(device):
        raise Unsupported("capture:cold")
    if len(_plans) >= LIMIT:
        _plans.clear()
    target: Any = execute.target_of(device)
    try:
        plan = ready(Alone(parse(text(tensors, params, last))), target, None, False, Plan, aligned,
                     settings.mode)
    except (ComputeError, ScheduleError, ProblemError, StageError) as error:
        _plans[key] = None
        raise Unsupported("schedule:refused", str(error)) from error
    except Unsupported as error:
        if error.reason not in (COMPILING, NEVER):  # the next call may find it
            _plans[key] = None
        raise
    return plan


def text(tensors: dict[str, Tensor], params: Params, last: bool) -> str:
    """The computation of a call: its tensors by name, and whether channels are innermost."""
    x, weight, scale, y = (tensors[n] for n in "XWSY")
    letters = LETTERS[-len(params.stride):]
    rows, channels = len(weight) // params.groups, 2 * weight.shape[-1]
    size = channels // scale.shape[1]
    g, axis = ("g*", f"g={params.groups} ") if params.groups > 1 else ("", "")
    feature, channel = (f"{g}{rows} + f", f"{g}{channels} + c") if g else ("f", "c")
    taps = ", ".join(f"k{a}" for a in letters)
    at = ", ".join(f"o{a}*{s} + k{a}*{d} - {p}" for a, s, d, p in zip(
        letters, params.stride, params.dilation, params.pad_lo, strict=True))
    sizes = " ".join(f"o{a}={n}" for a, n in zip(letters, y.shape[2:], strict=True))
    summed = " ".join(f"k{a}={n}" for a, n in zip(letters, weight.shape[1:-1], strict=True))
    held = {n: execute.RESULTS[t.dtype] for n, t in tensors.items()}
    kept = {n: f"    tensor {n} {held[n]} [{', '.join(map(str, t.shape))}]{' axb' * (last and n in 'XY')}"
            for n, t in tensors.items()}
    bias = "B" in tensors
    return "\n".join([
        "compute four_bits", *kept.values(), f"    axes   {axis}n={x.shape[0]} f={rows} {sizes} {summed} "
        f"c={channels}", f"    read   x = X[n, {channel}, {at}]",
        f"    read   p = W[{feature}, {taps}, c // 2]", f"    read   s = S[{feature}, c // {size}]",
        *[f"    read   b = B[{feature}]"] * bias, "    let    high = floor(p*0.0625)",
        "    let    q = where(c % 2 == 0, p - high*16, high) - 8", f"    let    w = {held['X']}(q*s)",
        f"    let    y = sum(x*w; {taps.replace(',', '')} c)",
        f"    store  Y[n, {feature}, {', '.join(f'o{a}' for a in letters)}] = y{' + b' * bias}"])
