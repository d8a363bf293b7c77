"""Decides what computes a quantised convolution: one kernel, or torch in wider types.

torch's way has the same order of operations: exact sums of integers in f64 (of 8-bit floats in f32), then
the operations behind them in f32, and one rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.compute import in_torch
from transconv.conv import Epilogue, Prop, without_zeros
from transconv.ir import chances, one_of_two
from transconv.support import Unsupported
from transconv.torch_ops import arguments, shapes
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import ConvCall, RouteEpilogue, RouteMatch
from transconv.torch_ops.calls.select_impl import compile_route, refused
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.quantized import input_quantization, qparams
from transconv.torch_ops.quantized.qparams import QuantizedCall, QuantizedEpilogue

Tensor = torch.Tensor
Given = Mapping[str, Any]  # quantities by name


def _epilogue(params: arguments.Params, channels_last: bool, call: QuantizedCall) -> RouteEpilogue:
    """What follows the sums of a call: its operands are the bias and quantities by name."""
    words, made = QuantizedEpilogue.of(call), call.quantities.output_dtype
    knows = any(r.argument == "input_zero_sums" for r in words.reads)

    def reads(w: Tensor, bias: Tensor | None, given: Given) -> list[Tensor]:
        if knows:
            given = _checked(w, given, params)
        return _operands(words, bias, given)

    def computed(x: Tensor, w: Tensor, bias: Tensor | None, given: Given, is_fake: bool = False) -> Tensor:
        read = _operands(words, bias, given) if is_fake else reads(w, bias, given)
        extra = {r.name: t.view(r.shape) for r, t in zip(words.reads, read, strict=True)}
        return shapes.with_result_strides(_by_torch(words.text, made, params, x, w, extra), channels_last)

    picks = None if any(r.casts for r in words.reads) else tuple(
        (r.argument, r.number) for r in words.reads)
    return RouteEpilogue(words.text, tuple(r.name for r in words.reads), reads, computed,
                         [r.shape for r in words.reads], picks=picks)


def _operands(words: QuantizedEpilogue, bias: Tensor | None, given: Given) -> list[Tensor]:
    """What the kernel reads beside input and weight, in its order."""
    return [r.number if r.number is not None
            else r.of(bias if r.argument == "bias" else given[r.argument])  # type: ignore[arg-type]
            for r in words.reads]


def _checked(w: Tensor, given: Given, params: arguments.Params) -> Given:
    """The quantities with sums of the zero point that are right; TensorError if they are not."""
    sums = given["input_zero_sums"]
    right = input_quantization.checked(w, given["input_zero_point"], sums, params)
    return given if right is sums else {**given, "input_zero_sums": right}


def _by_torch(text: str, made: torch.dtype, params: arguments.Params, x: Tensor, w: Tensor,
              extra: dict[str, Tensor]) -> Tensor:
    """What torch computes: a fresh result."""
    wide = torch.float32 if x.is_floating_point() and x.dtype is not torch.float64 else torch.float64
    epilogue, near = Epilogue.parse(text), "dst" if params.transposed else "src"
    whole = without_zeros({near: x, "wei": w, **extra}, epilogue.zeros)
    y = aten_convolutions.aten_forward(whole[near].to(wide), whole["wei"].to(wide), None, params)
    if epilogue.ops:
        computed = torch.float64 if torch.float64 in (x.dtype, w.dtype, made) else torch.float32
        y = in_torch(epilogue.function, {"acc": y.to(computed), **{
            o.name: extra[o.name].to(computed) for o in epilogue.operands}})
    return _stored(y, made, extra["seed"] if epilogue.random else None)


def _stored(y: Tensor, dtype: torch.dtype, seed: Tensor | None) -> Tensor:
    """Values in the type of the result: beyond its range the largest or smallest number. With a seed they
    are rounded at random."""
    held = lower_call.RESULTS[dtype]
    if seed is not None:
        places = torch.arange(y.numel(), device=y.device).view(y.shape)
        y = one_of_two(y.float().double(), chances(seed.flatten().long(), places), held, torch)
    if held.kind == "int":
        return y.double().round().clamp(*held.range).to(dtype)
    return (y if held.largest == float("inf") else y.clamp(*held.range)).to(dtype)


def _kind(t: Tensor | None) -> Hashable:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device)


def key_of(req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None,
           given: Given) -> tuple[Hashable, lower_call.Flags, bool]:
    """The key of a call, its flags and alignment: kinds of tensors, values of numbers."""
    flags = lower_call.flags(x.dtype)
    pointers = x.data_ptr() | w.data_ptr() | (0 if bias is None else bias.data_ptr())
    said: list[Hashable] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            pointers |= value.data_ptr()
            said.append((name, value.shape, value.stride(), value.dtype, value.device))
        else:
            said.append((name, value.__class__, value))
    aligned = not pointers & ALIGNMENT
    return (req, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
            _kind(bias), *said, flags, aligned), flags, aligned


def find(
    req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given
) -> RouteMatch:
    """The route of a call, found or made. Raises TensorError, TypeError and RuntimeError for arguments
    that do not fit, and Unsupported where torch may not compute."""
    key, flags, aligned = key_of(req, x, w, bias, given)
    try:
        known: ConvCall | None = route_cache.find(key)
    except TypeError:  # a list, say, has no hash, and is no scale
        known = None
    if known is not None:
        return RouteMatch(known, True, flags, aligned)
    made = decided(req, x, w, bias, given)
    behind = made.epilogue
    assert behind is not None
    read = behind.reads(w, bias, given)  # right or wrong, whoever computes
    if not (why := _reasons(made, x, w)):
        try:
            summed = lower_call.fast(flags) if given.get("use_fast_accum") else flags
            compile_route(made, x, w, None, behind.words, aligned, summed, settings.mode,
                          **behind.named(read))
        except Unsupported as error:
            refused(made, error, x)
    else:
        made.settle(why)
    return RouteMatch(route_cache.keep(key, made), False, flags, aligned)


def _reasons(made: ConvCall, x: Tensor, w: Tensor) -> list[str]:
    return (lower_call.reasons(x, w, qparams.OPERANDS)
            or ([] if all(made.shape) else ["shape:empty"]))


def decided(
    req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given
) -> ConvCall:
    """A new route of a call whose arguments fit, which has no kernel yet."""
    name = req.name or "transconv::quantized_convolution"
    q = qparams.Quantities.of(name, given)
    qparams.check(name, req.ndims, x, w, bias, q)
    params = arguments.resolve(x.shape, w.shape, None if bias is None else bias.shape, req.stride,
                               req.padding, req.dilation, req.transposed, req.output_padding, req.groups,
                               two_sided=not req.name)
    shape = shapes.output_shape(x.shape, w.shape, params)
    strides = shapes.result_strides(shape, shapes.channels_last_result(x, w))
    call = QuantizedCall(name, x, w, bias, (x.shape[1], shape[1]), params.transposed, q, (shape, strides))
    last = shapes.channels_last_result(x, w)
    made = ConvCall(Prop.BWD_D if params.transposed else Prop.FWD, params, shape, last,
                 _epilogue(params, last, call))
    made.types = (x.dtype, w.dtype, q.output_dtype)
    return made


def alone(req: CallAttributes, x: Tensor, w: Tensor, bias: Tensor | None, given: Given) -> Tensor:
    """The result of torch for tensors that no kernel can read: fakes, and other classes."""
    made = decided(req, x, w, bias, given)
    assert made.epilogue is not None
    return made.epilogue.computed(x, w, bias, given, is_fake=True)
