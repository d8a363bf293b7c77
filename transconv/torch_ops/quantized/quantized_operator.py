"""transconv::quantized_convolution: the operator that compilers see in the place of a quantised call.

A quantity is a tensor, or where there is None a number; both in the order of ``QUANTITIES``.

Also here: the gradient of a convolution's weight in 32 bits, from an input and a result's gradient of
fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.conv import Prop
from transconv.support import Unsupported
from transconv.torch_ops import arguments, shapes, transforms
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import dispatch, lower_call
from transconv.torch_ops.calls.call_attributes import request
from transconv.torch_ops.calls.dispatch import ConvFunction
from transconv.torch_ops.calls.route import ConvCall
from transconv.torch_ops.calls.select_impl import compile_route, refused
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.library import NUMBERS
from transconv.torch_ops.operators import library, register_fake
from transconv.torch_ops.quantized import qparams, quantized_route

Tensor = torch.Tensor

NAME = "transconv::quantized_convolution"
WORDS = ("output_dtype", "activation", "use_fast_accum", "rounding_seed")
NEVER_NUMBERS = ("residual", "input_zero_sums")
QUANTITIES = tuple(f for f in qparams.Quantities.__slots__ if f not in WORDS)

library.define(f"quantized_convolution(Tensor input, Tensor weight, Tensor? bias, {NUMBERS}, "
               "Tensor?[] tensors, float[] numbers, ScalarType output_dtype, str activation, "
               "bool use_fast_accum, Tensor? rounding_seed=None) -> Tensor",
               tags=(torch.Tag.pt2_compliant_tag,))
operator: Callable[..., Tensor] = torch.ops.transconv.quantized_convolution.default


def call(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any,
         output_padding: Any, dilation: Any, groups: Any, given: dict[str, Any]) -> Tensor:
    """A call that is traced, as the operator."""
    q = qparams.Quantities.of(f.name, given)
    qparams.check(f.name, f.ndims, input, weight, bias, q)
    parsed = dispatch.parse(f, stride, padding, output_padding, dilation, groups)
    if parsed is None:
        raise qparams.wrong_number(f, stride, padding, output_padding, dilation, groups)
    p = arguments.resolve(input.shape, weight.shape, None if bias is None else bias.shape, parsed[0],
                          parsed[1], parsed[3], f.transposed, parsed[2], parsed[4])
    values = [getattr(q, n) for n in QUANTITIES]
    return operator(input, weight, bias, *p, [v if isinstance(v, Tensor) else None for v in values],
                    [float(v) if isinstance(v, (int, float)) else 0.0 for v in values], q.output_dtype,
                    q.activation, q.use_fast_accum, q.rounding_seed)


def _given(tensors: Sequence[Tensor | None], numbers: Sequence[float], output_dtype: torch.dtype,
           activation: str, use_fast_accum: bool, rounding_seed: Tensor | None = None) -> dict[str, Any]:
    values = dict(zip(QUANTITIES, (n if t is None else t for t, n in zip(
        tensors, numbers, strict=True)), strict=False))  # graphs that torch kept may have fewer
    values = {n: v for n, v in values.items() if n not in NEVER_NUMBERS or isinstance(v, Tensor)}
    return {**values, "output_dtype": output_dtype,
            "activation": activation, "use_fast_accum": use_fast_accum, "rounding_seed": rounding_seed}


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
             transposed: bool, output_padding: Any, groups: int, *said: Any) -> Tensor:
    req = request("", len(stride), stride, padding, dilation, transposed, output_padding, groups)
    given = _given(*said)
    transforms.refuse_tangents(NAME, [input, weight, bias, *given.values()])
    return quantized_route.find(req, input, weight, bias, given).route.forward(input, weight, bias, given)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
          transposed: bool, output_padding: Any, groups: int, *said: Any) -> Tensor:
    req = request("", len(stride), stride, padding, dilation, transposed, output_padding, groups)
    return quantized_route.alone(req, input, weight, bias, _given(*said))


register_fake("transconv::quantized_convolution", _fake, lib=library)
for _key in ("CPU", "CUDA"):
    library.impl("quantized_convolution", _forward, _key)


def _of_leaves(form: Any, *leaves: Any) -> tuple[Tensor, ...]:
    return (operator(*tree_unflatten([*leaves], form)),)


RULES = transforms.Rules(NAME, _of_leaves, None, None, transforms.looped(_of_leaves))
"""One example after the other; there are no derivatives."""


def _transformed(*given: Any, rounding_seed: Tensor | None = None) -> Tensor:
    leaves, form = tree_flatten((*given, rounding_seed) if rounding_seed is not None else given)
    return transforms.transformed(RULES, form, *leaves)[0]


library.impl("quantized_convolution", _transformed, transforms.FRONT)


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
    why = lower_call.reasons(x, weight, qparams.OPERANDS) or (
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
