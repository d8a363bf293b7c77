"""Decides what computes convolution, bias, residual and activation in one kernel.

A fused route is made once for each kind of call, like any other; where the compiler has no such
epilogue, the plain route runs and torch does the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch

from transconv.calls.guard import ALIGNMENT
from transconv.compute import table
from transconv.conv import Prop
from transconv.errors import Unsupported
from transconv.torch_ops import arguments, shapes
from transconv.torch_ops.calls import lower_call, route, route_cache
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import Route, Run
from transconv.torch_ops.calls.select_impl import PASSING, compile_route, make_forward, refused
from transconv.torch_ops.precompile import precompile_backward

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = table(
    lambda op: op.function() if op.activation else None, {"": lambda y: y})


class FusedRoute(Route):
    """A forward route whose kernel also adds and activates; where there is none, the route of the
    convolution alone, and torch for the rest."""

    __slots__ = ("activation", "biased", "plain")

    def __init__(self, params: arguments.Params, shape: arguments.Ints, channels_last: bool,
                 activation: str, biased: bool) -> None:
        super().__init__(Prop.FWD, params, shape, channels_last)
        self.activation = activation
        self.biased = biased
        self.plain: Route | None = None

    def count(self) -> None:
        """Move the calls so far into the totals."""
        super().count()
        if self.plain is not None:
            self.plain.count()

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None = None,
                res: Tensor | None = None) -> Tensor:
        """Run the route: a fresh result."""
        if self.plain is not None:
            y = self.plain.forward(x, w, b)
            return ACTIVATIONS[self.activation](y if res is None else y.add_(res))
        given = [t for t in (x, w, b, res) if t is not None]
        if self.start is not None and route.current_device() == self.device:
            return self.start(*given)
        self.calls += 1
        y = x.new_empty_strided(self.shape, self.strides)
        extra = self.extra(b, res)
        self.launch({"src": x, "wei": w, "dst": y, **extra})
        if all(map(operator.is_, given[2:], extra.values())):
            self.bind(x, w.dtype, "src", "wei", *extra, "dst")
        return y

    def lay_out(self, w: Tensor) -> None:
        """See Route."""
        if self.plain is None:
            super().lay_out(w)
        else:
            self.plain.lay_out(w)

    def of_given(self) -> Run:
        """See Route."""
        return self.forward if self.biased else self._unbiased

    def _unbiased(self, x: Tensor, w: Tensor, res: Tensor | None = None) -> Tensor:
        return self.forward(x, w, None, res)

    def extra(self, b: Tensor | None, res: Tensor | None) -> dict[str, Tensor]:
        """What the epilogue reads, by name, laid out as the kernel expects it."""
        found = {}
        if b is not None:
            found["bia"] = b.contiguous()
        if res is not None:
            found["res"] = shapes.with_result_strides(res, self.channels_last)
        return found


def _made(params: arguments.Params, x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None,
          activation: str, flags: lower_call.Flags, aligned: bool, mode: str) -> FusedRoute:
    shape = shapes.output_shape(x.shape, w.shape, params)
    made = FusedRoute(params, shape, shapes.channels_last_result(x, w), activation, b is not None)
    if not lower_call.reasons(x, w):
        precompile_backward.gradients(params, x, w, flags, aligned, mode)
        words = [word for word, on in (("bias", b is not None), ("res", res is not None),
                                       (activation, bool(activation))) if on]
        try:
            compile_route(made, x, w, None, "+".join(words), aligned, flags, mode, **made.extra(b, res))
            return made
        except Unsupported as error:
            if error.reason in PASSING:
                made.plain = Route(Prop.FWD, params, shape, made.channels_last)
                refused(made.plain, error, x)
    made.plain = made.plain or make_forward(params, x, w, b, flags, aligned, mode)
    made.reason, made.over = made.plain.reason, made.plain.over
    return made


Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # input, weight, bias, residual


class FusedRouteMatch(NamedTuple):
    """The route of a call, whether it was known before, and what of its key is not in the tensors."""

    route: FusedRoute
    known: bool
    flags: lower_call.Flags
    aligned: bool


def find(req: CallAttributes, tensors: Tensors, activation: str, mode: str) -> FusedRouteMatch:
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
        return FusedRouteMatch(known, True, flags, aligned)
    p = req.resolve(x, w, b)
    check(x, w, res, activation, p)
    made = _made(p, x, w, b, res, activation, flags, aligned, mode)
    return FusedRouteMatch(route_cache.keep(key, made, [made]), False, flags, aligned)


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
