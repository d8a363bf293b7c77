"""Rows of gradients that gather: each element of the input sums those of the result that it went to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import numpy as np

from transconv.graph.fusion.index_ir import (
    ConstantValue,
    Index,
    Mapped,
    Piece,
    PiecewiseIndex,
    PiecewisePart,
)
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.pools import Averages, Stretch, stretched, window_numbers
from transconv.graph.lowerings.reductions import reduced, wide
from transconv.graph.lowerings.table import NodeCall, NotOurs, mapped, row
from transconv.graph.lowerings.view_indexing import IndexLine, fitted
from transconv.graph.sizes import Length, SymbolicSize, like
from transconv.ir import TRUE, Expr, all_of, as_expr, eq


def _spread(grad: Piece, sizes: Sequence[Length], window: Sequence[int], stride: Sequence[int],
            padding: Sequence[int], dilation: Sequence[int], all_inside: bool) -> Piece:
    """(..., i, j): the gradient of the last window but j that begins before element i or at it.
    ``all_inside``: 0 of one that ends before it; a window with gaps counts as one without."""
    n = len(window)
    lead = len(grad.shape) - n
    last = [(k - 1) * d for k, d in zip(window, dilation, strict=True)]
    reach = tuple(b // s + 1 for b, s in zip(last, stride, strict=True))

    def move(at: Index) -> Index:
        behind = [at[lead + d] + padding[d] for d in range(n)]
        windows = [e // s if s > 1 else e for e, s in zip(behind, stride, strict=True)]
        return (*at[:lead], *(w - at[lead + n + d] for d, w in enumerate(windows)))

    def where(at: Index) -> Expr:
        moved = move(at)[lead:]
        inside = [c for e, size in zip(moved, grad.shape[lead:], strict=True) for c in (e >= 0, e < size)]
        ends = [at[lead + d] + padding[d] - moved[d] * stride[d] <= last[d]
                for d in range(n) if all_inside and (last[d] + 1) % stride[d]]
        return all_of([*inside, *ends])
    shape = (*grad.shape[:lead], *sizes, *reach)
    nothing = ConstantValue(shape=shape, dtype=grad.dtype, value=0)
    return PiecewiseIndex(shape=shape, dtype=grad.dtype, label="windows", parts=(
        PiecewisePart(grad, move, where), PiecewisePart(nothing, lambda at: at)))


@row("avg_pool2d_backward", "avg_pool3d_backward")
def _avg_pool_backward(call: NodeCall) -> Piece:
    grad, x = call.args[:2]
    n = 3 if "3d" in call.name else 2
    pool = Averages.of(call, x, n, 2)
    each = grad if pool.by else pool.divided(grad, wide(call.dtype), "pool gradient")
    seen = _spread(each, x.shape[-n:], pool.window, pool.stride, pool.padding, [1] * n, True)
    dims = tuple(range(len(seen.shape) - n, len(seen.shape)))
    total = reduced("sum", dims, seen, dtype=wide(call.dtype), label="pool gradient")
    if pool.by:
        return pool.divided(total, call.dtype, "pool gradient")
    return mapped(str, total, dtype=call.dtype, label="pool gradient", work=0)


@row("index_put", "_unsafe_index_put")
def _put(call: NodeCall) -> Piece:
    """The gradient of elements that were taken from places that are the same at every call, in order, as
    interpolation takes them: each element sums its neighbours."""
    x, indices, grad = call.args[:3]
    told = [(d, i) for d, i in enumerate(indices) if i is not None]
    first = told[0][0]
    alone = isinstance(x, ConstantValue) and x.value == 0 and call.arg(3, "accumulate", False)
    if not alone or len(grad.shape) != len(x.shape) or [d for d, _ in told] != [
            *range(first, first + len(told))] or any(i.values is None for _, i in told):
        raise NotOurs("elements are put where values say")
    found = [_taken(i, k - len(told), x.shape[d], grad.shape[d]) for k, (d, i) in enumerate(told)]
    seen = stretched(grad, first, x.shape[first:first + len(told)], found)
    dims = tuple(range(len(x.shape), len(x.shape) + len(told)))
    return reduced("sum", dims, seen, dtype=call.dtype, label="sum of neighbours")


def _taken(index: Piece, dim: int, size: Length, made: Length) -> Stretch:
    """Which elements, along a dim of the index, were taken from each of a dim."""
    values = index.values
    assert values is not None
    if isinstance(size, SymbolicSize) or values.numel() != made or values.shape[dim:][:1] != (made,):
        raise NotOurs("places of several dims")
    flat = values.flatten().numpy()
    if (np.diff(flat) < 0).any() or flat[0] < 0:
        raise NotOurs("places that are in no order")
    line, places = fitted(flat.astype(np.int64)), np.arange(size)
    first, last = (np.searchsorted(flat, places, side).astype(np.int64) for side in ("left", "right"))
    if ((last - first) == last[0]).all() and (begin := fitted(first)) is not None:
        return Stretch(begin, int(last[0]), None)
    if line is None:
        raise NotOurs("places that no division of whole numbers gives")
    # From the first one on that the line has there, or that is cut off to it.
    up, down = (line.up, line.down) if line.up else (1, 0)
    early = (places * down - line.add + up - 1) // up if line.up else 0 * places
    shift = int(np.where(last > first, early - first, 0).max(initial=0))
    begin = IndexLine(down, (up - 1 - line.add if line.up else 0) - shift * up, up)
    most = int(np.where(last > first, last - early + shift, 0).max())
    return Stretch(begin, most, lambda place, i: all_of([i >= 0, i < len(flat), eq(line(i), place)]))


@row("as_strided_scatter")
def _put_in_memory(call: NodeCall) -> Piece:
    """The gradient of a view by strides, whose elements have places of their own."""
    x, source, sizes, strides = call.args[:4]
    begin = call.arg(4, "storage_offset") or 0
    dense = tuple(prod(x.shape[d + 1:]) for d in range(len(x.shape)))
    if x.strides is None or any(n != 1 and a != b for n, a, b in zip(
            x.shape, x.strides, dense, strict=True)):
        raise NotOurs("its operand has gaps, or another order")
    order = sorted((d for d, n in enumerate(sizes) if n != 1), key=lambda d: -like(strides[d]))
    for d, inner in pairwise(order):
        if strides[d] < strides[inner] * sizes[inner]:
            raise NotOurs("several elements have one place")

    def places(at: Index) -> tuple[list[Expr], Expr]:
        left, found = view_indexing.flattened(at, x.shape) - begin, [as_expr(0)] * len(sizes)
        for d in order:
            found[d] = left // strides[d]
            left = left - found[d] * strides[d]
        return found, left

    def where(at: Index) -> Expr:
        found, left = places(at)
        return all_of([eq(left, 0), *(c for d in order for c in (found[d] >= 0, found[d] < sizes[d]))])
    return PiecewiseIndex(shape=call.shape, dtype=x.dtype, label="as_strided_scatter", parts=(
        PiecewisePart(source, lambda at: tuple(places(at)[0]), where), PiecewisePart(x, lambda at: at)))


@row("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(call: NodeCall) -> Piece:
    grad, x = call.args[:2]
    n = 3 if "3d" in call.name else 2
    window, stride, padding = window_numbers(call, n, 2)
    given = call.args[5]
    dilation = list(given) * (n if len(given) == 1 else 1)
    sizes = x.shape[-n:]
    grads, places = (_spread(t, sizes, window, stride, padding, dilation, False)
                     for t in (grad, call.args[7]))
    lead = len(grad.shape) - n

    def own(at: Index) -> Index:
        flat = at[lead]
        for d in range(1, n):
            flat = flat * sizes[d] + at[lead + d]
        return (flat,)
    # The place of a window without the element is another one. Where there is no window, the place is 0,
    # and so is the gradient.
    chosen = Mapped(shape=grads.shape, dtype=grad.dtype, inputs=(grads, places), place=own, work=2,
                    write="where({1} == {2}, {0}, 0.0)".format, label="chosen")
    dims = tuple(range(len(grads.shape) - n, len(grads.shape)))
    return reduced("sum", dims, chosen, dtype=call.dtype, label="pool gradient")


@row("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def _replicate_backward(call: NodeCall) -> Piece:
    """Of the places of a window as wide as both pads the middle one counts, and at an end those beyond."""
    grad, x, sides = call.args
    n = len(sides) // 2
    before, behind = [*sides[::2]][::-1], [*sides[1::2]][::-1]
    if min(*before, *behind) < 0:
        raise NotOurs("a pad that takes away")
    lead = len(grad.shape) - n
    sizes = x.shape[lead:]

    def move(at: Index) -> Index:
        return (*at[:lead], *(at[lead + d] + at[lead + n + d] for d in range(n)))

    def where(at: Index) -> Expr:
        found = []
        for d in range(n):
            i, k = at[lead + d], at[lead + n + d]
            found.append(eq(k, before[d]) | ((k < before[d]) & eq(i, 0)) | (
                (k > before[d]) & eq(i, sizes[d] - 1)))
        return all_of(found)
    shape = (*x.shape, *(a + b + 1 for a, b in zip(before, behind, strict=True)))
    nothing = ConstantValue(shape=shape, dtype=grad.dtype, value=0)
    seen = PiecewiseIndex(shape=shape, dtype=grad.dtype, label="windows", parts=(
        PiecewisePart(grad, move, where), PiecewisePart(nothing, lambda at: at)))
    dims = tuple(range(lead + n, lead + 2 * n))
    return reduced("sum", dims, seen, dtype=call.dtype, label="pad gradient")


@row("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward")
def _reflect_backward(call: NodeCall) -> Piece:
    """Along each dim an element, and its images before the first and behind the last one."""
    found, x, sides = call.args
    rank = len(x.shape)
    for d in range(len(sides) // 2):
        dim, before, behind = rank - 1 - d, sides[2 * d], sides[2 * d + 1]
        if min(before, behind) < 0:
            raise NotOurs("a pad that takes away")
        found = _folded(found, dim, x.shape[dim], before, behind)
    return mapped(str, found, dtype=call.dtype, label="pad gradient", work=0)


def _folded(grad: Piece, dim: int, size: Length, before: int, behind: int) -> Piece:
    shape = (*grad.shape[:dim], size, *grad.shape[dim + 1:])

    def image(place: Callable[[Expr], Expr], where: Callable[[Expr], Expr]) -> Piece:
        part = PiecewisePart(
            grad, lambda at: (*at[:dim], place(at[dim]), *at[dim + 1 :]), lambda at: where(at[dim])
        )
        nothing = ConstantValue(shape=shape, dtype=grad.dtype, value=0)
        return PiecewiseIndex(shape=shape, dtype=grad.dtype, label="pad gradient", parts=(
            part, PiecewisePart(nothing, lambda at: at)))
    images = [image(lambda i: i + before, lambda i: TRUE)]
    if before:
        images.append(image(lambda i: as_expr(before) - i, lambda i: (i >= 1) & (i <= before)))
    if behind:
        last = size - 1
        images.append(image(lambda i: as_expr(last * 2 + before) - i,
                            lambda i: (i >= last - behind) & (i < last)))
    return mapped(" + ".join(["{}"] * len(images)).format, *images, dtype=wide(grad.dtype),
                  label="pad gradient", work=len(images) - 1)
