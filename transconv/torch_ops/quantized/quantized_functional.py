"""Convolutions of quantised tensors: integers and 8-bit floats with scales and zero points.

    real      = sum (input - input_zero_point) * (weight - weight_zero_point) * input_scale*weight_scale
                + bias, then the activation
    result    = real / output_scale + output_zero_point, rounded to nearest even and saturated

Padding is the zero point of the input (the real number 0), and so is what lies between the elements of a
transposed convolution's input. These functions have no gradients. What has no kernel is computed by torch
in wider types, as far as ``transconv.config.fallback`` allows. A kind of call that was seen before is
found by its key, like those of the other functions (calls/route_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transconv.torch_ops import arguments
from transconv.torch_ops.calls import dispatch, lower_call
from transconv.torch_ops.calls.dispatch import ConvFunction
from transconv.torch_ops.quantized import (
    input_quantization,
    qparam_checks,
    qparams,
    quantized_entries,
    quantized_operator,
    quantized_route,
)
from transconv.torch_ops.quantized.input_quantization import quantise
from transconv.torch_ops.quantized.quantized_entries import Real

Tensor = torch.Tensor

# Compilers see one constant here, and only the general way.
_compiling = torch.compiler.is_dynamo_compiling
_seen: Callable[[int, Callable[..., Tensor]], Callable[..., Tensor]] = quantized_entries.find


def conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1, **given: Any) -> Tensor:
    """The convolution of quantised tensors (mb, ic, iw) and (oc, ic/groups, kw); see ``conv2d``."""
    return _way(weight)(_CONV1D, input, weight, bias, stride, padding, 0, dilation, groups, given)


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1, **given: Any) -> Tensor:
    """The convolution of quantised tensors (mb, ic, ih, iw) and (oc, ic/groups, kh, kw): int8, uint8,
    float8_e4m3fn and float8_e5m2, both integers or both floats. ``bias`` (oc,) is in real numbers. Other
    arguments are torch.nn.functional.conv2d's, and by name those of ``Quantities``. Raises TypeError for
    an unknown name, TensorError and Unsupported, which name the argument, before anything runs."""
    return _way(weight)(_CONV2D, input, weight, bias, stride, padding, 0, dilation, groups, given)


def conv3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
           dilation: Any = 1, groups: int = 1, **given: Any) -> Tensor:
    """The convolution of quantised tensors (mb, ic, id, ih, iw) and (oc, ic/groups, kd, kh, kw); see
    ``conv2d``."""
    return _way(weight)(_CONV3D, input, weight, bias, stride, padding, 0, dilation, groups, given)


def conv_transpose1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                     padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
                     **given: Any) -> Tensor:
    """The transposed convolution of quantised tensors (mb, ic, iw) and (ic, oc/groups, kw); see
    ``conv2d``."""
    return _way(weight)(
        _CONV_TRANSPOSE1D, input, weight, bias, stride, padding, output_padding, dilation, groups, given)


def conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                     padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
                     **given: Any) -> Tensor:
    """The transposed convolution of quantised tensors (mb, ic, ih, iw) and (ic, oc/groups, kh, kw); see
    ``conv2d``."""
    return _way(weight)(
        _CONV_TRANSPOSE2D, input, weight, bias, stride, padding, output_padding, dilation, groups, given)


def conv_transpose3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                     padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
                     **given: Any) -> Tensor:
    """The transposed convolution of quantised tensors (mb, ic, id, ih, iw) and (ic, oc/groups, kd, kh,
    kw); see ``conv2d``."""
    return _way(weight)(
        _CONV_TRANSPOSE3D, input, weight, bias, stride, padding, output_padding, dilation, groups, given)


def _way(weight: Any) -> Callable[..., Tensor]:
    """The way of a call that was seen before, or the general one."""
    return _general if _compiling() else _seen(id(weight), _general)


def _general(
    f: ConvFunction,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
    groups: Any,
    given: dict[str, Any],
    again: bool = True,
    real: Real | None = None,
) -> Tensor:
    """``again``: whether other calls may have the same weight; ``real``: what was quantised."""
    if _compiling():
        return quantized_operator.call(f, input, weight, bias, stride, padding, output_padding, dilation,
                                       groups, given)
    req = dispatch.requested(f, stride, padding, output_padding, dilation, groups)
    if req is None:
        raise qparam_checks.wrong_number(f, stride, padding, output_padding, dilation, groups)
    if not all(isinstance(t, Tensor) for t in (input, weight, input if bias is None else bias)):
        said = qparams.Quantities.of(f.name, given)
        qparam_checks.check(f.name, f.ndims, input, weight, bias, said)
    if torch.is_grad_enabled():
        qparam_checks.refuse_gradients(f.name, input, weight, bias)
    if not (dispatch.is_plain(input) and dispatch.is_plain(weight)) or input.is_meta:
        return quantized_route.alone(req, input, weight, bias, given)
    input, weight = arguments.spelled_out(input), arguments.spelled_out(weight)
    found = quantized_route.find(req, input, weight, bias, given)
    route = found.route
    if found.known and again:
        numbers = (stride, padding, output_padding, dilation, groups)
        quantized_entries.note(
            f,
            _of_reals if real else _general,
            input,
            weight,
            bias,
            numbers,
            given,
            route,
            found.flags,
            found.aligned,
            real,
        )
    route.lay_out(weight)
    return route.forward(input, weight, bias, given)


def of_reals(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[Any, ...],
             given: dict[str, Any]) -> Tensor:
    """A call whose input is quantised first, to the weight's type, with its ``input_scale`` and
    ``input_zero_point``; ``numbers`` in the order of the public function."""
    if f.transposed:
        stride, padding, output_padding, groups, dilation = numbers
    else:
        (stride, padding, dilation, groups), output_padding = numbers, 0
    way = _of_reals if _compiling() else quantized_entries.find_real(id(weight), _of_reals)
    return way(f, input, weight, bias, stride, padding, output_padding, dilation, groups, given)


def _of_reals(
    f: ConvFunction,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
    groups: Any,
    given: dict[str, Any],
) -> Tensor:
    zero, held = given.get("input_zero_point"), lower_call.RESULTS[weight.dtype]
    whole = quantise(input, given["input_scale"], zero, held)
    real = None if _compiling() else Real(input, input_quantization.starter(input, zero, held))
    return _general(f, whole, weight, bias, stride, padding, output_padding, dilation, groups, given,
                    real=real)


def of_new_weight(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any,
                  padding: Any, output_padding: Any, dilation: Any, groups: Any,
                  given: dict[str, Any]) -> Tensor:
    """A call whose weight was made for it alone: nothing is remembered of that."""
    return _general(f, input, weight, bias, stride, padding, output_padding, dilation, groups, given,
                    again=False)


def _function(name: str, public: Callable[..., Tensor]) -> ConvFunction:
    aten = getattr(torch.nn.functional, name)
    said = f"transconv.quantized.{name}"
    return ConvFunction(said, int(name[-2]), "transpose" in name, aten, _general, public)


_CONV1D, _CONV2D, _CONV3D = (_function(f.__name__, f) for f in (conv1d, conv2d, conv3d))
_CONV_TRANSPOSE1D, _CONV_TRANSPOSE2D, _CONV_TRANSPOSE3D = (
    _function(f.__name__, f) for f in (conv_transpose1d, conv_transpose2d, conv_transpose3d))

FUNCTIONS = {(f.ndims, f.transposed): f for f in (
    _CONV1D, _CONV2D, _CONV3D, _CONV_TRANSPOSE1D, _CONV_TRANSPOSE2D, _CONV_TRANSPOSE3D)}
"""The functions by their number of spatial dimensions, and whether they are transposed."""
