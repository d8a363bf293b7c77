"""Groups: which values one kernel computes, and at which positions of its axes; plans, made of groups; and
what a kernel costs.

A group begins with a reduction, a product, or a value that must be stored. Values behind it ride along
while they stand at its own positions: maps, casts, residuals, reshapes, permutations, and in rows further
reductions over the same axes. Everything else is stored and read by a later kernel.

The costs are counts and a roofline, which decisions of a plan need; the estimate of a kernel's schedule is
the cost room's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from transconv.compute import counted
from transconv.functional.calls.compiled_launch import TensorMemory
from transconv.graph.fusion.index_ir import (
    Mapped,
    Piece,
    PiecewiseIndex,
    ProductSum,
    Reduced,
    memory_of,
    sources,
)
from transconv.graph.lowerings.view_indexing import reshape
from transconv.graph.sizes import Index, Length, divides, facts_of, like, with_axis
from transconv.ir import Expr, Var, free_vars
from transconv.simplify import Facts, simplify
from transconv.target import Target

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
    it stands. ``applied``: whether it is applied to the elements of its rows, as norms do."""

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
        if self.product is not None:
            return []
        ways = (
            _counted(tuple(shape), tuple(n), tuple(at), self.facts) for at, n in (self.space, self.rows)
        )
        return [at for at in ways if at is not None]


@lru_cache(maxsize=1024)  # values of one shape are many, and so are groups of the same axes
def _counted(
    shape: tuple[Length, ...], sizes: tuple[Length, ...], at: Index, facts: Facts
) -> Index | None:
    """The position in a shape of the element at a position of axes; None where those have others."""
    if prod(sizes) != prod(shape):
        return None
    return tuple(simplify(e, facts) for e in reshape(shape, sizes)(at))


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


def rows_group(
    number: int, inputs: Sequence[Piece], dims: Sequence[int], others: Sequence[Sequence[Length]]
) -> FusionGroup:
    """A group that reduces over some dims of its inputs."""
    shape = inputs[0].shape
    made = FusionGroup(number, named(refined(shape, others)))
    space, sizes = made.space
    at = made.simple(reshape(shape, sizes)(tuple(space)))
    made.reduced = {v.name for d in dims for v in free_vars(at[d])}
    for x in inputs:
        made.at[x] = at
    return made


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


# -- costs -------------------------------------------------------------------------------------------


WIDE = 128  # columns of a product's tile: as often is a row loaded


@dataclass(frozen=True, slots=True)
class Price:
    """The roofline of a target: microseconds by its rates."""

    target: Target

    @property
    def launch_us(self) -> float:
        """Microseconds of a launch that computes nothing."""
        return self.target.rates.issue.empty_us

    def late(self, p: ProductSum) -> float:
        """Microseconds more of a product of which a factor is computed in registers first."""
        return self.target.rates.issue.computed_late * self.multiplied(p)

    def moved(self, count: float) -> float:
        """Microseconds that so many bytes take."""
        return count / (self.target.bandwidth_gbs * 1e3)

    def worked(self, count: float) -> float:
        """Microseconds that so many instructions take."""
        issue = self.target.rates.issue
        return count / (self.target.sms * issue.cores * (issue.clock * 1e3))

    def multiplied(self, p: ProductSum) -> float:
        """Microseconds of a product."""
        rate = self.target.tflops * (1.0 if p.factors[0].of.dtype.itemsize < 4 else 0.5)
        return 2 * sum(part.multiplied for part in (p, *p.others)) / (rate * 1e6)

    def least(self, p: ProductSum) -> float:
        """Microseconds that no kernel of a product alone stays below, by the cost room's estimates."""
        moved = self.moved(sum(f.of.bytes for f in p.factors) + p.bytes)
        quick = 0.5 if p.factors[0].of.dtype.itemsize == 1 else 1.0
        return max(moved, quick * self.multiplied(p))

    def kernel(self, bytes_: float, work: float, p: ProductSum | None) -> float:
        """Microseconds of a kernel: its launch, and memory beside arithmetic."""
        busy = self.worked(work) + (self.multiplied(p) if p else 0.0)
        return self.launch_us + max(self.moved(bytes_), busy)


def ahead(piece: Piece) -> float:
    """Instructions of all elements of a value, of operands that are there."""
    return piece.work * like(piece.size) if isinstance(piece, Mapped) else 0.0


def visits(p: ProductSum, side: int) -> float:
    """How often each element of a factor is loaded: by every tile across, in every place of a window."""
    own = p.factors[side].of
    other = like(p.shape[1 - side - 2] if len(p.shape) == 2 else p.factors[1 - side].of.shape[0])
    moved = {v.name for e in p.factors[side].at for v in free_vars(e)}
    seen = prod(like(n) for name, n in p.axes if name in moved)
    return float(max(1.0, seen / max(1, like(own.size))) * -(-other // WIDE))


def traffic(group: FusionGroup, stored: set[Piece]) -> tuple[int, float]:
    """Bytes that a group reads and writes at least, and its operations: multiply-adds count twice."""
    ends = [*group.stores, *group.within, *([group.product] if group.product else [])]
    read = {x for e in ends for x in sources(e, stored - {*group.stores})}
    elements = prod(like(n) for _, n in group.axes)
    done = {*group.at, *group.evaluated}
    each = sum(x.work for x in done if isinstance(x, Mapped)) + len(group.within)
    operations = 2.0 * group.product.multiplied if group.product else 0.0
    operations += each * (like(group.product.size) if group.product else elements)
    return sum(x.bytes for x in {*read, *group.stores}), operations


# -- plans -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that goes through memory: from its operation to another one, and why."""

    value: str
    user: str
    reason: str


@dataclass(slots=True)
class FusionPlan:
    """The groups in the order in which they run, what is in memory behind which of them, and which of it
    lies in the memory of a concatenation."""

    groups: list[FusionGroup] = field(default_factory=list)
    stored: dict[Piece, FusionGroup] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    places: dict[Piece, ConcatOffset] = field(default_factory=dict)

    def strides(self, piece: Piece) -> tuple[Length, ...]:
        """Of a value that is stored, in elements."""
        place = self.places.get(piece)
        return memory_of(piece) if place is None else place.strides

    def note(self, value: Piece, user: Piece, reason: str) -> None:
        """That a value goes through memory, and why."""
        self.edges.append(Edge(value.label or "a value", user.label or "a value", reason))


@dataclass(frozen=True, slots=True)
class ConcatOffset:
    """Where a value lies: in the memory of a concatenation, so many elements behind its beginning, with
    these strides."""

    whole: PiecewiseIndex
    behind: int
    strides: tuple[int, ...]


class Slices(NamedTuple):
    """Memory that several values have together: of which value, how it lies, and which others have slices
    of it, with their sizes, their strides and how many elements behind its beginning they begin."""

    whole: Piece
    memory: TensorMemory
    parts: tuple[tuple[Piece, tuple[tuple[int, ...], tuple[int, ...], int]], ...]


def slices(plan: FusionPlan, value: Callable[[Length], int]) -> dict[Piece, Slices]:
    """What has memory with others, by each of these, for the sizes of a call."""

    def numbers(shape: Sequence[Length]) -> tuple[int, ...]:
        return tuple(map(value, shape))

    by_whole: dict[Piece, list[tuple[Piece, tuple[tuple[int, ...], tuple[int, ...], int]]]] = {}
    for piece, at in plan.places.items():
        by_whole.setdefault(at.whole, []).append((piece, (numbers(piece.shape), at.strides, at.behind)))
    made = {
        w: Slices(w, TensorMemory(numbers(w.shape), numbers(memory_of(w)), w.dtype), tuple(parts))
        for w, parts in by_whole.items()
    }
    return {piece: made[at.whole] for piece, at in plan.places.items()}


def numbers_of(sizes: Iterable[Length]) -> tuple[int, ...]:
    return tuple(n for n in sizes if isinstance(n, int))
