"""The checks of a quantised call's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from transconv.conv import Epilogue, why_not_multiplied
from transconv.errors import ScheduleError, TensorError, Unsupported
from transconv.ir import DTYPES as ROWS
from transconv.ir import SHORT, DType
from transconv.torch_ops import arguments
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.dispatch import ConvFunction

if TYPE_CHECKING:
    from transconv.torch_ops.quantized.qparams import Quantities

Tensor = torch.Tensor
Number = float | Tensor

OPERANDS = ROWS.table(lambda t: t if t.operand and (t.bits == 8 or t.kind == "float") else None,
                      key=lambda t: getattr(torch, t.torch))
"""The element types of inputs and weights, by torch's types."""


def check(name: str, ndims: int, input: Any, weight: Any, bias: Any, q: Quantities) -> None:
    """TensorError for arguments that are wrong whatever the shapes are."""
    for what, t in (("input", input), ("weight", weight)):
        if not isinstance(t, Tensor) or t.dtype not in OPERANDS:
            raise TensorError(f"{name}: {what}: expected a tensor of {names(OPERANDS)}, got "
                              f"{getattr(t, 'dtype', type(t).__name__)}")
        if t.dim() != ndims + 2:
            raise TensorError(f"{name}: {what}: expected {ndims + 2} dimensions, got {t.dim()}")
    if not input.dtype.is_floating_point and weight.dtype.is_floating_point:
        raise TensorError(f"{name}: weight: expected integers, as the input, got {weight.dtype}")
    if reason := why_not_multiplied(OPERANDS[input.dtype], OPERANDS[weight.dtype]):
        raise TensorError(f"{name}: weight: {reason}")
    if q.output_dtype not in lower_call.RESULTS:
        raise TensorError(f"{name}: output_dtype: expected one of {names(lower_call.RESULTS)}, got "
                          f"{q.output_dtype}")
    if not isinstance(q.use_fast_accum, bool):
        raise TensorError(f"{name}: use_fast_accum: expected True or False, got {q.use_fast_accum!r}")
    if q.use_fast_accum and not (OPERANDS[input.dtype].is_short and OPERANDS[weight.dtype].is_short):
        raise TensorError(f"{name}: use_fast_accum: it is for products of 8-bit floats, got {input.dtype} "
                          f"and {weight.dtype}")
    _check_seed(name, q.rounding_seed, q.output_dtype)
    if bias is not None and (not isinstance(bias, Tensor) or not bias.dtype.is_floating_point):
        raise TensorError(f"{name}: bias: expected floats, in real numbers, got "
                          f"{getattr(bias, 'dtype', type(bias).__name__)}")
    others = {"weight": weight, "bias": bias} | {f: getattr(q, f) for f in q.__slots__}
    for what, t in others.items():
        if isinstance(t, Tensor) and t.device != input.device:
            raise TensorError(f"{name}: {what}: expected a tensor on {input.device}, where the input is, "
                              f"got one on {t.device}")
    if q.residual is not None and (not isinstance(q.residual, Tensor) or
                                   q.residual.dtype not in lower_call.DTYPES):
        raise TensorError(f"{name}: residual: expected floats in the shape of the result, got "
                          f"{getattr(q.residual, 'dtype', type(q.residual).__name__)}")
    sums = q.input_zero_sums
    if sums is not None and (not isinstance(sums, Tensor) or sums.dtype is not torch.int32
                             or sums.dim() != 1 + 2 * ndims or len(sums) != len(weight)):
        raise TensorError(f"{name}: input_zero_sums: expected None or an int32 tensor of {len(weight)} "
                          f"features and {2 * ndims} dimensions more, got {getattr(sums, 'shape', sums)}")
    if not isinstance(q.activation, str):
        raise TensorError(f"{name}: activation: expected words of an epilogue, got {q.activation!r}")
    for what in ("input_scale", "weight_scale", "output_scale"):
        _check_scale(name, what, getattr(q, what))


def _check_seed(name: str, seed: Any, made: torch.dtype) -> None:
    if seed is None:
        return
    if not isinstance(seed, Tensor) or seed.is_floating_point() or seed.numel() != 1:
        said = f"{seed.dtype} of shape {tuple(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
        raise TensorError(f"{name}: rounding_seed: expected an integer tensor of one element, got {said}")
    if lower_call.RESULTS[made] not in SHORT:
        raise TensorError(f"{name}: rounding_seed: it is for results of {' '.join(map(str, SHORT))}; "
                          f"output_dtype is {made}")


def wrong_number(f: ConvFunction, stride: Any, padding: Any, output_padding: Any, dilation: Any,
                 groups: Any) -> TensorError:
    """The error of the first of these that is neither an integer nor one for each dimension."""
    for what, value in (("stride", stride), ("padding", padding), ("output_padding", output_padding),
                        ("dilation", dilation)):
        worded = what == "padding" and isinstance(value, str) and not f.transposed
        if arguments.ints(value, f.ndims) is None and not worded:
            return TensorError(f"{f.name}: {what}: expected an integer, or {f.ndims} of them, got "
                               f"{value!r}")
    return TensorError(f"{f.name}: groups: expected an integer, got {groups!r}")


def refuse_gradients(name: str, *tensors: Any) -> None:
    """Unsupported where a gradient would be asked for."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise Unsupported("quantized:gradient", f"{name} has no gradients; call it under torch.no_grad()")


def check_shape(name: str, what: str, given: Tensor, channels: int) -> None:
    if given.numel() not in (1, channels) or given.dim() > 1:
        also = f", or the shape ({channels},)" if channels > 1 else ""
        raise TensorError(f"{name}: {what}: expected one number{also}, got {tuple(given.shape)}")


def _check_number(name: str, what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TensorError(f"{name}: {what}: expected a number or a tensor, got {type(given).__name__}")


LEAST_SCALE, LARGEST_SCALE = 2.0**-149, torch.finfo(torch.float32).max


def _check_scale(name: str, what: str, given: Number) -> None:
    if isinstance(given, Tensor):
        if not given.is_floating_point():
            raise TensorError(f"{name}: {what}: expected floats, got {given.dtype}")
        return
    _check_number(name, what, given)
    if not LEAST_SCALE <= given <= LARGEST_SCALE:
        raise TensorError(f"{name}: {what}: expected a scale above 0 that f32 holds, got {given:g}")


def check_zero(name: str, what: str, given: Number, holds: DType) -> None:
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
            raise TensorError(f"{name}: {what}: expected integers, got {given.dtype}")
    else:
        _check_number(name, what, given)
        if given == 0:
            return
    if holds.kind != "int":
        raise TensorError(f"{name}: {what}: zero points are of integers, and this tensor is {holds}")
    low, high = holds.limits
    if not isinstance(given, Tensor) and (given != given // 1 or not low <= given <= high):
        raise TensorError(f"{name}: {what}: expected an integer from {low} to {high}, the range of "
                          f"{holds}, got {given:g}")


def activation(name: str, words: str) -> str:
    try:
        made = Epilogue.parse(words)
    except ScheduleError as error:
        raise TensorError(f"{name}: activation: {error}") from error
    if made.operands or made.zeros:
        raise TensorError(f"{name}: activation: expected functions of one value, got '{words}'")
    return words


def names(types: dict[torch.dtype, DType]) -> str:
    """The types, as a list of words."""
    return " ".join(str(t).removeprefix("torch.") for t in types)
