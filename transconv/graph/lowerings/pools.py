"""Rows of windows: pools, of one size or of sizes that their places tell, and gradients that gather, in
which each element of the input sums those of the result that it went to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from transconv.graph.fusion.index_ir import Mapped, MovedView, Piece
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.table import NodeCall, NotOurs, cast, mapped, piecewise, reduced, row, wide
from transconv.graph.sizes import Index, Length, SymbolicSize, dense_strides, like
from transconv.ir import TRUE, Expr, all_of, as_expr, eq, maximum, minimum
from transconv.runtime import torch_internals


def _list(given: Any, n: int, usual: Sequence[int]) -> list[int]:
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    listed = listed or list(usual)
    return listed * n if len(listed) == 1 else listed


def window_numbers(call: NodeCall, n: int, first: int) -> tuple[list[int], list[int], list[int]]:
    """The window, stride and padding of a pool, whose arguments begin with these at a place."""
    window = _list(call.args[first], n, ())
    return (
        window,
        _list(call.arg(first + 1, "stride", []), n, window),
        _list(call.arg(first + 2, "padding", 0), n, ()),
    )


def _windows(
    x: Piece,
    sizes: Sequence[Length],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    fill: float,
) -> Piece:
    """(..., o, k): the elements of each window."""
    n = len(window)
    shape = (*x.shape[:-n], *sizes, *window)
    move = view_indexing.windows(n, stride, padding, dilation)
    dims = [len(x.shape) - n + d for d in range(n)]
    leaves = any(
        p or (o - 1) * s + (k - 1) * d - p >= i
        for o, s, k, d, p, i in zip(sizes, stride, window, dilation, padding, x.shape[-n:], strict=True)
    )
    if not leaves:
        return MovedView(shape=shape, dtype=x.dtype, of=x, move=move, label="windows")
    return piecewise(x, shape, move, view_indexing.inside(x.shape, move, dims), fill, "windows")


def each_window(op: str, n: int, windows: Piece, dtype: torch.dtype, label: str) -> Piece:
    """A reduction of the last dims, the elements of each window."""
    rank = len(windows.shape)
    return reduced(op, range(rank - n, rank), windows, dtype=dtype, label=label)


@dataclass(eq=False, kw_only=True)
class WindowIndex(Mapped):
    """The places in an image that a max pool chose, from its input, those within each window."""


@dataclass(frozen=True, slots=True)
class MaxPool:
    """The numbers of a max pool over the last dims of an image of these sizes."""

    sizes: Sequence[Length]
    window: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @staticmethod
    def of(call: NodeCall, n: int, first: int) -> MaxPool:
        """``first``: where the arguments begin with the window; before them is the image."""
        numbers = window_numbers(call, n, first)
        dilation = _list(call.arg(first + 3, "dilation", 1), n, ())
        return MaxPool(call.args[first - 1].shape[-n:], *numbers, dilation)

    def chosen(self, call: NodeCall) -> tuple[Piece, Piece]:
        """The largest element of each window, and its place in the window."""
        n = len(self.window)
        rest = self.window, self.stride, self.padding, self.dilation
        seen = _windows(call.args[0], call.shape[-n:], *rest, float("-inf"))
        top = each_window("max", n, seen, call.dtype, "max_pool")
        place = each_window("argmax", n, seen, torch.int64, "max_pool")
        return top, self.inside(place) if any(self.padding) else place

    def corner(self, at: Index) -> Index:
        """Where a window begins in the image."""
        n = len(self.window)
        first = len(at) - n
        return tuple(at[first + d] * self.stride[d] - self.padding[d] for d in range(n))

    def inside(self, place: Piece) -> Piece:
        """Places in windows; in place of one in the padding, which is first where all elements are -inf,
        the first element of the image, as torch chooses it: it is before all others of the image."""

        def moved(found: str, *corner: str) -> str:
            first, below = "", prod(self.window)
            for d, n in enumerate(self.window):
                below //= n
                own = f"max(0, ({self.dilation[d] - 1} - {corner[d]}) // {self.dilation[d]})*{below}"
                first = f"{first} + {own}" if first else own
            return f"max({found}, {first})"

        return Mapped(
            shape=place.shape,
            dtype=torch.int64,
            inputs=(place,),
            write=moved,
            place=self.corner,
            label="max_pool",
            work=4 * len(self.window),
        )

    def index(self, place: Piece) -> Piece:
        """Places in windows as places in the image."""
        n = len(self.window)

        def flat(found: str, *corner: str) -> str:
            said, below = "", prod(self.window)
            found = f"i64({found})" if place.dtype is torch.int8 else found
            for d in range(n):
                below //= self.window[d]
                own = f"{found} // {below}" if below > 1 else found
                own = f"({own}) % {self.window[d]}" if d else f"({own})"
                own = f"({corner[d]} + {own}*{self.dilation[d]})"
                said = f"({said}*{self.sizes[d]} + {own})" if said else own
            return said

        return WindowIndex(
            shape=place.shape,
            dtype=torch.int64,
            inputs=(place,),
            write=flat,
            place=self.corner,
            label="max_pool",
            work=4 * n,
        )


@row("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(call: NodeCall) -> tuple[Piece, ...]:
    pool = MaxPool.of(call, 3 if "3d" in call.name else 2, 1)
    top, place = pool.chosen(call)
    return top, pool.index(place)


# -- places within windows ---------------------------------------------------------------------------

NARROW = 2**7  # places that 8 bits tell apart


def within_windows(gradient: fx.Node, n: int) -> fx.Node | None:
    """The places that the gradient of a pool over ``n`` dims is handed, from those within each window, in
    8 bits, which its pool stores instead and a forward graph leaves. None where others read them, and of
    windows with gaps or more than ``NARROW`` places."""
    places: Any = gradient.args[7]
    window = _list(gradient.args[2], n, ())
    stride, padding, dilation = (_list(x, n, window) for x in gradient.args[3:6])
    if (
        [*places.users] != [gradient]
        or places.target is not operator.getitem
        or prod(window) > NARROW
        or prod(dilation) > 1
    ):
        return None
    pool, graph, around = places.args[0], gradient.graph, (stride, padding, dilation)
    image, short = pool.args[0], places.meta["val"].to(torch.int8)
    with graph.inserting_before(pool):
        made = graph.call_function(
            torch_internals.max_pool_with_places, (image, window, *around, gradient.args[6])
        )
    made.meta = {**pool.meta, "val": (pool.meta["val"][0], short)}
    pool.replace_all_uses_with(made)
    graph.erase_node(pool)
    places.meta |= {"val": short, "recompute": CheckpointPolicy.MUST_SAVE}
    sizes = [*image.meta["val"].shape[-n:]]
    return graph.call_function(torch_internals.max_pool_index, (places, window, sizes, *around))


@row(torch_internals.max_pool_with_places)
def _max_pool_in_windows(call: NodeCall) -> tuple[Piece, ...]:
    top, place = MaxPool.of(call, len(call.args[1]), 1).chosen(call)
    return top, mapped("i8({})".format, place, dtype=torch.int8, label="max_pool")


@row(torch_internals.max_pool_index)
def _max_pool_index(call: NodeCall) -> Piece:
    place, window, sizes, *rest = call.args
    return MaxPool(sizes, window, *rest).index(place)


# -- averages --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Averages:
    """The numbers of an average pool over the last dims, of these sizes."""

    sizes: Sequence[Length]
    window: list[int]
    stride: list[int]
    padding: list[int]
    ceil: bool
    counts_all: bool
    divisor: int | None

    @classmethod
    def of(cls, call: NodeCall, x: Piece, n: int, first: int) -> Averages:
        """Those of a call whose arguments begin with them at a place."""
        return cls(
            x.shape[-n:],
            *window_numbers(call, n, first),
            call.arg(first + 3, "ceil_mode", False),
            call.arg(first + 4, "count_include_pad", True),
            call.arg(first + 5, "divisor_override"),
        )

    @property
    def by(self) -> int:
        """What every window is divided by; 0 where they have unlike counts."""
        alike = not self.ceil and (self.counts_all or not any(self.padding))
        return self.divisor or (prod(self.window) if alike else 0)

    def divided(self, x: Piece, dtype: torch.dtype, label: str) -> Piece:
        """What stands where results do, by the number of elements that the window there has."""
        if self.by:
            return mapped(f"{{}} / {self.by}".format, x, dtype=dtype, label=label)
        return over(x, len(self.window), self.count, dtype, label)

    def count(self, at: Index) -> Index:
        """How many elements of each dim count in a window."""
        found: list[Expr] = []
        for e, k, s, p, n in zip(at, self.window, self.stride, self.padding, self.sizes, strict=True):
            first = e * s - p
            last = minimum(first + k, as_expr(n + p))
            if not self.counts_all:
                first, last = maximum(first, as_expr(0)), minimum(last, as_expr(n))
            found.append(last - first)
        return tuple(found)


def over(x: Piece, n: int, count: Callable[[Index], Index], dtype: torch.dtype, label: str) -> Piece:
    """A value divided by a product of integers that the last dims of its position tell."""

    def write(value: str, *numbers: str) -> str:
        return f"{value} / ({'*'.join(numbers)})"

    return Mapped(
        shape=x.shape,
        dtype=dtype,
        inputs=(x,),
        write=write,
        label=label,
        work=4,
        place=lambda at: count(at[len(at) - n :]),
    )


@row("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(call: NodeCall) -> Piece:
    x = call.args[0]
    n = int(call.name.split(".")[0][-2])
    pool = Averages.of(call, x, n, 1)
    seen = _windows(x, call.shape[-n:], pool.window, pool.stride, pool.padding, [1] * n, 0.0)
    total = each_window("sum", n, seen, wide(call.dtype), "avg_pool")
    return pool.divided(total, call.dtype, "avg_pool")


# -- windows whose ends are functions of their place -----------------------------------------------


class Stretch(NamedTuple):
    """The windows of one dim: where each begins, how many places the longest has, and which elements are
    in the window of a place; None: all of so many places."""

    begin: view_indexing.IndexLine
    most: int
    inside: Callable[[Expr, Expr], Expr] | None


def adaptive(size: int, made: int) -> tuple[Stretch, view_indexing.IndexLine]:
    """The windows that divide a dim into so many, which may overlap; where they end."""
    lengths = {-(-(i + 1) * size // made) - i * size // made for i in range(made)}
    end = view_indexing.IndexLine(size, size + made - 1, made)
    return Stretch(
        view_indexing.IndexLine(size, 0, made),
        max(lengths),
        None if len(lengths) == 1 else lambda place, i: i < end(place),
    ), end


def stretched(x: Piece, first: int, made: Sequence[Length], each: Sequence[Stretch]) -> Piece:
    """(..., o, ..., k): the elements of each window along some dims from one on, 0 for those that are not
    in it."""
    rank = len(x.shape)
    shape = (*x.shape[:first], *made, *x.shape[first + len(each) :], *(s.most for s in each))

    def move(at: Index) -> Index:
        own = [s.begin(at[first + d]) + at[rank + d] for d, s in enumerate(each)]
        return (*at[:first], *own, *at[first + len(each) : rank])

    def where(at: Index) -> Expr:
        moved = move(at)
        return all_of([s.inside(at[first + d], moved[first + d]) for d, s in enumerate(each) if s.inside])

    if not any(s.inside for s in each):
        return MovedView(shape=shape, dtype=x.dtype, of=x, move=move, label="windows")
    return piecewise(x, shape, move, where, 0, "windows")


def _numbers(*shapes: Sequence[Length]) -> None:
    if any(isinstance(n, SymbolicSize) for shape in shapes for n in shape):
        raise NotOurs("windows of unlike sizes, at sizes that are names")


@row("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")
def _adaptive(call: NodeCall) -> Piece:
    x, n = call.args[0], int(call.name.split(".")[0][-2])
    return _averaged(x, x.shape[-n:], call.shape[-n:], call.dtype)


def _averaged(x: Piece, sizes: Sequence[Length], made: Sequence[Length], dtype: torch.dtype) -> Piece:
    _numbers(sizes, made)
    n, each = len(sizes), [adaptive(int(s), int(o)) for s, o in zip(sizes, made, strict=True)]
    seen = stretched(x, len(x.shape) - n, made, [windows for windows, _ in each])
    total = each_window("sum", n, seen, wide(dtype), "avg_pool")
    return over(total, n, lambda at: _lengths(each, at), dtype, "avg_pool")


def _lengths(each: Sequence[tuple[Stretch, view_indexing.IndexLine]], at: Index) -> Index:
    return tuple(
        end(e) - s.begin(e) if s.inside else as_expr(s.most) for (s, end), e in zip(each, at, strict=True)
    )


@row("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def _adaptive_backward(call: NodeCall) -> Piece:
    """The windows that an element is in are those of the pool with its sizes exchanged."""
    grad, x = call.args
    n = 3 if "3d" in call.name else 2
    sizes, made = x.shape[-n:], grad.shape[-n:]
    _numbers(sizes, made)
    there = [adaptive(int(s), int(o)) for s, o in zip(sizes, made, strict=True)]
    back = [adaptive(int(o), int(s))[0] for s, o in zip(sizes, made, strict=True)]
    each = over(grad, n, lambda at: _lengths(there, at), wide(call.dtype), "pool gradient")
    seen = stretched(each, len(x.shape) - n, sizes, back)
    return each_window("sum", n, seen, call.dtype, "pool gradient")


def _spread(
    grad: Piece,
    sizes: Sequence[Length],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    all_inside: bool,
) -> Piece:
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
        ends = [
            at[lead + d] + padding[d] - moved[d] * stride[d] <= last[d]
            for d in range(n)
            if all_inside and (last[d] + 1) % stride[d]
        ]
        return all_of([*inside, *ends])

    shape = (*grad.shape[:lead], *sizes, *reach)
    return piecewise(grad, shape, move, where, 0, "windows")


@row("avg_pool2d_backward", "avg_pool3d_backward")
def _avg_pool_backward(call: NodeCall) -> Piece:
    grad, x = call.args[:2]
    n = 3 if "3d" in call.name else 2
    pool = Averages.of(call, x, n, 2)
    each = grad if pool.by else pool.divided(grad, wide(call.dtype), "pool gradient")
    seen = _spread(each, x.shape[-n:], pool.window, pool.stride, pool.padding, [1] * n, True)
    total = each_window("sum", n, seen, wide(call.dtype), "pool gradient")
    if pool.by:
        return pool.divided(total, call.dtype, "pool gradient")
    return mapped(str, total, dtype=call.dtype, label="pool gradient", work=0)


@row("as_strided_scatter")
def _put_in_memory(call: NodeCall) -> Piece:
    """The gradient of a view by strides, whose elements have places of their own."""
    x, source, sizes, strides = call.args[:4]
    begin = call.arg(4, "storage_offset") or 0
    if x.strides is None or any(
        n != 1 and a != b for n, a, b in zip(x.shape, x.strides, dense_strides(x.shape), strict=True)
    ):
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

    return piecewise(source, call.shape, lambda at: tuple(places(at)[0]), where, x, "as_strided_scatter")


@row("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(call: NodeCall) -> Piece:
    grad = call.args[0]
    n = 3 if "3d" in call.name else 2
    pool, index = MaxPool.of(call, n, 2), call.args[7]
    rest = pool.sizes, pool.window, pool.stride, pool.padding, pool.dilation
    lead = len(grad.shape) - n
    within = isinstance(index, WindowIndex) and prod(pool.dilation) == 1
    grads = _spread(grad, *rest, within)
    places = _spread(index.inputs[0] if within else index, *rest, False)
    if within:
        places = cast(places, torch.int32)

    def own(at: Index) -> Index:
        """The element's place in the image."""
        flat = at[lead]
        for d in range(1, n):
            flat = flat * pool.sizes[d] + at[lead + d]
        return (flat,)

    def own_within(at: Index) -> Index:
        """Its place in the window, which has it where there is a gradient."""
        flat: Expr = as_expr(0)
        for d, (before, by) in enumerate(zip(pool.padding, pool.stride, strict=True)):
            behind = at[lead + d] + before
            flat = flat * pool.window[d] + (behind % by if by > 1 else 0) + at[lead + n + d] * by
        return (flat,)

    # The place of a window without the element is another one, or the gradient is 0. Where there is no
    # window, both are 0.
    chosen = Mapped(
        shape=grads.shape,
        dtype=grad.dtype,
        inputs=(grads, places),
        place=own_within if within else own,
        work=2,
        write="where({1} == {2}, {0}, 0.0)".format,
        label="chosen",
    )
    return each_window("sum", n, chosen, call.dtype, "pool gradient")


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
            found.append(
                eq(k, before[d]) | ((k < before[d]) & eq(i, 0)) | ((k > before[d]) & eq(i, sizes[d] - 1))
            )
        return all_of(found)

    shape = (*x.shape, *(a + b + 1 for a, b in zip(before, behind, strict=True)))
    seen = piecewise(grad, shape, move, where, 0, "windows")
    return each_window("sum", n, seen, call.dtype, "pad gradient")


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
    shape = (*grad.shape[:dim], size, *grad.shape[dim + 1 :])

    def image(place: Callable[[Expr], Expr], where: Callable[[Expr], Expr]) -> Piece:
        return piecewise(
            grad,
            shape,
            lambda at: (*at[:dim], place(at[dim]), *at[dim + 1 :]),
            lambda at: where(at[dim]),
            0,
            "pad gradient",
        )

    images = [image(lambda i: i + before, lambda i: TRUE)]
    if before:
        images.append(image(lambda i: as_expr(before) - i, lambda i: (i >= 1) & (i <= before)))
    if behind:
        last = size - 1
        images.append(
            image(lambda i: as_expr(last * 2 + before) - i, lambda i: (i >= last - behind) & (i < last))
        )
    return mapped(
        " + ".join(["{}"] * len(images)).format,
        *images,
        dtype=wide(grad.dtype),
        label="pad gradient",
        work=len(images) - 1,
    )
