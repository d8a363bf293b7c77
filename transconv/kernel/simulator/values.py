"""Tiles and vectors in the simulator: NumPy's functions and operators on data that knows what is active.

An operation makes a new value. Only ``t[...] = v`` and ``out=`` change a tile, and activate elements. A
product that is written in a sum, ``x + a * b`` or ``(a * b).sum()``, is rounded once: a compiled kernel
sees the source; in the simulator a product notes the instruction of Python that made it. It is written
in the sum if the same function is executing, and has stored nothing to a name since."""

from __future__ import annotations

import dis
import sys
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from transconv.ir import DType, boolean, f32, index, multiply_add
from transconv.kernel.functions import (
    FUNCTIONS,
    REDUCTIONS,
    RUNNING,
    TileFunction,
    clipped,
    function_of,
    held_number,
    reduction_of,
)
from transconv.kernel.simulator import numerics
from transconv.kernel.simulator.numerics import (
    Array,
    MaskedValues,
    Products,
    applied,
    converted,
    power,
    product,
    reduced,
)
from transconv.kernel.simulator.races import AccessTrace, Order, is_users
from transconv.kernel.source import ONE_VALUE, Refusal, dtype_of, named, number_of
from transconv.kernel.tiles.values import broadcast, described, each_dimension, side_by_side

SUMS = ("add", "subtract")


@dataclass(frozen=True, slots=True)
class Spot:
    """An instruction of a call of the user's function."""

    call: int
    code: CodeType
    at: int

    def is_in(self, later: Spot) -> bool:
        """Whether nothing was stored between this instruction and a later one of the same call."""
        if (self.call, self.code) != (later.call, later.code) or later.at <= self.at:
            return False
        stores = _stores(self.code)
        return bisect(stores, self.at) == bisect(stores, later.at)


def spot() -> Spot:
    """The user's instruction that is executed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return Spot(id(frame), frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _stores(code: CodeType) -> list[int]:
    """The places of the instructions of a function that give a value a name."""
    return [i.offset for i in dis.get_instructions(code) if i.opname.startswith("STORE")]


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """The factors of a product of float32, and where it is written."""

    factors: Products
    where: Spot

    def here(self) -> Products | None:
        """The factors, if the product is written in the sum that is computed now."""
        return self.factors if self.where.is_in(spot()) else None


def written(factors: Products | None) -> SplitProduct | None:
    """What a product of float32 notes; None for what is none."""
    return None if factors is None else SplitProduct(factors, spot())


def summed(row: TileFunction, parts: list[MaskedValues], products: list[Products | None]) -> MaskedValues:
    """A row applied to operands of which some are products that are written there; of two that are added
    or subtracted the second is not rounded."""
    if row.name not in SUMS or not any(products):
        return applied(row, parts)
    made = applied(row, parts)  # its type, and where it is active
    if made.dtype is not f32:
        return made
    at = 1 if products[1] is not None else 0
    product, other = products[at], converted(parts[1 - at], f32)
    assert product is not None
    x, y, added = (np.asarray(p.data) for p in (product.x, product.y, other))
    if row.name == "subtract":
        x, added = (-x, added) if at == 1 else (x, -added)
    return MaskedValues(multiply_add(x, y, added), made.active, f32, vector=made.vector)


BINARY = (
    "add",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "remainder",
    "power",
    "matmul",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "left_shift",
    "right_shift",
)
METHODS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)  # Python's names of the operators of BINARY
COMPARISONS = {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
UNARY = {"neg": "negative", "pos": "positive", "invert": "invert", "abs": "absolute"}


class SimulatedOperand:
    """What takes part in NumPy's functions: tiles, vectors, and parts of arrays, which it loads."""

    order: Order
    __hash__ = None  # type: ignore[assignment]

    def part(self) -> MaskedValues:
        """The values, and where they are active."""
        raise NotImplementedError

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **words: Any) -> Any:
        if method != "__call__" or words:
            how = method if method != "__call__" else ", ".join(words)
            raise Refusal(
                f"np.{ufunc.__name__} with {how}", "out= alone; reductions are methods", "x.sum(axis=0)"
            )
        made = self.wrapped(*_called(ufunc, inputs))
        made.matrix = ufunc is np.matmul
        return made if out is None else _written_out(out[0] if isinstance(out, tuple) else out, made)

    def __array_function__(self, function: Any, types: Any, args: Any, words: dict[str, Any]) -> Any:
        out = words.pop("out", None)
        name = getattr(function, "__name__", str(function))
        if (row := function_of(function)) is not None:
            made = self.wrapped(applied(row, [part_of(v) for v in args]))
        elif (reduction := reduction_of(function)) is not None:
            made = self.wrapped(
                reduced(reduction, part_of(args[0]), *args[1:], **words | {"factors": factors_of(args[0])})
            )
        elif name in JOINED:
            made = self.wrapped(numerics.joined(name, [part_of(v) for v in args[0]], *args[1:], **words))
        elif name in NAMED:
            made = NAMED[name](self.wrapped(part_of(args[0])), *args[1:], **words)
        else:
            raise Refusal(
                f"a call of {name}",
                " ".join((*FUNCTIONS, *REDUCTIONS, *NAMED, *JOINED)),
                "np.maximum(x, 0.0)",
            )
        return made if out is None else _written_out(out, made)

    def wrapped(self, part: MaskedValues, product: SplitProduct | None = None) -> Masked:
        """A result; outside of the scope of the group it is a vector."""
        made = Masked(self.order, part.data, part.active, part.dtype, part.vector or self.order.inside)
        made.product = product
        return made

    def __getattr__(self, name: str) -> Any:
        if name in REDUCTIONS:
            row = REDUCTIONS[name]
            return lambda *args, **words: self.wrapped(
                reduced(row, self.part(), *args, **words | {"factors": factors_of(self)})
            )
        if name in RUNNING:
            return lambda axis=None: self.wrapped(numerics.running(name, self.part(), axis))
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def astype(self, dtype: Any) -> Masked:
        """The values in another type."""
        return self.wrapped(converted(self.part(), dtype_of(dtype)))

    def dot(self, other: Any) -> Masked:
        """The product of matrices."""
        made = self.wrapped(product(self.part(), part_of(other)))
        made.matrix = True
        return made

    def clip(self, low: Any = None, high: Any = None) -> Masked:
        """The values between limits; None for no limit."""
        made: Any = self.wrapped(self.part())
        low, high = clipped(made.dtype, low, high)
        made = made if low is None else np.maximum(made, low)
        made = made if high is None else np.minimum(made, high)
        assert isinstance(made, Masked)
        return made

    def __iter__(self) -> Any:
        raise Refusal("a loop over elements", "range(...), functions of whole tiles", "x.sum()")

    def number(self) -> Any:
        """The only element. Refused where there are several, or where it is inactive."""
        part = self.part()
        if part.data.ndim:
            raise Refusal(
                f"the truth or number of a tile of shape {part.data.shape}",
                "numbers; of tiles & | ~ and np.where",
                "np.where(x > 0, x, 0.0)",
            )
        if not part.active:
            raise Refusal(
                "a decision by an inactive element", "elements inside of the array", "if i < X.shape[0]:"
            )
        return part.data.item()

    def __bool__(self) -> bool:
        return bool(self.number())

    def __int__(self) -> int:
        return int(self.number())

    def __float__(self) -> float:
        return float(self.number())

    def __index__(self) -> int:
        if not (part := self.part()).dtype.is_integer:
            raise Refusal(f"{named(part.dtype)} as an index", "whole numbers")
        return int(self.number())


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    function = getattr(np, name)
    return (lambda self, other: function(other, self)) if swapped else lambda *values: function(*values)


for _python, _name in zip(METHODS, BINARY, strict=True):
    setattr(SimulatedOperand, f"__{_python}__", _operator(_name))
    setattr(SimulatedOperand, f"__r{_python}__", _operator(_name, swapped=True))
for _python, _name in {**COMPARISONS, **UNARY}.items():
    setattr(SimulatedOperand, f"__{_python}__", _operator(_name))


class Masked(SimulatedOperand):
    """A tile, or a vector, which does not change. Its arrays are its own."""

    def __init__(
        self, order: Order, data: Array, active: Array, dtype: DType, vector: bool = False
    ) -> None:
        self.order, self.dtype, self.vector = order, dtype, vector
        self.data, self.active = np.array(data), np.array(active)
        self.trace: AccessTrace | None = None  # of items that access elements of a tile of the group
        self.product: SplitProduct | None = None  # if it is one of float32
        self.matrix = False  # whether it is a product of matrices

    def part(self) -> MaskedValues:
        self.touched(...)
        return MaskedValues(self.data, self.active, self.dtype, vector=self.vector)

    def touched(self, items: Any, write: bool = False) -> None:
        """Items of a group that access a tile which several of them see are traced."""
        if self.vector or (not self.order.inside and self.trace is None):
            return
        if self.trace is None:
            self.trace = AccessTrace(self.order, f"a tile of shape {self.shape}", self.data.size)
        places = np.arange(self.data.size).reshape(self.shape)[items]
        (self.trace.write if write else self.trace.read)(np.asarray(places))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.data.ndim

    @property
    def T(self) -> Masked:
        """The tile with its dimensions reversed."""
        return self.transpose()

    @property
    def mask(self) -> Masked:
        """True where an element is inactive, as in numpy.ma. It cannot be written to."""
        return Masked(self.order, ~self.active, np.ones(self.shape, bool), boolean, True)

    def __repr__(self) -> str:
        kind = "vector" if self.vector else "tile"
        shown: Any = np.ma.masked_array(self.data, mask=~self.active)  # type: ignore[no-untyped-call]
        return f"{kind} {self.dtype}{list(self.shape)}\n{shown}"

    def __len__(self) -> int:
        return self.shape[0]

    def moved(self, move: Callable[[Array], Array]) -> Masked:
        """The elements at other places."""
        self.touched(...)
        try:
            data, active = move(self.data), move(self.active)
        except (IndexError, ValueError) as error:
            raise Refusal(f"what NumPy refuses: {error}") from None
        return Masked(self.order, data, active, self.dtype, self.vector or self.order.inside)

    def __getitem__(self, items: Any) -> Masked:
        every = each_dimension(_tuple(items), self.ndim, "a tile")
        if tiles := {i: part_of(t) for i, t in enumerate(every) if np.ndim(getattr(t, "data", t))}:
            side_by_side([i in tiles for i in range(len(every))], every)
            cut = self[tuple(slice(None) if i in tiles else t for i, t in enumerate(every))]
            return self.wrapped(numerics.picked(cut.part(), tiles))
        if not self.vector:
            self.touched(items)
        made = Masked(self.order, self.data[items], self.active[items], self.dtype, True)
        made.vector = self.vector or self.order.inside
        return made

    def __setitem__(self, items: Any, value: Any) -> None:
        if self.vector:
            raise Refusal(
                "an assignment to elements of a vector",
                "tiles; vectors do not change",
                "x = np.where(mask, y, x)",
            )
        held_number(value, self.dtype)
        given = converted(part_of(value), self.dtype)
        if isinstance(items, Masked) and items.ndim and items.dtype is boolean:
            if items.shape != self.shape or given.data.ndim:
                raise Refusal(*ONE_VALUE)
            items.touched(...)
            items = items.data & items.active
        self.touched(items, write=True)
        try:
            data, active = (np.broadcast_to(a, self.data[items].shape) for a in (given.data, given.active))
        except ValueError as error:
            raise Refusal(f"what NumPy refuses: {error}") from None
        self.data[items] = np.where(active, data, self.data[items])
        self.active[items] |= active

    def transpose(self, *axes: Any) -> Masked:
        """The tile with its dimensions in another order, by default reversed."""
        return self.moved(lambda a: a.transpose(*axes))

    def filled(self, fill_value: Any) -> Masked:
        """A number in the place of inactive elements, as in numpy.ma; active everywhere."""
        held_number(fill_value, self.dtype)
        value = converted(part_of(fill_value), self.dtype)
        if value.data.ndim:
            raise Refusal("a tile in the place of inactive elements", "a number", "x.filled(0.0)")
        self.touched(...)
        data = np.where(self.active, self.data, value.data)
        return Masked(
            self.order, data, np.ones(self.shape, bool), self.dtype, self.vector or self.order.inside
        )

    def reshape(self, *shape: Any) -> Masked:
        """The elements in another shape."""
        return self.moved(lambda a: a.reshape(*shape))

    def copy(self) -> Masked:
        """Another tile with the same elements."""
        made = self.moved(lambda a: a)
        made.vector = self.order.inside
        return made

    def vec(self, shape: Any = None) -> Masked:
        """A vector of the same elements; of a larger shape the rest is inactive."""
        made = self.moved(lambda a: a)
        if shape is not None:
            inside = tuple(slice(0, min(n, m)) for n, m in zip(shape, self.shape, strict=True))
            data, active = np.zeros(shape, self.data.dtype), np.zeros(shape, bool)
            data[inside], active[inside] = self.data[inside], self.active[inside]
            made = Masked(self.order, data, active, self.dtype)
        made.vector = True
        return made


def part_of(value: Any) -> MaskedValues:
    """An operand. What NumPy makes inside of a kernel in its own types, int64 and float64, gives way to
    the types of tiles, as numbers of Python do."""
    if isinstance(value, SimulatedOperand):
        return value.part()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        kind = boolean if isinstance(value, bool) else index if isinstance(value, int) else f32
        number_of(value)
        held = np.float64 if isinstance(value, float) else kind.numpy
        return MaskedValues(np.asarray(value, held), np.asarray(True), kind, type(value))
    if not isinstance(value, np.ndarray):
        raise Refusal(described(value), "a tile or a number")
    active = np.ones(value.shape, bool)
    if value.dtype == np.float64:
        return MaskedValues(value, active, f32, float)
    return MaskedValues(value, active, index if value.dtype == np.int64 else dtype_of(value.dtype))


def factors_of(value: Any) -> Products | None:
    """The factors of a product that is written in the sum that is computed now."""
    noted = value.product if isinstance(value, Masked) else None
    return None if noted is None else noted.here()


def _called(ufunc: Any, inputs: Any) -> tuple[MaskedValues, SplitProduct | None]:
    """The result of a function of NumPy, and its factors where it is a product."""
    parts = [part_of(v) for v in inputs]
    if ufunc is np.matmul:
        return product(*parts), None
    row = function_of(ufunc)
    if row is None:
        raise Refusal(f"a call of {ufunc.__name__}", " ".join(FUNCTIONS), "np.maximum(x, 0.0)")
    if row.name == "power":
        made, factors = power(*parts)
        return made, written(factors)
    if row.name in ("multiply", "square"):
        made = applied(row, parts)
        factors = Products(*(converted(p, f32) for p in (parts[0], parts[-1])))
        return made, written(factors) if made.dtype is f32 else None
    alone = not any(isinstance(v, Masked) and v.matrix for v in inputs)
    return summed(row, parts, [factors_of(v) if alone else None for v in inputs]), None


def _written_out(out: Any, made: Masked) -> Masked:
    """The active elements of a result, written to a tile."""
    if not isinstance(out, Masked) or out.vector:
        raise Refusal("out= of another kind", "a tile that is not a vector")
    if made.shape != out.shape:
        raise Refusal(f"a result of shape {made.shape} for out= of shape {out.shape}", "equal shapes")
    if made.dtype.kind == "float" and out.dtype.kind != "float":
        raise Refusal(
            f"a result of type {named(made.dtype)} for out= of type {named(out.dtype)}",
            "a type that holds it",
        )
    out[...] = made
    return out


def _tuple(items: Any) -> tuple[Any, ...]:
    return items if isinstance(items, tuple) else (items,)


def _full_like(x: Masked, fill_value: Any, dtype: Any = None) -> Masked:
    held_number(fill_value, x.dtype if dtype is None else dtype_of(dtype))
    one = Masked(x.order, np.full(x.shape, fill_value), np.ones(x.shape, bool), f32, x.order.inside)
    return one.astype(x.dtype if dtype is None else dtype)


JOINED = ("concatenate", "stack")
NAMED: dict[str, Callable[..., Masked]] = {
    **{n: lambda x, axis=None, n=n: x.wrapped(numerics.running(n, x.part(), axis)) for n in RUNNING},
    "sort": lambda x, axis=-1: x.wrapped(numerics.ordered(x.part(), axis)),
    "dot": lambda x, y: x.dot(y),
    "clip": lambda x, low=None, high=None: x.clip(low, high),
    "transpose": lambda x, axes=None: x.transpose(axes),
    "reshape": lambda x, shape: x.reshape(shape),
    "expand_dims": lambda x, axis: x.moved(lambda a: np.expand_dims(a, axis)),
    "broadcast_to": lambda x, shape: x.moved(lambda a: np.broadcast_to(a, broadcast(tuple(shape)))),
    "zeros_like": lambda x, dtype=None: _full_like(x, 0, dtype),
    "ones_like": lambda x, dtype=None: _full_like(x, 1, dtype),
    "full_like": _full_like,
}
"""Functions of NumPy with a meaning of their own for tiles."""
