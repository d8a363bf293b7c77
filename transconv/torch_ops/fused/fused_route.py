"""Decides what computes convolution, bias, residual and activation in one kernel.

A fused route is made once for each kind of call, like any other; where the compiler has no such
epilogue, the plain route runs and torch does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.route_cache import PASSING
from transconv.compute import table
from transconv.conv import Prop
from transconv.support import Unsupported
from transconv.torch_ops import arguments, shapes
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import ConvCall, RouteEpilogue, RouteMatch
from transconv.torch_ops.calls.select_impl import compile_route, make_forward, refused
from transconv.torch_ops.precompile import precompile_backward

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = table(
    lambda op: op.function() if op.activation else None, {"": lambda y: y})


def _made(params: arguments.Params, x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None,
          activation: str, flags: lower_call.Flags, aligned: bool, mode: str) -> ConvCall:
    """A forward route whose kernel also adds and activates; where there is none, that of the convolution
    alone, and torch for the rest."""
    shape, last = shapes.output_shape(x.shape, w.shape, params), shapes.channels_last_result(x, w)
    there = [name for name, t in (("bia", b), ("res", res)) if t is not None]

    def reads(w: Tensor, b: Tensor | None, res: Tensor | None = None) -> list[Tensor]:
        found = [] if b is None else [b.contiguous()]
        return found if res is None else [*found, shapes.with_result_strides(res, last)]

    def computed(x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None = None) -> Tensor:
        assert made.plain is not None
        y = made.plain.forward(x, w, b)
        return ACTIVATIONS[activation](y if res is None else y.add_(res))

    words = [{"bia": "bias"}.get(name, name) for name in there] + [activation] * bool(activation)
    behind = RouteEpilogue("+".join(words), tuple(there), reads, computed, activation=activation,
                           biased=b is not None)
    made = ConvCall(Prop.FWD, params, shape, last, behind)
    if not lower_call.reasons(x, w):
        precompile_backward.gradients(params, x, w, flags, aligned, mode)
        read = reads(w, b, res)
        made.copies = any(t is not b and t is not res for t in read)
        try:
            compile_route(made, x, w, None, behind.words, aligned, flags, mode, **behind.named(read))
            return made
        except Unsupported as error:
            if error.reason in PASSING:
                made.plain = ConvCall(Prop.FWD, params, shape, last)
                refused(made.plain, error, x)
    made.plain = made.plain or make_forward(params, x, w, b, flags, aligned, mode)
    made.reason, made.over = made.plain.reason, made.plain.over
    return made


Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # input, weight, bias, residual


def find(req: CallAttributes, tensors: Tensors, activation: str, mode: str) -> RouteMatch:
    """The route of activation(conv(input, weight) + bias + residual), a batched call, found or made.
    RuntimeError where the tensors do not fit."""
    x, w, b, res = tensors
    flags = lower_call.flags(x.dtype)
    aligned = not any(t is not None and t.data_ptr() & ALIGNMENT for t in tensors)
    key = ("fused", req, activation, flags, aligned, *(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device)
        for t in tensors))
    known = route_cache.find(key)
    if known is not None:
        return RouteMatch(known, True, flags, aligned)
    p = req.resolve(x, w, b)
    check(x, w, res, activation, p)
    made = _made(p, x, w, b, res, activation, flags, aligned, mode)
    return RouteMatch(route_cache.keep(key, made), False, flags, aligned)


def refuse(activation: str | None) -> NoReturn:
    """RuntimeError: the activation is unknown."""
    known = ", ".join(filter(None, ACTIVATIONS))
    raise RuntimeError(f"activation '{activation}' is unknown; expected one of: {known}")


def check(input: Tensor, weight: Tensor, residual: Tensor | None, activation: str,
          p: arguments.Params) -> None:
    """RuntimeError for an activation that is unknown, or a residual that does not fit."""
    if activation not in ACTIVATIONS:
        refuse(activation)
    if residual is not None:
        check_residual(residual, shapes.output_shape(input.shape, weight.shape, p), input)


def check_residual(residual: Tensor, shape: arguments.Ints, like: Tensor) -> None:
    """RuntimeError unless a residual has this shape, and dtype and device of ``like``."""
    if tuple(residual.shape) != shape:
        raise RuntimeError(f"expected residual of size {list(shape)}, the size of the result, "
                           f"but got {list(residual.shape)}")
    if residual.dtype != like.dtype or residual.device != like.device:
        raise RuntimeError(f"expected residual of {like.dtype} on {like.device}, but got "
                           f"{residual.dtype} on {residual.device}")
