"""Autograd functions for eager calls, which bypass the registered operators.

They launch the same kernels as the registered operators in a fraction of the host time. A backward
pass that is itself differentiated, compiled or traced uses the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.torch_ops import library
from transconv.torch_ops.arguments import spelled_out
from transconv.torch_ops.calls import call_entries, route_cache
from transconv.torch_ops.calls.route import Route, Run
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor

_new_class: Any = type(torch.autograd.Function)
_compiling = torch.compiler.is_dynamo_compiling
# Whether `is_grads_batched` made it: a view of many gradients, without memory of its own.
is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def _started(kind: Any, backward: Callable[..., Any]) -> None:
    """Have the nodes of an autograd function start its backward pass; their own `apply` would look for it,
    in two more calls."""
    kind._backward_cls.apply = backward


class ConvolutionFunction(torch.autograd.Function):
    """``apply(input, weight, bias, route)``, for calls that have no function of their own
    (``function_of``): a class for each new size would cost more than its call."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
        ctx.to_save = (input, weight)  # as save_for_backward does
        ctx.route = route
        return route.forward(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
                cast_bias: Tensor | None, route: Route) -> Tensor:
        ctx.save_for_backward(input, cast, weight)
        ctx.route = route
        return route.forward(input, cast, cast_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
    _started(_kind, _kind.backward)
# Function.apply also looks for functorch transforms; the callers here have checked that.
apply: Callable[..., Tensor] = super(torch.autograd.Function, ConvolutionFunction).apply
apply_cast: Callable[..., Tensor] = super(torch.autograd.Function, CastConvolutionFunction).apply


def gradients(route: Route, wanted: tuple[bool, ...], grad: Tensor, input: Tensor, weight: Tensor,
              mask: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias the general way; None where ``mask`` is False. Recorded as
    the ``wanted`` of the route."""
    params = route.params
    if (torch.is_grad_enabled() or torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or is_batched(grad)):
        found = library.convolution_backward(grad, input, weight, *params, mask)
        return tuple(t if on else None for t, on in zip(found, mask, strict=True))
    if forward_ad._current_level >= 0:  # the gradient may be a dual number
        stats.handed_over("transform:forward_ad")
        return aten_convolutions.aten_backward(grad, input, weight, params, mask, dual=True)
    grad = spelled_out(grad)
    made, flags, aligned = route_cache.backward_routes(params, grad, input, weight, mask, settings.mode)
    call_entries.note_backward(route, wanted, grad, input, weight, made, flags, aligned)
    return made.run(grad, input, weight)


def function_of(route: Route, biased: bool, cast: torch.dtype | None = None) -> Callable[..., Tensor]:
    """``apply(input, weight)`` or ``apply(input, weight, bias)`` of an autograd function for
    one route, and the device that ``route.start`` is for: each further argument, and each object in
    the context, costs a tenth of a microsecond and more per call. With ``cast`` it casts weight and
    bias to this type, as CastConvolutionFunction has them cast."""
    made = route.functions.get((cast, True))
    if made is None:
        forward = _casting(route.of_given(), biased, cast) if cast else _plain(route.bound(), biased)
        made = route.functions[cast, True] = class_of(forward, _backward(route, biased),
                                                      "ConvolutionFunction")
    return made


def _plain(run: Run, biased: bool) -> Callable[..., Tensor]:
    def forward_unbiased(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.to_save = (input, weight)  # as save_for_backward does
        return run(input, weight)

    def forward_biased(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.to_save = (input, weight)
        return run(input, weight, bias)

    return forward_biased if biased else forward_unbiased


def _casting(run: Run, biased: bool, dtype: torch.dtype) -> Callable[..., Tensor]:
    def forward_unbiased(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        cast = weight.to(dtype)
        ctx.to_save = (input, cast, weight)
        return run(input, cast)

    def forward_biased(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        cast = weight.to(dtype)
        ctx.to_save = (input, cast, weight)
        return run(input, cast, bias.to(dtype))

    return forward_biased if biased else forward_unbiased


def _backward(route: Route, biased: bool) -> Callable[..., tuple[Tensor | None, ...]]:
    known = route.gradients

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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


def class_of(forward: Callable[..., Any], backward: Callable[..., tuple[Tensor | None, ...]],
             name: str) -> Callable[..., Any]:
    """``apply`` of an autograd function made of these two."""
    # autograd looks these up by name along the class hierarchy at every call: the nearest is cheapest.
    own = {"forward": staticmethod(forward), "backward": staticmethod(backward),
           "setup_context": staticmethod(torch.autograd.Function.setup_context),
           "clear_saved_tensors_on_access": False, "boxed_grads_call": False}
    made: Any = _new_class(name, (torch.autograd.Function,), own)
    _started(made, backward)
    apply: Callable[..., Any] = super(torch.autograd.Function, made).apply
    return apply


def by_torch(function: Callable[..., Tensor], given: Sequence[Tensor], wanted: Sequence[bool],
             grad: Tensor, differentiable: bool) -> list[Tensor | None]:
    """The gradients of the ``wanted`` operands of a function, in torch's operations; None for the others.
    If ``differentiable``, they depend on the operands as these were saved, with their history.

    The function sees each operand as a tensor of its own. Of two operands one may be made of the other, as
    in matmul(x, x.T): among saved tensors, the gradient of x would have the share that x.T has, which
    autograd's engine adds later."""
    with torch.enable_grad():
        own = [t if not on else t.view_as(t) if differentiable and t.requires_grad else
               t.detach().requires_grad_() for t, on in zip(given, wanted, strict=True)]
        of = [t for t, on in zip(own, wanted, strict=True) if on]
        found = iter(torch.autograd.grad(function(*own), of, grad, create_graph=differentiable,
                                         allow_unused=True))
    return [next(found) if on else None for on in wanted]
