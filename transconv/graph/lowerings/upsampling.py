"""Convolutions of images that nearest neighbours made larger, as transposed ones of the small image.

    y[o] = sum_t up[o + t - p] w[t],  up[j] = x[j // s]      3 taps of the large image, s = 2
         = sum_i x[i] v[o + P - s*i]                         4 taps, of which each place has 2
    v[u] = w[k - 1 - u] + ... + w[k - 1 - u + s - 1],  P = k - 1 - p

Taps that meet the same element are added up in the weight, once. Of a 3x3 filter behind an image that is
twice as large 4 products of 9 are left for each place, and the large image is never written. Whether that
is faster the estimates decide (regions/region_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product as every
from math import prod
from typing import NamedTuple

from transconv.graph.fusion.index_ir import ConstantValue, Mapped, MovedView, Piece, features_last, holds
from transconv.graph.lowerings import view_indexing
from transconv.graph.lowerings.table import mapped, piecewise
from transconv.graph.sizes import Index, Length, SymbolicSize, like, with_axis
from transconv.ir import Const, Expr, FloorDiv, Var, free_vars, substitute, value_at
from transconv.simplify import Facts, simplify
from transconv.torch_ops.arguments import Params

MOST = 16  # taps that are added up
MOST_TRIED = 64  # places of a dim whose coordinates are computed
FOLDED = (4, 3, 2)  # times that are looked for in views
SUMMED = "summed weight"


class Small(NamedTuple):
    """An image before it was made larger, so many times along each spatial dim."""

    image: Piece
    times: tuple[int, ...]


def small(x: Piece) -> Small | None:
    """What a value repeats, also through maps, of which each place has its own; None if it repeats none,
    and where sizes are names."""
    if len(x.shape) < 3 or any(isinstance(n, SymbolicSize) for n in x.shape):
        return None
    axes = tuple((f"d{d}", n) for d, n in enumerate(x.shape))
    facts = Facts()
    for name, n in axes:
        facts = with_axis(facts, name, n)
    at: Index = tuple(Var(name) for name, _ in axes)
    maps: list[Mapped] = []
    piece = x
    while True:
        own = [x for x in piece.operands if not isinstance(x, ConstantValue)]
        if isinstance(piece, Mapped) and piece.place is None and len(own) == 1:
            maps.append(piece)
            piece = own[0]
        elif isinstance(piece, MovedView):
            at = tuple(simplify(e, facts) for e in piece.move(at))
            piece = piece.of
            if any(isinstance(n, SymbolicSize) for n in piece.shape):
                return None
            if times := _times(at, x, piece):
                return Small(_again(piece, maps, lambda p: p), times)
            if times := _folded(at, x, facts):
                return Small(_again(piece, maps, partial(_fewer, at=at, large=x, times=times)), times)
        else:
            return None


def _times(at: Index, large: Piece, piece: Piece) -> tuple[int, ...]:
    """How often each element is there along the spatial dims; empty if a value is no such image."""
    if len(at) != len(large.shape) or piece.shape[:2] != large.shape[:2]:
        return ()
    found = [
        _repeats(e, f"d{d}", like(n), like(m))
        for d, (e, n, m) in enumerate(zip(at, large.shape, piece.shape, strict=True))
    ]
    return tuple(found[2:]) if found[:2] == [1, 1] and prod(found) > 1 else ()


def _folded(at: Index, large: Piece, facts: Facts) -> tuple[int, ...]:
    """The same of an image that is seen through further views, such as frames that are a batch."""

    def of(d: int, size: int) -> int:
        return next((s for s in FOLDED if size % s == 0 and _is_folded(at, f"d{d}", size, s, facts)), 1)

    times = [of(d, like(n)) for d, n in enumerate(large.shape) if d > 1]
    return tuple(times) if prod(times) > 1 else ()


def _is_folded(at: Index, name: str, size: int, times: int, facts: Facts) -> bool:
    """Whether coordinates depend on an axis, but not on where it is among so many neighbours."""
    q, r = Var(f"{name}_outer"), Var(f"{name}_inner")
    known = with_axis(with_axis(facts, q.name, size // times), r.name, times)
    moved = [simplify(substitute(e, {Var(name): q * times + r}), known) for e in at]
    used = {v for e in moved for v in free_vars(e)}
    return q in used and r not in used


def _fewer(piece: Piece, at: Index, large: Piece, times: Sequence[int]) -> Piece:
    """The small image: every so manieth place of the large one."""
    names = [Var(f"d{d}") for d in range(len(large.shape))]
    steps = (1, 1, *times)

    def move(own: Index) -> Index:
        placed = {v: e * s if s > 1 else e for v, e, s in zip(names, own, steps, strict=True)}
        return tuple(substitute(e, placed) for e in at)

    shape = tuple(like(n) // s for n, s in zip(large.shape, steps, strict=True))
    return MovedView(shape=shape, dtype=piece.dtype, of=piece, move=move, label="view")


def _repeats(e: Expr, name: str, large: int, small: int) -> int:
    """How often a coordinate has each of its values, one after another; 0 if it is another one."""
    by = large // small
    match e:
        case Var(own) if own == name and by == 1:
            return 1
        case FloorDiv(Var(own), Const(divisor)) if own == name and small * by == large and divisor == by:
            return by
    if small * by != large or {v.name for v in free_vars(e)} - {name} or large > MOST_TRIED:
        return 0
    return by if all(value_at(e, {name: i}) == i // by for i in range(large)) else 0  # written otherwise


def _again(piece: Piece, maps: Sequence[Mapped], image: Callable[[Piece], Piece]) -> Piece:
    """The same arithmetic on the small image of a value; none where it only widens elements and narrows
    them."""
    found, casts = piece, [*maps]
    while isinstance(found, Mapped) and found.label == "cast":
        casts.append(found)
        found = found.inputs[0]
    if (
        casts
        and casts[0].dtype is found.dtype
        and all(m.label == "cast" and holds(m.dtype, found.dtype) for m in casts)
    ):
        return image(found)
    piece = image(piece)
    for m in reversed(maps):
        inputs = tuple(
            replace(x, shape=piece.shape) if isinstance(x, ConstantValue) else piece for x in m.inputs
        )
        piece = replace(m, shape=piece.shape, inputs=inputs, strides=None)
    return piece


def params(p: Params, found: Small, taps: Sequence[int]) -> Params | None:
    """Those of the transposed convolution; None if a convolution steps, has gaps or groups, or if its
    taps do not meet."""
    pad = tuple(k - 1 - n for k, n in zip(taps, p.pad_lo, strict=True))
    if (
        p.transposed
        or p.groups != 1
        or p.pad_lo != p.pad_hi
        or any(n != 1 for n in (*p.stride, *p.dilation))
        or min(pad) < 0
        or prod(found.times) > MOST
    ):
        return None
    ones = (1,) * len(taps)
    return Params(found.times, pad, ones, True, (0,) * len(taps), 1)


def weight(w: Piece, found: Small) -> Piece:
    """Of (out, in, *k) the sums, as (in, out, *(k + s - 1)), in the weight's type."""
    taps = [int(k) for k in w.shape[2:]]
    shape = (w.shape[1], w.shape[0], *(k + s - 1 for k, s in zip(taps, found.times, strict=True)))
    terms = [_term(w, taps, place, shape) for place in every(*map(range, found.times))]
    made = mapped(
        " + ".join(["{}"] * len(terms)).format, *terms, dtype=w.dtype, label=SUMMED, work=float(len(terms))
    )
    made.strides = features_last(shape)
    return made


def _term(w: Piece, taps: Sequence[int], place: Sequence[int], shape: tuple[Length, ...]) -> Piece:
    """The tap that each place of the sums has as one of its terms, or none."""

    def move(at: Index) -> Index:
        return (at[1], at[0], *(k - 1 + d - u for k, d, u in zip(taps, place, at[2:], strict=True)))

    dims = [2 + d for d in range(len(taps)) if shape[2 + d] != taps[d]]
    return piecewise(w, shape, move, view_indexing.inside(w.shape, move, dims), 0.0)
