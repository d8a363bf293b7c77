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
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from transconv.torch_ops import (
    arguments,
    dispatch,
    functional,
    fused_route,
    library,
    operators,
    routes,
)
from transconv.torch_ops.dispatch import Function
from transconv.torch_ops.functional import Sizes
from transconv.torch_ops.fused_route import ACTIVATIONS

Tensor = torch.Tensor

# grad of the activation's input from its result y and the result's gradient g.
_GRAD_FROM_RESULT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda g, y: g,
    "relu": lambda g, y: g * (y > 0),
    "relu6": lambda g, y: g * ((y > 0) & (y < 6)),
    "sigmoid": lambda g, y: g * y * (1 - y),
    "tanh": lambda g, y: g * (1 - y * y),
}


# -- the operator ----------------------------------------------------------------------------------

operators.library.define(
    "fused_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
    f"str activation, {library.NUMBERS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
fused_convolution = torch.ops.transconv.fused_convolution.default
_call: Callable[..., Tensor] = fused_convolution


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
          activation: str, *numbers: Any) -> Tensor:
    return operators.fake_fwd(input, weight, bias, residual, activation,
                              operators.resolve(input, weight, bias, numbers))


operators.register_fake("transconv::fused_convolution", _fake, lib=operators.library)


class FusedConvolution(torch.autograd.Function):
    """``apply(input, weight, bias, residual, activation, *numbers)``."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                activation: str, *numbers: Any) -> Tensor:
        p = operators.resolve(input, weight, bias, numbers)
        return operators.fwd(input, weight, bias, residual, activation, operators.flat(p))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _bias, _residual, ctx.activation, *ctx.numbers = inputs
        ctx.save_for_backward(input, weight, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, y = ctx.saved_tensors
        g = _GRAD_FROM_RESULT[ctx.activation](grad, y)
        mask = list(ctx.needs_input_grad[:3])
        found: list[Tensor | None] = [None, None, None]
        if any(mask):
            made = library.convolution_backward(g, input, weight, *ctx.numbers, mask)
            found = [t if on else None for t, on in zip(made, mask, strict=True)]
        for_residual = g.clone() if ctx.needs_input_grad[3] and g is grad else g
        return *found, for_residual if ctx.needs_input_grad[3] else None, *[None] * 7


_apply: Any = FusedConvolution.apply


def _with_derivatives(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                      activation: str, *numbers: Any) -> Tensor:
    run = (_apply if library.differentiated(input, weight, bias, residual)
           else FusedConvolution.forward)
    made: Tensor = run(input, weight, bias, residual, activation, *numbers)
    return made


operators.library.impl("fused_convolution", _with_derivatives, "Autograd")
for _key in ("CPU", "CUDA"):
    operators.library.impl("fused_convolution", FusedConvolution.forward, _key)


# -- the public functions --------------------------------------------------------------------------


def _dispatch(f: Function, plain: Callable[..., Tensor], public: Callable[..., Tensor],
              input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
              groups: Any, activation: str | None, residual: Any) -> Tensor:
    given = [t for t in (input, weight, bias, residual) if t is not None]
    if not torch.compiler.is_compiling() and has_torch_function(given):
        seen: Tensor = dispatch.handle(
            public, given, input, weight, bias, stride, padding, dilation, groups,
            activation=activation, residual=residual)
        return seen
    activation = activation or ""
    fused_route.check_activation(activation)
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
    tensors = (input, weight, bias, residual)
    if is_batched and _eager(tensors) and not library.differentiated(*tensors):
        req = routes.request(f.name, f.ndims, stride, padding, dilation, False, output_padding,
                             groups)
        return fused_route.run(req, *tensors, activation)
    if not is_batched:
        input = input.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    p = arguments.resolve(input.shape, weight.shape, None if bias is None else bias.shape, stride,
                          padding, dilation, False, output_padding, groups)
    y = _call(input, weight, bias, residual, activation, *p)
    return y if is_batched else y.squeeze(0)


def _eager(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody watches the call, so that it need not go through the operator."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
                or torch._C._get_tracing_state()
                or any(t is not None and (t.is_meta or not dispatch.is_plain(t)) for t in tensors))


def _one_operator(f: Function, given: list[Any], activation: str) -> bool:
    """Whether the single operator may stand for the call; else it is composed."""
    if not all(isinstance(t, Tensor) for t in given) or torch._C._are_functorch_transforms_active():
        return False
    if not torch.compiler.is_compiling() and (
            forward_ad._current_level >= 0 or not all(dispatch.is_known(t) for t in given)):
        return False
    return not library.differentiated(*given) or activation in _GRAD_FROM_RESULT


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
