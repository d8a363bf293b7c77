"""Decides what computes a convolution with a traced epilogue: one kernel, or the convolution's route and
then torch, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from transconv.calls import route_cache
from transconv.calls.guard import ALIGNMENT
from transconv.calls.route_cache import PASSING
from transconv.compute import Pointwise, in_torch, pointwise
from transconv.conv import Prop
from transconv.errors import Unsupported
from transconv.ir import DTYPES
from transconv.runtime import Waiting
from transconv.torch_ops import shapes
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import ConvCall, RouteEpilogue
from transconv.torch_ops.calls.select_impl import compile_route, make_forward

Tensor = torch.Tensor

# The types of operands, by torch's: floats and integers that lie in memory.
TYPES = DTYPES.table(lambda t: t if t.torch and t.kind in ("float", "int") and not t.within else None,
                     key=lambda t: getattr(torch, t.torch))


def _epilogue(function: Pointwise, word: str, biased: bool, rank: int, channels_last: bool,
              plain: Callable[[], ConvCall]) -> RouteEpilogue:
    """That of a forward route whose kernel ends in a function; ``plain``: the route of the sums, where
    torch computes the rest."""
    names = [name for name in function.names if name != "acc"]

    def reads(w: Tensor, b: Tensor | None, *operands: Tensor) -> list[Tensor]:
        given = [spread(operands[int(name.removeprefix("arg"))], rank) for name in names]
        found = [shapes.with_result_strides(t, channels_last) for t in given]
        return found if b is None else [b.contiguous(), *found]

    def computed(x: Tensor, w: Tensor, b: Tensor | None, *operands: Tensor) -> Tensor:
        return applied(function, plain().forward(x, w, b), operands)

    return RouteEpilogue("bias+" * biased + word, (*["bia"] * biased, *names), reads, computed,
                         biased=biased)


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
            raise RuntimeError(f"operand {i} of the epilogue: expected a size that broadcasts to "
                               f"{list(shape)}, the size of the result, but got {list(t.shape)}")
        if t.device != like.device:
            raise RuntimeError(f"operand {i} of the epilogue: expected a tensor on {like.device}, but "
                               f"got one on {t.device}")
        if t.dtype not in TYPES:
            raise RuntimeError(f"operand {i} of the epilogue: expected one of "
                               f"{', '.join(str(k).removeprefix('torch.') for k in TYPES)}, but got "
                               f"{str(t.dtype).removeprefix('torch.')}")


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
    tensors = (x, w, b, *operands)
    flags = lower_call.flags(x.dtype)
    aligned = not any(t is not None and t.data_ptr() & ALIGNMENT for t in tensors)
    key = ("traced", req, text, flags, aligned, *(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors))
    known: ConvCall | None = route_cache.find(key)
    if known is not None:
        return known
    p = req.resolve(x, w, b)
    shape = shapes.output_shape(x.shape, w.shape, p)
    check(operands, shape, x)
    last = shapes.channels_last_result(x, w)
    behind = _epilogue(pointwise(text), _word(text, operands, shape), b is not None, len(shape), last,
                       lambda: _plain(route))
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
        mask = sum(1 << d for d, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n == m)
        whole = mask == (1 << len(shape)) - 1
        said.append(f"{TYPES[t.dtype]}:{'per_tensor' if whole else mask}")
    return f"fn({','.join(said)}|{text})"
