"""Decides what computes a convolution with a traced epilogue: one kernel, or the convolution's route and
then torch, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transconv.calls.guard import ALIGNMENT
from transconv.compute import Pointwise, in_torch, pointwise
from transconv.conv import Prop
from transconv.errors import Unsupported
from transconv.ir import DTYPES
from transconv.runtime import Waiting
from transconv.torch_ops import arguments, shapes
from transconv.torch_ops.calls import lower_call, route_cache
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import Route
from transconv.torch_ops.calls.select_impl import PASSING, compile_route, make_forward, settle

Tensor = torch.Tensor

# The types of operands, by torch's: floats and integers that lie in memory.
TYPES = DTYPES.table(lambda t: t if t.torch and t.kind in ("float", "int") and not t.within else None,
                     key=lambda t: getattr(torch, t.torch))


class TracedRoute(Route):
    """A forward route whose kernel ends in the function of an epilogue."""

    __slots__ = ("function", "plain")

    def __init__(self, params: arguments.Params, shape: arguments.Ints, channels_last: bool,
                 function: Pointwise) -> None:
        super().__init__(Prop.FWD, params, shape, channels_last)
        self.function = function
        self.plain: Route | None = None

    def count(self) -> None:
        """See Route."""
        super().count()
        if self.plain is not None:
            self.plain.count()

    def run(self, x: Tensor, w: Tensor, b: Tensor | None, operands: Sequence[Tensor]) -> Tensor:
        """A fresh result."""
        if self.plain is not None:
            return applied(self.function, self.plain.forward(x, w, b), operands)
        self.calls += 1
        y = x.new_empty_strided(self.shape, self.strides)
        self.launch({"src": x, "wei": w, "dst": y, **self.extra(b, operands)})
        return y

    def extra(self, b: Tensor | None, operands: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the kernel reads beside the operands of the convolution, as it expects it."""
        found = {} if b is None else {"bia": b.contiguous()}
        for name in self.function.names:
            if name != "acc":
                t = spread(operands[int(name.removeprefix("arg"))], len(self.shape))
                found[name] = shapes.with_result_strides(t, self.channels_last)
        return found


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
) -> TracedRoute:
    """The route of a batched call, found or made. RuntimeError where the tensors do not fit."""
    tensors = (x, w, b, *operands)
    flags = lower_call.flags(x.dtype)
    aligned = not any(t is not None and t.data_ptr() & ALIGNMENT for t in tensors)
    key = ("traced", req, text, flags, aligned, *(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors))
    known: TracedRoute | None = route_cache.find(key)
    if known is not None:
        return known
    p = req.resolve(x, w, b)
    shape = shapes.output_shape(x.shape, w.shape, p)
    check(operands, shape, x)
    route = TracedRoute(p, shape, shapes.channels_last_result(x, w), pointwise(text))
    if not lower_call.reasons(x, w):
        try:
            words = (["bias"] if b is not None else []) + [_word(text, operands, shape)]
            compile_route(route, x, w, None, "+".join(words), aligned, flags, mode,
                          **route.extra(b, operands))
        except Unsupported as error:
            route.plain = make_forward(p, x, w, b, flags, aligned, mode)
            if error.reason not in PASSING:
                settle(route, [error.reason], error.message)
                route.over = route.plain.over
            else:
                route.reason, route.over = error.reason, error.over if isinstance(error, Waiting) else None
    else:
        route.plain = make_forward(p, x, w, b, flags, aligned, mode)
        route.reason, route.over = route.plain.reason, route.plain.over
    made: TracedRoute = route_cache.keep(key, route, [route])
    return made


def _word(text: str, operands: Sequence[Tensor], shape: Sequence[int]) -> str:
    """The word of the epilogue: types and masks of the operands, and the text."""
    said = []
    for t in operands:
        sizes = spread(t, len(shape)).shape
        mask = sum(1 << d for d, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n == m)
        whole = mask == (1 << len(shape)) - 1
        said.append(f"{TYPES[t.dtype]}:{'per_tensor' if whole else mask}")
    return f"fn({','.join(said)}|{text})"
