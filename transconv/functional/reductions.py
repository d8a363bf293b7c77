"""Reductions and matrix products with the signatures of torch: sum, mean, prod, amax, amin, logsumexp,
var, std, any, all, argmax, argmin, max, min; linear (with an activation), matmul, bmm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transconv.calls import stats
from transconv.compute import library
from transconv.functional.calls.compiled_launch import TORCH
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, PublicFunction, Specs
from transconv.functional.calls.torch_operators import declare
from transconv.support import Unsupported
from transconv.torch_ops.calls.lower_call import read_precision
from transconv.torch_ops.fused.fused_route import ACTIVATIONS, refuse

Tensor = torch.Tensor
Dims = int | Sequence[int] | None
Dtype = torch.dtype | None


def dims(dim: Any, rank: int) -> tuple[int, ...]:
    """The dims that an argument of torch names, from 0: all for None and for none; of a tensor without
    dims its one element. IndexError for one that is out of range: torch does not check all of them for
    meta tensors."""
    named = (dim,) if isinstance(dim, int) else tuple(dim or range(rank))
    for d in named:
        if not -rank <= d < rank:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {d})"
            )
    return tuple(sorted({d % rank for d in named}))


def _formula(name: str) -> Callable[..., library.LibraryFormula]:
    """Numbers: dim, keepdim, and the dtype, or the correction of a variance."""

    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, dim, keep = given[0], numbers[0], bool(numbers[1])
        assert x is not None
        dtype = numbers[2] if len(numbers) > 2 else None
        if isinstance(dtype, torch.dtype) and TORCH[x.dtype] is not dtype and saves:
            raise Unsupported("dtype:two", "a gradient of another type than the result's")
        correction = numbers[2] if name in ("var", "std") else 1.0
        over = dims(dim, len(x.shape))
        rank = len(x.shape)
        whole = made[0] if len(made[0].shape) == (rank if keep else rank - len(over)) else None
        return library.reduced(
            name,
            x,
            over,
            keep and whole is not None,
            made[0].dtype,
            whole,
            correction=1.0 if correction is None else float(correction),
            undirected=dim is None,
        )

    return formula


def _left(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    x, dim, keep = given[0], numbers[0], bool(numbers[1])
    assert x is not None
    over = dims(dim, len(x.shape))
    return (tuple([1 if d in over else n for d, n in enumerate(x.shape) if keep or d not in over]),)


def _declared(name: str, function: Callable[..., Any], **more: Any) -> PublicFunction:
    return declare(name, function, _formula(name), shapes=_left, **more)


def _of_all(f: Callable[..., Tensor], x: Tensor, dim: Dims, keep: bool, **more: Any) -> Tensor:
    """A function of torch whose overload without dims takes no ``keepdim``."""
    return f(x, **more) if dim is None and keep is False else f(x, dim, keep, **more)


def _typed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, dim, keep, dtype, **out: _of_all(f, x, dim, keep, dtype=dtype, **out)


def _spreading(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, dim, keep, correction, **out: f(x, dim, keepdim=keep, correction=correction, **out)


def _asking(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, dim, keep, **out: _of_all(f, x, dim, keep, **out)


SUM = _declared("sum", _typed(torch.sum), autocast="f32", linear=True)
MEAN = _declared("mean", _typed(torch.mean), linear=True)
PROD = _declared("prod", _typed(torch.prod), autocast="f32")
AMAX = _declared("amax", torch.amax)
AMIN = _declared("amin", torch.amin)
MAX_OF_ALL = _declared("max_of_all", lambda x, dim, keep: torch.max(x))
MIN_OF_ALL = _declared("min_of_all", lambda x, dim, keep: torch.min(x))
LOGSUMEXP = _declared("logsumexp", torch.logsumexp)
VAR = _declared("var", _spreading(torch.var))
STD = _declared("std", _spreading(torch.std))
ANY = _declared("any", _asking(torch.any), whole=(True,))
ALL = _declared("all", _asking(torch.all), whole=(True,))


def sum(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
    out: Tensor | None = None,
) -> Tensor:
    """torch.sum over any dims, all by default, kept with size 1 or dropped; ``dtype`` of the result.
    Summed in f32, f64 in f64; torch computes integers, empty tensors, and calls with ``out``.
    Raises torch's errors: IndexError for a dim out of range, with the operands named."""
    return call(SUM, (input,), (dim, keepdim, dtype), out)


def mean(
    input: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
    out: Tensor | None = None,
) -> Tensor:
    """torch.mean. Arguments, dtypes and errors as sum."""
    return call(MEAN, (input,), (dim, keepdim, dtype), out)


def prod(
    input: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
    out: Tensor | None = None,
) -> Tensor:
    """torch.prod. Arguments, dtypes and errors as sum."""
    return call(PROD, (input,), (dim, keepdim, dtype), out)


def amax(input: Tensor, dim: Dims = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """torch.amax; equal elements share the gradient. Arguments, dtypes and errors as sum."""
    return call(AMAX, (input,), (dim, keepdim), out)


def amin(input: Tensor, dim: Dims = (), keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """torch.amin; as amax."""
    return call(AMIN, (input,), (dim, keepdim), out)


def logsumexp(
    input: Tensor, dim: int | Sequence[int], keepdim: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """torch.logsumexp: never overflows. Arguments, dtypes and errors as sum."""
    return call(LOGSUMEXP, (input,), (dim, keepdim), out)


def var(
    input: Tensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """torch.var: the mean first, then squared deviations from it, over their number less ``correction``
    (default 1; ``unbiased`` False is 0). Dtypes and errors as sum."""
    return call(VAR, (input,), _spread(dim, unbiased, keepdim, correction), out)


def std(
    input: Tensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """torch.std: the root of ``var``."""
    return call(STD, (input,), _spread(dim, unbiased, keepdim, correction), out)


def _spread(dim: Dims, unbiased: bool | None, keepdim: bool, correction: float | None) -> Numbers:
    if isinstance(dim, bool):  # torch's form without dims
        dim, unbiased = None, dim
    if unbiased is not None and not isinstance(unbiased, bool):
        raise TypeError(f"unbiased must be bool, not {type(unbiased).__name__}")
    if unbiased is not None and correction is not None:
        raise TypeError("expected unbiased or correction, got both")
    return dim, keepdim, correction if unbiased is None else int(unbiased)


def any(input: Tensor, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """torch.any: whether an element is not zero, for floats, i8, i32, i64 and bool."""
    return call(ANY, (input,), (dim, keepdim), out)


def all(input: Tensor, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """torch.all: whether no element is zero, for floats, i8, i32, i64 and bool."""
    return call(ALL, (input,), (dim, keepdim), out)


def _extremum(name: str, with_value: bool) -> Callable[..., library.LibraryFormula]:
    """Numbers: dim and keepdim. Of all dims torch's result has none, or as many of size 1."""

    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, (dim, keep) = given[0], numbers
        assert x is not None
        over = dims(dim, len(x.shape))
        whole = len(made[-1].shape) == (len(x.shape) if keep else len(x.shape) - len(over))
        at = (
            made[-1]
            if whole
            else library.Strided.dense(
                tuple(n for d, n in enumerate(x.shape) if d not in over), made[-1].dtype
            )
        )
        return library.extreme(
            name,
            x,
            over,
            at,
            keep and whole,
            (made[0] if whole else library.Strided.dense(at.shape, made[0].dtype)) if with_value else None,
        )

    return formula


ARGMAX = declare("argmax", torch.argmax, _extremum("argmax", False))
ARGMIN = declare("argmin", torch.argmin, _extremum("argmin", False))
MAX = declare(
    "max",
    torch.max,
    _extremum("argmax", True),
    finish=lambda tensors, numbers, made: torch.return_types.max(made),
)
MIN = declare(
    "min",
    torch.min,
    _extremum("argmin", True),
    finish=lambda tensors, numbers, made: torch.return_types.min(made),
)


def argmax(
    input: Tensor, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """torch.argmax: the index of the greatest element along ``dim``, or of all; the first of equal ones.
    NaN is the greatest. f16, bf16, f32 and f64 have kernels. IndexError for a dim out of range."""
    return call(ARGMAX, (_detached(input),), (dim, keepdim), out)


def argmin(
    input: Tensor, dim: int | None = None, keepdim: bool = False, *, out: Tensor | None = None
) -> Tensor:
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


def _extreme(
    f: PublicFunction,
    whole: PublicFunction,
    theirs: Callable[..., Any],
    input: Tensor,
    dim: Any,
    keepdim: bool,
    out: Any,
) -> Any:
    named: dict[str, Any] = ({} if keepdim is False else {"keepdim": keepdim}) | (
        {} if out is None else {"out": out}
    )
    if isinstance(dim, Tensor):
        if not torch.compiler.is_compiling():
            stats.handed_over("form:elementwise", f.name)
        return theirs(input, dim, **named)
    if dim is None:  # torch has no `keepdim` of all elements
        return theirs(input, **named) if named else call(whole, (input,), (None, False))
    return call(f, (input,), (dim, keepdim), out)


def _of_one_type(given: Specs) -> None:
    """Unsupported for operands of different types: torch's error then, which meta tensors do not raise."""
    if len(found := {str(t.dtype) for t in given if t is not None}) > 1:
        raise Unsupported("dtype:mixed", f"operands are {' and '.join(sorted(found))}")


def _linear(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    _of_one_type(given)
    x, w, b = given
    assert x is not None and w is not None
    return library.linear(x, w, b, numbers[0], _math(numbers[1]), saves, made[0])


def _matmul(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    _of_one_type(given)
    x, w = given
    assert x is not None and w is not None
    return library.matmul(x, w, numbers[0], _math(numbers[1]), saves, made[0])


def _then(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's product and then the activation; ``math`` is for kernels."""

    def whole(*given: Any, **out: Any) -> Tensor:
        *tensors, activation, _ = given
        made = ACTIVATIONS[activation](product(*tensors, **out))
        return out["out"].copy_(made) if activation and out else made

    return whole


LINEAR = declare("linear", _then(F.linear), _linear, autocast="low", linear=True)
MATMUL = declare("matmul", _then(torch.matmul), _matmul, autocast="low", linear=True)
BMM = declare("bmm", _then(torch.bmm), _matmul, autocast="low", linear=True)


def _numbers(input: Tensor, activation: str | None) -> tuple[str, str]:
    if (activation or "") not in ACTIVATIONS:
        refuse(activation)
    if torch.compiler.is_compiling():
        return activation or "", "now"
    return activation or "", _math("now") if getattr(input, "dtype", None) is torch.float32 else "ieee"


def _math(word: str) -> str:
    """How f32 is multiplied: ``now``, as graphs have it, stands for torch's current switch."""
    if word != "now":
        return word
    return "tf32" if read_precision("cuda", "matmul") == "tf32" else "ieee"


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """torch.nn.functional.linear of input (..., k), weight (n, k) and bias (n,), then an activation,
    by its name in ``transconv.compute.ACTIVATIONS``. Summed in f32, f64 in f64; f32 is rounded to tf32
    where torch's precision of products says so; with ``out`` torch computes. Raises what torch raises,
    with the operands named; RuntimeError for an activation that is unknown."""
    return call(LINEAR, (input, weight, bias), _numbers(input, activation), out)


def matmul(
    input: Tensor, other: Tensor, activation: str | None = None, *, out: Tensor | None = None
) -> Tensor:
    """torch.matmul of (..., m, k) and (..., k, n), whose leading dims broadcast, or of vectors. As
    linear."""
    return call(MATMUL, (input, other), _numbers(input, activation), out)


def bmm(
    input: Tensor, mat2: Tensor, activation: str | None = None, *, out: Tensor | None = None
) -> Tensor:
    """torch.bmm of (b, m, k) and (b, k, n). As linear."""
    return call(BMM, (input, mat2), _numbers(input, activation), out)
