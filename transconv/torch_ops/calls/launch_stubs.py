"""What a bound route runs: makes the result, starts the kernel, and counts the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from transconv.runtime import allocator
from transconv.torch_ops.arguments import Ints

if TYPE_CHECKING:
    from transconv.torch_ops.calls.route import Route, Run

_empty = allocator.quickest()


def _two(route: Route, shape: Ints, strides: Ints, begin: Callable[..., None], dtype: torch.dtype) -> Run:
    empty = _empty

    def start(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        route.calls += 1
        made: torch.Tensor = empty(shape, strides, dtype)
        begin(first, second, made)
        return made

    return start


def _three(route: Route, shape: Ints, strides: Ints, begin: Callable[..., None],
           dtype: torch.dtype) -> Run:
    empty = _empty

    def start(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> torch.Tensor:
        route.calls += 1
        made: torch.Tensor = empty(shape, strides, dtype)
        begin(first, second, third, made)
        return made

    return start


def _four(route: Route, shape: Ints, strides: Ints, begin: Callable[..., None], dtype: torch.dtype) -> Run:
    empty = _empty

    def start(first: torch.Tensor, second: torch.Tensor, third: torch.Tensor,
              fourth: torch.Tensor) -> torch.Tensor:
        route.calls += 1
        made: torch.Tensor = empty(shape, strides, dtype)
        begin(first, second, third, fourth, made)
        return made

    return start


def more(route: Route, shape: Ints, strides: Ints, begin: Callable[..., None], dtype: torch.dtype) -> Run:
    empty = _empty

    def start(*given: torch.Tensor) -> torch.Tensor:
        route.calls += 1
        made: torch.Tensor = empty(shape, strides, dtype)
        begin(*given, made)
        return made

    return start


# By the number of tensors: what makes the result and starts the kernel, and counts on a route.
STARTS = {3: _two, 4: _three, 5: _four}
