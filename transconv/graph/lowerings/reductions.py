"""Rows of reductions, of elements that are put where others were taken, and of moments and norms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from transconv.graph.fusion.index_ir import TYPES, ConstantValue, Mapped, MovedView, Piece, Reduced
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.pools import Stretch, each_window, stretched
from transconv.graph.lowerings.table import (
    NodeCall,
    NotOurs,
    cast,
    expanded,
    is_small,
    kind,
    mapped,
    reduced,
    reshaped,
    row,
    wide,
)
from transconv.graph.sizes import Fraction, Index, Length, SymbolicSize
from transconv.ir import all_of, eq


def dims_of(given: Any, rank: int) -> tuple[int, ...]:
    """The dims that a call names; none means all."""
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return tuple(range(rank))
    listed = given if isinstance(given, (list, tuple)) else [given]
    return tuple(sorted(d % rank for d in listed)) if rank else ()


def _over(call: NodeCall, op: str, x: Piece, dtype: torch.dtype | None = None) -> Piece:
    """The reduction of a value over the dims that a call names, in the shape of the result."""
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    return reshaped(reduced(op, dims, x, dtype=dtype or call.dtype), call.shape)


@row("sum.dim_IntList", "sum")
def _sum(call: NodeCall) -> Piece:
    x = call.args[0]
    if kind(x.dtype) == "bool":  # truths as integers
        x = cast(x, torch.int64)
    if kind(call.dtype) != kind(x.dtype) or kind(x.dtype) == "int":  # whole ones in 64 bits
        x = cast(x, call.dtype)
    return _over(call, "sum", x)


@row("mean.dim", "mean")
def _mean(call: NodeCall) -> Piece:
    x = call.args[0]
    return reshaped(_mean_of(x, dims_of(call.arg(1, "dim"), len(x.shape)), call.dtype), call.shape)


def _mean_of(x: Piece, dims: Sequence[int], dtype: torch.dtype) -> Piece:
    total = reduced("sum", dims, x, dtype=wide(dtype), label="mean")
    count = prod(x.shape[d] for d in dims)
    return mapped(f"{{}} / {count}".format, total, dtype=dtype, label="mean")


@row("amax", "amin")
def _extreme(call: NodeCall) -> Piece:
    if kind(call.args[0].dtype) == "bool":
        raise NotOurs("extremes of truths")
    return _extreme_of(call, call.name.split(".")[0][1:])


def _extreme_of(call: NodeCall, op: str) -> Piece:
    """The extreme of a call's first argument; one of 8 bits by way of 32."""
    x: Piece = call.args[0]
    if not is_small(x.dtype):
        return _over(call, op, x, x.dtype)
    found = _over(call, op, cast(x, torch.int32), torch.int32)
    return mapped(f"{TYPES[x.dtype].name}({{}})".format, found, dtype=x.dtype, label=op)


@row("prod", "prod.dim_int")
def _prod(call: NodeCall) -> Piece:
    if kind(call.args[0].dtype) == "bool":
        raise NotOurs("products of truths")
    return _over(call, "prod", cast(call.args[0], call.dtype))  # whole ones in 64 bits


@row("any", "any.dim", "any.dims", "all", "all.dim", "all.dims")
def _truths(call: NodeCall) -> Piece:
    x = cast(cast(call.args[0], torch.bool), torch.int32)
    return cast(_over(call, "max" if call.name.startswith("any") else "min", x, torch.int32), torch.bool)


@row("argmax", "argmin", "max.dim", "min.dim")
def _place(call: NodeCall) -> Piece | tuple[Piece, ...]:
    x, op = call.args[0], call.name.split(".")[0].removeprefix("arg")
    x = cast(x, torch.float32) if is_small(x.dtype) else x
    if kind(x.dtype) != "float":
        raise NotOurs("places of extremes of whole numbers")
    place = _over(call, f"arg{op}", x, torch.int64)
    return place if call.name.startswith("arg") else (_extreme_of(call, op), place)


MOST_COMPARED = 1 << 27  # elements: some 15 us of a large chip, less than torch takes to sort places


def _placed_sum(call: NodeCall, x: Piece, first: int, indices: Sequence[Piece], grad: Piece) -> Piece:
    """The sum of all elements of ``grad`` that go to the same place of a small tensor shaped like ``x``:
    each place compares itself with all indices, which stand for the dims from ``first`` on, in the order
    of the elements. Raises NotOurs where that takes longer than to sort the indices."""
    last, sizes = first + len(indices), call.shape
    taken = grad.shape[first : len(grad.shape) - len(x.shape) + last]
    n = len(taken)
    whole = (*sizes, *taken)
    if not all(isinstance(size, int) for size in whole) or prod(whole) > MOST_COMPARED:
        raise NotOurs("elements are put where values say")
    if kind(grad.dtype) != "float":
        raise NotOurs("whole numbers are put where values say")

    def element(at: Index) -> Index:
        return (*at[:first], *at[len(sizes) :], *at[last : len(sizes)])

    seen = [MovedView(shape=whole, dtype=grad.dtype, of=grad, move=element, label="put")]
    seen += [
        MovedView(
            shape=whole,
            dtype=i.dtype,
            of=expanded(i, taken),
            move=lambda at: at[len(sizes) :],
            label="put",
        )
        for i in indices
    ]
    places = [f"{{{1 + len(indices) + d}}}" for d in range(len(indices))]
    told = [
        f"({{{1 + d}}} == {place} or {{{1 + d}}} + {sizes[first + d]} == {place})"
        for d, place in enumerate(places)
    ]
    chosen = Mapped(
        shape=whole,
        dtype=grad.dtype,
        inputs=tuple(seen),
        place=lambda at: at[first:last],
        work=2 * len(indices),
        write=f"where({' and '.join(told)}, {{0}}, 0.0)".format,
        label="put",
    )
    return reduced("sum", range(len(whole) - n, len(whole)), chosen, dtype=call.dtype, label="put")


@row("index_put", "_unsafe_index_put")
def _put(call: NodeCall) -> Piece:
    """The gradient of elements that were taken. From places that are the same at every call, in order, as
    interpolation takes them: each element sums its neighbours. From others: all that were taken of it."""
    x, indices, grad = call.args[:3]
    told = [(d, i) for d, i in enumerate(indices) if i is not None]
    first = told[0][0]
    alone = isinstance(x, ConstantValue) and x.value == 0 and call.arg(3, "accumulate", False)
    if not alone or [d for d, _ in told] != [*range(first, first + len(told))]:
        raise NotOurs("elements are put where values say")
    if any(kind(i.dtype) != "int" for _, i in told):
        raise NotOurs("elements are put where a mask holds")
    rank = max(len(i.shape) for _, i in told)
    sizes = zip(*([1] * (rank - len(i.shape)) + [*i.shape] for _, i in told), strict=True)
    taken = [next((n for n in each if n != 1), 1) for each in sizes]
    grad = expanded(
        grad, (*x.shape[:first], *taken, *x.shape[first + len(told) :])
    )  # one may stand for all
    if rank != len(told) or any(i.values is None for _, i in told):
        return _placed_sum(call, x, first, [i for _, i in told], grad)
    try:
        found = [_taken(i, k - len(told), x.shape[d], grad.shape[d]) for k, (d, i) in enumerate(told)]
    except NotOurs:
        return _placed_sum(call, x, first, [i for _, i in told], grad)
    seen = stretched(grad, first, x.shape[first : first + len(told)], found)
    return each_window("sum", len(told), seen, call.dtype, "sum of neighbours")


def _taken(index: Piece, dim: int, size: Length, made: Length) -> Stretch:
    """Which elements, along a dim of the index, were taken from each of a dim."""
    values = index.values
    assert values is not None
    if isinstance(size, SymbolicSize) or values.numel() != made or values.shape[dim:][:1] != (made,):
        raise NotOurs("places of several dims")
    flat = values.flatten().numpy()
    if (np.diff(flat) < 0).any() or flat[0] < 0:
        raise NotOurs("places that are in no order")
    line, places = view_indexing.fitted(flat.astype(np.int64)), np.arange(size)
    first, last = (np.searchsorted(flat, places, side).astype(np.int64) for side in ("left", "right"))
    if ((last - first) == last[0]).all() and (begin := view_indexing.fitted(first)) is not None:
        return Stretch(begin, int(last[0]), None)
    if line is None:
        raise NotOurs("places that no division of whole numbers gives")
    # From the first one on that the line has there, or that is cut off to it.
    up, down = (line.up, line.down) if line.up else (1, 0)
    early = (places * down - line.add + up - 1) // up if line.up else 0 * places
    shift = int(np.where(last > first, early - first, 0).max(initial=0))
    begin = view_indexing.IndexLine(down, (up - 1 - line.add if line.up else 0) - shift * up, up)
    most = int(np.where(last > first, last - early + shift, 0).max())
    return Stretch(begin, most, lambda place, i: all_of([i >= 0, i < len(flat), eq(line(i), place)]))


# -- moments ---------------------------------------------------------------------------------------


@row("var.correction", "var_mean.correction")
def _moments(call: NodeCall) -> Piece | tuple[Piece, Piece]:
    x = call.args[0]
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    given = call.kwargs.get("correction", 1)
    count = prod(x.shape[d] for d in dims)
    least = count - (1 if given is None else given)
    if isinstance(least, Fraction):  # torch's, where the correction is more than the count
        least = f"max({least}, 0.0)"
    elif least <= 0:
        raise NotOurs("the variance of one number")
    mean, squares = _centred(x, dims, wide(call.dtype))
    var = mapped(f"{{}} / {least}".format, squares, dtype=call.dtype, label="var")
    made = reshaped(var, call.shape)
    return (made, reshaped(mean, call.shape)) if call.name.startswith("var_mean") else made


def _centred(x: Piece, dims: Sequence[int], dtype: torch.dtype) -> tuple[Piece, Piece]:
    """The mean, and the sum of the squared deviations from it."""
    mean = _mean_of(x, dims, dtype)
    kept = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    centre = expanded(reshaped(mean, kept), x.shape)
    off = mapped("{} - {}".format, x, centre, dtype=dtype, label="deviation")
    squares = reduced("sum", dims, off, dtype=dtype, label="var", write="{0}*{0}".format)
    if isinstance(squares, Reduced) and squares.inputs == (off,):
        squares.deviating = x
    return mean, squares


@row("native_group_norm")
def _group_norm(call: NodeCall) -> tuple[Piece, ...]:
    x, weight, bias, n, features, _, groups, eps = call.args
    shape = (n, groups, features // groups, *x.shape[2:])
    lead = (1, groups, features // groups, *[1] * (len(x.shape) - 2))
    scales = [None if t is None else expanded(reshaped(t, lead), shape) for t in (weight, bias)]
    made, *moments = _normal(reshaped(x, shape), scales, 2, eps, call)
    return (reshaped(made, call.shape), *moments)


@row("native_layer_norm")
def _layer_norm(call: NodeCall) -> tuple[Piece, ...]:
    x, normal, weight, bias, eps = call.args
    scales = [None if t is None else expanded(t, x.shape) for t in (weight, bias)]
    return _normal(x, scales, len(x.shape) - len(normal), eps, call)


def _normal(
    x: Piece, scales: Sequence[Piece | None], first: int, eps: float, call: NodeCall
) -> tuple[Piece, ...]:
    """What is normalized over the dims from ``first`` on, the mean, and one over the deviation."""
    dtype = wide(call.dtype)
    dims = tuple(range(first, len(x.shape)))
    mean, var = _centred(x, dims, dtype)
    scale = mapped(
        f"rsqrt({{}} / {prod(x.shape[d] for d in dims)} + {eps!r})".format,
        var,
        dtype=dtype,
        label="rsqrt",
        work=8,
    )
    kept = (*x.shape[:first], *[1] * len(dims))
    centred = [expanded(reshaped(t, kept), x.shape) for t in (mean, scale)]
    made: Piece = mapped("({} - {})*{}".format, x, *centred, dtype=dtype, label="norm", work=2)
    for write, scale_ in zip(("{}*{}", "{} + {}"), scales, strict=True):
        if scale_ is not None:
            made = mapped(write.format, made, scale_, dtype=dtype, label="norm")
    moments = []
    for t, result in zip((mean, scale), call.results[1:], strict=True):
        assert result is not None
        moments.append(reshaped(mapped(str, t, dtype=result.dtype, label="norm", work=0), result.shape))
    return mapped(str, made, dtype=call.dtype, label="norm", work=0), *moments
