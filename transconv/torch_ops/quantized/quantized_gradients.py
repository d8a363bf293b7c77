"""The gradient of a convolution's weight in 32 bits, from an input and a result's gradient of fewer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.conv import Prop
from transconv.errors import Unsupported
from transconv.torch_ops import shapes
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.route import ConvCall
from transconv.torch_ops.calls.select_impl import compile_route, refused
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.quantized import qparam_checks

Tensor = torch.Tensor


def weight_gradient(x: Tensor, grad: Tensor, weight: Tensor, params: Params, fast: bool) -> Tensor:
    """The sums of products, without scales, f32, in the shape of ``weight``. ``fast``: whether they stay
    in the matrix unit."""
    flags = lower_call.fast(lower_call.flags(x.dtype)) if fast else lower_call.flags(x.dtype)
    aligned = not (x.data_ptr() | grad.data_ptr()) & ALIGNMENT
    key: Hashable = ("weight_gradient", params, *(
        (t.shape, t.stride(), t.dtype, t.device) for t in (x, grad, weight)), flags, aligned)
    route: Any = route_cache.find(key)
    if route is None:
        route = route_cache.keep(key, _decided(x, grad, weight, params, flags, aligned))
    if route.compiled is None:
        route.calls += 1
        wide = aten_convolutions.aten_backward(grad.float(), x.float(), weight.float(), params,
                                       (False, True, False))
        assert wide[1] is not None
        return wide[1]
    made_like = torch.empty(0, dtype=torch.float32, device=x.device)
    result: Tensor = route.gradient(made_like, x, None, grad)
    return result


def _decided(x: Tensor, grad: Tensor, weight: Tensor, params: Params, flags: lower_call.Flags,
             aligned: bool) -> ConvCall:
    route = ConvCall(Prop.BWD_W, params, tuple(weight.shape), shapes.channels_last_result(x, weight))
    route.types = (x.dtype, torch.float32, grad.dtype)
    why = lower_call.reasons(x, weight, qparam_checks.OPERANDS) or (
        [] if grad.numel() else ["shape:empty"]
    )
    if why:
        route.settle(why)
        return route
    try:
        compile_route(route, x, None, grad, "", aligned, flags, settings.mode)
    except Unsupported as error:
        refused(route, error, x)
    return route
