"""Rows of products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from transconv.compute import counted
from transconv.graph.fusion.index_ir import Factor, MovedView, Piece, ProductSum
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.reductions import reduced
from transconv.graph.lowerings.table import NodeCall, NotOurs, expanded, mapped, row
from transconv.graph.sizes import Length, SymbolicSize
from transconv.ir import TRUE, Var
from transconv.torch_ops.calls.lower_call import DTYPES, read_precision

Shape = tuple[Length, ...]


def check_types(*operands: Piece) -> None:
    """Raises NotOurs unless the operands are of one type that is multiplied."""
    first = operands[0].dtype
    if first not in DTYPES or any(x.dtype is not first for x in operands):
        raise NotOurs("a product of these types")


def product(x: Piece, w: Piece, label: str, dtype: torch.dtype) -> Piece:
    """(..., m, k) times (..., k, n), of the same leading dims. Of one term it is no sum."""
    check_types(x, w)
    *lead, m, k = x.shape
    if k == 1:
        return one_term(x, w, (*lead, m, w.shape[-1]), label, dtype)
    axes = list(zip(counted("b"), lead, strict=False))
    batch = [Var(name) for name, _ in axes]
    places = []
    for name, n, seen in (("m", m, (x,)), ("n", w.shape[-1], (w,)), ("k", k, (x, w))):
        own = _split(name, n, seen)
        axes += own
        places.append(view_indexing.flattened([Var(e) for e, _ in own], [size for _, size in own]))
        summed = tuple(e for e, _ in own)
    row_, column, inner = places
    math = "tf32" if x.dtype is torch.float32 and read_precision("cuda", "matmul") == "tf32" else "ieee"
    return ProductSum(shape=(*lead, m, w.shape[-1]), dtype=dtype, label=label, math=math,
                   axes=tuple(axes), summed=summed,
                   factors=(Factor(x, (*batch, row_, inner), TRUE),
                            Factor(w, (*batch, inner, column), TRUE)), at=(*batch, row_, column))


def one_term(x: Piece, w: Piece, shape: Shape, label: str, dtype: torch.dtype) -> Piece:
    """A product of one term for each element: no sum, but a map."""
    return mapped("{} * {}".format, expanded(x, shape), expanded(w, shape), dtype=dtype, label=label)


def _split(name: str, n: Length, seen: Sequence[Piece]) -> list[tuple[str, Length]]:
    """An axis of a product; where its size is a name, the dims that were joined to it: a coordinate cannot
    be divided by a name."""
    for piece in seen if isinstance(n, SymbolicSize) else ():
        while isinstance(piece, MovedView):
            piece = piece.of
            for first in range(len(piece.shape)):
                for last in range(first + 2, len(piece.shape) + 1):
                    if prod(piece.shape[first:last]) == n:
                        wide = [size for size in piece.shape[first:last] if size != 1]
                        return list(zip(counted(name), wide, strict=False))
    return [(name, n)]


@row("mm", "bmm")
def _mm(call: NodeCall) -> Piece:
    x, w = call.args[:2]
    return product(x, w, call.name.split(".")[0], call.dtype)


@row("addmm", "baddbmm")
def _addmm(call: NodeCall) -> Piece:
    added, x, w = call.args[:3]
    beta, alpha = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)
    made = product(x, w, call.name.split(".")[0], call.dtype)
    text = "{}" if alpha == 1 else f"{{}}*{alpha!r}"
    if beta == 0:
        return mapped(text.format, made, dtype=call.dtype, label="addmm")
    text += " + {}" if beta == 1 else f" + {{}}*{beta!r}"
    return mapped(text.format, made, expanded(added, call.shape), dtype=call.dtype, label="addmm")


@row("mv", "dot")
def _mv(call: NodeCall) -> Piece:
    x, w = call.args[:2]
    check_types(x, w)
    return reduced("sum", (len(x.shape) - 1,), x, expanded(w, x.shape), dtype=call.dtype,
                   write="{}*{}".format, label=call.name.split(".")[0])
