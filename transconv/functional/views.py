"""Functions that only move elements, with the signatures of torch: pad, flip, cat, interpolate,
pixel_shuffle, pixel_unshuffle, unfold, fold; index_select, gather and embedding, which read at indices.

An index out of range is torch's error on a CPU, and on a GPU with TRANSCONV_VERIFY=1; else it reads 0 and
no other memory. Gradients are summed in place, in no fixed order: under
torch.use_deterministic_algorithms torch's functions compute them, which sort the indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from transconv.calls import stats
from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, Specs
from transconv.functional.calls.torch_operators import declare
from transconv.functional.reductions import dims
from transconv.support import Unsupported

Tensor = torch.Tensor
Ints = int | Sequence[int]


def _tuple(sizes: Any) -> Any:
    return tuple(sizes) if isinstance(sizes, (list, tuple, torch.Size)) else sizes


def _padded(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, (pad, mode, value) = given[0], numbers
    assert x is not None
    before = [0] * len(x.shape)
    before[len(x.shape) - len(pad) // 2 :] = pad[-2::-2]
    return library.pad(x, made[0], before, mode, float(value or 0.0))


PAD = declare("pad", F.pad, _padded, whole=(True,), linear=True)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """torch.nn.functional.pad: constant (any value), reflect, replicate, circular. Elements of any type
    are moved. Raises what torch raises, with the operands named."""
    return call(PAD, (input,), (_tuple(pad), mode, value))


def _flip(x: library.Strided, made: Made, numbers: Numbers) -> library.LibraryFormula:
    return library.flip(x, made[0], dims(numbers[0], len(x.shape)) if numbers[0] else ())


FLIP = declare(
    "flip",
    torch.flip,
    lambda given, made, numbers, saves: _flip(cast(library.Strided, given[0]), made, numbers),
    whole=(True,),
    linear=True,
)


def flip(input: Tensor, dims: Sequence[int]) -> Tensor:
    """torch.flip: a copy with some dims reversed. As pad."""
    return call(FLIP, (input,), (_tuple(dims),))


def _joined(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    parts = [t for t in given if t is not None]
    (dim,) = dims(numbers[0], len(made[0].shape))
    if any(len(t.shape) != len(made[0].shape) for t in parts):
        raise Unsupported("shape:empty")  # torch lets tensors without elements have one dim
    return library.join(parts, made[0], dim)


CAT = declare(
    "cat",
    lambda *all, **out: torch.cat(all[:-1], all[-1], **out),
    _joined,
    whole=(True,) * 64,
    linear=True,
)


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


NEAREST = declare("interpolate", _interpolated, _resized, linear=True)


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """torch.nn.functional.interpolate by nearest and nearest-exact; other modes are torch's. f16, bf16,
    f32 and f64 have kernels. Raises what torch raises, with the operands named."""
    if mode not in ("nearest", "nearest-exact") or align_corners is not None or antialias:
        _handed(f"form:{mode}", "interpolate")
        return F.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    return call(NEAREST, (input,), (_tuple(size), _tuple(scale_factor), mode, recompute_scale_factor))


def _shuffled(back: bool) -> Any:
    def formula(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
        assert given[0] is not None
        return library.shuffle(given[0], made[0], numbers[0], back)

    return formula


SHUFFLE = declare("pixel_shuffle", F.pixel_shuffle, _shuffled(False), whole=(True,), linear=True)
UNSHUFFLE = declare("pixel_unshuffle", F.pixel_unshuffle, _shuffled(True), whole=(True,), linear=True)


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


UNFOLD = declare("unfold", F.unfold, _unfolded, linear=True)
FOLD = declare("fold", F.fold, _folded, linear=True)


def unfold(
    input: Tensor, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0, stride: Ints = 1
) -> Tensor:
    """torch.nn.functional.unfold: every window as a column. As interpolate."""
    return call(UNFOLD, (input,), tuple(map(_pair, (kernel_size, dilation, padding, stride))))


def fold(
    input: Tensor,
    output_size: Ints,
    kernel_size: Ints,
    dilation: Ints = 1,
    padding: Ints = 0,
    stride: Ints = 1,
) -> Tensor:
    """torch.nn.functional.fold: the sum of columns at their windows. As interpolate."""
    return call(FOLD, (input,), tuple(map(_pair, (output_size, kernel_size, dilation, padding, stride))))


def _taken(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, index = given
    assert x is not None and index is not None
    return library.take(x, index, made[0], *dims(numbers[0], len(x.shape)))


def _gathered(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    x, index = given
    assert x is not None and index is not None
    return library.gather(x, index, made[0], *dims(numbers[0], len(x.shape)))


def _looked_up(given: Specs, made: Made, numbers: Numbers, saves: bool) -> library.LibraryFormula:
    index, table = given
    assert table is not None and index is not None
    left_out = numbers[0]
    rank = len(made[0].shape) - 1
    index = index if rank else library.Strided((1,), (1,), index.dtype)
    y = (
        made[0]
        if rank
        else library.Strided((1, *made[0].shape), (made[0].shape[0], *made[0].strides), made[0].dtype)
    )
    return library.embedding(index, table, y, None if left_out is None else left_out % table.shape[0])


TAKE = declare(
    "index_select",
    lambda x, i, dim, **out: torch.index_select(x, dim, i, **out),
    _taken,
    whole=(True, True),
    linear=True,
)
GATHER = declare(
    "gather",
    lambda x, i, dim, **out: torch.gather(x, dim, i, **out),
    _gathered,
    whole=(True, True),
    linear=True,
)
EMBEDDING = declare("embedding", F.embedding, _looked_up, whole=(True, False), linear=True)


def index_select(input: Tensor, dim: int, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.index_select: slices of ``dim`` by their numbers, i32 or i64. Elements of any type are moved,
    gradients are for f16, bf16, f32 and f64; with ``out`` torch computes. Raises what torch raises, with
    the operands named."""
    return call(TAKE, (input, index), (dim,), out)


def gather(
    input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, out: Tensor | None = None
) -> Tensor:
    """torch.gather: for every element of ``index`` the element of input at that position of ``dim``. As
    index_select; sparse gradients are torch's."""
    if sparse_grad:
        _handed("form:sparse", "gather")
        return torch.gather(input, dim, index, sparse_grad=True, out=out)
    return call(GATHER, (input, index), (dim,), out)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """torch.nn.functional.embedding: rows of ``weight`` by their numbers; the row ``padding_idx`` gets no
    gradient. Norms, frequencies and sparse gradients are torch's. As index_select."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        _handed("form:embedding", "embedding")
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return call(EMBEDDING, (input, weight), (padding_idx,))


def _handed(reason: str, name: str) -> Any:
    if not torch.compiler.is_compiling():
        stats.handed_over(reason, name)
