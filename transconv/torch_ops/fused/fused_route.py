"""The route of fused calls: what computes convolution, bias, residual and activation in one kernel, and
its registration as the operators of compiled graphs.

A fused route is made once for each kind of call, like any other; where the compiler has no such
epilogue, the plain route runs and torch does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from transconv.calls import route_cache
from transconv.calls.route_cache import PASSING
from transconv.compute import OPS, table
from transconv.conv import Prop
from transconv.support import Unsupported, nearest
from transconv.torch_ops import arguments, operators, transforms
from transconv.torch_ops.calls import layer_keys, lower_call, precompile, select_impl
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import ConvCall, RouteEpilogue, RouteMatch
from transconv.torch_ops.calls.select_impl import compile_route, make_forward, refused
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.operators import read, resolve

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = table(
    lambda op: op.function() if op.activation else None, {"": lambda y: y}
)


def _made(
    params: arguments.Params,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    res: Tensor | None,
    activation: str,
    flags: lower_call.Flags,
    aligned: bool,
    mode: str,
) -> ConvCall:
    """A forward route whose kernel also adds and activates; where there is none, that of the convolution
    alone, and torch for the rest."""
    shape, last = arguments.output_shape(x.shape, w.shape, params), arguments.channels_last_result(x, w)
    there = [name for name, t in (("bia", b), ("res", res)) if t is not None]

    def reads(w: Tensor, b: Tensor | None, res: Tensor | None = None) -> list[Tensor]:
        found = [] if b is None else [b.contiguous()]
        return found if res is None else [*found, arguments.with_result_strides(res, last)]

    def computed(x: Tensor, w: Tensor, b: Tensor | None, res: Tensor | None = None) -> Tensor:
        assert made.plain is not None
        y = made.plain.forward(x, w, b)
        return ACTIVATIONS[activation](y if res is None else y.add_(res))

    words = [{"bia": "bias"}.get(name, name) for name in there] + [activation] * bool(activation)
    behind = RouteEpilogue(
        "+".join(words), tuple(there), reads, computed, activation=activation, biased=b is not None
    )
    made = ConvCall(Prop.FWD, params, shape, last, behind)
    if not lower_call.reasons(x, w):
        precompile.gradients(params, x, w, flags, aligned, mode)
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
    key, flags, aligned = layer_keys.call_key("fused", req, activation, tensors)
    known = route_cache.find(key)
    if known is not None:
        return RouteMatch(known, True, flags, aligned)
    p = req.resolve(x, w, b)
    check(x, w, res, activation, p)
    made = _made(p, x, w, b, res, activation, flags, aligned, mode)
    return RouteMatch(route_cache.keep(key, made), False, flags, aligned)


def refuse(activation: object) -> NoReturn:
    """RuntimeError: the activation is unknown."""
    known = [*filter(None, ACTIVATIONS)]
    hint = nearest(getattr(activation, "__name__", str(activation)), known)
    raise RuntimeError(f"activation '{activation}' is unknown; expected one of: {', '.join(known)}{hint}")


def check(
    input: Tensor, weight: Tensor, residual: Tensor | None, activation: str, p: arguments.Params
) -> None:
    """RuntimeError for an activation that is unknown, or a residual that does not fit."""
    if activation not in ACTIVATIONS:
        refuse(activation)
    if residual is not None:
        check_residual(residual, arguments.output_shape(input.shape, weight.shape, p), input)


def check_residual(residual: Tensor, shape: arguments.Ints, like: Tensor) -> None:
    """RuntimeError unless a residual has this shape, and dtype and device of ``like``."""
    if tuple(residual.shape) != shape:
        raise RuntimeError(
            f"expected residual of size {list(shape)}, the size of the result, "
            f"but got {list(residual.shape)}"
        )
    if residual.dtype != like.dtype or residual.device != like.device:
        raise RuntimeError(
            f"expected residual of {like.dtype} on {like.device}, but got "
            f"{residual.dtype} on {residual.device}"
        )


# -- the operators of compiled graphs --------------------------------------------------------------
# These wait for their kernels: a first result by torch would be timed, captured and kept.


def _fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, numbers: str
) -> Tensor:
    if forward_ad._current_level >= 0:
        transforms.refuse_tangents("transconv::fwd", (input, weight, bias, residual))
    _, activation, req = read(numbers)
    input = arguments.in_any_batch(input, weight)
    residual = None if residual is None else arguments.in_any_batch(residual, input)
    if residual is None and not activation:
        route = select_impl.forward_route(req, input, weight, bias, "now")
        made: Tensor = route.forward(input, weight, bias)
        return made
    tensors = (input, weight, bias, residual)
    return find(req, tensors, activation, "now").route.forward(*tensors)


def composed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    p: arguments.Params,
) -> Tensor:
    """A checked call as torch's functions."""
    check(input, weight, residual, activation, p)
    y = aten_convolutions.aten_forward(input, weight, bias, p, dual=True)
    total: Tensor = y if residual is None else y + residual
    return OPS[activation].function()(total) if activation else total


def fake_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    p: arguments.Params,
) -> Tensor:
    """The result of a checked call, without values."""
    check(input, weight, residual, activation, p)
    return arguments.fake_result(input, weight, p)


def _read_for(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of a checked call as one of a call with its text."""

    def call(
        input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, numbers: str
    ) -> Tensor:
        given, activation, _ = read(numbers)
        return function(input, weight, bias, residual, activation, resolve(input, weight, bias, given))

    return call


def _fwd_flops(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    _bias: Any,
    _residual: Any,
    numbers: str,
    out_shape: Sequence[int],
    **_: Any,
) -> int:
    return operators.multiply_adds(input_shape, weight_shape, out_shape, read(numbers).params.transposed)


def _gradient_flops(
    grad_shape: Sequence[int],
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    numbers: str,
    **_: Any,
) -> int:
    return operators.multiply_adds(input_shape, weight_shape, grad_shape, read(numbers).params.transposed)


def _implement_gradient(name: str, at: int) -> None:
    """Register the gradient of the input (0) or of the weight (1)."""
    mask = (at == 0, at == 1, False)

    def kernel(grad: Tensor, input: Tensor, weight: Tensor, numbers: str) -> Tensor:
        if forward_ad._current_level >= 0:
            transforms.refuse_tangents(f"transconv::{name}", (grad, input, weight))
        made = select_impl.backward(read(numbers).params, grad, input, weight, mask, "now")[at]
        assert made is not None
        return made

    def by_torch(grad: Tensor, input: Tensor, weight: Tensor, numbers: str) -> Tensor:
        p = resolve(input, weight, None, read(numbers).params)
        arguments.check_grad(grad, input, weight, p)
        made = aten_convolutions.aten_backward(grad, input, weight, p, mask, dual=True)[at]
        assert made is not None
        return made

    def fake(grad: Tensor, input: Tensor, weight: Tensor, numbers: str) -> Tensor:
        like = (input, weight)[at]
        arguments.check_grad(grad, input, weight, resolve(input, weight, None, read(numbers).params))
        return arguments.empty_result(like, like.shape, arguments.channels_last_result(input, weight))

    operators.implement(name, fake, kernel, by_torch, flops=_gradient_flops)


operators.implement("fwd", _read_for(fake_fwd), _fwd, _read_for(composed), flops=_fwd_flops)
_implement_gradient("bwd_d", 0)
_implement_gradient("bwd_w", 1)
