"""Convolutions with traced epilogues, and their derivatives.

    transconv::traced_convolution    f(conv(input, weight) + bias, *operands) as one operator

The gradient computes the sums once more instead of keeping them, and then the derivative of the function
at them, which follows from the rows of the operations' table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from transconv.calls.autograd import by_torch
from transconv.compute import pointwise
from transconv.runtime import torch_internals
from transconv.torch_ops import library, operators, shapes, transforms
from transconv.torch_ops.calls.call_attributes import request
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.fused import traced_route

Tensor = torch.Tensor
_below_autograd: Any = torch_internals.below_autograd
Gradients = Callable[[str, Tensor, Sequence[Tensor], Tensor, Sequence[bool]],
                     Sequence[Tensor | None] | None]

operators.library.define(
    "traced_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor[] operands, str text, "
    f"{library.NUMBERS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
call: Callable[..., Tensor] = torch.ops.transconv.traced_convolution.default


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], text: str,
          *numbers: Any) -> Tensor:
    p = operators.resolve(input, weight, bias, numbers)
    shape = shapes.output_shape(input.shape, weight.shape, p)
    traced_route.check(operands, shape, input)
    return operators.fake_fwd(input, weight, bias, None, "", p)


operators.register_fake("transconv::traced_convolution", _fake, lib=operators.library)


def _forward(input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], text: str,
             *numbers: Any) -> Tensor:
    p = operators.resolve(input, weight, bias, numbers)
    req = request("", 0, *p)
    route = traced_route.find(req, input, weight, bias, operands, text, "now")
    return route.forward(input, weight, bias, *operands)


class TracedConvolution(torch.autograd.Function):
    """``apply(input, weight, bias, text, numbers, *operands)``. ``kernels``: what may compute the
    derivatives of a text in one kernel (functional/epilogue_derivatives.py); None sends them to torch."""

    kernels: ClassVar[tuple[Gradients, ...]] = ()

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, text: str, numbers: tuple[Any, ...],
                *operands: Tensor) -> Tensor:
        with _below_autograd():
            return call(input, weight, bias, list(operands), text, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, ctx.text, ctx.numbers, *operands = inputs
        ctx.save_for_backward(input, weight, bias, *operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, *operands = ctx.saved_tensors
        mask, wanted = list(ctx.needs_input_grad[:3]), ctx.needs_input_grad[5:]
        acc = library.call(input, weight, bias, *ctx.numbers)
        of_acc, *of_operands = _derivatives(ctx.text, acc, operands, grad, (any(mask), *wanted))
        found: list[Tensor | None] = [None, None, None]
        if of_acc is not None:
            made = library.convolution_backward(of_acc, input, weight, *ctx.numbers, mask)
            found = [t if on else None for t, on in zip(made, mask, strict=True)]
        return *found, None, None, *of_operands


def _derivatives(text: str, acc: Tensor, operands: Sequence[Tensor], grad: Tensor,
                 wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of ``acc`` and of the operands; None where they are not wanted."""
    again = torch.is_grad_enabled()
    for kernel in () if again else TracedConvolution.kernels:
        if (made := kernel(text, acc, operands, grad, wanted)) is not None:
            return list(made)
    function = pointwise(text)
    return by_torch(lambda acc, *operands: traced_route.applied(function, acc, operands),
                             [acc, *operands], wanted, grad, again)


_apply: Any = TracedConvolution.apply


def composed(input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor], text: str,
             *numbers: Any) -> Tensor:
    """The operator as torch's functions."""
    p = operators.resolve(input, weight, bias, numbers)
    acc = aten_convolutions.aten_forward(input, weight, bias, p, dual=True)
    return traced_route.applied(pointwise(text), acc, operands)


def _with_derivatives(input: Tensor, weight: Tensor, bias: Tensor | None, operands: Sequence[Tensor],
                      text: str, *numbers: Any) -> Tensor:
    if library.dual(input):
        return composed(input, weight, bias, operands, text, *numbers)
    if library.differentiated(input, weight, bias, *operands):
        made: Tensor = _apply(input, weight, bias, text, numbers, *operands)
        return made
    with _below_autograd():
        return call(input, weight, bias, list(operands), text, *numbers)


operators.library.impl("traced_convolution", _with_derivatives, "Autograd")
transforms.compose(operators.library, "traced_convolution", composed)
for _key in ("CPU", "CUDA"):
    operators.library.impl("traced_convolution", _forward, _key)


def _flops(input_shape: Sequence[int], weight_shape: Sequence[int], _bias: Any, _operands: Any, _text: str,
           *numbers: Any, out_shape: Sequence[int], **_: Any) -> int:
    return operators.multiply_adds(input_shape, weight_shape, out_shape, numbers[3])


operators.register_flop_formula(torch.ops.transconv.traced_convolution)(_flops)
