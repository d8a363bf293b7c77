"""The differentiable operators, any number of times: ``transconv::convolution``, and its gradients,
``transconv::convolution_backward``.

Their derivatives are made of the two operators themselves. Below autograd they turn into those of compiled
graphs (operators.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transconv.torch_ops import operators, shapes, tensor_subclasses
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.operators import convolution, convolution_backward, differentiated

Tensor = torch.Tensor


# -- fakes -----------------------------------------------------------------------------------------


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    return shapes.fake_result(input, weight, operators.resolve(input, weight, bias, numbers))


def _checked(grad: Tensor, input: Tensor, weight: Tensor,
             numbers: Sequence[Any]) -> tuple[Params, Sequence[bool]]:
    """The numbers of a call of the gradients' operator, whose tensors fit, and which ones are wanted."""
    *given, mask = numbers
    if len(mask) != 3:
        raise RuntimeError(f"output_mask: expected 3 flags, got {len(mask)}")
    p = operators.resolve(input, weight, None, given)
    shapes.check_grad(grad, input, weight, p)
    return p, mask


def _fake_backward(grad: Tensor, input: Tensor, weight: Tensor,
                   *numbers: Any) -> tuple[Tensor, ...]:
    p, mask = _checked(grad, input, weight, numbers)
    channels_last = shapes.channels_last_result(input, weight)
    wanted = [(input, input.shape), (weight, weight.shape)]
    found = [shapes.empty_result(like, shape, channels_last) if on else grad.new_empty(0)
             for (like, shape), on in zip(wanted, mask, strict=False)]
    return *found, shapes.bias_gradient(grad, weight, p) if mask[2] else grad.new_empty(0)


# -- derivatives -----------------------------------------------------------------------------------


class Convolution(torch.autograd.Function):
    """``apply(input, weight, bias, *numbers)``, the numbers as the operator takes them."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
        if (of_class := tensor_subclasses.at_once(input)) is not None:
            made: Tensor = of_class.forward(input, weight, bias, *numbers)
            return made
        p = operators.resolve(input, weight, bias, numbers)
        return operators.fwd(input, weight, bias, None, operators.spelled(p))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _bias, *numbers = inputs
        ctx.save_for_backward(input, weight)
        ctx.numbers = numbers

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        of_class = None if torch.is_grad_enabled() else tensor_subclasses.at_once(grad)
        backward = of_class.backward if of_class else convolution_backward
        found = backward(grad, input, weight, *ctx.numbers, mask)
        return *(t if on else None for t, on in zip(found, mask, strict=True)), *[None] * 6


class ConvolutionBackward(torch.autograd.Function):
    """``apply(grad_output, input, weight, *numbers, mask)``. The gradients are linear in grad_output
    and in one of input, weight each. For cotangents a, b, c of (dx, dw, db):

        grad_output:  conv(a, w) + conv(x, b) + c      input:  the dx of (grad, weight=b)
                                                       weight: the dw of (grad, input=a)
    """

    @staticmethod
    def forward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
        p, mask = _checked(grad, input, weight, numbers)
        if (of_class := tensor_subclasses.ServedClass.of.get(type(grad))) is not None:
            found = of_class.backward(grad, input, weight, *numbers)
            return tuple(grad.new_empty(0) if t is None else t for t in found)
        text = operators.spelled(p)
        made = (operators.bwd_d(grad, input, weight, text) if mask[0] else None,
                operators.bwd_w(grad, input, weight, text) if mask[1] else None,
                shapes.bias_gradient(grad, weight, p) if mask[2] else None)
        return tuple(grad.new_empty(0) if t is None else t for t in made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad, input, weight, *numbers, mask = inputs
        ctx.save_for_backward(grad, input, weight)
        ctx.numbers = numbers
        ctx.mask = mask
        # A cotangent that is not needed stays None instead of becoming a tensor of zeros.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, input, weight = ctx.saved_tensors
        a, b, c = (t if on else None for t, on in zip(cotangents, ctx.mask, strict=True))
        for_grad: Tensor | None = None
        if ctx.needs_input_grad[0]:
            terms = []
            if a is not None:
                terms.append(convolution(a, weight, None, *ctx.numbers))
            if b is not None:
                terms.append(convolution(input, b, None, *ctx.numbers))
            if c is not None:
                terms.append(c.view(1, -1, *[1] * (grad.dim() - 2)).expand_as(grad))
            for_grad = sum(terms[1:], terms[0]) if terms else None
        for_input = for_weight = None
        if ctx.needs_input_grad[1] and b is not None:
            for_input = convolution_backward(grad, input, b, *ctx.numbers, [True, False, False])[0]
        if ctx.needs_input_grad[2] and a is not None:
            for_weight = convolution_backward(grad, a, weight, *ctx.numbers,
                                              [False, True, False])[1]
        return for_grad, for_input, for_weight, *[None] * 7


class _AtOnce(torch.autograd.Function):
    """``Convolution`` for tensors of a served class: in one function, whose arguments torch takes as they
    are."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
        Convolution.setup_context(ctx, (input, weight, bias, *numbers), input)
        return Convolution.forward(input, weight, bias, *numbers)

    backward = Convolution.backward


_apply_at_once: Any = _AtOnce.apply


def called(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """The operator's result. Tensors of a class that is served, and that no transform is for, do not go
    through torch's dispatcher, which costs the host more than a launch."""
    if tensor_subclasses.at_once(input) is None:
        return convolution(input, weight, bias, *numbers)
    run = _apply_at_once if differentiated(input, weight, bias) else Convolution.forward
    made: Tensor = run(input, weight, bias, *numbers)
    return made


def composed(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """The operator as torch's, whose transforms have rules for its derivatives."""
    p = operators.resolve(input, weight, bias, numbers)
    return aten_convolutions.aten_forward(input, weight, bias, p, dual=True)


def composed_backward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    """The gradients' operator as torch's."""
    p, mask = _checked(grad, input, weight, numbers)
    made_by_torch = aten_convolutions.aten_backward(grad, input, weight, p, mask, dual=True)
    return tuple(grad.new_empty(0) if t is None else t for t in made_by_torch)


# -- FLOPs -----------------------------------------------------------------------------------------


def _flops(input_shape: Sequence[int], weight_shape: Sequence[int], _bias: Any, *numbers: Any,
           out_shape: Sequence[int], **_: Any) -> int:
    return operators.multiply_adds(input_shape, weight_shape, out_shape, numbers[3])


def _backward_flops(grad_shape: Sequence[int], input_shape: Sequence[int],
                    weight_shape: Sequence[int], *numbers: Any, **_: Any) -> int:
    *given, mask = numbers
    each = operators.multiply_adds(input_shape, weight_shape, grad_shape, given[3])
    return sum(map(bool, mask[:2])) * each


operators.implement("convolution", _fake, Convolution.forward, composed,
                    operators.with_derivatives(Convolution, composed), _flops)
operators.implement("convolution_backward", _fake_backward, ConvolutionBackward.forward, composed_backward,
                    operators.with_derivatives(ConvolutionBackward, composed_backward), _backward_flops)
