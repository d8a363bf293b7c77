"""The values of a kernel while its source is read: tiles, arrays and what Python computes already.

Numbers, tuples, strings, types and functions are Python's own objects. A number that is known at run time
only is a tile without dimensions; its type is ``index`` if it is a position (an id, a loop's counter).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from transconv.ir import (
    DTYPES,
    ZERO,
    Const,
    DType,
    Expr,
    Lane,
    Renamed,
    Tensor,
    Var,
    boolean,
    f32,
    i32,
    index,
)
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.lanes import Shape, own_lanes

if TYPE_CHECKING:
    from transconv.kernel.mappings import IndexMap

Mask: TypeAlias = tuple[Expr, ...]
"""Conditions, all of which hold where an element is active; none for a tile that is active everywhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A value of a group: an expression over the lanes of its shape, and where it is active. ``vector``:
    of the immutable kind. ``items``: how many of its first dimensions are the group's work-items, each of
    which has the rest as its own value."""

    shape: Shape
    expr: Expr
    mask: Mask = ()
    vector: bool = False
    items: int = 0

    @property
    def own(self) -> Shape:
        """The shape of the value of one work-item."""
        return self.shape[self.items:]

    @property
    def dtype(self) -> DType:
        """The type of its elements."""
        return self.expr.dtype

    @property
    def lanes(self) -> tuple[Lane, ...]:
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
    start: Expr
    stop: Expr
    step: int = 1
    place: Expr | None = None
    least: Expr = ZERO
    unsure: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ArrayView:
    """An array of the call, or a part of it. ``along``: its dimensions in order (None: a new one of one
    element); ``at``: the places in the other dimensions of the tensor; ``mask``: where these exist.
    ``items``: the shape of the items that each have such a part; places then vary along its lanes.
    ``layout``: where the elements are in an array of one dimension."""

    tensor: Tensor
    along: tuple[DimSlice | None, ...]
    at: dict[int, Expr] = field(default_factory=dict)
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
    """A method of a value, to be called."""

    name: str
    of: Any


NUMPY = {"float16": "f16", "float32": "f32", "float64": "f64", "int8": "i8", "uint8": "u8", "int32": "i32",
         "int64": "i64", "bool": "boolean"}
NAMES = {t.name: t.torch for t in DTYPES.values() if t.torch and t.within is None}


def named(dtype: DType) -> str:
    """The name of a type in messages: NumPy's or torch's."""
    return "int" if dtype.kind == "index" else NAMES.get(dtype.name, dtype.name)


def dtype_of(value: Any) -> DType:
    """The type that a value names: a type of NumPy, torch or the IR, or its name. Refuses others."""
    if isinstance(value, DType):
        return value
    if value is bool:
        return boolean
    text = value if isinstance(value, str) else getattr(value, "__name__", "") or str(value)
    text = text.removeprefix("torch.")
    name = next((k for k, torch in NAMES.items() if torch == text), NUMPY.get(text.rstrip("_"), ""))
    if not name:
        raise Refusal(f"the type {text or value!r}", " ".join(NAMES.values()), "dtype=np.float32")
    return DTYPES[name]


def is_number(value: Any) -> bool:
    """Whether a value is a number that Python knows."""
    return isinstance(value, (bool, int, float))


def number_of(value: Any) -> Any:
    """A number of Python. Refuses whole numbers beyond 64 bits."""
    if isinstance(value, int) and not -2**63 <= value < 2**63:
        raise Refusal(f"the number {value}", "whole numbers of 64 bits")
    return value


def tile_of(value: Any) -> Tile:
    """A tile, or a number as one. Refuses what is neither."""
    if isinstance(value, Tile):
        return value
    if isinstance(value, bool):
        return Tile((), Const(value, boolean))
    if isinstance(value, int):
        return Tile((), Const(number_of(value), index))
    if isinstance(value, float):
        return Tile((), Const(value, f32))
    raise Refusal(described(value), "a tile or a number")


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


def is_leaf(e: Expr) -> bool:
    """Whether repeating an expression costs nothing."""
    return isinstance(e.x if isinstance(e, Renamed) else e, (Var, Const, Lane))


WEAK = {bool: i32, int: i32, float: f32}
"""The types of numbers that change in a loop at run time."""
