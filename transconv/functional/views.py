"""Functions that only move elements, with the signatures of torch: pad, flip, cat, interpolate,
pixel_shuffle, pixel_unshuffle, unfold, fold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from transconv.calls import stats
from transconv.compute import library
from transconv.errors import Unsupported
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, PublicFunction, Specs
from transconv.functional.calls.torch_operators import declare
from transconv.functional.reductions import dims

Tensor = torch.Tensor
Ints = int | Sequence[int]


def _tuple(sizes: Any) -> Any:
    return tuple(sizes) if isinstance(sizes, (list, tuple, torch.Size)) else sizes


def _padded(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, (pad, mode, value) = given[0], numbers
    assert x is not None
    before = [0] * len(x.shape)
    before[len(x.shape) - len(pad) // 2:] = pad[-2::-2]
    return library.pad(x, made[0], before, mode, float(value or 0.0))


PAD = declare(PublicFunction("pad", F.pad, _padded, whole=(True,), linear=True))


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """torch.nn.functional.pad: constant (any value), reflect, replicate, circular. Elements of any type
    are moved. Raises what torch raises, with the operands named."""
    return call(PAD, (input,), (_tuple(pad), mode, value))


FLIP = declare(PublicFunction("flip", torch.flip, lambda given, made, numbers, saves: library.flip(
    given[0], made[0], dims(numbers[0], len(given[0].shape)) if numbers[0] else ()),  # type: ignore[arg-type, union-attr]
    whole=(True,), linear=True))


def flip(input: Tensor, dims: Sequence[int]) -> Tensor:
    """torch.flip: a copy with some dims reversed. As pad."""
    return call(FLIP, (input,), (_tuple(dims),))


def _joined(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    parts = [t for t in given if t is not None]
    dim, = dims(numbers[0], len(made[0].shape))
    if any(len(t.shape) != len(made[0].shape) for t in parts):
        raise Unsupported("shape:empty")  # torch lets tensors without elements have one dim
    return library.join(parts, made[0], dim)


CAT = declare(PublicFunction("cat", lambda *all, **out: torch.cat(all[:-1], all[-1], **out), _joined,
                       whole=(True,) * 64, linear=True))


def cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """torch.cat of tensors of one type. As pad; with ``out`` torch computes."""
    given = tuple(tensors)
    if not given or not all(isinstance(t, Tensor) and t.dim() for t in given):
        return torch.cat(given, dim, out=out)
    return call(CAT, given, (dim,), out)


def _resized(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, (_, scales, mode, again) = given[0], numbers
    assert x is not None
    n = len(x.shape) - 2
    wide = scales if isinstance(scales, tuple) else (scales,) * n
    steps = [None if s is None or again else 1.0 / s for s in wide]
    return library.nearest(x, made[0], steps, mode == "nearest-exact")


def _interpolated(x: Tensor, size: Any, scales: Any, mode: str, again: Any) -> Tensor:
    return F.interpolate(x, size, scales, mode, recompute_scale_factor=again)


NEAREST = declare(PublicFunction("interpolate", _interpolated, _resized, linear=True))


def interpolate(input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
                align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
                antialias: bool = False) -> Tensor:
    """torch.nn.functional.interpolate by nearest and nearest-exact; other modes are torch's. f16, bf16,
    f32 and f64 have kernels. Raises what torch raises, with the operands named."""
    if mode not in ("nearest", "nearest-exact") or align_corners is not None or antialias:
        if not torch.compiler.is_compiling():
            stats.handed_over(f"form:{mode}", "interpolate")
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor,
                             antialias)
    return call(NEAREST, (input,), (_tuple(size), _tuple(scale_factor), mode,
                                    recompute_scale_factor))


def _shuffled(back: bool) -> Any:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        assert given[0] is not None
        return library.shuffle(given[0], made[0], numbers[0], back)
    return formula


SHUFFLE = declare(
    PublicFunction("pixel_shuffle", F.pixel_shuffle, _shuffled(False), whole=(True,), linear=True)
)
UNSHUFFLE = declare(PublicFunction("pixel_unshuffle", F.pixel_unshuffle, _shuffled(True), whole=(True,),
                             linear=True))


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """torch.nn.functional.pixel_shuffle. As pad."""
    return call(SHUFFLE, (input,), (upscale_factor,))


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """torch.nn.functional.pixel_unshuffle. As pad."""
    return call(UNSHUFFLE, (input,), (downscale_factor,))


def _pair(sizes: Any) -> Any:
    return (sizes, sizes) if isinstance(sizes, int) else _tuple(sizes)


def _unfolded(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    window, dilation, padding, stride = numbers
    assert given[0] is not None
    if len(given[0].shape) != 4:
        raise ValueError("an image alone")
    return library.unfold(given[0], made[0], window, stride, padding, dilation)


def _folded(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    _, window, dilation, padding, stride = numbers
    assert given[0] is not None
    if len(given[0].shape) != 3:
        raise ValueError("an image alone")
    return library.fold(given[0], made[0], window, stride, padding, dilation)


UNFOLD = declare(PublicFunction("unfold", F.unfold, _unfolded, linear=True))
FOLD = declare(PublicFunction("fold", F.fold, _folded, linear=True))


def unfold(input: Tensor, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0,
           stride: Ints = 1) -> Tensor:
    """torch.nn.functional.unfold: every window as a column. As interpolate."""
    return call(UNFOLD, (input,), tuple(map(_pair, (kernel_size, dilation, padding, stride))))


def fold(input: Tensor, output_size: Ints, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0,
         stride: Ints = 1) -> Tensor:
    """torch.nn.functional.fold: the sum of columns at their windows. As interpolate."""
    return call(FOLD, (input,), tuple(map(_pair, (
        output_size, kernel_size, dilation, padding, stride))))
