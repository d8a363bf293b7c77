"""Torch border, step 4d. Who computes convolution + bias + residual + activation in one kernel.

A fused route is made once for each kind of call, like any other; where the compiler has no such
epilogue, the plain route runs and torch does the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F

from transconv.errors import Unsupported
from transconv.problem import Prop
from transconv.torch_ops import arguments, execute, route, routes, shapes

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y,
    "relu": torch.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
}


class FusedRoute(routes.Route):
    """A forward route whose kernel also adds and activates; ``rest_by_torch`` if it could not."""

    __slots__ = ("activation", "rest_by_torch")

    def __init__(self, params: arguments.Params, shape: arguments.Ints, channels_last: bool,
                 activation: str) -> None:
        super().__init__(Prop.FWD, params, shape, channels_last)
        self.activation = activation
        self.rest_by_torch = False

    def run(self, x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None) -> Tensor:
        compiled = self.compiled
        if compiled is None or self.rest_by_torch:
            y = self.forward(x, w, b)
            return ACTIVATIONS[self.activation](y if res is None else y.add_(res))
        given = [t for t in (x, w, b, res) if t is not None]
        if self.start is not None and route.current_device() == self.device:
            return self.start(*given)
        self.calls += 1
        y = x.new_empty_strided(self.shape, self.strides)
        extra = self.extra(b, res)
        execute.launch(compiled, x, w, y, **extra)
        if not (x.is_neg() or w.is_neg()) and all(map(operator.is_, given[2:], extra.values())):
            self.bind(x, w.dtype, "src", "wei", *extra, "dst")
        return y

    def extra(self, b: Tensor | None, res: Tensor | None) -> dict[str, Tensor]:
        """What the epilogue reads, by name, laid out as the kernel expects it."""
        found = {}
        if b is not None:
            found["bia"] = b.resolve_neg().contiguous()
        if res is not None:
            found["res"] = shapes.with_result_strides(res.resolve_neg(), self.channels_last)
        return found


def _made(params: arguments.Params, x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None,
          activation: str, flags: execute.Flags, aligned: bool) -> FusedRoute:
    shape = shapes.output_shape(x.shape, w.shape, params)
    made = FusedRoute(params, shape, shapes.channels_last_result(x, w), activation)
    if why := execute.reasons(x, w):
        routes.settle(made, why)
        return made
    words = [word for word, on in (("bias", b is not None), ("res", res is not None),
                                   (activation, bool(activation))) if on]
    try:
        routes.compile_route(made, x, w, None, "+".join(words), aligned, flags,
                             **made.extra(b, res))
    except Unsupported:
        plain = routes.make_forward(params, x, w, b, flags, aligned)
        made.rest_by_torch = True
        for name in ("compiled", "reason", "adds_bias", "copies_bias", "aligned"):
            setattr(made, name, getattr(plain, name))
    return made


def run(req: routes.Request, input: Tensor, weight: Tensor, bias: Tensor | None,
        residual: Tensor | None, activation: str) -> Tensor:
    """activation(conv(input, weight) + bias + residual) of a batched call. RuntimeError where the
    tensors do not fit."""
    flags = execute.flags(input.dtype)
    tensors = (input, weight, bias, residual)
    aligned = not any(t is not None and t.data_ptr() & routes.ALIGNMENT for t in tensors)
    key = ("fused", req, activation, flags, aligned, *(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.is_neg())
        for t in tensors))

    def make() -> FusedRoute:
        p = req.resolve(input, weight, bias)
        check(input, weight, residual, activation, p)
        return _made(p, input, weight, bias, residual, activation, flags, aligned)

    found: FusedRoute = routes.kept(key, make)
    return found.run(input, weight, bias, residual)


def check_activation(activation: str) -> None:
    """RuntimeError for an activation that is unknown."""
    if activation not in ACTIVATIONS:
        known = ", ".join(filter(None, ACTIVATIONS))
        raise RuntimeError(f"activation '{activation}' is unknown; expected one of: {known}")


def check(input: Tensor, weight: Tensor, residual: Tensor | None, activation: str,
          p: arguments.Params) -> None:
    """RuntimeError for an activation that is unknown, or a residual that does not fit."""
    check_activation(activation)
    if residual is not None:
        shape = shapes.output_shape(input.shape, weight.shape, p)
        if tuple(residual.shape) != shape:
            raise RuntimeError(f"expected residual of size {list(shape)}, the size of the result, "
                               f"but got {list(residual.shape)}")
        if residual.dtype != input.dtype or residual.device != input.device:
            raise RuntimeError(f"expected residual of {input.dtype} on {input.device}, but got "
                               f"{residual.dtype} on {residual.device}")
