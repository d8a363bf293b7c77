"""The row of concatenations: one of several values by the position, or one whose ends are repeated."""

from __future__ import annotations

from collections.abc import Sequence

from transconv.graph.fusion.index_ir import (
    Index,
    MovedView,
    Piece,
    PiecewiseIndex,
    PiecewisePart,
    Where,
)
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.casts import cast
from transconv.graph.lowerings.table import NodeCall, NotOurs, kind, row
from transconv.graph.sizes import Length, same
from transconv.ir import Var, as_expr
from transconv.simplify import Facts, simplify


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
        start += x.shape[dim]
        end = start
        before = [start - x.shape[dim] if d == dim else 0 for d in range(len(call.shape))]
        parts.append(
            PiecewisePart(
                x if x.dtype is call.dtype else cast(x, call.dtype),
                view_indexing.shifted(before),
                _below(dim, end),
            )
        )
    return PiecewiseIndex(shape=call.shape, dtype=call.dtype, label="cat", parts=tuple(parts), along=dim)


def _clamped(given: Sequence[Piece], dim: int, call: NodeCall) -> Piece | None:
    """A concatenation of a value with repetitions of its first and last elements along the dim, as one
    view: causal padding that repeats a frame needs no copy. None for another one."""
    for i, x in enumerate(given):
        last = x.shape[dim] - 1
        ends: list[tuple[Piece, Length]] = [(p, 0) for p in given[:i]] + [(p, last) for p in given[i + 1:]]
        if len(given) > 1 and x.dtype is call.dtype and all(_repeats(p, x, dim, end) for p, end in ends):
            before = sum((p.shape[dim] for p in given[:i]), start=0)
            return MovedView(shape=call.shape, dtype=x.dtype, of=x, label="clamp pad",
                        move=view_indexing.bounded("clamp", x.shape, {dim: before}))
    return None


def _repeats(piece: Piece, of: Piece, dim: int, place: Length) -> bool:
    """Whether a value is a view of another one that has the elements of one place along a dim."""
    at: Index = tuple(Var(f"d{d}") for d in range(len(piece.shape)))
    moved = at
    while isinstance(piece, MovedView) and piece is not of:
        moved, piece = piece.move(moved), piece.of
    return piece is of and all(
        n == 1 or simplify(e, Facts()) == (as_expr(place) if d == dim else own)
        for d, (e, own, n) in enumerate(zip(moved, at, of.shape, strict=True)))


def _below(dim: int, end: Length) -> Where:
    return lambda at: at[dim] < end
