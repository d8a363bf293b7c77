"""The IR of a graph: values of every position, made of other values at positions.

    RegionInput      a tensor in memory                      Mapped    arithmetic on a position of others
    MovedView        another value at other positions        Indexed   at positions that values tell
    PiecewiseIndex   one of several, by the position         Reduced   many positions become one
    ConstantValue    a number                                Counted   a number made of the position
    ProductSum       a sum of products of two values

A view is a function of coordinates; nothing is computed or copied until a kernel asks for a position.

What is stored lies in memory in torch's order, but for images of convolutions. Convolutions read and store
boxes of features, and what stands between them is as fast in any order that all have in common. So values
that a convolution reads or makes, and those that maps, pads, windows and concatenations connect with such
ones, lie with features last, whatever torch says; what is handed out keeps its order, but for what only
the backward graph sees (regions/aot_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from transconv.conv import ConvProblem, Prop
from transconv.functional.calls import compiled_launch
from transconv.graph.sizes import Fraction, Index, Length, Move, Where, dense_strides, like, packed
from transconv.ir import TRUE, DType, Expr

TYPES: dict[torch.dtype, DType] = compiled_launch.HELD
"""The types of values, by torch's."""


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a type has all numbers of another one: it is that type, or a float of more bytes."""
    return wide is narrow or (wide.is_floating_point and wide.itemsize > narrow.itemsize)


def everywhere(_: Index) -> Expr:
    """The condition of what is there at all positions."""
    return TRUE


@dataclass(eq=False, kw_only=True)
class Piece:
    """A value for each position of a shape. ``label``: the operation it comes from; ``strides``: in
    elements, which torch gives it where it is stored; None: dense. ``values``: its elements, where they
    are the same at every call."""

    shape: tuple[Length, ...]
    dtype: torch.dtype
    label: str = ""
    strides: tuple[Length, ...] | None = None
    values: torch.Tensor | None = None

    @property
    def size(self) -> Length:
        """How many positions."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of its elements in memory; of the example where sizes are names."""
        return int(like(self.size)) * self.dtype.itemsize

    @property
    def operands(self) -> tuple[Piece, ...]:
        """What it is made of."""
        return ()

    @property
    def anchored(self) -> bool:
        """Whether a kernel has it at one position only: the rows of a reduction, the tile of a product."""
        return False


@dataclass(eq=False, kw_only=True)
class RegionInput(Piece):
    """A tensor that is handed to the region; ``of`` tells which."""

    of: Any


@dataclass(eq=False, kw_only=True)
class ConstantValue(Piece):
    """One number everywhere."""

    value: float | Length | Fraction


@dataclass(eq=False, kw_only=True)
class Counted(Piece):
    """An integer made of the position."""

    count: Callable[[Index], Expr]


@dataclass(eq=False, kw_only=True)
class Mapped(Piece):
    """Arithmetic. ``write``: of the operands' names, the text; ``work``: instructions of an element;
    ``place``: what else its text takes, coordinates of the position; ``equal``: it tells whether floats
    are equal; ``widened``: it is its operand in a type that has all of its numbers; ``range``: the least
    and the largest number that it may be, where that is known; ``nearest``: where its values are whole,
    what they are the nearest integers of, and an integer that is added to them, if any."""

    inputs: tuple[Piece, ...]
    write: Callable[..., str]
    work: float = 1.0
    equal: bool = False
    widened: bool = False
    range: tuple[float, float] | None = None
    nearest: tuple[Piece, Piece | None] | None = None
    place: Callable[[Index], Index] | None = None

    @property
    def operands(self) -> tuple[Piece, ...]:
        return self.inputs


@dataclass(eq=False, kw_only=True)
class MovedView(Piece):
    """A view of a value: ``of`` at the positions that ``move`` makes of its own. ``back``: the own
    position of one of ``of``, where each has one; ``alias``: torch's result is the same memory."""

    of: Piece
    move: Move
    back: Move | None = None
    alias: bool = False

    @property
    def operands(self) -> tuple[Piece, ...]:
        return (self.of,)


@dataclass(frozen=True, slots=True)
class PiecewisePart:
    """One of the values that a position may be taken from: where, and at which of its positions."""

    of: Piece
    move: Move
    where: Where = everywhere


@dataclass(eq=False, kw_only=True)
class PiecewiseIndex(Piece):
    """A choice by position: the first part whose condition holds; the last one's is not asked for.
    ``along``: of a concatenation, the dim along which the parts follow one another."""

    parts: tuple[PiecewisePart, ...]
    along: int | None = None

    @property
    def operands(self) -> tuple[Piece, ...]:
        return tuple(p.of for p in self.parts)


@dataclass(eq=False, kw_only=True)
class Indexed(Piece):
    """A gather: ``of`` at positions that values give. ``told``: which values, and at which of their
    positions; ``move``: of the position and the names of these values, the coordinates in ``of``."""

    of: Piece
    told: tuple[tuple[Piece, Move], ...]
    move: Callable[[Index, Sequence[Expr]], Index]

    @property
    def operands(self) -> tuple[Piece, ...]:
        return (self.of, *(piece for piece, _ in self.told))


@dataclass(eq=False, kw_only=True)
class Reduced(Piece):
    """A reduction: ``op`` over some dims of inputs of one shape; ``write``: what is reduced, of the
    inputs' names. ``deviating``: the value whose squared deviations from its mean over these dims are
    summed."""

    inputs: tuple[Piece, ...]
    op: str
    dims: tuple[int, ...]
    write: Callable[..., str] = str
    deviating: Piece | None = None

    @property
    def operands(self) -> tuple[Piece, ...]:
        return self.inputs

    @property
    def anchored(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a product: its positions along the product's axes, and where it counts."""

    of: Piece
    at: Index
    where: Expr


@dataclass(eq=False, kw_only=True)
class ProductSum(Piece):
    """A sum of products over axes of its own: names and sizes, those that are summed, the two factors,
    and the position of the result. ``math``: how f32 is multiplied. ``others``: the same for the other
    parts of a result that takes several computations, as the phases of a stride do. ``prop``: the
    direction of a convolution whose sums these are, and ``relation``, where no size is a name, its
    problem, too. ``instead``: another product of the same values."""

    axes: tuple[tuple[str, Length], ...]
    summed: tuple[str, ...]
    factors: tuple[Factor, Factor]
    at: Index
    math: str = "ieee"
    others: tuple[ProductSum, ...] = ()
    prop: Prop | None = None
    relation: tuple[ConvProblem, Prop] | None = None
    instead: Instead | None = None

    def become(self, other: ProductSum) -> None:
        """Be computed as another product of the same values."""
        for name in "label axes summed factors at math others prop relation instead".split():
            setattr(self, name, getattr(other, name))

    @property
    def operands(self) -> tuple[Piece, ...]:
        return (self.factors[0].of, self.factors[1].of)

    @property
    def anchored(self) -> bool:
        return True

    @property
    def multiplied(self) -> int:
        """How many products this part adds up; for the example where sizes are names."""
        return prod(like(n) for _, n in self.axes)


class Instead(NamedTuple):
    """Another product of the same values; ``rounds``: more often than torch."""

    product: ProductSum
    rounds: bool


def ingredients(piece: Piece, stored: set[Piece]) -> Iterator[Piece]:
    """All that a value is made of, up to what is in memory, once each."""
    left, seen = [piece], {piece}
    while left:
        at = left.pop()
        yield at
        if at in stored or isinstance(at, RegionInput):
            continue
        for x in at.operands:
            if x not in seen:
                seen.add(x)
                left.append(x)


def sources(piece: Piece, stored: set[Piece]) -> set[Piece]:
    """The tensors in memory that a value is made of."""
    return {x for x in ingredients(piece, stored) if isinstance(x, RegionInput) or x in stored}


def instructions(piece: Piece, stored: set[Piece]) -> float:
    """Instructions of one element."""
    return sum(x.work for x in ingredients(piece, stored) if isinstance(x, Mapped) and x not in stored)


ALIGNED = 16  # bytes of which the rows of boxes are multiples


def features_last(shape: Sequence[Length]) -> tuple[Length, ...]:
    """Dense strides with the second dim innermost, as boxes of a convolution like it."""
    inner = [prod(shape[d + 1 :]) * shape[1] for d in range(2, len(shape))]
    return (prod(shape[1:]), 1, *inner)


def memory_of(piece: Piece) -> tuple[Length, ...]:
    """The strides in which a value is stored: torch's, where its elements have places of their own."""
    if piece.strides is not None and packed(piece.shape, piece.strides) is not None:
        return piece.strides
    return dense_strides(piece.shape)


def aliased(piece: Piece) -> Piece:
    """What a value is a view of, in the same memory."""
    while isinstance(piece, MovedView) and piece.alias:
        piece = piece.of
    return piece


def images(order: Iterable[Piece]) -> set[Piece]:
    """Of values, operands first, those that are images of convolutions or connected with such ones."""
    pieces = [*order]
    near: dict[Piece, list[Piece]] = {}
    for piece in pieces:
        for x in _beside(piece):
            joined = isinstance(piece, PiecewiseIndex) and piece.along == 1
            if len(x.shape) == len(piece.shape) > 2 and (joined or x.shape[1] == piece.shape[1]):
                near.setdefault(x, []).append(piece)
                near.setdefault(piece, []).append(x)
    left = [x for p in pieces if isinstance(p, ProductSum) for x in _own(p)]
    found = {*left}
    while left:
        new = [x for x in near.get(left.pop(), ()) if x not in found]
        found |= {*new}
        left += new
    return {x for x in found if like(x.shape[1]) * x.dtype.itemsize % ALIGNED == 0}


def _beside(piece: Piece) -> Iterator[Piece]:
    """The operands of which a value may have the order in memory; of sums of windows, what these see."""
    if isinstance(piece, (Mapped, MovedView, PiecewiseIndex)):
        yield from piece.operands
    elif isinstance(piece, Reduced) and piece.dims[0] == len(piece.shape):
        for x in piece.inputs:
            while len(x.shape) > len(piece.shape) and x.operands:
                x = x.operands[0]
            yield x


def _own(product: ProductSum) -> Iterator[Piece]:
    """The images of a convolution."""
    prop = product.prop
    if prop is None:
        return
    for name, factor in zip(prop.operands, product.factors, strict=True):
        if name != "wei":
            yield factor.of
    if prop is not Prop.BWD_W:
        yield product


def ordered(ends: Iterable[Piece]) -> list[Piece]:
    """All values that some are made of, operands first."""
    found: dict[Piece, None] = {}
    left: list[tuple[Piece, bool]] = [(e, False) for e in reversed([*ends])]
    while left:
        piece, known = left.pop()
        if known:
            found[piece] = None
        elif piece not in found:
            left.append((piece, True))
            left += [(x, False) for x in reversed(piece.operands) if x not in found]
    return [*found]
