"""The fused calls: convolution, bias, residual and activation in one, and modules of them.

    y = activation(conv(input, weight) + bias + residual)

One kernel where the compiler has it as an epilogue, in training too if the activation's gradient can be
computed from the result alone (relu and its kind); others are composed of the unfused calls when
gradients are asked for. A call that was seen before is found by its weight (calls/call_entries.py); eager
calls go past the operator ``transconv::fused_convolution``, which is for those that are traced, compiled
or watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from transconv.calls.settings import settings
from transconv.compute import table
from transconv.runtime import torch_internals
from transconv.torch_ops import arguments, functional, modules, operators
from transconv.torch_ops.arguments import autocast, autocast_dtype, cast_dtype, cast_like, traced_autocast
from transconv.torch_ops.calls import call_attributes, call_entries
from transconv.torch_ops.calls.call_attributes import ConvFunction, request
from transconv.torch_ops.calls.route import ConvCall
from transconv.torch_ops.functional import Padding, Sizes
from transconv.torch_ops.fused import fused_route, traced_route
from transconv.torch_ops.fused.fused_route import ACTIVATIONS, refuse

Tensor = torch.Tensor

_compiling = torch.compiler.is_dynamo_compiling
_modes: Callable[[], int] = torch_internals.dispatch_modes
_tracing: Callable[[], Any] = torch_internals.tracing_state
_transforms: Callable[[], bool] = torch_internals.transforms
_seen = call_entries.find

# -- sending one call the right way ----------------------------------------------------------------


@dataclass(eq=False, slots=True, kw_only=True)
class FusedFunction(ConvFunction):
    """One public function with one activation: what is seen again is found by these."""

    plain: Callable[..., Tensor]  # our function of the convolution alone
    activation: str


Kinds = dict[str | None, FusedFunction]  # of one rank, by activation
ConvArguments = tuple[
    Any, Any, Any, Any, Any, Any, Any
]  # three tensors, stride, padding, dilation, groups


def _send(
    f: FusedFunction,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
    groups: Any,
    residual: Any = None,
) -> Tensor:
    """The way of calls that were never seen: to what watches them, to the operator, or to a route."""
    given, numbers = (input, weight, bias, residual), (stride, padding, output_padding, dilation, groups)
    present = [input, weight, *(t for t in (bias, residual) if t is not None)]
    if not torch.compiler.is_compiling() and has_torch_function(present):
        seen: Tensor = functional.handle(
            f.public,
            present,
            input,
            weight,
            bias,
            stride,
            padding,
            dilation,
            groups,
            activation=f.activation or None,
            residual=residual,
        )
        return seen
    parsed = call_attributes.parse(f, *numbers)
    if parsed is None or not _one_operator(present, f.activation):
        return _composed(f, *given, stride, padding, dilation, groups, as_result=True)
    cast = autocast_dtype(input)
    casting = traced_autocast if torch.compiler.is_compiling() else autocast
    input, weight, bias = casting(input, weight, bias)
    if residual is not None:
        residual = cast_like(residual, input)
    call_attributes.check_bias(f, input, bias, padding)
    if call_attributes.is_bias_left_to_torch(f, input, bias, padding):
        return _composed(f, *given, stride, padding, dilation, groups, as_result=True)
    if not arguments.batched(f.name, f.ndims, input.shape):
        residual = None if residual is None else residual.unsqueeze(0)
        return _send(f, input.unsqueeze(0), weight, bias, *numbers, residual).squeeze(0)
    stride, padding, output_padding, dilation, groups = parsed
    tensors = (input, weight, bias, residual)
    if _eager(tensors):
        input, weight, bias, residual = tensors = (
            arguments.spelled_out(input),
            arguments.spelled_out(weight),
            None if bias is None else arguments.spelled_out(bias),
            None if residual is None else arguments.spelled_out(residual),
        )
        own = arguments.in_any_batch(input, weight)
        added = None if residual is None else arguments.in_any_batch(residual, own)
        if own is not input or added is not residual:
            return _send(f, own, weight, bias, *numbers, added)
        req = request(f.name, f.ndims, stride, padding, dilation, False, output_padding, groups)
        found = fused_route.find(req, tensors, f.activation, settings.mode)
        differentiated = operators.differentiated(*tensors)
        if found.known and (cast is None or not differentiated):
            call_entries.note(
                partial(_applied, f, numbers),
                f,
                given,
                tensors,
                numbers,
                found.route,
                found.flags,
                found.aligned,
                cast,
            )
        found.route.lay_out(weight)
        if differentiated:
            apply = function_of(found.route, bound=False)
            return apply(*(t for t in tensors if t is not None))
        return found.route.forward(*tensors)
    p = arguments.resolve_call(
        input, weight, bias, stride, padding, dilation, False, output_padding, groups
    )
    call_attributes.check_types(input, weight, bias)
    return operators.fused_convolution(input, weight, bias, residual, f.activation, *p)


def _send_fitting(
    f: FusedFunction,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    dilation: Any,
    groups: Any,
    residual: Any,
) -> Tensor:
    """The same for modules, whose residual may have to be broadcast."""
    if _fits(input, weight, residual, stride, padding, dilation, groups):
        return _send(f, input, weight, bias, stride, padding, output_padding, dilation, groups, residual)
    return _composed(f, input, weight, bias, residual, stride, padding, dilation, groups)


def _fits(
    input: Any, weight: Any, residual: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> bool:
    if (
        not isinstance(residual, Tensor)
        or input.dim() != weight.dim()
        or residual.dtype != cast_dtype(input)
    ):
        return False
    p = arguments.resolve_call(
        input,
        weight,
        None,
        stride,
        padding if isinstance(padding, (str, tuple)) else (padding,),
        dilation,
        False,
        (0,),
        groups,
    )
    return tuple(residual.shape) == arguments.output_shape(input.shape, weight.shape, p)


def _applied(
    f: FusedFunction, numbers: tuple[Any, ...], route: ConvCall, biased: bool, cast: torch.dtype | None
) -> Callable[..., Tensor]:
    """The differentiable call of the tensors that ``route`` takes."""
    if f.activation in GRAD_FROM_RESULT and cast is None:
        return function_of(route, bound=True)

    def general(input: Tensor, weight: Tensor, *extra: Tensor) -> Tensor:
        bias, *residual = extra if biased else (None, *extra)
        return _send(f, input, weight, bias, *numbers, *residual)

    return general


def _composed(
    f: FusedFunction,
    input: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    *numbers: Any,
    as_result: bool = False,
) -> Tensor:
    """The calls that the fused one replaces. ``as_result`` asks for a residual of the result's size
    and dtype, under autocast as that casts it; else it is taken as torch's addition takes it."""
    y = f.plain(input, weight, bias, *numbers)
    if as_result and isinstance(residual, Tensor):
        residual = cast_like(residual, input)
        fused_route.check_residual(residual, tuple(y.shape), y)
    return ACTIVATIONS[f.activation](y if residual is None else y + residual)


def _eager(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether no mode or tracer sees the call, so that it need not go through the operator."""
    return not (
        torch.compiler.is_compiling()
        or _modes()
        or _tracing()
        or any(t is not None and (t.is_meta or not call_attributes.is_plain(t)) for t in tensors)
    )


def _one_operator(given: list[Any], activation: str) -> bool:
    """Whether the single operator can compute the call; otherwise it is composed."""
    if not all(isinstance(t, Tensor) for t in given) or forward_ad._current_level >= 0 or _transforms():
        return False
    if not torch.compiler.is_compiling() and not all(call_attributes.is_known(t) for t in given):
        return False
    return not operators.differentiated(*given) or activation in GRAD_FROM_RESULT


# -- the public functions --------------------------------------------------------------------------


def fused_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Tensor] = (),
) -> Tensor:
    """activation(conv1d(input, weight, bias, ...) + residual) in one kernel where possible.

    ``residual`` has the shape and dtype of the result. ``activation`` is one of relu, relu6,
    sigmoid, tanh, silu, gelu, gelu_tanh, hardswish, or None. ``epilogue``: instead of these, any function
    of the sums and of ``operands``, tensors that broadcast to the result, such as
    ``lambda acc, res, gate: F.silu(acc + res) * gate`` (see ``transconv.epilogue``). Differentiable.
    RuntimeError as conv1d's, and for an unknown activation or a tensor that does not fit; ComputeError for
    what an epilogue cannot do."""
    if epilogue is not None or operands:
        given = (input, weight, bias, stride, padding, dilation, groups)
        return _traced(_CONV1D, given, epilogue, operands, activation, residual)
    f = (_CONV1D if residual is None else _CONV1D_ADD).get(activation) or refuse(activation)
    call = _send if _compiling() else _seen(id(weight), _send)
    return call(f, input, weight, bias, stride, padding, 0, dilation, groups, residual)


def fused_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Tensor] = (),
) -> Tensor:
    """activation(conv2d(input, weight, bias, ...) + residual): see fused_conv1d."""
    if epilogue is not None or operands:
        given = (input, weight, bias, stride, padding, dilation, groups)
        return _traced(_CONV2D, given, epilogue, operands, activation, residual)
    f = (_CONV2D if residual is None else _CONV2D_ADD).get(activation) or refuse(activation)
    call = _send if _compiling() else _seen(id(weight), _send)
    return call(f, input, weight, bias, stride, padding, 0, dilation, groups, residual)


def fused_conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Tensor] = (),
) -> Tensor:
    """activation(conv3d(input, weight, bias, ...) + residual): see fused_conv1d."""
    if epilogue is not None or operands:
        given = (input, weight, bias, stride, padding, dilation, groups)
        return _traced(_CONV3D, given, epilogue, operands, activation, residual)
    f = (_CONV3D if residual is None else _CONV3D_ADD).get(activation) or refuse(activation)
    call = _send if _compiling() else _seen(id(weight), _send)
    return call(f, input, weight, bias, stride, padding, 0, dilation, groups, residual)


def _traced(
    kinds: Kinds,
    given: ConvArguments,
    function: Callable[..., Any] | None,
    operands: Sequence[Any],
    activation: str | None,
    residual: Any,
) -> Tensor:
    if function is None:
        raise RuntimeError(
            "operands are what an epilogue reads beside the sums: expected epilogue=, a function of them"
        )
    if activation or residual is not None:
        raise RuntimeError(
            "an epilogue says all that follows the sums: expected no activation and no residual beside it"
        )
    f = kinds[None]
    return traced_route.traced(f, f.plain, *given, function, operands)


def broadcasting(
    kinds: Kinds,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    groups: int,
    activation: str,
    residual: Tensor,
) -> Tensor:
    """As the functions above, for one of BROADCASTING: a residual of another shape or dtype is taken
    as torch's addition takes it."""
    f = kinds.get(activation) or refuse(activation)
    call = _send_fitting if _compiling() else _seen(id(weight), _send_fitting)
    return call(f, input, weight, bias, stride, padding, 0, dilation, groups, residual)


def _kinds(conv: ConvFunction, public: Callable[..., Tensor], general: Callable[..., Tensor]) -> Kinds:
    assert conv.public is not None
    plain = conv.public

    def made(activation: str) -> FusedFunction:
        return FusedFunction(
            conv.name, conv.ndims, False, conv.aten, general, public, plain=plain, activation=activation
        )

    return table(lambda op: made(op.name) if op.activation else None, {None: made(""), "": made("")})


# A function of its own for calls with a residual, so that entries need not ask whether there is one.
_CONV1D = _kinds(functional.CONV1D, fused_conv1d, _send)
_CONV2D = _kinds(functional.CONV2D, fused_conv2d, _send)
_CONV3D = _kinds(functional.CONV3D, fused_conv3d, _send)
_CONV1D_ADD = _kinds(functional.CONV1D, fused_conv1d, _send)
_CONV2D_ADD = _kinds(functional.CONV2D, fused_conv2d, _send)
_CONV3D_ADD = _kinds(functional.CONV3D, fused_conv3d, _send)
BROADCASTING = {
    1: _kinds(functional.CONV1D, fused_conv1d, _send_fitting),
    2: _kinds(functional.CONV2D, fused_conv2d, _send_fitting),
    3: _kinds(functional.CONV3D, fused_conv3d, _send_fitting),
}


# grad of the activation's input from the result's gradient g and, where there is one, its result y:
# one kernel of torch's.
GRAD_FROM_RESULT: dict[str, Callable[..., Tensor]] = table(
    lambda op: op.from_result() if op.activation else None, {"": lambda g: g}
)


# -- the operator ----------------------------------------------------------------------------------


def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    *numbers: Any,
) -> Tensor:
    return fused_route.fake_fwd(
        input, weight, bias, residual, activation, operators.resolve(input, weight, bias, numbers)
    )


class FusedConvolution(torch.autograd.Function):
    """``apply(input, weight, bias, residual, activation, *numbers)``."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str,
        *numbers: Any,
    ) -> Tensor:
        p = operators.resolve(input, weight, bias, numbers)
        return operators.fwd(input, weight, bias, residual, operators.spelled(p, activation))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, _bias, _residual, ctx.activation, *ctx.numbers = inputs
        # What is not saved may be written to.
        ctx.save_for_backward(input, weight, *([output] if ctx.activation else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, *kept = ctx.saved_tensors
        g = GRAD_FROM_RESULT[ctx.activation](grad, *kept)
        mask = list(ctx.needs_input_grad[:3])
        found: list[Tensor | None] = [None, None, None]
        if any(mask):
            made = operators.convolution_backward(g, input, weight, *ctx.numbers, mask)
            found = [t if on else None for t, on in zip(made, mask, strict=True)]
        for_residual = g.clone() if ctx.needs_input_grad[3] and g is grad else g
        return *found, for_residual if ctx.needs_input_grad[3] else None, *[None] * 7


def composed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    *numbers: Any,
) -> Tensor:
    """The operator as torch's functions."""
    return fused_route.composed(
        input, weight, bias, residual, activation, operators.resolve(input, weight, bias, numbers)
    )


operators.implement(
    "fused_convolution",
    _fake,
    FusedConvolution.forward,
    composed,
    operators.with_derivatives(FusedConvolution, composed),
)


# -- eager calls -----------------------------------------------------------------------------------


def function_of(route: ConvCall, bound: bool) -> Callable[..., Tensor]:
    """``apply`` of the tensors that the route takes, in its order: see autograd.function_of."""
    behind = route.epilogue
    assert behind is not None
    return functional.function_of(
        route, behind.biased, through=GRAD_FROM_RESULT[behind.activation], bound=bound
    )


class Activates:
    """Mixin: a convolution module with an activation, whose call takes a residual."""

    fused: Any
    kinds: Kinds
    activation: str = ""

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        if activation not in self.kinds:
            refuse(activation)
        super().__init__(*args, **kwargs)
        self.activation = activation or ""

    def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """activation(conv(input) + residual); a residual of another shape is broadcast as torch's
        addition would."""
        input, padding = modules.padded(self, input)
        if residual is None:
            made: Tensor = self.fused(
                input,
                self.weight,
                self.bias,
                self.stride,
                padding,
                self.dilation,
                self.groups,
                activation=self.activation,
            )
            return made
        return broadcasting(
            self.kinds,
            input,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            self.activation,
            residual,
        )

    def extra_repr(self: Any) -> str:
        inherited: Any = super()
        shown: str = inherited.extra_repr()
        return f"{shown}, activation={self.activation or None}"


class FusedConv1d(Activates, modules.Conv1d):
    """Conv1d with ``activation``, an argument by name: as fused_conv1d's; ``forward(input,
    residual=None)``. RuntimeError for an unknown activation."""

    fused = staticmethod(fused_conv1d)
    kinds = BROADCASTING[1]


class FusedConv2d(Activates, modules.Conv2d):
    """Conv2d with ``activation``; ``forward(input, residual=None)``: see FusedConv1d."""

    fused = staticmethod(fused_conv2d)
    kinds = BROADCASTING[2]


class FusedConv3d(Activates, modules.Conv3d):
    """Conv3d with ``activation``; ``forward(input, residual=None)``: see FusedConv1d."""

    fused = staticmethod(fused_conv3d)
    kinds = BROADCASTING[3]
