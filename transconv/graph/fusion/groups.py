"""Groups: which values one kernel computes, and at which positions of its axes.

A group begins with a reduction, a product, or a value that must be stored. Values behind it ride along
while they stand at its own positions: maps, casts, residuals, reshapes, permutations, and in rows further
reductions over the same axes. Everything else is stored and read by a later kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from transconv.compute import counted
from transconv.graph.fusion.index_ir import Index, Piece, ProductSum, Reduced
from transconv.graph.lowerings.view_indexing import reshape
from transconv.graph.sizes import Length, divides, facts_of, with_axis
from transconv.ir import Expr, Var, free_vars
from transconv.simplify import Facts, simplify

SILENT = ("view", "reshape", "expand", "permute", "copy", "cast")  # in the names of kernels
NAMED = 6  # operations at most


@lru_cache(maxsize=512)
def _facts(axes: tuple[tuple[str, Length], ...], known: Facts) -> Facts:
    """The ranges of axes. Groups of the same axes share them, with what was simplified by them."""
    for name, n in axes:
        known = with_axis(known, name, n)
    return known


class Statistic(NamedTuple):
    """A reduction of a value that rides with a product: the operation of the store, the value, and where
    it stands. ``applied``: whether something else needs the value, too."""

    op: str
    of: Piece
    at: Index
    applied: bool


@dataclass(eq=False, slots=True)
class FusionGroup:
    """Axes with sizes, which of them are ``reduced``, and the positions of values: ``at`` of every value
    that rides, ``within`` of what a reduction reduces. ``stores``: the values that are stored, and
    ``evaluated``: all that they are made of here;
    ``statistics``: which of them are reductions that leave with a product's store, and how."""

    number: int
    axes: list[tuple[str, Length]]
    reduced: set[str] = field(default_factory=set)
    product: ProductSum | None = None
    at: dict[Piece, Index] = field(default_factory=dict)
    within: dict[Piece, Index] = field(default_factory=dict)
    stores: list[Piece] = field(default_factory=list)
    strides: dict[Piece, tuple[Length, ...]] = field(default_factory=dict)
    evaluated: dict[Piece, None] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    siblings: list[FusionGroup] = field(default_factory=list)
    statistics: dict[Piece, Statistic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = _facts(tuple(self.axes), facts_of(n for _, n in self.axes))

    @property
    def kind(self) -> str:
        """product, rows or map."""
        return "product" if self.product else "rows" if self.reduced else "map"

    @property
    def labels(self) -> list[str]:
        """The names of the operations that it evaluates."""
        return [piece.label for piece in self.evaluated if piece.label]

    @property
    def math(self) -> str:
        """How f32 is multiplied."""
        return self.product.math if self.product else "tf32"

    @property
    def name(self) -> str:
        """What its operations are called, in short."""
        words = [w.replace(" ", "_") for w in dict.fromkeys(self.labels) if w not in SILENT]
        name = "_".join(words[:NAMED]) or "copy"
        return name if "_" in name else f"{name}_{self.kind}"

    def axes_of(self, at: Index, dims: Sequence[int]) -> list[str]:
        """The axes that some coordinates are made of, in the order of the group."""
        own = {v.name for d in dims for v in free_vars(at[d])}
        return [name for name, _ in self.axes if name in own]

    def simple(self, at: Sequence[Expr]) -> Index:
        """A position in its shortest form."""
        return tuple(simplify(e, self.facts) for e in at)

    @property
    def space(self) -> tuple[list[Expr], list[Length]]:
        """The positions of all elements, and the sizes."""
        return [Var(name) for name, _ in self.axes], [n for _, n in self.axes]

    @property
    def rows(self) -> tuple[list[Expr], list[Length]]:
        """Those of what is behind the reductions."""
        kept = [(name, n) for name, n in self.axes if name not in self.reduced]
        return [Var(name) for name, _ in kept], [n for _, n in kept]

    def positions(self, shape: Sequence[Length]) -> list[Index]:
        """Positions in a shape that has as many elements as the group, or rows: counted alike."""
        found = []
        for at, sizes in (self.space, self.rows):
            if self.product is None and prod(sizes) == prod(shape):
                found.append(self.simple(reshape(shape, sizes)(tuple(at))))
        return found


def refined(shape: Sequence[Length], others: Sequence[Sequence[Length]]) -> list[Length]:
    """A shape whose dims are those of this one, cut where the dims of others end: so that each of them is
    some neighbouring dims. Others that do not fit are left out."""
    cuts = _ends(shape)
    for other in others:
        cuts = _together(cuts, _ends(other)) or cuts
    return [a // b for b, a in reversed([*pairwise(cuts)])] or [1]


def _ends(shape: Sequence[Length]) -> list[Length]:
    """How many elements there are between the ends of dims and the last element, the fewest first."""
    return [prod(shape[d:]) for d in reversed(range(len(shape) + 1)) if d == len(shape) or shape[d] != 1]


def _together(one: Sequence[Length], other: Sequence[Length]) -> list[Length]:
    """All of two lists in which each number divides the next; empty where they have no such order for all
    sizes."""
    found, left, right = list[Length](), [*one], [*other]
    while left and right:
        a, b = left[0], right[0]
        equal = a == b
        if not equal and not divides(a, b) and not divides(b, a):
            return []
        first = equal or divides(a, b)
        found.append(left.pop(0) if first else right.pop(0))
        if equal:
            right.pop(0)
    found += [*left, *right]
    return found if all(divides(a, b) for a, b in pairwise(found)) else []


def named(sizes: Sequence[Length]) -> list[tuple[str, Length]]:
    """Axes of these sizes."""
    return list(zip(counted("i"), sizes, strict=False))


def rows_group(number: int, inputs: Sequence[Piece], dims: Sequence[int],
               others: Sequence[Sequence[Length]]) -> FusionGroup:
    """A group that reduces over some dims of its inputs."""
    shape = inputs[0].shape
    made = FusionGroup(number, named(refined(shape, others)))
    at = _position(made, shape)
    made.reduced = {v.name for d in dims for v in free_vars(at[d])}
    for x in inputs:
        made.at[x] = at
    return made


def _position(group: FusionGroup, shape: Sequence[Length]) -> Index:
    at, sizes = group.space
    return group.simple(reshape(shape, sizes)(tuple(at)))


def product_group(number: int, piece: ProductSum) -> FusionGroup:
    """A group for a product, with one for each of its other parts."""
    made, *others = [FusionGroup(number, list(p.axes), {*p.summed}, p) for p in (piece, *piece.others)]
    for group in (made, *others):
        assert group.product is not None
        group.at[piece] = group.simple(group.product.at)
        group.stores, group.strides, group.evaluated = made.stores, made.strides, made.evaluated
    made.siblings = others
    return made


def map_group(number: int, shape: Sequence[Length]) -> FusionGroup:
    """A group that stores values of a shape."""
    return FusionGroup(number, named(shape) or [("one", 1)])


def behind(at: Index, piece: Reduced) -> Index:
    """The position of a reduction's result, of that of its inputs."""
    return tuple(e for d, e in enumerate(at) if d not in piece.dims)
