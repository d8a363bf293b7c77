"""Autograd functions for eager calls, which bypass the registered operators.

They launch the same kernels as the registered operators in a fraction of the host time. A backward
pass that is itself differentiated, compiled or traced uses the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from transconv.calls import stats
from transconv.calls.autograd import Gradients, class_of, forward_of, start_backward
from transconv.calls.guard import is_batched
from transconv.calls.settings import settings
from transconv.runtime import torch_internals
from transconv.torch_ops import operators, shapes
from transconv.torch_ops.arguments import spelled_out
from transconv.torch_ops.calls import call_entries, select_impl
from transconv.torch_ops.calls.route import ConvCall
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor

READ_OFTEN = 16
"""How often each element of a gradient is read, from where on a copy of it costs less than what a kernel
loses that cannot read many of them at once."""

_compiling = torch.compiler.is_dynamo_compiling
_modes: Callable[[], int] = torch_internals.dispatch_modes
_transforms: Callable[[], bool] = torch_internals.transforms


class ConvolutionFunction(torch.autograd.Function):
    """``apply(input, weight, bias, route)``, for calls that have no function of their own
    (``function_of``): a class for each new size would cost more than its call."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, route: ConvCall) -> Tensor:
        ctx.to_save = (input, weight)  # as save_for_backward does
        ctx.route = route
        return route.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        input, weight = ctx.saved_tensors
        wanted, route = ctx.needs_input_grad[:3], ctx.route
        entry = None if _compiling() else route.gradients.get(wanted)
        found = entry and entry(grad, input, weight)
        return *(found or gradients(route, wanted, grad, input, weight, wanted)), None


class CastConvolutionFunction(torch.autograd.Function):
    """Under autocast, for calls whose casts are made already: ``apply(input, weight, bias, cast weight,
    cast bias, route)``. Weight and bias are as the caller gave them, their casts carry no history:
    autograd's engine casts the gradients back, and a call costs one node instead of three."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, cast: Tensor,
                cast_bias: Tensor | None, route: ConvCall) -> Tensor:
        ctx.save_for_backward(input, cast, weight)
        ctx.route = route
        return route.forward(input, cast, cast_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        input, cast, weight = ctx.saved_tensors
        wanted, route = ctx.needs_input_grad[:3], ctx.route
        entry = None if _compiling() else route.gradients.get(wanted)
        found = entry and entry(grad, input, cast)
        found = found or gradients(route, wanted, grad, input, _history(cast, weight), wanted)
        return *found, None, None, None


def _history(cast: Tensor, weight: Tensor) -> Tensor:
    """The cast of a weight; made anew where its own derivatives are recorded."""
    return weight.to(cast.dtype) if torch.is_grad_enabled() else cast


for _kind in (ConvolutionFunction, CastConvolutionFunction):
    start_backward(_kind, _kind.backward)
# Function.apply also looks for functorch transforms; the callers here have checked that.
apply: Callable[..., Tensor] = super(torch.autograd.Function, ConvolutionFunction).apply
apply_cast: Callable[..., Tensor] = super(torch.autograd.Function, CastConvolutionFunction).apply


def gradients(route: ConvCall, wanted: tuple[bool, ...], grad: Tensor, input: Tensor, weight: Tensor,
              mask: tuple[bool, ...]) -> Gradients:
    """Gradients of input, weight and bias the general way; None where ``mask`` is False. Recorded as
    the ``wanted`` of the route."""
    params = route.params
    if (torch.is_grad_enabled() or torch.compiler.is_compiling()
            or _modes()
            or _transforms()
            or is_batched(grad)):
        found = operators.convolution_backward(grad, input, weight, *params, mask)
        return tuple(t if on else None for t, on in zip(found, mask, strict=True))
    if forward_ad._current_level >= 0:  # the gradient may be a dual number
        stats.handed_over("transform:forward_ad")
        return aten_convolutions.aten_backward(grad, input, weight, params, mask, dual=True)
    grad = _dense(spelled_out(grad), input, weight) if settings.varies else spelled_out(grad)
    made, flags, aligned = select_impl.backward_routes(params, grad, input, weight, mask, settings.mode)
    call_entries.note_backward(route, wanted, grad, input, weight, made, flags, aligned)
    return made.run(grad, input, weight)


def _dense(grad: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a result; a copy if it is expanded or has gaps, and a kernel of its own would be
    slower than the copy and a kernel that other calls use: where its elements are read often."""
    last = shapes.channels_last_result(input, weight)
    if weight.numel() < READ_OFTEN * grad.shape[1] or not shapes.has_gaps(grad, last):
        return grad
    return shapes.with_result_strides(grad, last)


def function_of(route: ConvCall, biased: bool, cast: torch.dtype | None = None,
                through: Callable[..., Tensor] | None = None, bound: bool = True) -> Callable[..., Tensor]:
    """``apply`` of an autograd function for one route, of the tensors that it takes in their order: input,
    weight, a bias if ``biased``, and a residual where its epilogue reads one. With ``cast`` it casts
    weight and bias to this type, as CastConvolutionFunction has them cast. ``through``: the gradient of
    the sums from that of the result, and from the result, which is then saved; ``bound``: for the device
    that ``route.start`` is for."""
    made = route.functions.get((cast, bound))
    if made is None:
        behind = route.epilogue
        keeps = behind is not None and bool(behind.activation)
        operands = ["x", "w", *["b"] * biased, *["r"] * (behind is not None and "res" in behind.names)]
        run = route.bound() if bound and cast is None else route.of_given()
        forward = (forward_of(run, operands, ("x", "w", *["made"] * keeps)) if cast is None else
                   forward_of(run, operands, ("x", "cast_w", "w"), ("w", *["b"] * biased), cast))
        name = "ConvolutionFunction" if behind is None else "FusedFunction"
        backward = (_backward(route, biased) if through is None else
                    _backward_through(route, biased, through))
        made = route.functions[cast, bound] = class_of(forward, backward, name)
    return made


def _backward(route: ConvCall, biased: bool) -> Callable[..., Gradients]:
    known = route.gradients

    def backward(ctx: Any, grad: Tensor) -> Gradients:
        saved = ctx.saved_tensors  # input, the weight as it was used, and the weight before its cast
        wanted = ctx.needs_input_grad
        if not _compiling():
            entry = known.get(wanted)
            if entry is not None:
                found = entry(grad, saved[0], saved[1])
                if found is not None:
                    return found
        weight = saved[1] if len(saved) == 2 else _history(saved[1], saved[2])
        # Further returned values are None, which autograd allows.
        return gradients(route, wanted, grad, saved[0], weight,
                         wanted if biased else (*wanted, False))

    return backward


def _backward_through(route: ConvCall, biased: bool,
                      through: Callable[..., Tensor]) -> Callable[..., Gradients]:
    known = route.gradients

    def backward(ctx: Any, grad: Tensor) -> Gradients:
        input, weight, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        mask = (wanted[0], wanted[1], biased and wanted[2])
        of_sums = through(grad, *kept)
        entry = None if _compiling() else known.get(mask)
        found = None if entry is None else entry(of_sums, input, weight)
        if found is None:
            found = ((None, None, None) if not any(mask) else
                     gradients(route, mask, of_sums, input, weight, mask))
        # What is returned beyond the arguments has to be None.
        return *found[:2 + biased], of_sums if wanted[-1] and len(wanted) == 3 + biased else None

    return backward
