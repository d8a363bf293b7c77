"""Convolutions of torchao's 8-bit float tensors, computed by transconv.

torchao exchanges the weight of a convolution for a ``Float8Tensor``: its bytes, their scale, and how the
input is to be quantised. Which function computes an operator of such a tensor is a table of its class,
which others may write to (``Float8Tensor.implements``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transconv.support import Unsupported
from transconv.torch_ops import functional
from transconv.torch_ops.calls import dispatch
from transconv.torch_ops.quantized import quantized_functional, quantized_operator

Tensor = torch.Tensor

_aten = torch.ops.aten
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding",
          "groups")
_TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups",
                     "dilation")
_OPERATORS = {_aten.convolution.default: _NAMES,
              **{op.default: _NAMES[:6] + _NAMES[8:] for op in (_aten.conv1d, _aten.conv2d, _aten.conv3d)},
              **{op: _TRANSPOSED_NAMES for op in (_aten.conv_transpose1d.default,
                                                  _aten.conv_transpose2d.input,
                                                  _aten.conv_transpose3d.input)}}
"""The names of each operator's arguments, in its order."""


def serve_torchao() -> None:
    """Let transconv compute the convolutions of torchao's ``Float8Tensor`` from now on.

    With this, ``torchao.quantize_(model, Float8DynamicActivationFloat8WeightConfig(PerTensor()), ...)``
    serves convolutions on every GPU of transconv's: of 1 to 3 dimensions, grouped, transposed and with a
    bias. The weight has one scale, or one for each output channel; its ``mm_config`` says whether sums
    stay in the matrix unit. A weight whose inputs are not quantised is widened. Such convolutions have no
    gradients. ImportError without torchao (``pip install "transconv[torchao]"``)."""
    try:
        from torchao.quantization import Float8Tensor
    except ImportError as error:
        raise ImportError('serve_torchao needs torchao 0.13 or later (pip install "transconv[torchao]"): '
                          f"{error}") from error
    Float8Tensor.implements(list(_OPERATORS))(_convolution)


def _convolution(operator: Any, types: Any, args: Sequence[Any],
                 kwargs: Mapping[str, Any] | None) -> Tensor:
    """One operator of a tensor of torchao's: what its class calls."""
    names = _OPERATORS[operator]
    call = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    input, weight, bias = call["input"], call["weight"], call.get("bias")
    if not hasattr(weight, "qdata"):
        raise Unsupported("a convolution of torchao's 8-bit floats: weight: expected a Float8Tensor "
                          "beside an input of that class, got a plain tensor")
    f = quantized_functional.FUNCTIONS[
        weight.dim() - 2, call.get("transposed", names is _TRANSPOSED_NAMES)
    ]
    numbers = (call.get("stride", 1), call.get("padding", 0), call.get("output_padding", 0),
               call.get("dilation", 1), call.get("groups", 1))
    with torch.no_grad():
        if weight.act_quant_kwargs is None and not hasattr(input, "qdata"):
            return _widened(f, input, weight.dequantize(), bias, numbers)
        return _quantised(f, input, weight, bias, numbers)


def _quantised(f: dispatch.ConvFunction, input: Any, weight: Any, bias: Tensor | None,
               numbers: tuple[Any, ...]) -> Tensor:
    result = input.dtype
    if not hasattr(input, "qdata"):
        how = weight.act_quant_kwargs
        input = type(weight).from_hp(input, how.float8_dtype, how.granularity, how.mm_config,
                                     how.hp_value_lb, how.hp_value_ub, how.kernel_preference)
    given = {"input_scale": _scale(f, "input", input, 1),
             "weight_scale": _scale(f, "weight", weight, 0 if not f.transposed else 1),
             "output_dtype": result,
             "use_fast_accum": bool(getattr(weight.mm_config, "use_fast_accum", False))}
    x, w = input.qdata, weight.qdata
    plain = dispatch.is_plain(x) and dispatch.is_plain(w)
    compute = f.general if plain else quantized_operator.call
    stride, padding, output_padding, dilation, groups = numbers
    return compute(f, x, w, bias, stride, padding, output_padding, dilation, groups, given)


def _scale(f: dispatch.ConvFunction, name: str, tensor: Any, axis: int) -> Tensor:
    """The scale of all elements (1), or of the channels on ``axis`` (channels,), in 32-bit floats."""
    scale: Tensor = tensor.scale
    if scale.numel() != 1 and (name == "input" or scale.numel() != scale.shape[axis]):
        most = "one scale" if name == "input" else "one scale, or one for each output channel"
        raise Unsupported(f"{f.name} of torchao's Float8Tensor: {name}: expected {most}, got scales of "
                          f"shape {tuple(scale.shape)}")
    return scale.reshape(-1).float()


def _widened(f: dispatch.ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None,
             numbers: tuple[Any, ...]) -> Tensor:
    """The convolution of a weight alone in 8 bits, in the input's type."""
    stride, padding, output_padding, dilation, groups = numbers
    wide = getattr(functional, f.name.rpartition(".")[2])
    if f.transposed:
        result: Tensor = wide(input, weight, bias, stride, padding, output_padding, groups, dilation)
    else:
        result = wide(input, weight, bias, stride, padding, dilation, groups)
    return result
