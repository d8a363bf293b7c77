"""Pools with the signatures of torch.nn.functional: max_pool2d, avg_pool2d, adaptive_avg_pool2d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transconv.compute import library
from transconv.functional.bound import Function, Made, Numbers, Specs
from transconv.functional.calls import call
from transconv.functional.operators import declare
from transconv.torch_ops import stats

Tensor = torch.Tensor
Ints = int | Sequence[int]


def _pair(sizes: Any) -> Any:
    """One number for each of the two dims; another form is for torch to judge."""
    if isinstance(sizes, (list, tuple)):
        return tuple(sizes) * 2 if len(sizes) == 1 else tuple(sizes)
    return (sizes, sizes)


def _max(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.Formula:
    x, (window, stride, padding, dilation, _) = given[0], numbers
    assert x is not None
    return library.max_pool(x, window, stride, padding, dilation, made[0], saves)


def _average(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.Formula:
    x, (window, stride, padding, _, pads, divisor) = given[0], numbers
    assert x is not None
    return library.average_pool(x, window, stride, padding, made[0], pads, divisor)


def _adaptive(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.Formula:
    x, y = given[0], made[0]
    assert x is not None
    if any(a % b for a, b in zip(x.shape[-2:], y.shape[-2:], strict=True)):
        raise ValueError(f"{list(y.shape[-2:])} windows of {list(x.shape[-2:])} are not of one size")
    window = tuple(a // b for a, b in zip(x.shape[-2:], y.shape[-2:], strict=True))
    return library.average_pool(x, window, window, (0, 0), y)


MAX = declare(Function("max_pool2d", F.max_pool2d, _max))
AVERAGE = declare(Function("avg_pool2d", F.avg_pool2d, _average, linear=True))
ADAPTIVE = declare(Function("adaptive_avg_pool2d", F.adaptive_avg_pool2d, _adaptive, linear=True))


def max_pool2d(input: Tensor, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0,
               dilation: Ints = 1, ceil_mode: bool = False, return_indices: bool = False) -> Any:
    """torch.nn.functional.max_pool2d of input (n, c, h, w) or (c, h, w); the first of equal elements gets
    the gradient. Indices are torch's. f16, bf16, f32 and f64 have kernels. Raises what torch raises, with
    the operands named."""
    numbers = (_pair(kernel_size), _pair(stride or kernel_size), _pair(padding), _pair(dilation),
               ceil_mode)
    if return_indices:
        if not torch.compiler.is_compiling():
            stats.handed_over("form:return_indices", "max_pool2d")
        return F.max_pool2d(input, *numbers, return_indices=True)
    return call(MAX, (input,), numbers)


def avg_pool2d(input: Tensor, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0,
               ceil_mode: bool = False, count_include_pad: bool = True,
               divisor_override: int | None = None) -> Tensor:
    """torch.nn.functional.avg_pool2d. As max_pool2d."""
    return call(AVERAGE, (input,), (  # type: ignore[no-any-return]
        _pair(kernel_size), _pair(stride or kernel_size), _pair(padding), ceil_mode, count_include_pad,
        divisor_override))


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:
    """torch.nn.functional.adaptive_avg_pool2d; where the windows are of several sizes, torch's. As
    max_pool2d."""
    return call(ADAPTIVE, (input,), (_pair(output_size),))  # type: ignore[no-any-return]
