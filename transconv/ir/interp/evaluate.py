"""Expressions of the IR computed with NumPy, over all iterations and lanes at once, and the memory that
they read: a flat array per tensor, with a record of the writes.

Every value is an array of one fixed rank. Each independent loop around and each lane has an axis of its
own; a value has size 1 along the axes that it does not depend on, and NumPy broadcasts it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir import tensor as ac
from transconv.ir.dtype import DType, boolean, promote
from transconv.ir.functions.calls import CALLS, REDUCERS
from transconv.ir.functions.rounding import convert
from transconv.ir.operations import Call, Cast, Gather, Reduce, Renamed, Running, Select, Spread
from transconv.ir.tensor import Tensor

Array: TypeAlias = NDArray[Any]
"""A NumPy array of any type."""

_STORED, _ADDED = 1, 2


class InterpError(RuntimeError):
    """A kernel did something that is undefined on a GPU, such as an access out of bounds."""


class Memory:
    """Flat arrays by tensor name, written in place, with a record of every write.

    ``buffers[name]`` is 1-D, has ``tensor.layout.span`` elements and the type ``tensor.dtype.numpy`` (a
    bf16 tensor is a float32 array of bf16 values). Within one launch an element is stored at most once, or
    only added to. Kernels that run on the same memory belong to one launch until ``new_launch`` is called.
    Which elements were ever written (``check_written``) is kept across launches."""

    def __init__(self, buffers: Mapping[str, Array]) -> None:
        self.buffers = dict(buffers)
        self.covered = {n: np.zeros(len(b), np.bool_) for n, b in self.buffers.items()}
        self._writer = {n: np.zeros(len(b), np.uint8) for n, b in self.buffers.items()}
        self._stamp: dict[str, NDArray[np.int64]] = {}

    def new_launch(self) -> None:
        """Allow elements to be written again; ``check_written`` still counts earlier writes."""
        for writer in self._writer.values():
            writer[:] = 0

    def ends_elsewhere(self, tensor: Tensor) -> bool:
        """Whether the buffer of a tensor is shorter or longer than its layout. That is legal for a view
        as interleaved planes, some of which may lack the last row."""
        data = self.buffers.get(tensor.name)
        return data is not None and data.ndim == 1 and data.size != tensor.layout.span

    def why_not(self, tensor: Tensor) -> str | None:
        """Why the buffer of a tensor cannot serve as one, or None."""
        data = self.buffers.get(tensor.name)
        if data is None:
            return f"no buffer is given for the tensor {tensor.name}"
        if data.shape != (tensor.layout.span,):
            return (
                f"the buffer of {tensor.name} has shape {data.shape}, "
                f"its layout spans {tensor.layout.span} elements"
            )
        if data.dtype != np.dtype(tensor.dtype.numpy):
            return (
                f"the buffer of {tensor.name} is {data.dtype}, "
                f"{tensor.dtype} is held in {tensor.dtype.numpy}"
            )
        return None

    def claim(self, tensor: Tensor, offsets: Array, atomic: bool) -> tuple[int, str] | None:
        """Record writes to offsets (int64 of shape (n,)), each by another program or lane. Returns None,
        or the position of the first write that conflicts with another one, and why."""
        writer = self._writer[tensor.name]
        before = writer[offsets]
        conflict = before == _STORED if atomic else before != 0
        if conflict.any():
            at = int(np.argmax(conflict))
            both = atomic or before[at] == _ADDED
            return at, "is both stored and added to" if both else "is written twice"
        if not atomic:
            stamp = self._stamp.setdefault(tensor.name, np.zeros(len(writer), np.int64))
            order = np.arange(len(offsets))
            stamp[offsets] = order
            repeated = stamp[offsets] != order
            if repeated.any():
                # Each offset keeps the stamp of its last write, so earlier writes of it are ``repeated``.
                twin = offsets == offsets[int(np.argmax(repeated))]
                return int(np.flatnonzero(twin)[1]), "is written twice"
        writer[offsets] = _ADDED if atomic else _STORED
        self.covered[tensor.name][offsets] = True
        return None

    def check_written(self, tensor: Tensor) -> None:
        """Raise InterpError with the first coordinate within the logical shape that was never written.
        Padding of the layout and elements beyond the end of the buffer do not count."""
        covered, offsets = self.covered[tensor.name], offsets_of(tensor)
        there = offsets < covered.size
        written = ~there | covered[np.where(there, offsets, 0)]
        if written.all():
            return
        where = np.unravel_index(int(np.argmin(written)), written.shape)
        coords = ", ".join(f"{d}={int(x)}" for d, x in zip(tensor.dims, where, strict=True))
        missing = written.size - int(np.count_nonzero(written))
        raise InterpError(
            f"{tensor.name}[{coords}] is never written "
            f"(nor are {missing - 1} more of {written.size} elements)"
        )


def offsets_of(tensor: Tensor) -> NDArray[np.int64]:
    """The element offset of every coordinate, an array of the tensor's logical shape."""
    total = np.full((1,) * len(tensor.shape), tensor.layout.offset, np.int64)
    for d, size in enumerate(tensor.shape):
        coord = np.arange(size, dtype=np.int64)
        along = np.zeros(size, np.int64)
        blocks = tensor.layout.of_dim(d)
        for i, block in reversed(list(enumerate(blocks))):
            along += (coord if i == 0 else coord % block.size) * block.stride
            coord = coord // block.size if block.size else coord
        total = total + along.reshape([-1 if x == d else 1 for x in range(len(tensor.shape))])
    return np.broadcast_to(total, tensor.shape)


_ARITHMETIC: dict[type, Callable[[Array, Array], Array]] = {
    ex.Add: np.add,
    ex.Sub: np.subtract,
    ex.Mul: np.multiply,
    ex.Div: np.true_divide,
    ex.Min: np.minimum,
    ex.Max: np.maximum,
    ex.Shl: np.left_shift,
    ex.Shr: np.right_shift,
    ex.And: np.bitwise_and,
    ex.Or: np.bitwise_or,
    ex.Xor: np.bitwise_xor,
    ex.FloorDiv: np.floor_divide,
    ex.Mod: np.mod,
}
_COMPARE: dict[type, Callable[[Array, Array], Array]] = {
    ex.Lt: np.less,
    ex.Le: np.less_equal,
    ex.Eq: np.equal,
    ex.Ne: np.not_equal,
}


class Fault(Exception):
    """An evaluation failed at ``position``, an index per axis (None: the value does not vary along it).
    The interpreter raises it as an InterpError that names kernel, statement and indices."""

    def __init__(self, reason: str, position: tuple[int | None, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


def position(flat: int, shape: tuple[int, ...]) -> tuple[int | None, ...]:
    """The index per axis of an element counted in C order; None along axes of size 1."""
    at = np.unravel_index(flat, shape)
    return tuple(None if n == 1 else int(i) for i, n in zip(at, shape, strict=True))


def contract(x: Array, y: Array, summed: list[int], dtype: np.dtype[np.generic]) -> Array:
    """The product of two arrays of one rank, summed over the axes ``summed``, which get size 1.

    Axes that both arrays have and that are not summed are batch axes of one ``matmul``."""
    rank = x.ndim
    both = [i for i in range(rank) if x.shape[i] > 1 and y.shape[i] > 1]
    inner = [i for i in both if i in summed]
    # Integers whose sums float64 and the type hold are multiplied exactly in it, which has a fast matmul.
    terms = math.prod(max(x.shape[i], y.shape[i]) for i in summed)
    most = min(1 << 53, (1 << 8 * dtype.itemsize - 1) - 1) if dtype.kind == "i" else 0
    small = most and terms * _largest(x) * _largest(y) <= most
    work = np.dtype(np.float64) if small else dtype
    x, y = x.astype(work, copy=False), y.astype(work, copy=False)
    lone = tuple(i for i in summed if i not in inner)
    x, y = x.sum(axis=lone, keepdims=True), y.sum(axis=lone, keepdims=True)
    batch = [i for i in both if i not in inner]
    rows = [i for i in range(rank) if x.shape[i] > 1 and i not in both]
    cols = [i for i in range(rank) if i not in both and i not in rows]
    size = [max(n, m) for n, m in zip(x.shape, y.shape, strict=True)]
    sizes = [math.prod(size[i] for i in part) for part in (batch, rows, inner, cols)]
    left = x.transpose(batch + rows + inner + cols).reshape(sizes[0], sizes[1], sizes[2])
    right = y.transpose(batch + inner + cols + rows).reshape(sizes[0], sizes[2], sizes[3])
    order = batch + rows + cols + inner
    shaped = (left @ right).reshape([1 if i in inner else size[i] for i in order])
    return np.asarray(shaped.transpose(np.argsort(order)).astype(dtype, copy=False))


def _largest(x: Array) -> int:
    """The largest absolute value of integers, without going through them if they have 8 bits."""
    return 1 << 8 if x.itemsize == 1 else max(abs(int(x.max(initial=0))), abs(int(x.min(initial=0))))


@functools.cache
def _holder(dtype: DType) -> np.dtype[Any]:
    return np.dtype(dtype.numpy)


def _held(x: Array, as_type: DType) -> Array:
    """The values in the NumPy type that holds ``as_type``, without rounding to ``as_type`` itself."""
    holder = _holder(as_type)
    return x if x.dtype is holder else x.astype(holder, copy=False)


class Evaluator:
    """Values of expressions, with variables bound by ``env``, where the conditions ``active`` hold.

    ``axes`` gives the axis of each lane; ``rank`` is the rank of every value."""

    def __init__(self, memory: Memory, axes: Mapping[ex.Lane, int], rank: int) -> None:
        self.memory = memory
        self.axes = axes
        self.rank = rank
        self.env: dict[ex.Var, Array] = {}
        self.active: Array = np.ones((1,) * rank, np.bool_)
        # Reads shared memory; None outside of roles.
        self.piece: Callable[[st.SlotTile], Array] | None = None
        self.busy: set[ex.Var] = set()  # accumulators of products in flight
        self._known: dict[ex.Expr, Array] = {}
        self._types: dict[ex.Expr, DType] = {}
        self._fixed: dict[ex.Expr, Array] = {}

    def compute(self, e: ex.Expr, known: Mapping[ex.Expr, Array] | None = None) -> Array:
        """The value of one expression; the bindings may have changed since the last call. ``known``: the
        values of some of its parts, which are not evaluated."""
        self._known = {**(known or {})}
        return self.value(e)

    def parts(self, e: ex.Expr) -> dict[ex.Expr, Array]:
        """The values of an expression and of all its parts."""
        self.compute(e)
        return {**self._known}

    def compute_all(self, *exprs: ex.Expr) -> tuple[Array, ...]:
        """The values of the expressions of one statement; parts they share are computed once."""
        self._known.clear()
        return tuple(self.value(e) for e in exprs)

    def along(self, axis: int, values: Array) -> Array:
        """A 1-D array reshaped to lie along one axis."""
        return values.reshape((1,) * axis + (-1,) + (1,) * (self.rank - axis - 1))

    def type_of(self, e: ex.Expr) -> DType:
        """``e.dtype``, computed once for shared subexpressions."""
        found = self._types.get(e)
        if found is None:
            if isinstance(e, (ex.Arithmetic, ex.Logic)):
                found = promote(self.type_of(e.a), self.type_of(e.b))
            else:
                found = e.dtype
            self._types[e] = found
        return found

    def value(self, e: ex.Expr) -> Array:
        """The value of an expression, an array with an axis for each lane."""
        found = self._known.get(e)
        if found is None:
            found = self._known[e] = self._value(e)
        return found

    def _value(self, e: ex.Expr) -> Array:
        kind = type(e)
        if kind in _ARITHMETIC:
            return self._arithmetic(e)
        if kind in _COMPARE:
            return self._compare(e)
        method: Callable[[Any], Array] | None = getattr(self, f"_{kind.__name__}", None)
        if method is None:
            raise Fault(f"no meaning is known for the node class {kind.__name__}")
        return method(e)

    def _Const(self, e: ex.Const) -> Array:
        found = self._fixed.get(e)
        if found is None:
            value = np.full((1,) * self.rank, e.value)
            found = self._fixed[e] = convert(value, e.type)
        return found

    def _Var(self, e: ex.Var) -> Array:
        found = self.env.get(e)
        if found is None:
            raise Fault(f"the variable {e.name} is not bound")
        if e in self.busy:
            raise Fault(f"{e.name} is read while products are still being added to it")
        return found

    def _Lane(self, e: ex.Lane) -> Array:
        found = self._fixed.get(e)
        if found is None:
            found = self._fixed[e] = self.along(self.axes[e], np.arange(e.extent, dtype=np.int64))
        return found

    def _Spread(self, e: Spread) -> Array:
        value = self.value(e.x)
        shape = list(value.shape)
        for lane in e.lanes:
            shape[self.axes[lane]] = lane.extent
        return np.broadcast_to(value, shape)

    def _SlotTile(self, e: st.SlotTile) -> Array:
        if self.piece is None:
            raise Fault("shared memory is read outside of a role")
        return self.piece(e)

    def _BoxLoad(self, e: ac.BoxLoad) -> Array:
        fetched = self.value(e.as_load())
        return fetched if e.tensor.near is None else convert(fetched, e.tensor.near)

    def _Neg(self, e: ex.Neg) -> Array:
        return np.asarray(np.negative(self.value(e.x)))

    def _Not(self, e: ex.Not) -> Array:
        return np.asarray(np.logical_not(self.value(e.x)))

    def _arithmetic(self, e: Any) -> Array:
        dtype = self.type_of(e)
        a, b = _held(self.value(e.a), dtype), _held(self.value(e.b), dtype)
        if (
            isinstance(e, (ex.FloorDiv, ex.Mod))
            and dtype.is_integer
            and not (isinstance(e.b, ex.Const) and e.b.value)
        ):
            zero = b == 0
            if zero.any():
                self.forbid(zero, f"`{e}` divides by zero")
        return _ARITHMETIC[type(e)](a, b)

    def _compare(self, e: Any) -> Array:
        dtype = promote(self.type_of(e.a), self.type_of(e.b))
        return _COMPARE[type(e)](_held(self.value(e.a), dtype), _held(self.value(e.b), dtype))

    def _Select(self, e: Select) -> Array:
        dtype = self.type_of(e)
        yes, no = _held(self.value(e.yes), dtype), _held(self.value(e.no), dtype)
        return np.where(self.value(e.cond), yes, no)

    def _Cast(self, e: Cast) -> Array:
        return convert(self.value(e.x), e.type)

    def _Call(self, e: Call) -> Array:
        if e.name not in CALLS:
            raise Fault(f"the function {e.name} is not known")
        callee = CALLS[e.name]
        if len(e.args) != callee.arity:
            raise Fault(f"{e.name} takes {callee.arity} arguments, not {len(e.args)}")
        if callee.takes and callee.result is not None:
            return _held(callee.numpy(*(self.value(a) for a in e.args)), callee.result)
        taken = functools.reduce(promote, map(self.type_of, e.args))
        made = callee.numpy(*(_held(self.value(a), taken) for a in e.args))
        return _held(made, callee.result or taken)

    def _Reduce(self, e: Reduce) -> Array:
        axis, x = self.axes[e.lane], self.value(e.x)
        shape = (*x.shape[:axis], e.lane.extent, *x.shape[axis + 1 :])
        x = np.broadcast_to(x, shape)
        if e.op not in REDUCERS:
            raise Fault(f"the reduction {e.op} is not known")
        whole = {"dtype": x.dtype} if e.op in ("sum", "prod") else {}
        return np.asarray(REDUCERS[e.op].numpy.reduce(x, axis, keepdims=True, **whole))

    def _Running(self, e: Running) -> Array:
        x = self.value(Spread(e.x, (e.lane,)))
        return np.asarray(REDUCERS[e.op].numpy.accumulate(x, self.axes[e.lane], x.dtype))

    def _Gather(self, e: Gather) -> Array:
        x, axes = self.value(Spread(e.x, e.lanes)), [self.axes[lane] for lane in e.lanes]
        places = np.broadcast_arrays(*map(self.value, e.places))
        for place, lane in zip(places, e.lanes, strict=True):
            self.forbid((place < 0) | (place >= lane.extent), f"`{e}` has no element there")
        flat = np.ravel_multi_index(places, [lane.extent for lane in e.lanes])
        inner = x.transpose([a for a in range(x.ndim) if a not in axes] + axes)
        inner = inner.reshape(*(1 if a in axes else n for a, n in enumerate(x.shape)), -1)
        batch = np.broadcast_shapes(inner.shape[:-1], flat.shape)
        inner, flat = np.broadcast_to(inner, (*batch, inner.shape[-1])), np.broadcast_to(flat, batch)
        return np.asarray(np.take_along_axis(inner, flat[..., None], -1)[..., 0])

    def _Renamed(self, e: Renamed) -> Array:
        value = self.value(e.x)
        where = {self.axes[a]: self.axes[b] for a, b in zip(e.old, e.new, strict=True)}
        # An axis that only receives comes from one that only gives, along which nothing varies afterwards.
        gives = [a for a in where if a not in where.values()]
        receives = [b for b in where.values() if b not in where]
        where |= dict(zip(receives, gives, strict=True))
        return value.transpose(
            [next((a for a, b in where.items() if b == i), i) for i in range(value.ndim)]
        )

    def _Load(self, e: ac.Load) -> Array:
        data = self.memory.buffers.get(e.tensor.name)
        if data is None:
            raise Fault(f"{e.tensor.name} is not a tensor of the kernel")
        offset, mask = self.value(e.offset), self.mask(e.mask)
        self.check_bounds(e.tensor.name, offset, mask)
        if mask.all():
            shape = np.broadcast_shapes(offset.shape, mask.shape)
            return np.asarray(data[np.broadcast_to(offset, shape)])
        if not data.size:
            return np.full(np.broadcast_shapes(offset.shape, mask.shape), e.fill, data.dtype)
        return np.where(mask, data[np.where(mask, offset, 0)], data.dtype.type(e.fill))

    def mask(self, e: ex.Expr) -> Array:
        """A mask, combined with the conditions around the statement."""
        value = _held(self.value(e), boolean)
        return value if self.active.size == 1 else value & self.active

    def forbid(self, bad: Array, reason: str) -> None:
        """Raise Fault if ``bad`` holds anywhere under the conditions around the statement."""
        bad = bad & self.active
        if bad.any():
            raise Fault(reason, position(int(np.argmax(bad)), bad.shape))

    def check_bounds(self, tensor: str, offset: Array, mask: Array) -> None:
        """Raise Fault unless each offset is within the buffer wherever the mask holds."""
        span = len(self.memory.buffers[tensor])
        if offset.size and (offset.min() < 0 or offset.max() >= span):
            outside = ((offset < 0) | (offset >= span)) & mask
            if outside.any():
                flat = int(np.argmax(outside))
                found = int(np.broadcast_to(offset, outside.shape).flat[flat])
                raise Fault(
                    f"offset {found} of {tensor} is not in 0..{span}", position(flat, outside.shape)
                )
