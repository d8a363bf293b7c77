"""Derivatives of fused calls whose activation's gradient follows from its result.

    transconv::fused_convolution    the operator, for calls that are traced, compiled or watched
    function_of(route, bound)       the short way past it, for eager calls
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transconv.compute import table
from transconv.torch_ops import library, operators, transforms
from transconv.torch_ops.calls import autograd
from transconv.torch_ops.calls.route import ConvCall

Tensor = torch.Tensor

# grad of the activation's input from the result's gradient g and, where there is one, its result y:
# one kernel of torch's.
GRAD_FROM_RESULT: dict[str, Callable[..., Tensor]] = table(
    lambda op: op.from_result() if op.activation else None, {"": lambda g: g})


# -- the operator ----------------------------------------------------------------------------------

operators.library.define(
    "fused_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
    f"str activation, {library.NUMBERS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
fused_convolution = torch.ops.transconv.fused_convolution.default
call: Callable[..., Tensor] = fused_convolution


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
        return operators.fwd(input, weight, bias, residual, operators.spelled(p, activation))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _bias, _residual, ctx.activation, *ctx.numbers = inputs
        # What is not saved may be written to.
        ctx.save_for_backward(input, weight, *([output] if ctx.activation else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, *kept = ctx.saved_tensors
        g = GRAD_FROM_RESULT[ctx.activation](grad, *kept)
        mask = list(ctx.needs_input_grad[:3])
        found: list[Tensor | None] = [None, None, None]
        if any(mask):
            made = library.convolution_backward(g, input, weight, *ctx.numbers, mask)
            found = [t if on else None for t, on in zip(made, mask, strict=True)]
        for_residual = g.clone() if ctx.needs_input_grad[3] and g is grad else g
        return *found, for_residual if ctx.needs_input_grad[3] else None, *[None] * 7


_apply: Any = FusedConvolution.apply


def composed(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
             activation: str, *numbers: Any) -> Tensor:
    """The operator as torch's functions."""
    return operators.composed(input, weight, bias, residual, activation,
                              operators.resolve(input, weight, bias, numbers))


def _with_derivatives(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
                      activation: str, *numbers: Any) -> Tensor:
    if library.dual(input):
        return composed(input, weight, bias, residual, activation, *numbers)
    run = (_apply if library.differentiated(input, weight, bias, residual)
           else FusedConvolution.forward)
    made: Tensor = run(input, weight, bias, residual, activation, *numbers)
    return made


operators.library.impl("fused_convolution", _with_derivatives, "Autograd")
transforms.compose(operators.library, "fused_convolution", composed)
for _key in ("CPU", "CUDA"):
    operators.library.impl("fused_convolution", FusedConvolution.forward, _key)


# -- eager calls -----------------------------------------------------------------------------------


def function_of(route: ConvCall, bound: bool) -> Callable[..., Tensor]:
    """``apply`` of the tensors that the route takes, in its order: see autograd.function_of."""
    behind = route.epilogue
    assert behind is not None
    return autograd.function_of(route, behind.biased, through=GRAD_FROM_RESULT[behind.activation],
                                bound=bound)
