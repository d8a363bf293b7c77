"""argmax, argmin, max and min, with the signatures of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transconv.calls import stats
from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, PublicFunction, Specs
from transconv.functional.calls.torch_operators import declare
from transconv.functional.reductions import MAX_OF_ALL, MIN_OF_ALL, dims

Tensor = torch.Tensor


def _formula(name: str, with_value: bool) -> Callable[..., library.LibraryFormula]:
    """Numbers: dim and keepdim. Of all dims torch's result has none, or as many of size 1."""
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, (dim, keep) = given[0], numbers
        assert x is not None
        over = dims(dim, len(x.shape))
        whole = len(made[-1].shape) == (len(x.shape) if keep else len(x.shape) - len(over))
        at = made[-1] if whole else library.Strided.dense(
            tuple(n for d, n in enumerate(x.shape) if d not in over), made[-1].dtype)
        return library.extreme(name, x, over, at, keep and whole,
                               (made[0] if whole else library.Strided.dense(at.shape, made[0].dtype))
                               if with_value else None)
    return formula


ARGMAX = declare(PublicFunction("argmax", torch.argmax, _formula("argmax", False)))
ARGMIN = declare(PublicFunction("argmin", torch.argmin, _formula("argmin", False)))
MAX = declare(PublicFunction("max", torch.max, _formula("argmax", True),
                       finish=lambda tensors, numbers, made: torch.return_types.max(made)))
MIN = declare(PublicFunction("min", torch.min, _formula("argmin", True),
                       finish=lambda tensors, numbers, made: torch.return_types.min(made)))


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False, *,
           out: Tensor | None = None) -> Tensor:
    """torch.argmax: the index of the greatest element along ``dim``, or of all; the first of equal ones.
    NaN is the greatest. f16, bf16, f32 and f64 have kernels. IndexError for a dim out of range."""
    return call(ARGMAX, (_detached(input),), (dim, keepdim), out)


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False, *,
           out: Tensor | None = None) -> Tensor:
    """torch.argmin; as argmax, NaN is the least."""
    return call(ARGMIN, (_detached(input),), (dim, keepdim), out)


def _detached(t: Any) -> Any:
    return t.detach() if isinstance(t, Tensor) and t.requires_grad else t


def max(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """torch.max of all elements, or (values, indices) along ``dim`` from one kernel; the first of equal
    elements gets the gradient. Of two tensors torch's. Dtypes and errors as argmax."""
    return _extreme(MAX, MAX_OF_ALL, torch.max, input, dim, keepdim, out)


def min(input: Tensor, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """torch.min; as max."""
    return _extreme(MIN, MIN_OF_ALL, torch.min, input, dim, keepdim, out)


def _extreme(f: PublicFunction, whole: PublicFunction, theirs: Callable[..., Any], input: Tensor,
             dim: Any, keepdim: bool, out: Any) -> Any:
    named: dict[str, Any] = ({} if keepdim is False else {"keepdim": keepdim}) | (
        {} if out is None else {"out": out})
    if isinstance(dim, Tensor):
        if not torch.compiler.is_compiling():
            stats.handed_over("form:elementwise", f.name)
        return theirs(input, dim, **named)
    if dim is None:  # torch has no `keepdim` of all elements
        return theirs(input, **named) if named else call(whole, (input,), (None, False))
    return call(f, (input,), (dim, keepdim), out)
