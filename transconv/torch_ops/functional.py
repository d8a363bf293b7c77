"""The six public convolution functions, with the signatures of torch.nn.functional, and where their calls
go.

A call that was seen before is found by its weight (calls/call_entries.py). Of others, plain eager tensors
take the fast path: one lookup, one launch. The rest is passed on: `__torch_function__` to its handler,
functorch transforms and dual numbers to aten, so that no derivative is dropped; compilers, tracers,
dispatch modes and fake tensors to the registered operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from transconv.calls import route_cache, stats
from transconv.calls.guard import means_more
from transconv.calls.settings import settings
from transconv.calls.size_policy import policy
from transconv.runtime import torch_internals
from transconv.torch_ops import arguments, library, operators, shapes, tensor_subclasses
from transconv.torch_ops.arguments import Params, autocast, autocast_dtype, traced_autocast
from transconv.torch_ops.calls import autograd, call_entries, lower_call, precompile, select_impl
from transconv.torch_ops.calls.call_attributes import (
    CallAttributes,
    ConvFunction,
    _Parameter,
    check_bias,
    check_types,
    is_bias_left_to_torch,
    is_known,
    is_plain,
    parse,
    requested,
)
from transconv.torch_ops.calls.select_impl import layer_of
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.fused import fused_route  # noqa: F401  (registers its operators)
from transconv.torch_ops.quantized import quantized_route  # noqa: F401  (the same)

Tensor = torch.Tensor
handle: Any = handle_torch_function
_any_autocast: Callable[[], bool] = torch_internals.any_autocast
_transforms: Callable[[], bool] = torch_internals.transforms
_modes: Callable[[], int] = torch_internals.dispatch_modes
_tracing: Callable[[], Any] = torch_internals.tracing_state


def _hand_over(f: ConvFunction, input: Any, weight: Any, bias: Any, stride: Any, padding: Any,
               output_padding: Any, dilation: Any, groups: Any) -> Tensor:
    """torch's own function, with unchanged arguments."""
    if f.transposed:
        return f.aten(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return f.aten(input, weight, bias, stride, padding, dilation, groups)


def dispatch(f: ConvFunction, input: Any, weight: Any, bias: Any, stride: Any, padding: Any,
             output_padding: Any, dilation: Any, groups: Any) -> Tensor:
    """Pass one call on to its implementation. The cheapest tests come first."""
    rest = (stride, padding, output_padding, dilation, groups)
    if torch.compiler.is_compiling():
        return _compiled(f, input, weight, bias, *rest)
    if has_torch_function((input, weight, bias)):
        order = ((stride, padding, output_padding, groups, dilation) if f.transposed
                 else (stride, padding, dilation, groups))
        seen: Tensor = handle(f.public, (input, weight, bias), input, weight, bias, *order)
        return seen
    if _transforms():
        _note_transform("transform:functorch", input)
        return _hand_over(f, input, weight, bias, *rest)
    if forward_ad._current_level >= 0:
        _note_transform("transform:forward_ad", input)
        return _hand_over(f, input, weight, bias, *rest)
    if not (is_plain(input) and is_plain(weight) and (bias is None or is_plain(bias))):
        return _unusual(f, input, weight, bias, *rest)
    if (input.is_neg() or weight.is_neg() or input._is_zerotensor()
            or weight._is_zerotensor() or (bias is not None and means_more(bias))):
        input, weight = arguments.spelled_out(input), arguments.spelled_out(weight)
        bias = None if bias is None else arguments.spelled_out(bias)
    given, cast = (input, weight, bias, None), None
    if _any_autocast():
        cast = autocast_dtype(input)
        input, weight, bias = autocast(input, weight, bias)
    if _modes() or _tracing() or input.is_meta:
        return _operator(f, input, weight, bias, *rest)

    req = requested(f, stride, padding, output_padding, dilation, groups)
    if req is None:
        return _odd_form(f, input, weight, bias, *rest)
    key, flags, aligned = select_impl.forward_key(req, input, weight, bias)
    route = route_cache.find(key)
    if route is None:
        if input.dtype.is_complex:
            stats.handed_over(f"dtype:{str(input.dtype).removeprefix('torch.')}")
            return _hand_over(f, input, weight, bias, *rest)  # in real parts, by torch
        check_bias(f, input, bias, padding)
        if is_bias_left_to_torch(f, input, bias, padding):
            return _mixed_types(f, input, weight, bias, *rest)
        if not arguments.batched(f.name, f.ndims, input.shape):
            return dispatch(f, input.unsqueeze(0), weight, bias, *rest).squeeze(0)
        if settings.varies and _is_copied(req, input, weight, bias):
            dense = shapes.with_result_strides(input, shapes.channels_last_result(input, weight))
            return dispatch(f, dense, weight, bias, *rest)
        precompile.layers(given[1], input, weight, flags, settings.mode)
        route, layer = select_impl.add_sized(key, req, input, weight, bias, flags, aligned, settings.mode)
        if layer is not None:
            call_entries.note_layer((autograd.apply, autograd.apply_cast), f, given,
                                    (input, weight, bias, None), rest, route, layer, flags, aligned, cast)
    else:
        if not route.trains:
            select_impl.trained(route, input, weight, flags, aligned, settings.mode)
        call_entries.note(autograd.function_of, f, given, (input, weight, bias, None), rest, route, flags,
                          aligned, cast)
    if (route.over is not None and route.compiled is None and route.asks_own
            and input.device.type not in aten_convolutions.replaced):
        route.calls += 1  # torch's own call, with its gradients, costs the least until the kernel is there
        return _hand_over(f, *given[:3], *rest)
    route.lay_out(weight)
    if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad
                                    or (bias is not None and bias.requires_grad)):
        if weight is given[1] and bias is given[2]:
            return autograd.apply(input, weight, bias, route)
        return autograd.apply_cast(input, *given[1:3], weight, bias, route)
    result: Tensor = route.forward(input, weight, bias)
    return result


def _is_copied(req: CallAttributes, x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether kernels for any size are to answer a call through a copy of an input with gaps: at a size
    that is not the layer's first one."""
    if not x.numel() or not shapes.has_gaps(x, shapes.channels_last_result(x, w)):
        return False
    params = req.resolve(x, w, b)
    src = shapes.output_shape(x.shape, w.shape, params) if params.transposed else x.shape
    return policy.is_further(layer_of(params, x.dtype, w.shape, x.device), (src[0], *src[2:]))


def _note_transform(reason: str, input: Any) -> None:
    """Count a call that goes to aten because of a transform, unless `enable` replaced aten's kernel."""
    if getattr(getattr(input, "device", None), "type", "") not in aten_convolutions.replaced:
        stats.handed_over(reason)


def _unusual(f: ConvFunction, *call: Any) -> Tensor:
    """Tensors of other classes and layouts: fakes go to the operators, others to torch."""
    tensors = call[:2] if call[2] is None else call[:3]
    if any(not isinstance(t, Tensor) for t in tensors):
        return _hand_over(f, *call)  # a TypeError, in torch's words
    if all(is_known(t) for t in tensors) or any(tensor_subclasses.served(t) for t in tensors):
        return _operator(f, *autocast(*call[:3]), *call[3:])
    odd = next(t for t in tensors if not is_known(t))
    if type(odd) in (Tensor, _Parameter):
        stats.handed_over(f"layout:{lower_call.layout_name(odd)}")
    else:
        stats.handed_over(f"subclass:{type(odd).__name__}")
    return _hand_over(f, *call)


def _odd_form(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Numbers in a form that only torch's parser decides about: its error or its result."""
    made = _hand_over(f, input, weight, bias, *rest)
    odd = next(v for v in rest if not isinstance(v, str) and arguments.ints(v, f.ndims) is None)
    stats.handed_over(f"form:{type(odd).__name__}")
    return made


def _mixed_types(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None,
                 *rest: Any) -> Tensor:
    made = _hand_over(f, input, weight, bias, *rest)
    if not torch.compiler.is_compiling():
        stats.handed_over("dtype:bias")
    return made


# -- the ways that end in the registered operators -------------------------------------------------


def _operator(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any,
              padding: Any, output_padding: Any, dilation: Any, groups: Any) -> Tensor:
    rest = (stride, padding, output_padding, dilation, groups)
    parsed = parse(f, *rest)
    if parsed is None or input.dtype.is_complex:
        return _hand_over(f, input, weight, bias, *rest)
    stride, padding, output_padding, dilation, groups = parsed
    if _tracing():
        # Sizes are traced values here: leave looking at them to the operator, and "same" to torch.
        if padding == "same" or len(padding) > f.ndims or input.dim() != f.ndims + 2:
            return _hand_over(f, input, weight, bias, *rest)
        numbers = (stride, (0,) if padding == "valid" else padding, dilation, f.transposed)
        check_types(input, weight, bias)
        return operators.convolution(input, weight, bias, *numbers, output_padding, groups)
    check_bias(f, input, bias, padding)
    # Traced on the CPU, the refusal would only come when the graph runs.
    if input.device.type != "cpu" and is_bias_left_to_torch(f, input, bias, padding):
        return _mixed_types(f, input, weight, bias, *rest)
    is_batched = arguments.batched(f.name, f.ndims, input.shape)
    x = input if is_batched else input.unsqueeze(0)
    p: Params = arguments.resolve(
        x.shape, weight.shape, None if bias is None else bias.shape, stride, padding, dilation,
        f.transposed, output_padding, groups)
    check_types(x, weight, bias)
    y = library.called(x, weight, bias, *p)
    return y if is_batched else y.squeeze(0)


def _compiled(f: ConvFunction, input: Any, weight: Any, bias: Any, *rest: Any) -> Tensor:
    """Inside torch.compile or export: no graph break on this way."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if (_transforms() or forward_ad._current_level >= 0
            or not all(isinstance(t, Tensor) for t in tensors)):
        return _hand_over(f, input, weight, bias, *rest)
    return _operator(f, *traced_autocast(input, weight, bias), *rest)


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
