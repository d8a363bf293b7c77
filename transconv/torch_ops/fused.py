"""Torch border, step 9. One call for convolution + bias + residual + activation.

    y = activation(conv(input, weight) + bias + residual)

One kernel where the compiler has it as an epilogue. A gradient that can be computed from the result
alone (relu and its kind) keeps the single kernel in training too; other activations are composed of
the unfused calls when gradients are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from transconv.errors import Unsupported
from transconv.problem import Prop
from transconv.torch_ops import (
    arguments,
    dispatch,
    execute,
    functional,
    library,
    routes,
    shapes,
)
from transconv.torch_ops.dispatch import Function
from transconv.torch_ops.functional import Sizes

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y,
    "relu": torch.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
}

# grad of the activation's input from its result y and the result's gradient g.
_GRAD_FROM_RESULT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda g, y: g,
    "relu": lambda g, y: g * (y > 0),
    "relu6": lambda g, y: g * ((y > 0) & (y < 6)),
    "sigmoid": lambda g, y: g * y * (1 - y),
    "tanh": lambda g, y: g * (1 - y * y),
}


class FusedRoute(routes.Route):
    """A forward route whose kernel also adds and activates; ``rest_by_torch`` if it could not."""

    __slots__ = ("activation", "rest_by_torch")

    def __init__(self, params: arguments.Params, shape: arguments.Ints, channels_last: bool,
                 activation: str) -> None:
        super().__init__(Prop.FWD, params, shape, channels_last)
        self.activation = activation
        self.rest_by_torch = False

    def run(self, x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None) -> Tensor:
        compiled = self.compiled
        if compiled is None or self.rest_by_torch:
            y = self.forward(x, w, b)
            return ACTIVATIONS[self.activation](y if res is None else y.add_(res))
        self.calls += 1
        y = x.new_empty_strided(self.shape, self.strides)
        execute.launch(compiled, x, w, y, **self.extra(b, res))
        return y

    def extra(self, b: Tensor | None, res: Tensor | None) -> dict[str, Tensor]:
        """What the epilogue reads, by name, laid out as the kernel expects it."""
        found = {}
        if b is not None:
            found["bia"] = b.contiguous()
        if res is not None:
            found["res"] = shapes.with_result_strides(res, self.channels_last)
        return found


def _make(params: arguments.Params, x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None,
          activation: str, flags: execute.Flags, aligned: bool) -> FusedRoute:
    shape = shapes.output_shape(x.shape, w.shape, params)
    route = FusedRoute(params, shape, shapes.channels_last_result(x, w), activation)
    if why := execute.reasons(x, w):
        routes.settle(route, why)
        return route
    words = [word for word, on in (("bias", b is not None), ("res", res is not None),
                                   (activation, bool(activation))) if on]
    try:
        routes.compile_route(route, x, w, None, "+".join(words), aligned, flags,
                             **route.extra(b, res))
    except Unsupported:
        plain = routes.make_forward(params, x, w, b, flags, aligned)
        route.rest_by_torch = True
        for name in ("compiled", "reason", "adds_bias", "copies_bias", "aligned"):
            setattr(route, name, getattr(plain, name))
    return route


def _run(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
         activation: str, *numbers: Any) -> Tensor:
    req = routes.request("", 0, *numbers)
    flags = execute.flags(input.dtype)
    key = ("fused", req, activation, flags, *(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device,
                                t.data_ptr() & routes.ALIGNMENT)
        for t in (input, weight, bias, residual)))

    def make() -> FusedRoute:
        p = _check(input, weight, bias, residual, activation, numbers)
        aligned = not any(t is not None and t.data_ptr() & routes.ALIGNMENT
                          for t in (input, weight, bias, residual))
        return _make(p, input, weight, bias, residual, activation, flags, aligned)

    route: FusedRoute = routes.kept(key, make)
    return route.run(input, weight, bias, residual)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
           activation: str, numbers: Any) -> arguments.Params:
    if activation not in ACTIVATIONS:
        known = ", ".join(filter(None, ACTIVATIONS))
        raise RuntimeError(f"activation '{activation}' is unknown; expected one of: {known}")
    stride, padding, dilation, transposed, output_padding, groups = numbers
    arguments.check_tensors(input, weight, bias)
    p = arguments.resolve(
        input.shape, weight.shape, None if bias is None else bias.shape, tuple(stride),
        tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups, two_sided=True)
    if residual is not None:
        shape = shapes.output_shape(input.shape, weight.shape, p)
        if tuple(residual.shape) != shape:
            raise RuntimeError(f"expected residual of size {list(shape)}, the size of the result, "
                               f"but got {list(residual.shape)}")
        if residual.dtype != input.dtype or residual.device != input.device:
            raise RuntimeError(f"expected residual of {input.dtype} on {input.device}, but got "
                               f"{residual.dtype} on {residual.device}")
    return p


# -- the operator ----------------------------------------------------------------------------------

library.library.define(
    "fused_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
    f"str activation, {library.NUMBERS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
fused_convolution = torch.ops.transconv.fused_convolution.default
_call: Callable[..., Tensor] = fused_convolution

for _key in ("CPU", "CUDA"):
    library.library.impl("fused_convolution", _run, _key)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
          activation: str, *numbers: Any) -> Tensor:
    p = _check(input, weight, bias, residual, activation, numbers)
    return shapes.empty_result(input, shapes.output_shape(input.shape, weight.shape, p),
                               shapes.channels_last_result(input, weight))


library.register_fake("transconv::fused_convolution", _fake, lib=library.library)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _bias, _residual, ctx.activation, *ctx.numbers = inputs
    ctx.save_for_backward(input, weight, output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, y = ctx.saved_tensors
    g = _GRAD_FROM_RESULT[ctx.activation](grad, y)
    mask = list(ctx.needs_input_grad[:3])
    found: list[Tensor | None] = [None, None, None]
    if any(mask):
        made = library.convolution_backward(g, input, weight, *ctx.numbers, mask)
        found = [t if on else None for t, on in zip(made, mask, strict=True)]
    for_residual = g.clone() if ctx.needs_input_grad[3] and g is grad else g
    return *found, for_residual if ctx.needs_input_grad[3] else None, *[None] * 7


torch.library.register_autograd("transconv::fused_convolution", _differentiate,
                                setup_context=_keep, lib=library.library)


# -- the public functions --------------------------------------------------------------------------


def _dispatch(f: Function, plain: Callable[..., Tensor], public: Callable[..., Tensor],
              input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
              groups: Any, activation: str | None, residual: Any) -> Tensor:
    tensors = (input, weight, bias, residual)
    given = [t for t in tensors if t is not None]
    if not torch.compiler.is_compiling() and has_torch_function(given):
        seen: Tensor = dispatch.handle(
            public, given, input, weight, bias, stride, padding, dilation, groups,
            activation=activation, residual=residual)
        return seen
    activation = activation or ""
    if activation not in ACTIVATIONS:
        known = ", ".join(filter(None, ACTIVATIONS))
        raise RuntimeError(f"activation '{activation}' is unknown; expected one of: {known}")
    parsed = dispatch.parse(f, stride, padding, 0, dilation, groups)
    if parsed is None or not _one_operator(f, given, activation):
        y = plain(input, weight, bias, stride, padding, dilation, groups)
        return ACTIVATIONS[activation](y if residual is None else y + residual)
    input, weight, bias = dispatch.autocast(input, weight, bias)
    if residual is not None:
        residual = dispatch.cast_like(residual, input)
    stride, padding, output_padding, dilation = parsed
    dispatch.check_bias(f, input, bias, padding)
    is_batched = arguments.batched(f.name, f.ndims, input.shape)
    if not is_batched:
        input = input.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    p = arguments.resolve(input.shape, weight.shape, None if bias is None else bias.shape, stride,
                          padding, dilation, False, output_padding, groups)
    y = _call(input, weight, bias, residual, activation, *p)
    return y if is_batched else y.squeeze(0)


def _one_operator(f: Function, given: list[Any], activation: str) -> bool:
    """Whether the single operator may stand for the call; else it is composed."""
    if not all(isinstance(t, Tensor) for t in given) or torch._C._are_functorch_transforms_active():
        return False
    if not torch.compiler.is_compiling() and (
            forward_ad._current_level >= 0 or not all(dispatch.is_known(t) for t in given)):
        return False
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return not differentiated or activation in _GRAD_FROM_RESULT


def fused_conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
                 padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1, *,
                 activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    """activation(conv1d(input, weight, bias, ...) + residual) in one kernel where possible.

    ``residual`` has the shape and dtype of the result. ``activation`` is one of relu, relu6,
    sigmoid, tanh, silu, gelu, gelu_tanh, hardswish, or None. Differentiable. RuntimeError as
    conv1d's, and for an unknown activation or a residual that does not fit."""
    return _dispatch(functional.CONV1D, functional.conv1d, fused_conv1d, input, weight, bias,
                     stride, padding, dilation, groups, activation, residual)


def fused_conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
                 padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1, *,
                 activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    """activation(conv2d(input, weight, bias, ...) + residual): see fused_conv1d."""
    return _dispatch(functional.CONV2D, functional.conv2d, fused_conv2d, input, weight, bias,
                     stride, padding, dilation, groups, activation, residual)


def fused_conv3d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sizes = 1,
                 padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1, *,
                 activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    """activation(conv3d(input, weight, bias, ...) + residual): see fused_conv1d."""
    return _dispatch(functional.CONV3D, functional.conv3d, fused_conv3d, input, weight, bias,
                     stride, padding, dilation, groups, activation, residual)
