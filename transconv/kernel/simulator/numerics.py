"""Numerics of the simulator on pairs of NumPy arrays, data and where it is active, by the rows that the
compiled way uses: types, rounding, masks. Sums run in the order of the elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transconv.ir import REDUCERS, DType, boolean, convert, f32, index, multiply_add
from transconv.kernel import functions
from transconv.kernel.source import Refusal, named

Array = np.ndarray[Any, Any]
REPEATED = 8  # whole exponents up to here are products


@dataclass(frozen=True, slots=True, eq=False)
class MaskedValues:
    """Values, where they are active, and their type. ``weak``: the Python type of a number, which gives
    way to the types of tiles, as that of positions does."""

    data: Array
    active: Array
    dtype: DType
    weak: type | None = None
    vector: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """The factors of float32 of values that are products."""

    x: MaskedValues
    y: MaskedValues

    @property
    def value(self) -> MaskedValues:
        """The products, rounded."""
        return applied(functions.FUNCTIONS["multiply"], [self.x, self.y])


def applied(row: functions.TileFunction, parts: Sequence[MaskedValues]) -> MaskedValues:
    """A row applied: active where all operands are."""
    if len(parts) != row.arity:
        raise Refusal(f"{row.name} of {len(parts)} values", f"{row.arity}")
    try:
        shape = np.broadcast_shapes(*(p.data.shape for p in parts))
    except ValueError:
        told = " and ".join(str(p.data.shape) for p in parts)
        raise Refusal(
            f"the shapes {told}, which NumPy cannot broadcast",
            "equal sizes from the last dimension on, or 1",
            "x[:, None] - y[None, :]",
        ) from None
    first: list[Array] = []
    if row.types == "choice":
        test, *parts = parts
        if test.dtype is not boolean:
            raise Refusal(f"{named(test.dtype)} as a condition", "booleans", "np.where(x > 0, x, 0.0)")
        first, active = [test.data], [test.active]
        work = gives = _shared(parts)
    else:
        shared, active = _shared(parts), []
        work, gives = functions.operand_type(row, shared), functions.result_type(row, shared)
        if functions.beyond(row, work, [_numbers(p) for p in parts]):
            work = index
    with np.errstate(all="ignore"):
        data = row.numpy(*first, *(convert(p.data, work) for p in parts))
        data = convert(np.broadcast_to(data, shape), gives)
    active += [p.active for p in parts]
    both = np.logical_and.reduce([np.broadcast_to(a, shape) for a in active])
    return MaskedValues(data, both, gives, vector=any(p.vector for p in parts))


def _numbers(x: MaskedValues) -> tuple[int, int] | None:
    """The least and the largest number of an operand that gives way to the types of tiles; None for
    others."""
    if x.dtype.kind != "index" or not (found := x.data[x.active] if x.data.ndim else x.data).size:
        return None
    return int(found.min()), int(found.max())


def _shared(parts: Sequence[MaskedValues]) -> DType:
    strong = [p.dtype for p in parts if p.weak is None]
    return functions.common(
        strong or [p.dtype for p in parts], [p.weak for p in parts if p.weak is not None]
    )


def power(base: MaskedValues, exponent: MaskedValues) -> tuple[MaskedValues, Products | None]:
    """``base ** exponent``, and the factors if it is a product: small whole exponents are products, and
    0.5 is a root."""
    if exponent.weak is None or base.dtype is boolean:
        return applied(functions.FUNCTIONS["power"], [base, exponent]), None
    number = exponent.data.item()
    if number == 0.5:
        return applied(functions.FUNCTIONS["sqrt"], [base]), None
    if base.dtype.kind == "int" and exponent.weak is int and number >= 0:
        functions.held_number(number, base.dtype)
        with np.errstate(all="ignore"):
            return replace(base, data=np.power(base.data, base.data.dtype.type(number)), weak=None), None
    if number != int(number) or abs(number) > REPEATED or (base.dtype.is_integer and number < 0):
        return applied(functions.FUNCTIONS["power"], [base, exponent]), None
    floats = base.dtype.kind == "float"
    gives = functions.common([base.dtype], []) if floats else base.dtype
    made = one = converted(base, functions.operand_type(functions.FUNCTIONS["square"], gives))
    factors = None
    for _ in range(abs(int(number)) - 1):
        factors = Products(made, one)
        made = factors.value
    if number == 0:
        made = MaskedValues(np.ones_like(made.data), made.active, made.dtype)
    elif number < 0:
        made = applied(functions.FUNCTIONS["reciprocal"], [made])
    made = converted(made, gives)
    factors = factors if number > 1 and gives is f32 else None
    return MaskedValues(made.data, made.active, made.dtype, vector=base.vector), factors


def converted(x: MaskedValues, dtype: DType) -> MaskedValues:
    """The values in another type."""
    data = x.data != 0 if dtype is boolean else convert(x.data, dtype)
    return MaskedValues(data, x.active, dtype, vector=x.vector)


def joined(name: str, parts: Sequence[MaskedValues], axis: Any = 0) -> MaskedValues:
    """Values one behind the other along a dimension: a new one for ``stack``."""
    held = [converted(p, functions.common([q.dtype for q in parts], [])) for p in parts]
    together = getattr(np, name)
    try:
        data, active = (
            together(part, int(axis)) for part in zip(*((p.data, p.active) for p in held), strict=True)
        )
    except (ValueError, TypeError, IndexError) as error:
        raise Refusal(f"an np.{name} that NumPy refuses: {error}") from None
    return MaskedValues(data, active, held[0].dtype, vector=any(p.vector for p in parts))


def picked(x: MaskedValues, places: dict[int, MaskedValues]) -> MaskedValues:
    """The elements at places along dimensions side by side; inactive where there is none."""
    if not all(p.dtype.is_integer for p in places.values()):
        raise Refusal("floats as an index of a tile", "whole numbers", "np.where(x > 0, x, 0.0)")
    at: list[Any] = [slice(None)] * x.data.ndim
    inside = np.asarray(True)
    for i, p in places.items():
        size = x.data.shape[i]
        place = np.where(p.data < 0, p.data + size, p.data).astype(np.int64)
        at[i] = np.clip(place, 0, size - 1)
        inside = inside & p.active & (place == at[i])
    inside = inside.reshape(*inside.shape, *(1 for _ in at[max(places) + 1 :]))
    return MaskedValues(x.data[tuple(at)], x.active[tuple(at)] & inside, x.dtype, vector=x.vector)


def running(name: str, x: MaskedValues, axis: Any = None) -> MaskedValues:
    """Sums or products of the active elements up to each."""
    row, at = functions.RUNNING[name], one_axis(name, x, axis)
    gives, work = functions.types_of(row, x.dtype)
    reducer = REDUCERS[row.op]
    held = np.where(x.active, convert(x.data, work), np.asarray(reducer.neutral, work.numpy))
    with np.errstate(all="ignore"):
        found = reducer.numpy.accumulate(held, at, work.numpy)
    return MaskedValues(convert(found, gives), x.active, gives, vector=x.vector)


def ordered(x: MaskedValues, axis: Any = -1) -> MaskedValues:
    """Active elements from the least to the largest, before all others."""
    at = one_axis("sort", x, axis)
    order = np.lexsort((x.data, ~x.active), axis=at)
    data, active = (np.take_along_axis(a, order, at) for a in (x.data, x.active))
    return replace(x, data=data, active=active)


def one_axis(name: str, x: MaskedValues, axis: Any) -> int:
    """The dimension along which elements have an order."""
    return functions.one_axis(name, axis, x.data.ndim, f"a tile of {x.data.ndim} dimensions")


# -- reductions ------------------------------------------------------------------------------------


def reduced(
    row: functions.TileReduction,
    x: MaskedValues,
    axis: Any = None,
    keepdims: bool = False,
    factors: Products | None = None,
) -> MaskedValues:
    """A reduction over the active elements: active where there is one, as in numpy.ma. ``factors``: of
    values that are products, which a sum does not round."""
    axes = functions.reduced_axes(axis, x.data.ndim, f"a tile of {x.data.ndim} dimensions")
    if row.types == "mean":
        wide = x.dtype if x.dtype.kind == "float" and x.dtype.bits >= 32 else f32
        total = reduced(functions.REDUCTIONS["sum"], converted(x, wide), axis, keepdims, factors)
        ones = MaskedValues(np.ones(x.data.shape, wide.numpy), x.active, wide)
        mean = applied(
            functions.FUNCTIONS["divide"],
            [total, reduced(functions.REDUCTIONS["sum"], ones, axis, keepdims)],
        )
        made = converted(mean, x.dtype if x.dtype.kind == "float" else f32)
        return MaskedValues(made.data, made.active, made.dtype, vector=x.vector)
    if row.types == "place" and len(axes) > 1:
        raise Refusal(f"{row.name} over {len(axes)} dimensions", "one axis", f"x.{row.name}(axis=1)")
    gives, work = functions.types_of(row, x.dtype)
    given = x.data.astype(bool) if row.types == "bool" else x.data
    data, active = _last(convert(given, work), axes), _last(x.active, axes)
    data = np.where(active, data, np.asarray(REDUCERS[row.op].identity(work).value, work.numpy))
    if not data.shape[-1]:  # as if there were one element, and it inactive
        data, active = (np.zeros((*data.shape[:-1], 1), a.dtype) for a in (data, active))
    if row.op == "sum" and factors is not None and work is f32:
        left, right = (_last(np.broadcast_to(f.data, x.data.shape), axes) for f in (factors.x, factors.y))
        found = _added_up(left, right, active)
    else:
        with np.errstate(all="ignore"):
            found = REDUCERS[row.op].numpy.accumulate(data, axis=-1, dtype=work.numpy)[..., -1]
    if row.types == "place":
        found = (active & ((data == found[..., None]) | (data != data))).argmax(axis=-1)  # a NaN is found
    some = active.any(axis=-1)
    if keepdims:
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.data.shape))
        found, some = found.reshape(shape), some.reshape(shape)
    final = found.astype(bool) if gives is boolean else convert(np.asarray(found), gives)
    return MaskedValues(final, np.asarray(some), gives, vector=x.vector)


def _added_up(x: Array, y: Array, active: Array) -> Array:
    """The sum of products along the last dimension, one rounding for each."""
    total = np.zeros(active.shape[:-1], np.float32)
    for at in range(x.shape[-1]):
        total = np.where(active[..., at], multiply_add(x[..., at], y[..., at], total), total)
    return total


def _last(x: Array, axes: Sequence[int]) -> Array:
    """The elements of some dimensions as one dimension, the last."""
    rest = [i for i in range(x.ndim) if i not in axes]
    return x.transpose(*rest, *axes).reshape(*(x.shape[i] for i in rest), -1)


# -- products --------------------------------------------------------------------------------------


def product(a: MaskedValues, b: MaskedValues) -> MaskedValues:
    """``a @ b``: inactive elements count as 0; active where a pair of active elements is."""
    shared = functions.common([a.dtype, b.dtype], [])
    told = " and ".join(f"a tile {named(x.dtype)}{list(x.data.shape)}" for x in (a, b))
    result = functions.product_type(shared, a.data.shape, b.data.shape, told)
    left, right = (np.where(p.active, convert(convert(p.data, shared), result), 0) for p in (a, b))
    with np.errstate(all="ignore"):
        data = left.astype(result.numpy) @ right.astype(result.numpy)
    pairs = a.active.astype(np.int32) @ b.active.astype(np.int32)
    return MaskedValues(data, pairs > 0, result, vector=a.vector or b.vector)
