"""The registered operators, differentiable any number of times.

    transconv::convolution            one operator for 1d, 2d, 3d, transposed or not
    transconv::convolution_backward   its gradients, any subset

Both have fakes (shapes and strides from shapes.py), derivatives made of the two operators
themselves, and FLOP formulas. Below autograd they turn into the operators of operators.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from transconv.calls import stats
from transconv.torch_ops import operators, shapes, tensor_subclasses, transforms
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.operators import library, register_fake, register_flop_formula

Tensor = torch.Tensor

NUMBERS = ("SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
           "SymInt[] output_padding, SymInt groups")

library.define(f"convolution(Tensor input, Tensor weight, Tensor? bias, {NUMBERS}) -> Tensor",
               tags=(torch.Tag.pt2_compliant_tag,))
library.define(f"convolution_backward(Tensor grad_output, Tensor input, Tensor weight, {NUMBERS}, "
               "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
               tags=(torch.Tag.pt2_compliant_tag,))

convolution = torch.ops.transconv.convolution.default
call: Callable[..., Tensor] = convolution
convolution_backward = torch.ops.transconv.convolution_backward.default


# -- fakes -----------------------------------------------------------------------------------------


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    p = operators.resolve(input, weight, bias, numbers)
    return operators.fake_fwd(input, weight, bias, None, "", p)


def _fake_backward(grad: Tensor, input: Tensor, weight: Tensor,
                   *numbers: Any) -> tuple[Tensor, ...]:
    *given, mask = numbers
    _check_mask(mask)
    p = operators.resolve(input, weight, None, given)
    shapes.check_grad(grad, input, weight, p)
    channels_last = shapes.channels_last_result(input, weight)
    wanted = [(input, input.shape), (weight, weight.shape)]
    found = [shapes.empty_result(like, shape, channels_last) if on else grad.new_empty(0)
             for (like, shape), on in zip(wanted, mask, strict=False)]
    return *found, shapes.bias_gradient(grad, weight, p) if mask[2] else grad.new_empty(0)


register_fake("transconv::convolution", _fake, lib=library)
register_fake("transconv::convolution_backward", _fake_backward, lib=library)


# -- derivatives -----------------------------------------------------------------------------------


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether derivatives with respect to one of these may be needed."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


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


def _check_mask(mask: Sequence[bool]) -> None:
    if len(mask) != 3:
        raise RuntimeError(f"output_mask: expected 3 flags, got {len(mask)}")


class ConvolutionBackward(torch.autograd.Function):
    """``apply(grad_output, input, weight, *numbers, mask)``. The gradients are linear in grad_output
    and in one of input, weight each. For cotangents a, b, c of (dx, dw, db):

        grad_output:  conv(a, w) + conv(x, b) + c      input:  the dx of (grad, weight=b)
                                                       weight: the dw of (grad, input=a)
    """

    @staticmethod
    def forward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
        *given, mask = numbers
        _check_mask(mask)
        p = operators.resolve(input, weight, None, given)
        shapes.check_grad(grad, input, weight, p)
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


_apply: Any = Convolution.apply
_apply_at_once: Any = _AtOnce.apply


def called(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """The operator's result. Tensors of a class that is served, and that no transform is for, do not go
    through torch's dispatcher, which costs the host more than a launch."""
    if tensor_subclasses.at_once(input) is None:
        return call(input, weight, bias, *numbers)
    run = _apply_at_once if differentiated(input, weight, bias) else Convolution.forward
    made: Tensor = run(input, weight, bias, *numbers)
    return made


_apply_backward: Any = ConvolutionBackward.apply


def dual(input: Tensor | None) -> bool:
    """Whether tensors may carry tangents: then torch computes, whose operators have rules for them."""
    if forward_ad._current_level < 0 or input is None:
        return False
    if input.device.type not in aten_convolutions.replaced:  # else torch's operator calls ours again
        stats.handed_over("transform:forward_ad")
    return True


def composed(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """The operator as torch's, whose transforms have rules for its derivatives."""
    p = operators.resolve(input, weight, bias, numbers)
    return aten_convolutions.aten_forward(input, weight, bias, p, dual=True)


def _with_derivatives(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    if dual(input):
        return composed(input, weight, bias, *numbers)
    run = _apply if differentiated(input, weight, bias) else Convolution.forward
    made: Tensor = run(input, weight, bias, *numbers)
    return made


def composed_backward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    """The gradients' operator as torch's."""
    *given, mask = numbers
    _check_mask(mask)
    p = operators.resolve(input, weight, None, given)
    shapes.check_grad(grad, input, weight, p)
    made_by_torch = aten_convolutions.aten_backward(grad, input, weight, p, mask, dual=True)
    return tuple(grad.new_empty(0) if t is None else t for t in made_by_torch)


def _backward_with_derivatives(grad: Tensor, input: Tensor, weight: Tensor,
                               *numbers: Any) -> tuple[Tensor, ...]:
    _check_mask(numbers[-1])
    if dual(input):
        return composed_backward(grad, input, weight, *numbers)
    run = (_apply_backward if differentiated(grad, input, weight)
           else ConvolutionBackward.forward)
    made: tuple[Tensor, ...] = run(grad, input, weight, *numbers)
    return made


library.impl("convolution", _with_derivatives, "Autograd")
library.impl("convolution_backward", _backward_with_derivatives, "Autograd")
transforms.compose(library, "convolution", composed)
transforms.compose(library, "convolution_backward", composed_backward)
for _key in ("CPU", "CUDA"):  # for calls that bypass autograd, as in inference mode
    library.impl("convolution", Convolution.forward, _key)
    library.impl("convolution_backward", ConvolutionBackward.forward, _key)


# -- FLOPs -----------------------------------------------------------------------------------------


def _flops(input_shape: Sequence[int], weight_shape: Sequence[int], _bias: Any, *numbers: Any,
           out_shape: Sequence[int], **_: Any) -> int:
    return operators.multiply_adds(input_shape, weight_shape, out_shape, numbers[3])


def _backward_flops(grad_shape: Sequence[int], input_shape: Sequence[int],
                    weight_shape: Sequence[int], *numbers: Any, **_: Any) -> int:
    *given, mask = numbers
    each = operators.multiply_adds(input_shape, weight_shape, grad_shape, given[3])
    return sum(map(bool, mask[:2])) * each


register_flop_formula(torch.ops.transconv.convolution)(_flops)
register_flop_formula(torch.ops.transconv.convolution_backward)(_backward_flops)
