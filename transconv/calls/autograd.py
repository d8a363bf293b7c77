"""Autograd functions of calls: a class for each route, made of what runs it and what runs its gradients.

Each further argument of an autograd function, and each object in its context, costs a tenth of a
microsecond and more per call: a class of its own has the tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transconv.calls.guard import listed, written

Tensor = torch.Tensor
Gradients = tuple[Tensor | None, ...]

_new_class: Any = type(torch.autograd.Function)


def start_backward(kind: Any, backward: Callable[..., Any]) -> None:
    """Have the nodes of an autograd function start its backward pass; their own `apply` would look for it,
    in two more calls."""
    kind._backward_cls.apply = backward


def forward_of(
    run: Callable[..., Any],
    operands: Sequence[str],
    saved: Sequence[str],
    casts: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> Callable[..., Any]:
    """The forward pass, of autograd's context and the operands: ``run``, and what is ``saved`` of the
    operands, of the result ``made``, and of ``cast_x`` where ``casts`` to a dtype has x."""
    given = [f"cast_{n}" if n in casts else n for n in operands]
    return written(
        f"forward(ctx, {', '.join(operands)})",
        [
            *(f"cast_{n} = {n}.to(dtype)" for n in casts),
            f"made = run({', '.join(given)})",
            f"ctx.to_save = {listed(saved)}",
        ],
        "return made",
        {"run": run, "dtype": dtype},
    )


def class_of(
    forward: Callable[..., Any], backward: Callable[..., Gradients], name: str
) -> Callable[..., Any]:
    """``apply`` of an autograd function made of these two. Function.apply also looks for functorch's
    transforms; the callers have checked that."""
    # autograd looks these up by name along the class hierarchy at every call: the nearest is cheapest.
    own = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "setup_context": staticmethod(torch.autograd.Function.setup_context),
        "clear_saved_tensors_on_access": False,
        "boxed_grads_call": False,
    }
    made: Any = _new_class(name, (torch.autograd.Function,), own)
    start_backward(made, backward)
    apply: Callable[..., Any] = super(torch.autograd.Function, made).apply
    return apply


def by_torch(
    function: Callable[..., Tensor | Sequence[Tensor]],
    given: Sequence[Tensor],
    wanted: Sequence[bool],
    grad: Tensor | Sequence[Tensor],
    differentiable: bool,
) -> list[Tensor | None]:
    """The gradients of the ``wanted`` operands of a function, in torch's operations; None for the others.
    If ``differentiable``, they depend on the operands as these were saved, with their history.

    The function sees each operand as a tensor of its own. Of two operands one may be made of the other, as
    in matmul(x, x.T): among saved tensors, the gradient of x would have the share that x.T has, which
    autograd's engine adds later."""
    with torch.enable_grad():
        own = [
            t
            if not on
            else t.view_as(t)
            if differentiable and t.requires_grad
            else t.detach().requires_grad_()
            for t, on in zip(given, wanted, strict=True)
        ]
        of = [t for t, on in zip(own, wanted, strict=True) if on]
        found = iter(
            torch.autograd.grad(function(*own), of, grad, create_graph=differentiable, allow_unused=True)
        )
    return [next(found) if on else None for on in wanted]
