"""Rows of operations that only move elements: each is a function of coordinates, or a choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transconv.compute import COORDINATES
from transconv.graph.fusion.index_ir import Indexed, MovedView, Piece, PiecewiseIndex, PiecewisePart
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.table import NodeCall, NotOurs, cast, expanded, filled, kind, piecewise, row
from transconv.graph.lowerings.view_indexing import told_by_place
from transconv.graph.sizes import Fraction, Index, Length, Move, SymbolicSize, packed, same
from transconv.ir import ZERO, Expr, Var, all_of, as_expr, eq
from transconv.simplify import Facts, simplify


def _seen(call: NodeCall, x: Piece, move: Move, back: Move | None = None, label: str = "") -> MovedView:
    return MovedView(shape=call.shape, dtype=x.dtype, of=x, move=move, back=back, label=label)


def _dims(given: Any, rank: int) -> list[int]:
    listed = given if isinstance(given, (list, tuple)) else [given]
    return [int(d) % rank for d in listed] if rank else []


@row("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims")
def _view(call: NodeCall) -> Piece:
    x = call.args[0]
    return _seen(
        call,
        x,
        view_indexing.reshape(x.shape, call.shape),
        view_indexing.reshape(call.shape, x.shape),
        "view",
    )


@row("expand")
def _expand(call: NodeCall) -> Piece:
    x = call.args[0]
    back = tuple if same(x.shape, call.shape) else None  # all elements, each at its own position
    return _seen(call, x, view_indexing.expand(x.shape, call.shape), back, "expand")


@row("repeat")
def _repeat(call: NodeCall) -> Piece:
    x = call.args[0]
    return _seen(call, x, view_indexing.repeat(x.shape, call.shape), label="repeat")


@row("permute")
def _permute(call: NodeCall) -> Piece:
    x, order = call.args
    return _permuted(call, x, _dims(order, len(x.shape)))


def _permuted(call: NodeCall, x: Piece, order: Sequence[int]) -> Piece:
    return _seen(
        call,
        x,
        lambda at: tuple(at[order.index(d)] for d in range(len(order))),
        lambda at: tuple(at[d] for d in order),
        "permute",
    )


@row("transpose.int", "t")
def _transpose(call: NodeCall) -> Piece:
    x = call.args[0]
    order = list(range(len(x.shape)))
    if order:
        a, b = _dims(call.args[1:3] or [0, -1], len(order))
        order[a], order[b] = order[b], order[a]
    return _permuted(call, x, order)


@row("as_strided")
def _as_strided(call: NodeCall) -> Piece:
    x, _, strides = call.args[:3]
    if x.strides is None:
        raise NotOurs("where its operand lies in memory is not known")
    if packed(x.shape, x.strides) is None:
        raise NotOurs("its operand has gaps")
    begin = call.arg(3, "storage_offset") or 0

    def move(at: Index) -> Index:
        flat: Expr = as_expr(begin)
        for e, s in zip(at, strides, strict=True):
            flat = flat + e * s
        return tuple(flat // x.strides[d] % n if n != 1 else ZERO for d, n in enumerate(x.shape))

    return _seen(call, x, move, label="view")


@row("flip")
def _flip(call: NodeCall) -> Piece:
    x = call.args[0]
    move = view_indexing.flip(x.shape, _dims(call.args[1], len(x.shape)))
    return _seen(call, x, move, move, "flip")


@row("slice.Tensor")
def _slice(call: NodeCall) -> Piece:
    x = call.args[0]
    dim = call.arg(1, "dim", 0) % len(x.shape)
    start, _ = _range(x.shape[dim], call.arg(2, "start"), call.arg(3, "end"))
    return _seen(call, x, view_indexing.sliced(dim, start, call.arg(4, "step", 1)), label="slice")


def _range(size: Length, start: Length | None, end: Length | None) -> tuple[Length, Length]:
    """The first place and the one behind the last, as a slice has them."""
    first, last = (
        min(size, max(0, n + size if n < 0 else n))
        for n in (0 if start is None else start, size if end is None else end)
    )
    return first, max(first, last)


@row("select.int")
def _select(call: NodeCall) -> Piece:
    x, dim, place = call.args
    dim %= len(x.shape)
    place = as_expr(place % x.shape[dim])
    return _seen(call, x, lambda at: (*at[:dim], place, *at[dim:]), label="select")


@row("split_with_sizes")
def _split(call: NodeCall) -> tuple[Piece, ...]:
    x, sizes = call.args[:2]
    dim = call.arg(2, "dim", 0) % len(x.shape)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        MovedView(
            shape=(*x.shape[:dim], n, *x.shape[dim + 1 :]),
            dtype=x.dtype,
            of=x,
            label="split",
            move=view_indexing.sliced(dim, at, 1),
        )
        for n, at in zip(sizes, starts, strict=True)
    )


@row("constant_pad_nd")
def _pad(call: NodeCall) -> Piece:
    x = call.args[0]
    if kind(x.dtype) == "bool":
        raise NotOurs("truths are padded")
    before = _before(call)
    move = view_indexing.shifted([before.get(d, 0) for d in range(len(x.shape))])
    dims = [d for d, n in enumerate(x.shape) if call.shape[d] != n or before.get(d, 0)]
    return piecewise(
        x,
        call.shape,
        move,
        view_indexing.inside(x.shape, move, dims),
        filled(call.arg(2, "value", 0), x.dtype),
        "pad",
    )


def _before(call: NodeCall) -> dict[int, int]:
    """How many places a pad adds before each of the last dims, whose numbers are the last first."""
    x, sides = call.args[:2]
    return {len(x.shape) - 1 - i: n for i, n in enumerate(sides[::2])}


@row(*(f"{mode}_pad{n}d" for mode in ("reflection", "replication") for n in (1, 2, 3)))
def _bounded(call: NodeCall) -> Piece:
    mode = "clamp" if call.name.startswith("replication") else "reflect"
    x = call.args[0]
    return _seen(call, x, view_indexing.bounded(mode, x.shape, _before(call)), label=f"{mode} pad")


@row("slice_scatter")
def _slice_scatter(call: NodeCall) -> Piece:
    x, source = call.args[:2]
    dim = call.arg(2, "dim", 0) % len(x.shape)
    first, last = _range(x.shape[dim], call.arg(3, "start"), call.arg(4, "end"))
    step = call.arg(5, "step", 1)

    def move(at: Index) -> Index:
        e = at[dim] - first if first != 0 else at[dim]
        return (*at[:dim], e // step if step > 1 else e, *at[dim + 1 :])

    def where(at: Index) -> Expr:
        parts = [at[dim] >= first] if first != 0 else []
        parts += [at[dim] < last] if last < x.shape[dim] else []
        parts += [eq((at[dim] - first) % step, 0)] if step > 1 else []
        return all_of(parts)

    return piecewise(source, call.shape, move, where, x, "slice_scatter")


@row("select_scatter")
def _select_scatter(call: NodeCall) -> Piece:
    x, source, dim, place = call.args
    dim %= len(x.shape)
    place %= x.shape[dim]
    return piecewise(
        source,
        call.shape,
        lambda at: (*at[:dim], *at[dim + 1 :]),
        lambda at: eq(at[dim], place),
        x,
        "select_scatter",
    )


@row(*(f"upsample_nearest{n}d{vec}" for n in (1, 2, 3) for vec in ("", ".vec")))
def _upsample(call: NodeCall) -> Piece:
    x = call.args[0]
    rank = len(x.shape) - 2
    given = [v for v in (*call.args[2:], *call.kwargs.values())]
    listed = [v for v in given if isinstance(v, (list, tuple))]
    scales = list(listed[0]) if listed else [v for v in given if v is not None]
    if len(scales) != rank or any(isinstance(s, (SymbolicSize, Fraction)) for s in scales):
        scales = [None] * rank  # sizes tell them
    steps = [1.0 / s if s else n / m for s, n, m in zip(scales, x.shape[2:], call.shape[2:], strict=True)]
    move = view_indexing.scaled(x.shape[2:], call.shape[2:], steps)
    if move is None:
        raise NotOurs("nearest neighbours at a ratio that no division of whole numbers gives")
    return _seen(call, x, move, label="upsample")


@row("roll")
def _roll(call: NodeCall) -> Piece:
    x, shifts = call.args[:2]
    dims = call.arg(2, "dims", ())
    if not dims:
        raise NotOurs("a roll of all dims as one")
    before = {
        d % len(x.shape): s if 0 <= s < x.shape[d] else s % x.shape[d]
        for d, s in zip(dims, shifts, strict=True)
    }
    return _seen(call, x, view_indexing.bounded("wrap", x.shape, before), label="roll")


@row("index_select")
def _index_select(call: NodeCall) -> Piece:
    x, dim, index = call.args
    dim %= max(1, len(x.shape))
    return _indexed(
        call, x, index, lambda at: (at[dim],), lambda at, j: (*at[:dim], j, *at[dim + 1 :]), "index_select"
    )


@row("embedding")
def _embedding(call: NodeCall) -> Piece:
    x, index = call.args[:2]
    n = len(index.shape)
    return _indexed(call, x, index, lambda at: at[:n], lambda at, j: (j, *at[n:]), "embedding")


@row("gather")
def _gather(call: NodeCall) -> Piece:
    x, dim, index = call.args[:3]
    dim %= max(1, len(x.shape))
    return _indexed(call, x, index, lambda at: at, lambda at, j: (*at[:dim], j, *at[dim + 1 :]), "gather")


@row("index.Tensor", "_unsafe_index.Tensor")
def _index(call: NodeCall) -> Piece:
    x, indices = call.args
    told = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not told or any(kind(i.dtype) != "int" for _, i in told):
        raise NotOurs("a mask chooses elements")
    first = told[0][0]
    if [d for d, _ in told] != list(range(first, first + len(told))):
        raise NotOurs("indices of dims that are no neighbours")
    shape = call.shape[first : len(call.shape) - len(x.shape) + first + len(told)]
    rank = len(shape)
    placed = [_counted(expanded(i, shape)) for _, i in told]
    if all(c is not None for c in placed):

        def seen(at: Index) -> Index:
            own = at[first : first + rank]
            return (*at[:first], *(c(own) for c in placed if c), *at[first + rank :])

        return _seen(call, x, seen, label="index")
    parts = tuple((expanded(i, shape), lambda at: at[first : first + rank]) for _, i in told)

    def move(at: Index, values: Sequence[Expr]) -> Index:
        wrap = COORDINATES["from_end"]
        inside = [wrap(v, as_expr(x.shape[first + k])) for k, v in enumerate(values)]
        return (*at[:first], *inside, *at[first + rank :])

    return Indexed(shape=call.shape, dtype=x.dtype, of=x, told=parts, move=move, label="index")


def _counted(index: Piece) -> Callable[[Index], Expr] | None:
    """An index that the position tells, none of them negative."""
    if index.values is not None:
        return told_by_place(index.values) if bool((index.values >= 0).all()) else None
    if isinstance(index, MovedView):
        inner = _counted(index.of)
        return None if inner is None else lambda at: inner(index.move(at))
    return None


def _indexed(call: NodeCall, x: Piece, index: Any, told: Move, move: Any, label: str) -> Piece:
    if not x.shape:
        raise NotOurs("an index into one number")
    return Indexed(
        shape=call.shape,
        dtype=x.dtype,
        of=x,
        told=((index, told),),
        label=label,
        move=lambda at, values: move(at, values[0]),
    )


@row("cat")
def _cat(call: NodeCall) -> Piece:
    given = [x for x in call.args[0] if not same(x.shape, (0,))]
    dim = call.arg(1, "dim", 0) % len(call.shape)
    if kind(call.dtype) == "bool":
        raise NotOurs("truths are joined")
    if (clamped := _clamped(given, dim, call)) is not None:
        return clamped
    parts: list[PiecewisePart] = []
    start: Length = 0
    for x in given:
        before = [start if d == dim else 0 for d in range(len(call.shape))]
        start += x.shape[dim]
        parts.append(
            PiecewisePart(
                x if x.dtype is call.dtype else cast(x, call.dtype),
                view_indexing.shifted(before),
                partial(_is_below, dim, start),
            )
        )
    return PiecewiseIndex(shape=call.shape, dtype=call.dtype, label="cat", parts=tuple(parts), along=dim)


def _clamped(given: Sequence[Piece], dim: int, call: NodeCall) -> Piece | None:
    """A concatenation of a value with repetitions of its first and last elements along the dim, as one
    view: causal padding that repeats a frame needs no copy. None for another one."""
    for i, x in enumerate(given):
        last = x.shape[dim] - 1
        ends: list[tuple[Piece, Length]] = [(p, 0) for p in given[:i]] + [
            (p, last) for p in given[i + 1 :]
        ]
        if len(given) > 1 and x.dtype is call.dtype and all(_repeats(p, x, dim, end) for p, end in ends):
            before = sum((p.shape[dim] for p in given[:i]), start=0)
            return MovedView(
                shape=call.shape,
                dtype=x.dtype,
                of=x,
                label="clamp pad",
                move=view_indexing.bounded("clamp", x.shape, {dim: before}),
            )
    return None


def _repeats(piece: Piece, of: Piece, dim: int, place: Length) -> bool:
    """Whether a value is a view of another one that has the elements of one place along a dim."""
    at: Index = tuple(Var(f"d{d}") for d in range(len(piece.shape)))
    moved = at
    while isinstance(piece, MovedView) and piece is not of:
        moved, piece = piece.move(moved), piece.of
    return piece is of and all(
        n == 1 or simplify(e, Facts()) == (as_expr(place) if d == dim else own)
        for d, (e, own, n) in enumerate(zip(moved, at, of.shape, strict=True))
    )


def _is_below(dim: int, end: Length, at: Index) -> Expr:
    return at[dim] < end
