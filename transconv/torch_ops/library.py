"""Torch border, step 5. The registered operators.

    transconv::convolution            one operator for 1d, 2d, 3d, transposed or not
    transconv::convolution_backward   its gradients, any subset

Both have fakes (shapes and strides from shapes.py), derivatives made of the two operators
themselves, and FLOP formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from transconv.torch_ops import arguments, routes, shapes
from transconv.torch_ops.arguments import Params

Tensor = torch.Tensor

NUMBERS = ("SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
            "SymInt[] output_padding, SymInt groups")

# torch's border is untyped here.
_new_library: Any = torch.library.Library
register_fake: Any = torch.library.register_fake
register_flop_formula: Any = flop_counter.register_flop_formula

# The operators live as long as this object: it must stay at module scope.
library: Any = _new_library("transconv", "DEF")
library.define(f"convolution(Tensor input, Tensor weight, Tensor? bias, {NUMBERS}) -> Tensor",
               tags=(torch.Tag.pt2_compliant_tag,))
library.define(f"convolution_backward(Tensor grad_output, Tensor input, Tensor weight, {NUMBERS}, "
               "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
               tags=(torch.Tag.pt2_compliant_tag,))

convolution = torch.ops.transconv.convolution.default
call: Callable[..., Tensor] = convolution
convolution_backward = torch.ops.transconv.convolution_backward.default


# -- kernels ---------------------------------------------------------------------------------------


def _run(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    route = routes.forward_route(routes.request("", 0, *numbers), input, weight, bias)
    found: Tensor = route.forward(input, weight, bias)
    return found


def _run_backward(grad: Tensor, input: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    *given, mask = numbers
    req = routes.request("", 0, *given)
    _check_grad(grad, input, weight, params := req.resolve(input, weight, None))
    found = routes.backward(params, grad, input, weight, mask)
    # An operator returns tensors; what was not asked for is an empty one.
    return tuple(grad.new_empty(0) if t is None else t for t in found)


def _check_grad(grad: Tensor, input: Tensor, weight: Tensor, p: Params) -> None:
    shape = shapes.output_shape(input.shape, weight.shape, p)
    if tuple(grad.shape) != shape:
        raise RuntimeError(f"Expected grad_output of size {list(shape)}, "
                           f"but got {list(grad.shape)}")


for _key in ("CPU", "CUDA"):
    library.impl("convolution", _run, _key)
    library.impl("convolution_backward", _run_backward, _key)


# -- fakes -----------------------------------------------------------------------------------------


def _resolve(input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Sequence[Any]) -> Params:
    stride, padding, dilation, transposed, output_padding, groups = numbers
    arguments.check_tensors(input, weight, bias)
    return arguments.resolve(
        input.shape, weight.shape, None if bias is None else bias.shape, tuple(stride),
        tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups, two_sided=True)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    shape = shapes.output_shape(input.shape, weight.shape, _resolve(input, weight, bias, numbers))
    return shapes.empty_result(input, shape, shapes.channels_last_result(input, weight))


def _fake_backward(grad: Tensor, input: Tensor, weight: Tensor,
                   *numbers: Any) -> tuple[Tensor, ...]:
    *given, mask = numbers
    _check_grad(grad, input, weight, _resolve(input, weight, None, given))
    channels_last = shapes.channels_last_result(input, weight)
    wanted = [(input, input.shape), (weight, weight.shape)]
    found = [shapes.empty_result(like, shape, channels_last) if on else grad.new_empty(0)
             for (like, shape), on in zip(wanted, mask, strict=False)]
    return *found, grad.new_empty(grad.shape[1] if mask[2] else 0)


register_fake("transconv::convolution", _fake, lib=library)
register_fake("transconv::convolution_backward", _fake_backward, lib=library)


# -- derivatives -----------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _bias, *numbers = inputs
    ctx.save_for_backward(input, weight)
    ctx.numbers = numbers


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    found = convolution_backward(grad, input, weight, *ctx.numbers, mask)
    return *(t if on else None for t, on in zip(found, mask, strict=True)), *[None] * 6


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, input, weight, *numbers, mask = inputs
    ctx.save_for_backward(grad, input, weight)
    ctx.numbers = numbers
    ctx.mask = mask
    # A cotangent that nobody asked for stays None instead of becoming a tensor of zeros.
    ctx.set_materialize_grads(False)


def _differentiate_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients are linear in grad_output and in one of input, weight each. For cotangents a,
    b, c of (dx, dw, db):

        grad_output:  conv(a, w) + conv(x, b) + c      input:  the dx of (grad, weight=b)
                                                       weight: the dw of (grad, input=a)
    """
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
        for_weight = convolution_backward(grad, a, weight, *ctx.numbers, [False, True, False])[1]
    return for_grad, for_input, for_weight, *[None] * 7


torch.library.register_autograd("transconv::convolution", _differentiate, setup_context=_keep,
                                lib=library)
torch.library.register_autograd("transconv::convolution_backward", _differentiate_backward,
                                setup_context=_keep_backward, lib=library)


# -- FLOPs -----------------------------------------------------------------------------------------


def _multiply_adds(input_shape: Sequence[int], weight_shape: Sequence[int],
                   result_shape: Sequence[int], transposed: bool) -> int:
    """Twice the products of one pass over the problem, which each of its three directions makes."""
    return int(flop_counter.conv_flop_count(list(input_shape), list(weight_shape),
                                            list(result_shape), transposed=transposed))


def _flops(input_shape: Sequence[int], weight_shape: Sequence[int], _bias: Any, *numbers: Any,
           out_shape: Sequence[int], **_: Any) -> int:
    return _multiply_adds(input_shape, weight_shape, out_shape, numbers[3])


def _backward_flops(grad_shape: Sequence[int], input_shape: Sequence[int],
                    weight_shape: Sequence[int], *numbers: Any, **_: Any) -> int:
    *given, mask = numbers
    each = _multiply_adds(input_shape, weight_shape, grad_shape, given[3])
    return sum(map(bool, mask[:2])) * each


register_flop_formula(torch.ops.transconv.convolution)(_flops)
register_flop_formula(torch.ops.transconv.convolution_backward)(_backward_flops)
