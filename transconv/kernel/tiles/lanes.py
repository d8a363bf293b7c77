"""The lanes of tiles: one for each place of a dimension, counted from the last, and each power of two.

    shape (3, 100)    row4, col128: elements from row 3 and column 100 on are no part of the tile

Dimensions of the same place and extent share a lane, so NumPy's broadcasting needs no node of the IR. What
moves to another place (``x[:, None]``, a transpose, what is left of a reduction) gets other lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transconv.ir import Expr, ExprMutator, Lane, Reduce, Renamed, Var
from transconv.kernel.refusals import Refusal

PLACES = ("col", "row", "page", "book", "shelf", "room")
"""The names of places, from the last dimension to the first."""
LAST = 32  # the axis of the last dimension's lanes; axes between two places are those of products
Shape = tuple[int, ...]
Scope = Mapping[Var, tuple[Lane, ...]]


def capacity(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def lane_at(place: int, size: int) -> Lane | None:
    """The lane of a dimension of this size, ``place`` dimensions before the last; None for one element."""
    if size == 1:
        return None
    return Lane(f"{PLACES[place]}{capacity(size)}", capacity(size), LAST - 2 * place)


def each_dimension(items: Sequence[Any], ndim: int, of: str = "an array") -> list[Any]:
    """Indices, one for each dimension and each None, with slices in place of an ellipsis and behind the
    last."""
    used = sum(x is not None and x is not Ellipsis for x in items)
    if used > ndim:
        raise Refusal(f"{used} indices of {of} of {ndim} dimensions", f"up to {ndim}")
    found: list[Any] = []
    for x in items if any(x is Ellipsis for x in items) else (*items, Ellipsis):
        found += [slice(None)] * (ndim - used) if x is Ellipsis else [x]
    return found


def lanes_along(shape: Sequence[int]) -> tuple[Lane | None, ...]:
    """The lane of each dimension."""
    if len(shape) > len(PLACES):
        raise Refusal(f"a tile of {len(shape)} dimensions", f"up to {len(PLACES)}")
    return tuple(lane_at(len(shape) - 1 - at, size) for at, size in enumerate(shape))


def inner_lane(size: int) -> Lane:
    """The lane over which a product sums: the columns of its left operand, the rows of its right one."""
    return Lane(f"inner{capacity(size)}", capacity(size), LAST - 1)


def between_lane(place: int, size: int) -> Lane:
    """The lane along which elements of a dimension are looked for, beside that of those that are found."""
    return Lane(f"found_{PLACES[place]}{capacity(size)}", capacity(size), LAST - 2 * place - 1)


def own_lanes(shape: Sequence[int]) -> tuple[Lane, ...]:
    """The lanes of a tile, in the order of its dimensions."""
    return tuple(x for x in lanes_along(shape) if x is not None)


def ends(shape: Sequence[int]) -> tuple[Expr, ...]:
    """The conditions that hold for the elements of a tile, and not for the lanes beyond its end."""
    return tuple(lane < size for lane, size in zip(lanes_along(shape), shape, strict=True)
                 if lane is not None and lane.extent != size)


def broadcast(*shapes: Shape) -> Shape:
    """The shape of tiles that are combined element by element."""
    rank = max((len(s) for s in shapes), default=0)
    made = []
    for at in range(rank):
        sizes = {s[at - rank] for s in shapes if len(s) >= rank - at} - {1}
        if len(sizes) > 1:
            told = " and ".join(map(str, shapes))
            raise Refusal(f"the shapes {told}, which NumPy cannot broadcast",
                          "equal sizes from the last dimension on, or 1", "x[:, None] - y[None, :]")
        made.append(sizes.pop() if sizes else 1)
    return tuple(made)


def moved(e: Expr, lanes: Mapping[Lane, Lane], scope: Scope) -> Expr:
    """An expression along other lanes. ``scope``: the lanes of variables."""
    lanes = {a: b for a, b in lanes.items() if a is not b}
    return _Moved(lanes, scope).mutate(e) if lanes else e


class _Moved(ExprMutator):
    def __init__(self, lanes: Mapping[Lane, Lane], scope: Scope) -> None:
        super().__init__()
        self.lanes, self.scope = lanes, scope

    def mutate_Lane(self, at: Lane) -> Expr:
        return self.lanes.get(at, at)

    def mutate_Var(self, at: Var) -> Expr:
        return renamed(at, {x: self.lanes.get(x, x) for x in self.scope.get(at, ())})

    def mutate_Renamed(self, at: Renamed) -> Expr:
        assert isinstance(at.x, Var)
        before = {x: at.of(x) for x in self.scope.get(at.x, ())}
        return renamed(at.x, {x: self.lanes.get(y, y) for x, y in before.items()})

    def mutate_Reduce(self, at: Reduce) -> Expr:
        raise AssertionError(f"{at} has no name")


def renamed(var: Var, lanes: Mapping[Lane, Lane]) -> Expr:
    """A name along other lanes."""
    other = [(a, b) for a, b in lanes.items() if a is not b]
    return Renamed(var, tuple(a for a, _ in other), tuple(b for _, b in other)) if other else var
