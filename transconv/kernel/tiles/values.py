"""The values of a kernel while its source is read: lanes, tiles, masks, arrays and where their elements
are.

Numbers, tuples, strings, types and functions are Python's own objects. A number that is known at run
time only is a tile without dimensions; its type is ``index`` if it is a position (an id, a loop's
counter).

Lanes: one for each place of a dimension, counted from the last, and each power of two.

    shape (3, 100)    row4, col128: elements from row 3 and column 100 on are no part of the tile

Dimensions of the same place and extent share a lane, so NumPy's broadcasting needs no node of the IR.
What moves to another place (``x[:, None]``, a transpose, what is left of a reduction) gets other lanes.

Masks: conditions that travel with a tile. They are proved away where facts allow it.

    f(a, b)      active where both are
    reduction    active where an element is active: ``row < m & col < n`` over col is ``row < m & 0 < n``
    t[..] = v    active where t was, or where v is written

Mappings: where the elements of a tile are in an array, from Python functions.

    rows = create_mapping(lambda m, k: (m // W, m % W + k // C, k % C))
    a = group.load(X[y:], shape=(32, 64), mapping=rows)     a[m, k]: X[y + m // W, m % W + k // C, k % C]
    Z = index_map((H, W), lambda i, j: j * H + i)(X)        Z[i, j]: X[j * H + i]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np

from transconv import ir
from transconv.kernel.source import Refusal, named, number_of
from transconv.simplify import Facts, simplify
from transconv.support import KernelError

# -- lanes -----------------------------------------------------------------------------------------

PLACES = ("col", "row", "page", "book", "shelf", "room")
"""The names of places, from the last dimension to the first."""
LAST = 32  # the axis of the last dimension's lanes; axes between two places are those of products
Shape = tuple[int, ...]
Scope = dict[ir.Var, tuple[ir.Lane, ...]]


def capacity(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def lane_at(place: int, size: int) -> ir.Lane | None:
    """The lane of a dimension of this size, ``place`` dimensions before the last; None for one element."""
    if size == 1:
        return None
    return ir.Lane(f"{PLACES[place]}{capacity(size)}", capacity(size), LAST - 2 * place)


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


def side_by_side(tiles: Sequence[bool], items: Sequence[Any]) -> None:
    """Refuse indices of a tile of which some are tiles, and others are no slices or stand between them."""
    first, last = tiles.index(True), len(tiles) - 1 - tiles[::-1].index(True)
    if not all(tiles[first : last + 1]) or not all(
        tile or isinstance(i, slice) for tile, i in zip(tiles, items, strict=True)
    ):
        raise Refusal("a tile beside other indices of a tile", "tiles side by side, and slices", "x[:, i]")


def lanes_along(shape: Sequence[int]) -> tuple[ir.Lane | None, ...]:
    """The lane of each dimension."""
    if len(shape) > len(PLACES):
        raise Refusal(f"a tile of {len(shape)} dimensions", f"up to {len(PLACES)}")
    return tuple(lane_at(len(shape) - 1 - at, size) for at, size in enumerate(shape))


def inner_lane(size: int) -> ir.Lane:
    """The lane over which a product sums: the columns of its left operand, the rows of its right one."""
    return ir.Lane(f"inner{capacity(size)}", capacity(size), LAST - 1)


def between_lane(place: int, size: int) -> ir.Lane:
    """The lane along which elements of a dimension are looked for, between it and that of the next."""
    return ir.Lane(f"found_{PLACES[place]}{capacity(size)}", capacity(size), LAST - 2 * place - 1)


def own_lanes(shape: Sequence[int]) -> tuple[ir.Lane, ...]:
    """The lanes of a tile, in the order of its dimensions."""
    return tuple(x for x in lanes_along(shape) if x is not None)


def ends(shape: Sequence[int]) -> tuple[ir.Expr, ...]:
    """The conditions that hold for the elements of a tile, and not for the lanes beyond its end."""
    return tuple(
        lane < size
        for lane, size in zip(lanes_along(shape), shape, strict=True)
        if lane is not None and lane.extent != size
    )


def broadcast(*shapes: Shape) -> Shape:
    """The shape of tiles that are combined element by element."""
    rank = max((len(s) for s in shapes), default=0)
    made = []
    for at in range(rank):
        sizes = {s[at - rank] for s in shapes if len(s) >= rank - at} - {1}
        if len(sizes) > 1:
            told = " and ".join(map(str, shapes))
            raise Refusal(
                f"the shapes {told}, which NumPy cannot broadcast",
                "equal sizes from the last dimension on, or 1",
                "x[:, None] - y[None, :]",
            )
        made.append(sizes.pop() if sizes else 1)
    return tuple(made)


def moved(e: ir.Expr, lanes: dict[ir.Lane, ir.Lane], scope: Scope) -> ir.Expr:
    """An expression along other lanes. ``scope``: the lanes of variables."""
    lanes = {a: b for a, b in lanes.items() if a is not b}
    return _Moved(lanes, scope).mutate(e) if lanes else e


class _Moved(ir.ExprMutator):
    def __init__(self, lanes: dict[ir.Lane, ir.Lane], scope: Scope) -> None:
        super().__init__()
        self.lanes, self.scope = lanes, scope

    def mutate_Lane(self, at: ir.Lane) -> ir.Expr:
        return self.lanes.get(at, at)

    def mutate_Var(self, at: ir.Var) -> ir.Expr:
        return renamed(at, {x: self.lanes.get(x, x) for x in self.scope.get(at, ())})

    def mutate_Renamed(self, at: ir.Renamed) -> ir.Expr:
        assert isinstance(at.x, ir.Var)
        before = {x: at.of(x) for x in self.scope.get(at.x, ())}
        return renamed(at.x, {x: self.lanes.get(y, y) for x, y in before.items()})

    def mutate_Reduce(self, at: ir.Reduce) -> ir.Expr:
        raise AssertionError(f"{at} has no name")


def renamed(var: ir.Var, lanes: dict[ir.Lane, ir.Lane]) -> ir.Expr:
    """A name along other lanes."""
    other = [(a, b) for a, b in lanes.items() if a is not b]
    return ir.Renamed(var, tuple(a for a, _ in other), tuple(b for _, b in other)) if other else var


# -- values ----------------------------------------------------------------------------------------

Mask: TypeAlias = tuple[ir.Expr, ...]
"""Conditions, all of which hold where an element is active; none for a tile that is active everywhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A value of a group: an expression over the lanes of its shape, and where it is active. ``vector``:
    of the immutable kind. ``items``: how many of its first dimensions are the group's work-items, each of
    which has the rest as its own value."""

    shape: Shape
    expr: ir.Expr
    mask: Mask = ()
    vector: bool = False
    items: int = 0

    @property
    def own(self) -> Shape:
        """The shape of the value of one work-item."""
        return self.shape[self.items :]

    @property
    def dtype(self) -> ir.DType:
        """The type of its elements."""
        return self.expr.dtype

    @property
    def lanes(self) -> tuple[ir.Lane, ...]:
        """The lanes of its dimensions, without those of one element."""
        return own_lanes(self.shape)

    def __str__(self) -> str:
        if not self.own:
            each = " of each work-item" * bool(self.items)
            return f"a number of type {named(self.dtype)}{each}"
        return f"a tile {named(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class DimSlice:
    """A dimension of an array as it is accessed: from ``start`` to before ``stop`` by ``step``. ``place``:
    the start as it was written, where it may be below ``least``, the first place of the array, and then
    counts from the end; ``unsure``: whether it may also not be."""

    dim: int
    start: ir.Expr
    stop: ir.Expr
    step: int = 1
    place: ir.Expr | None = None
    least: ir.Expr = ir.ZERO
    unsure: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ArrayView:
    """An array of the call, or a part of it. ``along``: its dimensions in order (None: a new one of one
    element); ``at``: the places in the other dimensions of the tensor; ``mask``: where these exist.
    ``items``: the shape of the items that each have such a part; places then vary along its lanes.
    ``layout``: where the elements are in an array of one dimension."""

    tensor: ir.Tensor
    along: tuple[DimSlice | None, ...]
    at: dict[int, ir.Expr] = field(default_factory=dict)
    mask: Mask = ()
    items: Shape = ()
    layout: IndexMap | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.along)

    @property
    def dims(self) -> int:
        """The number of dimensions of the array that this is a part of."""
        return len(self.layout.shape if self.layout is not None else self.tensor.shape)

    def __str__(self) -> str:
        return f"an array of {self.ndim} dimensions"


@dataclass(frozen=True, slots=True, eq=False)
class AtomicView:
    """An array, to elements of which is added in one indivisible step."""

    view: ArrayView


@dataclass(frozen=True, slots=True, eq=False)
class BoundMethod:
    """A method of a value, to be called. ``function``: of the reader, the value, and the arguments."""

    name: str
    of: Any
    function: Callable[..., Any]


def tile_of(value: Any) -> Tile:
    """A tile, or a number as one. Refuses what is neither."""
    if isinstance(value, Tile):
        return value
    if isinstance(value, bool):
        return Tile((), ir.Const(value, ir.boolean))
    if isinstance(value, int):
        return Tile((), ir.Const(number_of(value), ir.index))
    if isinstance(value, float):
        return Tile((), ir.Const(value, ir.f32))
    loads = "x = group.load(X[i:], shape=group.shape)" if isinstance(value, ArrayView) else ""
    raise Refusal(described(value), "a tile or a number", loads)


def combined(tiles: Sequence[Tile], expr: ir.Expr) -> Tile:
    """A value of tiles that are combined element by element: active where all of them are."""
    return Tile(
        broadcast(*(t.shape for t in tiles)),
        expr,
        joined(*(t.mask for t in tiles)),
        any(t.vector for t in tiles),
        max(t.items for t in tiles),
    )


def described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, (Tile, ArrayView)):
        return str(value)
    if isinstance(value, BoundMethod):
        return f"the method {value.name}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    name = getattr(value, "__name__", "")
    return f"{type(value).__name__} {name}".strip()


def is_leaf(e: ir.Expr) -> bool:
    """Whether repeating an expression costs nothing."""
    return isinstance(e.x if isinstance(e, ir.Renamed) else e, (ir.Var, ir.Const, ir.Lane))


WEAK = {bool: ir.i32, int: ir.i32, float: ir.f32}
"""The types of numbers that change in a loop at run time."""


# -- masks -----------------------------------------------------------------------------------------


def joined(*masks: Iterable[ir.Expr]) -> Mask:
    """The mask of what needs all of these; ``a`` makes ``a or b`` superfluous."""
    parts = dict.fromkeys(p for m in masks for p in m if p is not ir.TRUE)
    if ir.FALSE in parts:
        return (ir.FALSE,)
    return tuple(p for p in parts if not (isinstance(p, ir.Or) and (p.a in parts or p.b in parts)))


def whole(mask: Mask) -> ir.Expr:
    """A mask as one condition."""
    return ir.all_of(mask) if mask else ir.TRUE


def proved(mask: Iterable[ir.Expr], facts: Facts) -> Mask:
    """The mask without conditions that always hold; (False,) if one never does."""
    kept = []
    for part in mask:
        found = simplify(part, facts)
        if found is ir.FALSE:
            return (ir.FALSE,)
        if found is not ir.TRUE:
            kept.append(part)
    return joined(kept)


def either(a: Mask, b: Mask) -> Mask:
    """Where one of two masks holds."""
    if not a or not b:
        return ()
    common = [p for p in a if p in b]
    rest_a, rest_b = ([p for p in m if p not in common] for m in (a, b))
    if not rest_a or not rest_b:
        return tuple(common)
    if ir.FALSE in (rest_a[0], rest_b[0]):
        return tuple(common) + tuple(rest_b if rest_a[0] is ir.FALSE else rest_a)
    return (*common, ir.Or(ir.all_of(rest_a), ir.all_of(rest_b)))


def at_first(mask: Sequence[ir.Expr], lanes: Iterable[ir.Lane], scope: Scope) -> Mask | None:
    """Whether the conditions hold anywhere along lanes, as conditions without these; None if that cannot
    be read off them, because one is no upper bound."""
    found: list[ir.Expr] = []
    wanted = set(lanes)
    for part in mask:
        if part is ir.FALSE:
            return (ir.FALSE,)
        varies = any(scope.get(v) for v in ir.free_vars(part))
        if varies or not (isinstance(part, ir.Lt) and _grows(part.a) and not ir.lanes_of(part.b)):
            return None
        found.append(ir.substitute(part, dict.fromkeys(wanted, ir.ZERO)))
    return tuple(found)


def _grows(e: ir.Expr) -> bool:
    """Whether an expression grows with each of its lanes."""
    match e:
        case ir.Lane() | ir.Const():
            return True
        case ir.Var():
            return e.dtype.kind == "index"
        case ir.Add(a, b):
            return _grows(a) and _grows(b)
        case ir.Mul(a, ir.Const(value)):
            return value > 0 and _grows(a)
    return not ir.lanes_of(e)


def mentions(e: ir.Expr, lanes: Iterable[ir.Lane], scope: Scope) -> bool:
    """Whether an expression varies along one of these lanes."""
    return bool({*ir.lanes_of(e, scope)} & {*lanes})


# -- mappings --------------------------------------------------------------------------------------

MOST = 1 << 26  # elements of a layout that is checked


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """Where the elements of a tile are: from their indices to those of an array. ``of_tiles``: the
    function is read in a kernel, and takes each index as a tile of the whole shape."""

    function: Callable[..., Any]
    of_tiles: bool = False

    def places(self, indices: Any) -> tuple[Any, ...]:
        """The indices of the array, of those of a tile. Refuses what the function cannot compute."""
        try:
            made = self.function(*indices)
        except TypeError as error:
            raise Refusal(
                f"a mapping that fails ({error})",
                f"a function of {len(indices)} indices, those of the shape",
                "create_mapping(lambda i, j: (j, i))",
            ) from None
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    def collision(self, shape: Sequence[int], sizes: Sequence[int] | None = None) -> str:
        """As ``colliding``, for numbers alone."""
        if prod(shape) > MOST:
            raise Refusal(f"a mapping of {prod(shape)} elements", f"up to {MOST}, which are checked")
        indices = np.indices(tuple(shape)).reshape(len(shape), -1)
        at = [np.broadcast_to(np.asarray(p), indices.shape[1:]) for p in self.places(indices)]
        return colliding(at, shape, sizes)


def mapped_places(mapping: Any, indices: Callable[[Mapping], Any], ndim: int) -> tuple[Any, ...]:
    """The places that a mapping gives in an array of so many dimensions. Refuses others."""
    if not isinstance(mapping, Mapping):
        raise Refusal("mapping= of another kind", "create_mapping", "create_mapping(lambda i, j: (j, i))")
    made = mapping.places(indices(mapping))
    if len(made) != ndim:
        raise Refusal(
            f"a mapping that gives {len(made)} indices for an array of {ndim} dimensions",
            "one for each dimension",
        )
    return made


def colliding(at: Sequence[Any], shape: Sequence[int], sizes: Sequence[int] | None = None) -> str:
    """Two elements of a tile that are in one place, in words; empty if there are none. ``at``: for each
    dimension of the array the places of the tile's elements, in the order of their indices; ``sizes``: of
    the array, elements outside of which are in no place."""
    inside, flat = np.ones(prod(shape), bool), np.zeros(prod(shape), np.int64)
    limits = [int(p.max(initial=0)) + 1 for p in at] if sizes is None else sizes
    for p, n in zip(at, limits, strict=True):
        inside &= (p >= 0) & (p < n)
        flat = flat * n + p
    there = np.flatnonzero(inside)
    order = np.argsort(flat[there], kind="stable")
    places = flat[there][order]
    same = np.flatnonzero(places[1:] == places[:-1])
    if not len(same):
        return ""
    first, second = (
        tuple(int(i) for i in np.unravel_index(int(there[order[same[0] + k]]), tuple(shape)))
        for k in (0, 1)
    )
    return f"{first} and {second} are one element"


def create_mapping(function: Callable[..., Any]) -> Mapping:
    """A view for ``group.load(X, shape=, mapping=)`` and ``group.store(Y, y, mapping=)``. ``function``: of
    an element's indices in the tile, gives those in the array: a number, or one for each dimension, by
    ``+ - * // %``. An element outside of the array is inactive. Stores are refused where two elements of a
    tile are one of the array. Raises KernelError for what is no function."""
    if not callable(function):
        raise KernelError(f"create_mapping({function!r}); expected a function of indices")
    return Mapping(function)


@dataclass(frozen=True, slots=True, eq=False)
class IndexMap:
    """A layout: where the elements of an array of a shape are in memory of one dimension. Called with an
    array of one dimension it gives one of this shape."""

    shape: tuple[int, ...]
    mapping: Mapping
    storage_size: int
    collision: str

    def __call__(self, array: Any) -> Any:
        if hasattr(array, "laid_out"):
            return array.laid_out(self)
        raise KernelError("a layout is for arrays inside of kernels; expected layout(X) there")


def index_map(
    shape: Sequence[int], offset: Callable[..., Any], storage_size: int | None = None
) -> IndexMap:
    """A layout from a Python function. ``offset``: of an element's indices, gives its place in memory, by
    ``+ - * // %``. ``storage_size``: the elements of that memory, by default what the places need. Whether
    two elements are in one place is checked; then stores are refused. Raises KernelError for places
    outside of the memory."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes) or not callable(offset):
        raise KernelError(
            f"index_map({shape!r}, {offset!r}); expected sizes from 1 on, and a function of indices"
        )
    mapping = create_mapping(offset)
    try:
        found = [np.asarray(p) for p in mapping.places(np.indices(sizes).reshape(len(sizes), -1))]
        collision = mapping.collision(sizes)
    except Refusal as refusal:
        raise KernelError(f"index_map: found {refusal.found}; allowed: {refusal.allowed}") from None
    if len(found) != 1 or found[0].dtype.kind not in "iu":
        raise KernelError(
            "index_map: found a function that gives no whole number; allowed: the place in memory"
        )
    least, most = int(found[0].min()), int(found[0].max())
    held = most + 1 if storage_size is None else storage_size
    if least < 0 or most >= held:
        raise KernelError(
            f"index_map: found the place {least if least < 0 else most}; allowed: 0 to "
            f"{held - 1}, the memory of storage_size={held}"
        )
    return IndexMap(sizes, mapping, held, collision)


@dataclass(frozen=True, slots=True)
class PendingProduct:
    """``a @ b`` that is not computed yet: it may be added to a name that changes."""

    a: Tile
    b: Tile
    result: ir.DType

    @property
    def own(self) -> tuple[int, ...]:
        """The shape of the result, that of one item."""
        return self.a.own[0], self.b.own[1]

    @property
    def items(self) -> int:
        """How many dimensions of items the result has."""
        return max(self.a.items, self.b.items)
