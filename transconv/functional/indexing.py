"""index_select, gather and embedding, with the signatures of torch: reads at indices from a tensor.

An index out of range is torch's error on a CPU, and on a GPU with TRANSCONV_VERIFY=1; else it reads 0 and
no other memory. Gradients are summed in place, in no fixed order: under
torch.use_deterministic_algorithms torch's functions compute them, which sort the indices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transconv.calls import stats
from transconv.compute import library
from transconv.functional.calls.dispatch import call
from transconv.functional.calls.symbolic_bind import Made, Numbers, PublicFunction, Specs
from transconv.functional.calls.torch_operators import declare
from transconv.functional.reductions import dims

Tensor = torch.Tensor


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
    y = made[0] if rank else library.Strided((1, *made[0].shape), (made[0].shape[0], *made[0].strides),
                                             made[0].dtype)
    return library.embedding(index, table, y, None if left_out is None else left_out % table.shape[0])


TAKE = declare(
    PublicFunction(
        "index_select",
        lambda x, i, dim, **out: torch.index_select(x, dim, i, **out),
        _taken,
        whole=(True, True),
        linear=True,
    )
)
GATHER = declare(
    PublicFunction(
        "gather",
        lambda x, i, dim, **out: torch.gather(x, dim, i, **out),
        _gathered,
        whole=(True, True),
        linear=True,
    )
)
EMBEDDING = declare(
    PublicFunction(
        "embedding",
        lambda i, w, left_out: F.embedding(i, w, left_out),
        _looked_up,
        whole=(True, False),
        linear=True,
    )
)


def index_select(input: Tensor, dim: int, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """torch.index_select: slices of ``dim`` by their numbers, i32 or i64. Elements of any type are moved,
    gradients are for f16, bf16, f32 and f64; with ``out`` torch computes. Raises what torch raises, with
    the operands named."""
    return call(TAKE, (input, index), (dim,), out)


def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False,
           out: Tensor | None = None) -> Tensor:
    """torch.gather: for every element of ``index`` the element of input at that position of ``dim``. As
    index_select; sparse gradients are torch's."""
    if sparse_grad:
        _handed("form:sparse", "gather")
        return torch.gather(input, dim, index, sparse_grad=True, out=out)
    return call(GATHER, (input, index), (dim,), out)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
              norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Tensor:
    """torch.nn.functional.embedding: rows of ``weight`` by their numbers; the row ``padding_idx`` gets no
    gradient. Norms, frequencies and sparse gradients are torch's. As index_select."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        _handed("form:embedding", "embedding")
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return call(EMBEDDING, (input, weight), (padding_idx,))


def _handed(reason: str, name: str) -> Any:
    if not torch.compiler.is_compiling():
        stats.handed_over(reason, name)
