"""Convolutions with traced epilogues: one kernel, or the convolution's route and then torch, operation by
operation; and their derivatives.

    transconv::traced_convolution    f(conv(input, weight) + bias, *operands) as one operator

The gradient computes the sums once more instead of keeping them, and then the derivative of the function
at them, which follows from the rows of the operations' table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from transconv.calls import route_cache, stats
from transconv.calls.autograd import by_torch
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.compute import Pointwise, in_torch, pointwise
from transconv.conv import Prop
from transconv.ir import DTYPES
from transconv.runtime import Waiting, torch_internals
from transconv.support import Unsupported
from transconv.torch_ops import arguments, operators
from transconv.torch_ops.arguments import autocast, traced_autocast
from transconv.torch_ops.calls import call_attributes, lower_call
from transconv.torch_ops.calls.call_attributes import CallAttributes, ConvFunction, request
from transconv.torch_ops.calls.layer_keys import call_key
from transconv.torch_ops.calls.route import ConvCall, RouteEpilogue
from transconv.torch_ops.calls.select_impl import compile_route, make_forward
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.fused.tracing import TracedEpilogue, epilogue
from transconv.torch_ops.operators import traced_convolution

Tensor = torch.Tensor

# The types of operands, by torch's: floats and integers that lie in memory.
TYPES = DTYPES.table(
    lambda t: t if t.torch and t.kind in ("float", "int") and not t.within else None,
    key=lambda t: getattr(torch, t.torch),
)


def _epilogue(
    function: Pointwise,
    word: str,
    biased: bool,
    rank: int,
    channels_last: bool,
    plain: Callable[[], ConvCall],
) -> RouteEpilogue:
    """That of a forward route whose kernel ends in a function; ``plain``: the route of the sums, where
    torch computes the rest."""
    names = [name for name in function.names if name != "acc"]

    def reads(w: Tensor, b: Tensor | None, *operands: Tensor) -> list[Tensor]:
        given = [spread(operands[int(name.removeprefix("arg"))], rank) for name in names]
        found = [arguments.with_result_strides(t, channels_last) for t in given]
        return found if b is None else [b.contiguous(), *found]

    def computed(x: Tensor, w: Tensor, b: Tensor | None, *operands: Tensor) -> Tensor:
        return applied(function, plain().forward(x, w, b), operands)

    return RouteEpilogue(
        "bias+" * biased + word, (*["bia"] * biased, *names), reads, computed, biased=biased
    )


def applied(function: Pointwise, acc: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """What torch makes of a convolution's result, in the result's type."""
    given = {f"arg{i}": t for i, t in enumerate(operands)}
    return in_torch(function, {"acc": acc, **given}).to(acc.dtype)


def spread(operand: Tensor, rank: int) -> Tensor:
    """An operand with as many dimensions as the result."""
    return operand.view(*[1] * (rank - operand.dim()), *operand.shape) if operand.dim() < rank else operand


def check(operands: Sequence[Tensor], shape: Sequence[int], like: Tensor) -> None:
    """RuntimeError for an operand that does not broadcast to the result."""
    for i, t in enumerate(operands):
        ahead = len(shape) - t.dim()
        if ahead < 0 or any(n not in (1, m) for n, m in zip(t.shape, shape[ahead:], strict=True)):
            raise RuntimeError(
                f"operand {i} of the epilogue: expected a size that broadcasts to "
                f"{list(shape)}, the size of the result, but got {list(t.shape)}"
            )
        if t.device != like.device:
            raise RuntimeError(
                f"operand {i} of the epilogue: expected a tensor on {like.device}, but "
                f"got one on {t.device}"
            )
        if t.dtype not in TYPES:
            raise RuntimeError(
                f"operand {i} of the epilogue: expected one of "
                f"{', '.join(str(k).removeprefix('torch.') for k in TYPES)}, but got "
                f"{str(t.dtype).removeprefix('torch.')}"
            )


def find(
    req: CallAttributes,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    operands: Sequence[Tensor],
    text: str,
    mode: str,
) -> ConvCall:
    """The route of a batched call, found or made. RuntimeError where the tensors do not fit."""
    key, flags, aligned = call_key("traced", req, text, (x, w, b, *operands))
    known: ConvCall | None = route_cache.find(key)
    if known is not None:
        return known
    p = req.resolve(x, w, b)
    shape = arguments.output_shape(x.shape, w.shape, p)
    check(operands, shape, x)
    last = arguments.channels_last_result(x, w)
    behind = _epilogue(
        pointwise(text),
        _word(text, operands, shape),
        b is not None,
        len(shape),
        last,
        lambda: _plain(route),
    )
    route = ConvCall(Prop.FWD, p, shape, last, behind)
    if not lower_call.reasons(x, w):
        try:
            read = behind.reads(w, b, *operands)
            compile_route(route, x, w, None, behind.words, aligned, flags, mode, **behind.named(read))
        except Unsupported as error:
            route.plain = make_forward(p, x, w, b, flags, aligned, mode)
            if error.reason not in PASSING:
                route.settle([error.reason], error.message)
                route.over = route.plain.over
            else:
                route.reason, route.over = error.reason, error.over if isinstance(error, Waiting) else None
    else:
        route.plain = make_forward(p, x, w, b, flags, aligned, mode)
        route.reason, route.over = route.plain.reason, route.plain.over
    made: ConvCall = route_cache.keep(key, route)
    return made


def _plain(route: ConvCall) -> ConvCall:
    assert route.plain is not None
    return route.plain


def _word(text: str, operands: Sequence[Tensor], shape: Sequence[int]) -> str:
    """The word of the epilogue: types and masks of the operands, and the text."""
    said = []
    for t in operands:
        sizes = spread(t, len(shape)).shape
        ahead = len(shape) - t.dim() if settings.invariant else 0  # no samples, also where there is one
        mask = sum(
            1 << d for d, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n == m and d >= ahead
        )
        whole = mask == (1 << len(shape)) - 1
        said.append(f"{TYPES[t.dtype]}:{'per_tensor' if whole else mask}")
    return f"fn({','.join(said)}|{text})"


_below_autograd: Any = torch_internals.below_autograd
Gradients = Callable[
    [str, Tensor, Sequence[Tensor], Tensor, Sequence[bool]], Sequence[Tensor | None] | None
]


def _fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    text: str,
    *numbers: Any,
) -> Tensor:
    p = operators.resolve(input, weight, bias, numbers)
    shape = arguments.output_shape(input.shape, weight.shape, p)
    check(operands, shape, input)
    return arguments.fake_result(input, weight, p)


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    text: str,
    *numbers: Any,
) -> Tensor:
    p = operators.resolve(input, weight, bias, numbers)
    req = request("", 0, *p)
    input = arguments.in_any_batch(input, weight)
    operands = [arguments.in_any_place(t) for t in operands]
    route = find(req, input, weight, bias, operands, text, "now")
    return route.forward(input, weight, bias, *operands)


class TracedConvolution(torch.autograd.Function):
    """``apply(input, weight, bias, text, numbers, *operands)``. ``kernels``: what may compute the
    derivatives of a text in one kernel (functional/epilogue_derivatives.py); None sends them to torch."""

    kernels: ClassVar[tuple[Gradients, ...]] = ()

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        text: str,
        numbers: tuple[Any, ...],
        *operands: Tensor,
    ) -> Tensor:
        with _below_autograd():
            return traced_convolution(input, weight, bias, list(operands), text, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, weight, bias, ctx.text, ctx.numbers, *operands = inputs
        ctx.save_for_backward(input, weight, bias, *operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, *operands = ctx.saved_tensors
        mask, wanted = list(ctx.needs_input_grad[:3]), ctx.needs_input_grad[5:]
        acc = operators.convolution(input, weight, bias, *ctx.numbers)
        of_acc, *of_operands = _derivatives(ctx.text, acc, operands, grad, (any(mask), *wanted))
        found: list[Tensor | None] = [None, None, None]
        if of_acc is not None:
            made = operators.convolution_backward(of_acc, input, weight, *ctx.numbers, mask)
            found = [t if on else None for t, on in zip(made, mask, strict=True)]
        return *found, None, None, *of_operands


def _derivatives(
    text: str, acc: Tensor, operands: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of ``acc`` and of the operands; None where they are not wanted."""
    again = torch.is_grad_enabled()
    for i, (t, on) in enumerate(zip(operands, wanted[1:], strict=True)):
        if on and (t.dim() < acc.dim() or t.shape[0] != acc.shape[0]):
            what = f"the gradient of operand {i} of an epilogue, a sum over samples"
            stats.refuse_invariant("torch", f"torch would compute {what}")
    for kernel in () if again else TracedConvolution.kernels:
        if (made := kernel(text, acc, operands, grad, wanted)) is not None:
            return list(made)
    function = pointwise(text)
    return by_torch(
        lambda acc, *operands: applied(function, acc, operands), [acc, *operands], wanted, grad, again
    )


_apply: Any = TracedConvolution.apply


def composed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    text: str,
    *numbers: Any,
) -> Tensor:
    """The operator as torch's functions."""
    p = operators.resolve(input, weight, bias, numbers)
    acc = aten_convolutions.aten_forward(input, weight, bias, p, dual=True)
    return applied(pointwise(text), acc, operands)


def _with_derivatives(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    text: str,
    *numbers: Any,
) -> Tensor:
    if aten_convolutions.dual(input):
        return composed(input, weight, bias, operands, text, *numbers)
    if operators.differentiated(input, weight, bias, *operands):
        made: Tensor = _apply(input, weight, bias, text, numbers, *operands)
        return made
    with _below_autograd():
        return traced_convolution(input, weight, bias, list(operands), text, *numbers)


def _flops(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    _bias: Any,
    _operands: Any,
    _text: str,
    *numbers: Any,
    out_shape: Sequence[int],
    **_: Any,
) -> int:
    return operators.multiply_adds(input_shape, weight_shape, out_shape, numbers[3])


operators.implement("traced_convolution", _fake, _forward, composed, _with_derivatives, _flops)


_transforms: Callable[[], bool] = torch_internals.transforms


@torch_internals.constant_in_graphs
def _text(function: Callable[..., Any]) -> tuple[str, int]:
    made = epilogue(function)
    return made.text, len(made.names)


def traced(
    f: ConvFunction,
    plain: Callable[..., Tensor],
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    function: Callable[..., Any],
    operands: Sequence[Any],
) -> Tensor:
    """function(conv(input, weight) + bias, *operands) as one operator; operation by operation where
    tensors are of other classes or transforms are active."""
    if isinstance(function, TracedEpilogue):
        text, count = function.text, len(function.names)
    else:
        text, count = _text(function)
    operands = [operands] if isinstance(operands, Tensor) else list(operands)
    if len(operands) != count or not all(isinstance(t, Tensor) for t in operands):
        raise RuntimeError(
            f"{f.name}: the epilogue takes {count} tensors behind acc; operands are "
            f"{len(operands)}: {', '.join(type(t).__name__ for t in operands) or 'none'}"
        )
    parsed = call_attributes.parse(f, stride, padding, 0, dilation, groups)
    present = [input, weight, *([] if bias is None else [bias]), *operands]
    if parsed is None or not _one_operator(present) or input.dim() != len(parsed[0]) + 2:
        y = plain(input, weight, bias, stride, padding, dilation, groups)
        return applied(pointwise(text), y, operands)
    casting = traced_autocast if torch.compiler.is_compiling() else autocast
    input, weight, bias = casting(input, weight, bias)
    call_attributes.check_bias(f, input, bias, padding)
    p = arguments.resolve_call(
        input, weight, bias, parsed[0], parsed[1], parsed[3], False, parsed[2], parsed[4]
    )
    call_attributes.check_types(input, weight, bias)
    return traced_convolution(input, weight, bias, operands, text, *p)


def _one_operator(given: list[Any]) -> bool:
    if not all(isinstance(t, Tensor) for t in given) or _transforms():
        return False
    return torch.compiler.is_compiling() or (
        all(call_attributes.is_known(t) for t in given) and not aten_convolutions.dual(None)
    )
