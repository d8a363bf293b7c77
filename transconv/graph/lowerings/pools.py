"""Rows of pools: reductions of windows, of one size or of sizes that their places tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from transconv.graph.fusion.index_ir import (
    ConstantValue,
    Index,
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    PiecewisePart,
)
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.reductions import reduced, wide
from transconv.graph.lowerings.table import NodeCall, NotOurs, mapped, row
from transconv.graph.lowerings.view_indexing import IndexLine
from transconv.graph.sizes import Length, SymbolicSize
from transconv.ir import Expr, all_of, as_expr, maximum, minimum


def _list(given: Any, n: int, usual: Sequence[int]) -> list[int]:
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    listed = listed or list(usual)
    return listed * n if len(listed) == 1 else listed


def window_numbers(call: NodeCall, n: int, first: int) -> tuple[list[int], list[int], list[int]]:
    """The window, stride and padding of a pool, whose arguments begin with these at a place."""
    window = _list(call.args[first], n, ())
    return (window, _list(call.arg(first + 1, "stride", []), n, window),
            _list(call.arg(first + 2, "padding", 0), n, ()))


def _windows(x: Piece, sizes: Sequence[Length], window: Sequence[int], stride: Sequence[int],
             padding: Sequence[int], dilation: Sequence[int], fill: float) -> Piece:
    """(..., o, k): the elements of each window."""
    n = len(window)
    shape = (*x.shape[:-n], *sizes, *window)
    move = view_indexing.windows(n, stride, padding, dilation)
    dims = [len(x.shape) - n + d for d in range(n)]
    leaves = any(p or (o - 1) * s + (k - 1) * d - p >= i for o, s, k, d, p, i in zip(
        sizes, stride, window, dilation, padding, x.shape[-n:], strict=True))
    if not leaves:
        return MovedView(shape=shape, dtype=x.dtype, of=x, move=move, label="windows")
    beyond = ConstantValue(shape=shape, dtype=x.dtype, value=fill)
    return PiecewiseIndex(
        shape=shape,
        dtype=x.dtype,
        label="windows",
        parts=(
            PiecewisePart(x, move, view_indexing.inside(x.shape, move, dims)),
            PiecewisePart(beyond, lambda at: at),
        ),
    )


@row("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(call: NodeCall) -> tuple[Piece, ...]:
    x = call.args[0]
    n = 3 if "3d" in call.name else 2
    window, stride, padding = window_numbers(call, n, 1)
    dilation = _list(call.arg(4, "dilation", 1), n, ())
    sizes = call.shape[-n:]
    seen = _windows(x, sizes, window, stride, padding, dilation, float("-inf"))
    dims = tuple(range(len(seen.shape) - n, len(seen.shape)))
    top = reduced("max", dims, seen, dtype=call.dtype, label="max_pool")
    place = reduced("argmax", dims, seen, dtype=torch.int64, label="max_pool")

    def coordinates(at: Index) -> Index:
        first = len(at) - n
        return tuple(at[first + d] * stride[d] - padding[d] for d in range(n))

    def flat(found: str, *corner: str) -> str:
        said, below = "", prod(window)
        for d in range(n):
            below //= window[d]
            own = f"{found} // {below}" if below > 1 else found
            own = f"({own}) % {window[d]}" if d else f"({own})"
            own = f"({corner[d]} + {own}*{dilation[d]})"
            said = f"({said}*{x.shape[len(x.shape) - n + d]} + {own})" if said else own
        return said

    index = Mapped(shape=top.shape, dtype=torch.int64, inputs=(place,), write=flat, place=coordinates,
                   label="max_pool", work=4 * n)
    return top, index


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
        return cls(x.shape[-n:], *window_numbers(call, n, first), call.arg(first + 3, "ceil_mode", False),
                   call.arg(first + 4, "count_include_pad", True), call.arg(first + 5, "divisor_override"))

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
    """A value divided by a product of whole numbers that the last dims of its position tell."""
    def write(value: str, *numbers: str) -> str:
        return f"{value} / ({'*'.join(numbers)})"
    return Mapped(shape=x.shape, dtype=dtype, inputs=(x,), write=write, label=label, work=4,
                  place=lambda at: count(at[len(at) - n:]))


@row("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(call: NodeCall) -> Piece:
    x = call.args[0]
    n = int(call.name.split(".")[0][-2])
    pool = Averages.of(call, x, n, 1)
    seen = _windows(x, call.shape[-n:], pool.window, pool.stride, pool.padding, [1] * n, 0.0)
    dims = tuple(range(len(seen.shape) - n, len(seen.shape)))
    total = reduced("sum", dims, seen, dtype=wide(call.dtype), label="avg_pool")
    return pool.divided(total, call.dtype, "avg_pool")


# -- windows whose ends are functions of their place -----------------------------------------------


class Stretch(NamedTuple):
    """The windows of one dim: where each begins, how many places the longest has, and which elements are
    in the window of a place; None: all of so many places."""

    begin: IndexLine
    most: int
    inside: Callable[[Expr, Expr], Expr] | None


def adaptive(size: int, made: int) -> tuple[Stretch, IndexLine]:
    """The windows that divide a dim into so many, which may overlap; where they end."""
    lengths = {-(-(i + 1) * size // made) - i * size // made for i in range(made)}
    end = IndexLine(size, size + made - 1, made)
    return Stretch(IndexLine(size, 0, made), max(lengths),
                   None if len(lengths) == 1 else lambda place, i: i < end(place)), end


def stretched(x: Piece, first: int, made: Sequence[Length], each: Sequence[Stretch]) -> Piece:
    """(..., o, ..., k): the elements of each window along some dims from one on, 0 for those that are not
    in it."""
    rank = len(x.shape)
    shape = (*x.shape[:first], *made, *x.shape[first + len(each):], *(s.most for s in each))

    def move(at: Index) -> Index:
        own = [s.begin(at[first + d]) + at[rank + d] for d, s in enumerate(each)]
        return (*at[:first], *own, *at[first + len(each):rank])

    def where(at: Index) -> Expr:
        moved = move(at)
        return all_of([s.inside(at[first + d], moved[first + d]) for d, s in enumerate(each) if s.inside])
    if not any(s.inside for s in each):
        return MovedView(shape=shape, dtype=x.dtype, of=x, move=move, label="windows")
    nothing = ConstantValue(shape=shape, dtype=x.dtype, value=0)
    return PiecewiseIndex(shape=shape, dtype=x.dtype, label="windows", parts=(
        PiecewisePart(x, move, where), PiecewisePart(nothing, lambda at: at)))


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
    dims = tuple(range(len(x.shape), len(x.shape) + n))
    total = reduced("sum", dims, seen, dtype=wide(dtype), label="avg_pool")
    return over(total, n, lambda at: _lengths(each, at), dtype, "avg_pool")


def _lengths(each: Sequence[tuple[Stretch, IndexLine]], at: Index) -> Index:
    return tuple(end(e) - s.begin(e) if s.inside else as_expr(s.most)
                 for (s, end), e in zip(each, at, strict=True))


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
    dims = tuple(range(len(x.shape), len(x.shape) + n))
    return reduced("sum", dims, seen, dtype=call.dtype, label="pool gradient")
