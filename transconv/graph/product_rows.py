"""Rows of products: of matrices, and of convolutions by their relation, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transconv.compute import Compute
from transconv.conv import Prop, computes
from transconv.errors import TransconvError
from transconv.graph.map_rows import arithmetic
from transconv.graph.pieces import Factor, Piece, Product
from transconv.graph.reduction_rows import reduced
from transconv.graph.rows import Call, NotOurs, expanded, kind, mapped, reshaped, row
from transconv.ir import TRUE, Var, all_of
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.execute import DTYPES, describe, flags, read_precision


def _multiplied(*operands: Piece) -> None:
    first = operands[0].dtype
    if first not in DTYPES or any(x.dtype is not first for x in operands):
        raise NotOurs("a product of these types")


def product(x: Piece, w: Piece, label: str, dtype: torch.dtype) -> Product:
    """(..., m, k) times (..., k, n), of the same leading dims."""
    _multiplied(x, w)
    *lead, m, k = x.shape
    names = [*(f"b{d}" for d in range(len(lead))), "m", "n", "k"]
    sizes = [*lead, m, w.shape[-1], k]
    *batch, row_, column, inner = (Var(name) for name in names)
    math = "tf32" if x.dtype is torch.float32 and read_precision("cuda", "matmul") == "tf32" else "ieee"
    return Product(shape=(*lead, m, w.shape[-1]), dtype=dtype, label=label, math=math,
                   axes=tuple(zip(names, sizes, strict=True)), summed=("k",),
                   factors=(Factor(x, (*batch, row_, inner), TRUE),
                            Factor(w, (*batch, inner, column), TRUE)), at=(*batch, row_, column))


@row("mm", "bmm")
def _mm(call: Call) -> Piece:
    x, w = call.args[:2]
    return product(x, w, call.name.split(".")[0], call.dtype)


@row("addmm", "baddbmm")
def _addmm(call: Call) -> Piece:
    added, x, w = call.args[:3]
    beta, alpha = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)
    made = product(x, w, call.name.split(".")[0], call.dtype)
    text = "{}" if alpha == 1 else f"{{}}*{alpha!r}"
    if beta == 0:
        return mapped(text.format, made, dtype=call.dtype, label="addmm")
    text += " + {}" if beta == 1 else f" + {{}}*{beta!r}"
    return mapped(text.format, made, expanded(added, call.shape), dtype=call.dtype, label="addmm")


@row("mv", "dot")
def _mv(call: Call) -> Piece:
    x, w = call.args[:2]
    _multiplied(x, w)
    return reduced("sum", (len(x.shape) - 1,), x, expanded(w, x.shape), dtype=call.dtype,
                   write="{}*{}".format, label=call.name.split(".")[0])


# -- convolutions ----------------------------------------------------------------------------------


@row("convolution")
def _convolution(call: Call) -> Piece:
    x, w, bias, *rest = call.args
    p = _params(rest)
    made = _related(Prop.BWD_D if p.transposed else Prop.FWD, call.shape, x, w, p, call.dtype)
    if bias is None:
        return made
    if bias.dtype is not x.dtype and kind(bias.dtype) != "float":
        raise NotOurs("a bias of whole numbers")
    wide = expanded(reshaped(bias, (bias.size, *[1] * (len(call.shape) - 2))), call.shape)
    return arithmetic(call, "{} + {}".format, made, wide, label="bias")


@row("convolution_backward")
def _backward(call: Call) -> tuple[Piece | None, ...]:
    grad, x, w, _, *rest, mask = call.args
    p = _params(rest)
    made: list[Piece | None] = [None, None, None]
    if mask[0]:
        prop = Prop.FWD if p.transposed else Prop.BWD_D
        made[0] = _gradient(prop, x.shape, grad, w, p, x.dtype)
    if mask[1]:
        made[1] = _weight(x, grad, w, p)
    if mask[2]:
        dims = [d for d in range(len(grad.shape)) if d != 1]
        made[2] = reduced("sum", dims, grad, dtype=grad.dtype, label="bias gradient")
    return tuple(made)


def _params(rest: Sequence[Any]) -> Params:
    stride, padding, dilation, transposed, output_padding, groups = rest[:6]
    n = len(stride)

    def ints(given: Any) -> tuple[int, ...]:
        return tuple(given) * (n if len(given) == 1 else 1)
    return Params(ints(stride), ints(padding), ints(dilation), transposed, ints(output_padding), groups)


def _dense(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(shape), torch.empty(tuple(shape), device="meta").stride()


def _relation(prop: Prop, near: Sequence[int], weight: Sequence[int], far: Sequence[int], p: Params,
              dtype: torch.dtype) -> tuple[Compute, ...]:
    """The computations of a direction. Raises NotOurs."""
    try:
        problem = describe(dtype, _dense(near), _dense(weight), _dense(far), p, flags(dtype).math)
        return computes(problem, prop)
    except (TransconvError, ValueError) as error:
        raise NotOurs(str(error)) from None


def _related(prop: Prop, shape: tuple[int, ...], x: Piece, w: Piece, p: Params,
             dtype: torch.dtype) -> Product:
    """A convolution, forward."""
    _multiplied(x, w)
    return _product(_relation(prop, x.shape, w.shape, shape, p, x.dtype), (x, w), shape, dtype,
                    "convolution")


def _gradient(prop: Prop, shape: tuple[int, ...], grad: Piece, w: Piece, p: Params,
              dtype: torch.dtype) -> Product:
    """The gradient of the input."""
    _multiplied(grad, w)
    return _product(_relation(prop, shape, w.shape, grad.shape, p, grad.dtype), (grad, w), shape, dtype,
                    "input gradient")


def _weight(x: Piece, grad: Piece, w: Piece, p: Params) -> Product:
    """The gradient of the weight."""
    _multiplied(x, grad)
    found = _relation(Prop.BWD_W, x.shape, w.shape, grad.shape, p, x.dtype)
    given = (grad, x) if p.transposed else (x, grad)
    return _product(found, given, w.shape, w.dtype, "weight gradient")


def _product(computes_: Sequence[Compute], given: tuple[Piece, Piece], shape: tuple[int, ...],
             dtype: torch.dtype, label: str) -> Product:
    """The relation's axes and views, over pieces."""
    first, *others = [_one(c, given, shape, dtype, label) for c in computes_]
    first.others = tuple(others)
    return first


def _one(compute: Compute, given: tuple[Piece, Piece], shape: tuple[int, ...], dtype: torch.dtype,
         label: str) -> Product:
    assert compute.sum is not None and compute.b is not None
    a, b = (Factor(piece, tuple(d.coord for d in view.dims), all_of([d.mask for d in view.dims]))
            for view, piece in zip((compute.a, compute.b), given, strict=True))
    if any(d.mask is not TRUE for d in compute.c.dims):
        raise NotOurs("its phases are not of one size")
    return Product(shape=shape, dtype=dtype, label=label, math=compute.math, summed=compute.sum.axes,
                   axes=tuple((x.name, x.size) for x in compute.axes), factors=(a, b),
                   at=tuple(d.coord for d in compute.c.dims))
