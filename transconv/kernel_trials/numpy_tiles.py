"""Values of a drawn kernel in plain NumPy: elements in NumPy's own types, and which of them are active.

Nothing here is shared with the simulator or the front end of kernels: types are those that NumPy's
functions give, sums are of 64 bits, and what is active follows docs/kernel_masks.md.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = np.ndarray[Any, Any]
ACCUMULATED: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "max": np.maximum,
                                    "min": np.minimum}
REDUCED = ("sum", "prod", "max", "min", "any", "all", "mean", "argmax", "argmin")


class Elements(NDArrayOperatorsMixin):
    """``data``, and where it is ``active``."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any, active: Any = True) -> None:
        self.data: Array = np.array(data)
        self.active: Array = np.array(np.broadcast_to(active, self.data.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> Any:
        """NumPy's type."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.data.ndim

    @property
    def T(self) -> Elements:
        """The dimensions reversed."""
        return Elements(self.data.T, self.active.T)

    @property
    def mask(self) -> Elements:
        """True where an element is inactive."""
        return Elements(~self.active)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None) -> Elements:
        with np.errstate(all="ignore"):
            made = product(*inputs) if ufunc is np.matmul else Elements(
                ufunc(*map(data_of, inputs)), active_of(inputs))
        if out is None:
            return made
        target: Elements = out[0]
        target[...] = made
        return target

    def __array_function__(self, function: Any, types: Any, args: Any, words: Any) -> Any:
        name = function.__name__
        if name in REDUCED:
            return reduced(name, args[0], *args[1:], **words)
        if name == "stack":
            parts = [of(a) for a in args[0]]
            return Elements(np.stack([p.data for p in parts], *args[1:], **words),
                            np.stack([p.active for p in parts], *args[1:], **words))
        data = function(*map(data_of, args), **words)
        if name.endswith("_like"):
            return Elements(data)
        if name in ("where", "clip"):
            return Elements(data, active_of(args))
        return Elements(data, function(of(args[0]).active, *args[1:], **words))

    def __getattr__(self, name: str) -> Any:
        if name in REDUCED:
            return lambda *args, **words: reduced(name, self, *args, **words)
        raise AttributeError(name)

    def __getitem__(self, items: Any) -> Elements:
        items = plain(items)
        return Elements(self.data[items], self.active[items])

    def __setitem__(self, items: Any, value: Any) -> None:
        items = plain(items)
        given = Elements(value) if isinstance(value, (int, float)) else value
        if not isinstance(value, Elements):
            np.zeros(1, self.dtype)[:] = value  # raises what NumPy raises of a number
        data, active = (np.broadcast_to(a, self.data[items].shape) for a in (given.data, given.active))
        self.data[items] = np.where(active, data.astype(self.dtype), self.data[items])
        self.active[items] |= active

    def astype(self, dtype: Any) -> Elements:
        """The values in another type."""
        with np.errstate(all="ignore"):
            return Elements(self.data.astype(dtype), self.active)

    def copy(self) -> Elements:
        """Other elements of the same values."""
        return Elements(self.data, self.active)

    vec = copy

    def filled(self, value: Any) -> Elements:
        """A number where elements are inactive."""
        return Elements(np.where(self.active, self.data, self.dtype.type(value)))

    def clip(self, low: Any = None, high: Any = None) -> Any:
        """The values between limits."""
        return np.clip(self, low, high)

    def item(self) -> Any:
        """The only element."""
        assert self.active.all()
        return self.data.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())


for _name in ("add", "sub", "mul", "truediv"):  # `x += y` is another tile, of all operands' masks
    setattr(Elements, f"__i{_name}__", getattr(Elements, f"__{_name}__"))


def of(value: Any) -> Elements:
    """A value as elements."""
    return value if isinstance(value, Elements) else Elements(value)


def data_of(value: Any) -> Any:
    """What NumPy computes with: numbers of Python stay such."""
    return value.data if isinstance(value, Elements) else value


def active_of(values: Sequence[Any]) -> Array:
    """Where all operands are active."""
    parts = (v.active if isinstance(v, Elements) else np.ones(np.shape(v), bool) for v in values
             if v is not None)
    return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*parts)))


def plain(items: Any) -> Any:
    """Indices with Python's numbers for elements without dimensions."""
    if isinstance(items, tuple):
        return tuple(map(plain, items))
    if isinstance(items, slice):
        return slice(*map(plain, (items.start, items.stop, items.step)))
    if items is None or items is Ellipsis or np.ndim(data_of(items)):
        return items
    return operator.index(items)


def product(a: Any, b: Any) -> Elements:
    """``a @ b`` in 64 bits: inactive elements count as 0."""
    left, right = (np.where(x.active, x.data, 0).astype(np.float64) for x in (a, b))
    pairs = a.active.astype(int) @ b.active.astype(int)
    return Elements((left @ right).astype(np.float32), pairs > 0)


def reduced(name: str, x: Elements, axis: Any = None, keepdims: bool = False) -> Elements:
    """A reduction of active elements: active where there is one."""
    some = x.active.any(axis=axis, keepdims=keepdims)
    if name in ("any", "all"):
        data = np.where(x.active, x.data != 0, name == "all")
        return Elements(getattr(data, name)(axis=axis, keepdims=keepdims), some)
    floats = x.dtype.kind == "f"
    if name in ("sum", "prod", "mean"):
        wide = x.data.astype(np.float64 if floats or name == "mean" else np.int64)
        held = np.where(x.active, wide, 1 if name == "prod" else 0)
        combine = ACCUMULATED["prod" if name == "prod" else "sum"]
        found = combine.reduce(held, axis=_all(axis, x), keepdims=keepdims)
        if name == "mean":
            found = found / np.maximum(x.active.sum(axis=axis, keepdims=keepdims), 1)
        return Elements(np.asarray(found).astype(x.dtype) if floats else found, some)
    most = name in ("max", "argmax")
    if x.dtype.kind == "b":
        x = x.astype(np.int32)
    limits = (-np.inf, np.inf) if floats else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
    held = np.where(x.active, x.data, x.dtype.type(limits[0 if most else 1]))
    if not held.size:
        held = held.astype(x.dtype)
    combine = ACCUMULATED["max" if most else "min"]
    if name in ("max", "min"):
        return Elements(combine.reduce(held, axis=_all(axis, x), keepdims=keepdims), some)
    best = combine.reduce(held, axis=axis, keepdims=True)
    return Elements((x.active & (x.data == best)).argmax(axis=axis, keepdims=keepdims), some)


def _all(axis: Any, x: Elements) -> Any:
    return tuple(range(x.ndim)) if axis is None else axis
