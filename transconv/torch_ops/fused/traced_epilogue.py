"""Fused calls whose epilogue is a function of Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transconv.compute import pointwise
from transconv.runtime import torch_internals
from transconv.torch_ops import arguments, library
from transconv.torch_ops.autocast import autocast, traced_autocast
from transconv.torch_ops.calls import dispatch
from transconv.torch_ops.calls.dispatch import ConvFunction
from transconv.torch_ops.fused import traced_autograd
from transconv.torch_ops.fused.traced_route import applied
from transconv.torch_ops.fused.tracing import TracedEpilogue, epilogue

Tensor = torch.Tensor
_transforms: Callable[[], bool] = torch_internals.transforms


@torch_internals.constant_in_graphs
def _text(function: Callable[..., Any]) -> tuple[str, int]:
    made = epilogue(function)
    return made.text, len(made.names)


def traced(f: ConvFunction, plain: Callable[..., Tensor], input: Any, weight: Any, bias: Any, stride: Any,
           padding: Any, dilation: Any, groups: Any, function: Callable[..., Any],
           operands: Sequence[Any]) -> Tensor:
    """function(conv(input, weight) + bias, *operands) as one operator; operation by operation where
    tensors are of other classes or transforms are active."""
    if isinstance(function, TracedEpilogue):
        text, count = function.text, len(function.names)
    else:
        text, count = _text(function)
    operands = [operands] if isinstance(operands, Tensor) else list(operands)
    if len(operands) != count or not all(isinstance(t, Tensor) for t in operands):
        raise RuntimeError(f"{f.name}: the epilogue takes {count} tensors behind acc; operands are "
                           f"{len(operands)}: {', '.join(type(t).__name__ for t in operands) or 'none'}")
    parsed = dispatch.parse(f, stride, padding, 0, dilation, groups)
    present = [input, weight, *([] if bias is None else [bias]), *operands]
    if parsed is None or not _one_operator(present) or input.dim() != len(parsed[0]) + 2:
        y = plain(input, weight, bias, stride, padding, dilation, groups)
        return applied(pointwise(text), y, operands)
    casting = traced_autocast if torch.compiler.is_compiling() else autocast
    input, weight, bias = casting(input, weight, bias)
    dispatch.check_bias(f, input, bias, padding)
    p = arguments.resolve(input.shape, weight.shape, None if bias is None else bias.shape, parsed[0],
                          parsed[1], parsed[3], False, parsed[2], parsed[4])
    dispatch.check_types(input, weight, bias)
    return traced_autograd.call(input, weight, bias, operands, text, *p)


def _one_operator(given: list[Any]) -> bool:
    if not all(isinstance(t, Tensor) for t in given) or _transforms():
        return False
    return torch.compiler.is_compiling() or (
        all(dispatch.is_known(t) for t in given) and not library.dual(None))
