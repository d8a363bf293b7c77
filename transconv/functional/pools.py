"""Pools with the signatures of torch.nn.functional, over one to three dims: max_pool, avg_pool,
adaptive_max_pool and adaptive_avg_pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, PublicFunction, Specs, expect
from transconv.functional.calls.torch_operators import declare

Tensor = torch.Tensor
Ints = int | Sequence[int]
Formulas = Callable[[int], Callable[[Specs, Made, Numbers, bool], library.LibraryFormula]]


def _each(sizes: Any, n: int) -> Any:
    """One number for each of the dims; torch decides about other forms."""
    if isinstance(sizes, (list, tuple)):
        return tuple(sizes) * n if len(sizes) == 1 else tuple(sizes)
    return (sizes,) * n


def _sizes(sizes: Any) -> Any:
    """The sizes in a hashable form; torch checks them."""
    return tuple(sizes) if isinstance(sizes, list) else sizes


def _step(stride: Any, kernel_size: Any, n: int) -> Any:
    """The stride; by default the window's size."""
    none = stride is None or (isinstance(stride, (list, tuple)) and not stride)
    return _each(kernel_size if none else stride, n)


def _max(n: int) -> Callable[[Specs, Made, Numbers, bool], library.LibraryFormula]:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, (window, stride, padding, dilation, _, indices) = given[0], numbers
        assert x is not None
        return library.max_pool(
            x, window, stride, padding, dilation, made[0], saves, made[1] if indices else None
        )

    return formula


def _average(n: int) -> Callable[[Specs, Made, Numbers, bool], library.LibraryFormula]:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, (window, stride, padding, _, pads, *divisor) = given[0], numbers
        assert x is not None
        return library.average_pool(x, window, stride, padding, made[0], pads, *divisor)

    return formula


def _adaptive_average(n: int) -> Callable[[Specs, Made, Numbers, bool], library.LibraryFormula]:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        x, y = given[0], made[0]
        assert x is not None
        if any(a % b for a, b in zip(x.shape[-n:], y.shape[-n:], strict=True)):
            return library.adaptive_average_pool(x, n, y)
        window = tuple(a // b for a, b in zip(x.shape[-n:], y.shape[-n:], strict=True))
        return library.average_pool(x, window, window, (0,) * n, y)

    return formula


def _adaptive_max(n: int) -> Callable[[Specs, Made, Numbers, bool], library.LibraryFormula]:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        assert given[0] is not None
        return library.adaptive_max_pool(given[0], n, made[0], made[1] if numbers[-1] else None, saves)

    return formula


def _with_indices(name: str, n: int) -> Callable[..., Any]:
    """torch's function; the last number says whether indices are returned."""
    theirs: Callable[..., Any] = getattr(F, f"{name}{n}d")
    return lambda x, *numbers: theirs(x, *numbers[:-1], return_indices=numbers[-1])


def _declared(
    name: str, formulas: Formulas, theirs: Callable[[str, int], Callable[..., Any]], **more: Any
) -> dict[int, PublicFunction]:
    return {n: declare(f"{name}{n}d", theirs(name, n), formulas(n), **more) for n in (1, 2, 3)}


def _plainly(name: str, n: int) -> Callable[..., Any]:
    made: Callable[..., Any] = getattr(F, f"{name}{n}d")
    return made


def _first_if_alone(tensors: Any, numbers: Numbers, made: tuple[Tensor, ...]) -> Any:
    return made if numbers[-1] else made[0]


def _of_windows(given: Specs, numbers: Numbers) -> Sequence[tuple[int, ...]]:
    x, (window, stride, padding, *more) = given[0], numbers
    assert x is not None
    is_max = isinstance(more[0], tuple)
    dilation, ceil = (more[0], more[1]) if is_max else ((1,) * len(window), more[0])
    n = len(window)
    expect(not ceil and len(x.shape) > n)
    space = x.shape[-n:]
    made = [
        (i + 2 * p - d * (k - 1) - 1) // s + 1
        for i, k, s, p, d in zip(space, window, stride, padding, dilation, strict=True)
    ]
    expect(all([o >= 1 for o in made]))
    return ((*x.shape[:-n], *made),) * (2 if is_max and more[2] else 1)


MAX = _declared("max_pool", _max, _with_indices, finish=_first_if_alone, shapes=_of_windows)
AVERAGE = _declared("avg_pool", _average, _plainly, linear=True, shapes=_of_windows)
ADAPTIVE_AVERAGE = _declared("adaptive_avg_pool", _adaptive_average, _plainly, linear=True)
ADAPTIVE_MAX = _declared("adaptive_max_pool", _adaptive_max, _with_indices, finish=_first_if_alone)


def _max_pool(
    n: int,
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    return_indices: bool,
) -> Any:
    return call(
        MAX[n],
        (input,),
        (
            _each(kernel_size, n),
            _step(stride, kernel_size, n),
            _each(padding, n),
            _each(dilation, n),
            ceil_mode,
            return_indices,
        ),
    )


def max_pool1d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """torch.nn.functional.max_pool1d. As max_pool2d."""
    return _max_pool(1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """torch.nn.functional.max_pool2d of input (n, c, h, w) or (c, h, w), with indices from the same kernel
    on request; the first of equal elements gets the gradient. f16, bf16, f32 and f64 have
    kernels. Raises what torch raises, with the operands named."""
    return _max_pool(2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """torch.nn.functional.max_pool3d. As max_pool2d."""
    return _max_pool(3, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def avg_pool1d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """torch.nn.functional.avg_pool1d. As max_pool2d."""
    return _averaged(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad)


def avg_pool2d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """torch.nn.functional.avg_pool2d. As max_pool2d."""
    return _averaged(
        2, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, out=out
    )


def avg_pool3d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """torch.nn.functional.avg_pool3d. As max_pool2d."""
    return _averaged(
        3, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, out=out
    )


def _averaged(
    n: int,
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None,
    padding: Ints,
    *more: Any,
    out: Any = None,
) -> Tensor:
    return call(
        AVERAGE[n],
        (input,),
        (_each(kernel_size, n), _step(stride, kernel_size, n), _each(padding, n), *more),
        out,
    )


def adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Tensor:
    """torch.nn.functional.adaptive_avg_pool1d. As max_pool2d."""
    return call(ADAPTIVE_AVERAGE[1], (input,), (_sizes(output_size),))


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Tensor:
    """torch.nn.functional.adaptive_avg_pool2d, windows of one size or of several. As max_pool2d."""
    return call(ADAPTIVE_AVERAGE[2], (input,), (_sizes(output_size),))


def adaptive_avg_pool3d(input: Tensor, output_size: Any) -> Tensor:
    """torch.nn.functional.adaptive_avg_pool3d. As max_pool2d."""
    return call(ADAPTIVE_AVERAGE[3], (input,), (_sizes(output_size),))


def adaptive_max_pool1d(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """torch.nn.functional.adaptive_max_pool1d. As adaptive_max_pool2d."""
    return call(ADAPTIVE_MAX[1], (input,), (_sizes(output_size), return_indices))


def adaptive_max_pool2d(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """torch.nn.functional.adaptive_max_pool2d. As max_pool2d."""
    return call(ADAPTIVE_MAX[2], (input,), (_sizes(output_size), return_indices))


def adaptive_max_pool3d(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    """torch.nn.functional.adaptive_max_pool3d. As adaptive_max_pool2d."""
    return call(ADAPTIVE_MAX[3], (input,), (_sizes(output_size), return_indices))
