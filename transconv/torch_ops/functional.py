"""The six public convolution functions, with the signatures of torch.nn.functional.

A call that was seen before is found by its weight (calls/call_entries.py); any other is sent its way by
dispatch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transconv.torch_ops.calls import call_entries
from transconv.torch_ops.calls.dispatch import ConvFunction, dispatch

Tensor = torch.Tensor
Sizes = Any  # int, tuple or list of ints, for padding also "same" and "valid"

# Compilers see one constant here, and only the general way.
_compiling = torch.compiler.is_dynamo_compiling
_seen = call_entries.find

CONV1D = ConvFunction("conv1d", 1, False, F.conv1d, dispatch)
CONV2D = ConvFunction("conv2d", 2, False, F.conv2d, dispatch)
CONV3D = ConvFunction("conv3d", 3, False, F.conv3d, dispatch)
CONV_TRANSPOSE1D = ConvFunction("conv_transpose1d", 1, True, F.conv_transpose1d, dispatch)
CONV_TRANSPOSE2D = ConvFunction("conv_transpose2d", 2, True, F.conv_transpose2d, dispatch)
CONV_TRANSPOSE3D = ConvFunction("conv_transpose3d", 3, True, F.conv_transpose3d, dispatch)


def conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
           padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1) -> Tensor:
    """torch.nn.functional.conv1d. input (mb, ic, iw) or (ic, iw), weight (oc, ic/groups, kw), bias
    (oc,); result (mb, oc, ow). f16, bf16, f32 and f64 have generated kernels, the rest is torch's.
    Raises what torch raises: TypeError for forms, RuntimeError for sizes, types and devices."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV1D, input, weight, bias, stride, padding, 0, dilation, groups)


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
           padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1) -> Tensor:
    """torch.nn.functional.conv2d. input (mb, ic, ih, iw) or (ic, ih, iw), weight
    (oc, ic/groups, kh, kw), bias (oc,); result (mb, oc, oh, ow), channels_last if input or weight
    is. f16, bf16, f32 and f64 have generated kernels, the rest is torch's. Raises what torch
    raises: TypeError for forms, RuntimeError for sizes, types and devices."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV2D, input, weight, bias, stride, padding, 0, dilation, groups)


def conv3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
           padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1) -> Tensor:
    """torch.nn.functional.conv3d. input (mb, ic, id, ih, iw) or without mb, weight
    (oc, ic/groups, kd, kh, kw), bias (oc,); result (mb, oc, od, oh, ow), channels_last_3d if input
    or weight is. Dtypes and errors as conv2d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV3D, input, weight, bias, stride, padding, 0, dilation, groups)


def conv_transpose1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
                     padding: Sizes = 0, output_padding: Sizes = 0, groups: int = 1,
                     dilation: Sizes = 1) -> Tensor:
    """torch.nn.functional.conv_transpose1d. input (mb, ic, iw) or (ic, iw), weight
    (ic, oc/groups, kw), bias (oc,); result (mb, oc, ow) with
    ow = (iw - 1)*stride - 2*padding + dilation*(kw - 1) + output_padding + 1. Dtypes and errors as
    conv1d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV_TRANSPOSE1D, input, weight, bias, stride, padding, output_padding, dilation,
                groups)


def conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
                     padding: Sizes = 0, output_padding: Sizes = 0, groups: int = 1,
                     dilation: Sizes = 1) -> Tensor:
    """torch.nn.functional.conv_transpose2d. input (mb, ic, ih, iw) or (ic, ih, iw), weight
    (ic, oc/groups, kh, kw), bias (oc,); sizes as conv_transpose1d, layout, dtypes and errors as
    conv2d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV_TRANSPOSE2D, input, weight, bias, stride, padding, output_padding, dilation,
                groups)


def conv_transpose3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
                     padding: Sizes = 0, output_padding: Sizes = 0, groups: int = 1,
                     dilation: Sizes = 1) -> Tensor:
    """torch.nn.functional.conv_transpose3d. input (mb, ic, id, ih, iw) or without mb, weight
    (ic, oc/groups, kd, kh, kw), bias (oc,); sizes as conv_transpose1d, layout, dtypes and errors as
    conv3d."""
    call = dispatch if _compiling() else _seen(id(weight), dispatch)
    return call(CONV_TRANSPOSE3D, input, weight, bias, stride, padding, output_padding, dilation,
                groups)


# Handlers of `__torch_function__` get these names.
for _function, _public in ((CONV1D, conv1d), (CONV2D, conv2d), (CONV3D, conv3d),
                           (CONV_TRANSPOSE1D, conv_transpose1d),
                           (CONV_TRANSPOSE2D, conv_transpose2d),
                           (CONV_TRANSPOSE3D, conv_transpose3d)):
    _function.public = _public
