"""softmax, log_softmax, normalize and cross_entropy, with the signatures of torch.nn.functional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transconv.calls import stats
from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import (
    Made,
    Numbers,
    PublicFunction,
    Specs,
    Values,
    as_first,
    expect,
)
from transconv.functional.calls.torch_operators import declare
from transconv.functional.reductions import dims
from transconv.support import Unsupported

Tensor = torch.Tensor
Ints = int | tuple[int, ...]


def _exponential(make: Any) -> Any:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, dim = given[0], numbers[0]
        if dim is None:
            raise Unsupported("dim:implicit", "expected dim=...")
        assert x is not None
        found: library.LibraryFormula = make(x, *dims(dim, len(x.shape)), y=made[0])
        return found
    return formula


def _softmax_again(values: Values, numbers: Numbers, g: Tensor) -> tuple[Tensor, ...]:
    y, dtype = _widened(values["Y"]), g.dtype
    g = _widened(g)
    found = y * (g - (y * g).sum(numbers[0], keepdim=True))
    return (found.to(numbers[2] or dtype),)


def _log_softmax_again(values: Values, numbers: Numbers, g: Tensor) -> tuple[Tensor, ...]:
    y, dtype = _widened(values["Y"]), g.dtype
    g = _widened(g)
    found = g - y.exp() * g.sum(numbers[0], keepdim=True)
    return (found.to(numbers[2] or dtype),)


def _widened(t: Tensor) -> Tensor:
    """16-bit tensors as f32, as kernels compute them."""
    return t.float() if t.dtype.itemsize == 2 else t


SOFTMAX = declare(PublicFunction("softmax", lambda x, dim, dtype, _: F.softmax(x, dim, dtype=dtype),
                           _exponential(library.softmax), autocast="f32", again=_softmax_again,
                           shapes=as_first))
LOG_SOFTMAX = declare(
    PublicFunction(
        "log_softmax",
        lambda x, dim, dtype, _: F.log_softmax(x, dim, dtype=dtype),
        _exponential(library.log_softmax),
        autocast="f32",
        again=_log_softmax_again,
        shapes=as_first,
    )
)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3,
            dtype: torch.dtype | None = None) -> Tensor:
    """torch.nn.functional.softmax: exp(input) over its sum along ``dim``, of any shape; ``dtype`` of the
    result, default input's. f16, bf16, f32 and f64 have kernels, the rest is torch's. Raises what torch
    raises: IndexError for a dim out of range, with the operands named."""
    return call(SOFTMAX, (input,), (dim, dtype, dtype and _narrow(input, dtype)))


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3,
                dtype: torch.dtype | None = None) -> Tensor:
    """torch.nn.functional.log_softmax: the logarithm of ``softmax``. Arguments, dtypes and errors as
    there."""
    return call(LOG_SOFTMAX, (input,), (dim, dtype, dtype and _narrow(input, dtype)))


def _narrow(input: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """The input's type where the result has another: that of its gradient."""
    return None if dtype is input.dtype else input.dtype


def _normalize(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    p, dim, eps = numbers
    if p != 2:
        raise Unsupported("norm:order", f"p={p}; only p=2 has a kernel")
    x, = given
    assert x is not None
    return library.normalize(x, dims(dim, len(x.shape)), eps, made[0])


NORMALIZE = declare(
    PublicFunction(
        "normalize",
        lambda x, p, dim, eps, **out: F.normalize(x, p, dim, eps, **out),
        _normalize,
        autocast="f32",
        shapes=as_first,
    )
)


def normalize(input: Tensor, p: float = 2.0, dim: Ints = 1, eps: float = 1e-12,
              out: Tensor | None = None) -> Tensor:
    """torch.nn.functional.normalize: input over its norm along ``dim``, or over ``eps`` where that is
    larger. p=2 has kernels; with ``out`` torch computes. Dtypes and errors as softmax."""
    return call(NORMALIZE, (input,), (p, dim, eps), out)


def _rows(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, t = given
    assert x is not None and t is not None
    dim = min(1, len(x.shape) - 1)
    return library.cross_entropy(x, t, dim, numbers[0], y=made[0])


def _of_rows(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    x, t = given
    assert x is not None and t is not None
    dim = min(1, len(x.shape) - 1)
    expect(len(x.shape) > 1 and t.shape == x.shape[:dim] + x.shape[dim + 1:])
    return (t.shape,)


CROSS_ENTROPY = declare(PublicFunction(
    "cross_entropy", lambda x, t, ignore: F.cross_entropy(x, t, ignore_index=ignore, reduction="none"),
    _rows, whole=(False, True), autocast="f32", shapes=_of_rows))


def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None,
                  size_average: bool | None = None, ignore_index: int = -100, reduce: bool | None = None,
                  reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    """torch.nn.functional.cross_entropy of input (n, c, ...) and classes (n, ...) as whole numbers.
    Weights, smoothing and targets that are probabilities are torch's. An invalid class gives infinity on
    a GPU, where torch aborts with a device assertion; dtypes and errors as softmax."""
    plain = (weight is None and size_average is None and reduce is None
             and isinstance(label_smoothing, float) and label_smoothing == 0
             and reduction in ("none", "mean", "sum") and isinstance(target, Tensor)
             and target.dtype is torch.int64)
    if not plain:
        if not torch.compiler.is_compiling():
            stats.handed_over("form:cross_entropy", "cross_entropy")
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction,
                               label_smoothing)
    rows: Tensor = call(CROSS_ENTROPY, (input, target), (ignore_index,))
    if reduction == "none":
        return rows
    wide = rows.dtype if rows.dtype is torch.float64 else torch.float32
    total = rows.sum(dtype=wide)
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(rows.dtype)
