"""The derivatives of calls: autograd functions whose gradients are kernels of a route, or in graphs the
operators of a bound formula; torch's operations where gradients are differentiated themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transconv.calls import stats
from transconv.calls.autograd import by_torch, class_of
from transconv.calls.guard import is_batched
from transconv.functional.calls import torch_operators
from transconv.functional.calls.route import FunctionCall
from transconv.functional.calls.symbolic_bind import BoundCall, Values, as_tuple
from transconv.runtime import torch_internals
from transconv.torch_ops.calls.call_attributes import is_plain

Tensor = torch.Tensor

_deterministic: Callable[[], bool] = torch_internals.deterministic
_grad_enabled = torch.is_grad_enabled
_modes: Callable[[], int] = torch_internals.dispatch_modes
_compiling = torch.compiler.is_compiling
_transforms: Callable[[], bool] = torch_internals.transforms


class Apply(torch.autograd.Function):
    """``apply(how, *operands)``: how is a Route, or a Bound inside a graph."""

    @staticmethod
    def forward(ctx: Any, how: Any, *given: Tensor) -> Any:
        ctx.how = how
        routed = isinstance(how, FunctionCall)
        if routed and (run := how.written(True)) is not None:
            return run(ctx, *given)
        results, values = how.forward(given) if routed else forward_in_graph(how, given)
        bound: BoundCall = how.bound if routed else how
        ctx.save_for_backward(*[values[name] for name in bound.saved])
        if len(results) > 1:
            ctx.mark_non_differentiable(*results[1:])
            return results
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        return None, *_gradients(ctx.how, ctx.saved_tensors, grad)


apply: Any = super(torch.autograd.Function, Apply).apply
apply_in_graph: Any = Apply.apply


def function_of(route: FunctionCall) -> Callable[..., Any] | None:
    """The differentiable call of one route on operands, without look-ups; None before the first launch."""
    forward = route.written(True)
    if forward is None:
        return None

    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        saved = ctx.saved_tensors
        entry = route.entry_back
        if entry is not None and not _compiling() and (found := entry(grad, *saved)) is not None:
            return found
        return _gradients(route, saved, grad)

    return class_of(forward, backward, f"{''.join(map(str.title, route.name.split('_')))}Function")


def _gradients(how: Any, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the operands of a Route, or of a Bound."""
    routed = how.__class__ is FunctionCall
    bound: BoundCall = how.bound if routed else how
    again, batched = _grad_enabled(), is_batched(grad)
    if not again and not batched and routed and not how.hands_gradients and not _watched(grad):
        found: tuple[Tensor | None, ...] = how.gradients_of(saved, grad)
        if how.entry_back is None:  # for gradients like these
            how.entry_back = how.written_back(saved, grad)
        return found
    values = dict(zip(bound.saved, saved, strict=True))
    if again:
        return _again(bound, values, grad)
    handed = how.hands_gradients if routed else bound.adds and _deterministic()
    if batched or handed:
        stats.handed_over("deterministic:add" if handed else "transform:batched",
                          f"{bound.function.name}_gradient")
        return _again(bound, values, grad, differentiable=False)
    bound = bound.exact()
    memory = bound.forward.stored[bound.results[0]]
    values["G"] = grad.expand(memory.shape)
    for step in bound.backward:
        torch_operators.run(bound, step, values)
    return tuple(values.get(f"d{n}") if on else None
                 for n, on in zip(bound.operands, bound.wanted, strict=True))


def _watched(grad: Tensor) -> bool:
    """Whether the gradient's operations are traced or differentiated, or it is no plain tensor."""
    return bool(_modes() or _compiling() or _transforms() or not is_plain(grad))


def _again(bound: BoundCall, values: Values, grad: Tensor,
           differentiable: bool = True) -> tuple[Tensor | None, ...]:
    """Gradients in torch's operations, which themselves can be differentiated if ``differentiable``."""
    f = bound.function
    if f.again is not None:
        return f.again(values, bound.numbers, grad)
    given = [values[name] if name in values else
             torch.zeros((), dtype=m.dtype, device=grad.device).expand(m.shape)
             for name, m in bound.memory.items()]
    return tuple(by_torch(lambda *own: as_tuple(f.torch(*bound.spread(own), *bound.numbers))[0],
                          given, bound.wanted, grad, differentiable))


def forward_in_graph(bound: BoundCall, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Values]:
    """The results of a formula by its operator, and all values by name."""
    values = dict(zip(bound.operands, given, strict=True))
    torch_operators.run(bound, bound.forward, values)
    return tuple(values[name] for name in bound.results), values
