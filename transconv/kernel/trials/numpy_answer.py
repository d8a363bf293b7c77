"""The answer of plain NumPy, what a drawn kernel stores: its statements run as Python, once for each
group, or once for the whole work where they say the same of all groups.

Nothing here is shared with the simulator or the front end of kernels: the group, its items and its arrays
are those of this file, types are those that NumPy's functions give, sums are of 64 bits, and what is
active follows docs/kernel_masks.md. An index that is a tile counts from the end below 0, as in NumPy."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from transconv.support import executed

Array = np.ndarray[Any, Any]
ACCUMULATED: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
REDUCED = ("sum", "prod", "max", "min", "any", "all", "mean", "argmax", "argmin")


class Elements(NDArrayOperatorsMixin):
    """Elements of a tile: ``data``, and where it is ``active``."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any, active: Any = True) -> None:
        self.data: Array = np.array(data)
        self.active: Array = np.array(np.broadcast_to(active, self.data.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def T(self) -> Elements:
        return Elements(self.data.T, self.active.T)

    @property
    def mask(self) -> Elements:
        """True where an element is inactive."""
        return Elements(~self.active)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None) -> Elements:
        with np.errstate(all="ignore"):
            made = (
                product(*inputs)
                if ufunc is np.matmul
                else Elements(ufunc(*map(data_of, inputs)), active_of(inputs))
            )
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
            return Elements(
                np.stack([p.data for p in parts], *args[1:], **words),
                np.stack([p.active for p in parts], *args[1:], **words),
            )
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
        with np.errstate(all="ignore"):
            return Elements(self.data.astype(dtype), self.active)

    def copy(self) -> Elements:
        return Elements(self.data, self.active)

    vec = copy

    def filled(self, value: Any) -> Elements:
        return Elements(np.where(self.active, self.data, self.dtype.type(value)))

    def clip(self, low: Any = None, high: Any = None) -> Any:
        return np.clip(self, low, high)

    def item(self) -> Any:
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
    parts = (
        v.active if isinstance(v, Elements) else np.ones(np.shape(v), bool)
        for v in values
        if v is not None
    )
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


SCOPES = ("WorkGroup", "SubGroup", "WorkItem")


class DrawnProgram(Protocol):
    """What is run: ``work`` in groups of ``group``, in sub-groups of ``sub``; ``whole``: whether the
    statements of ``body`` say the same of all groups."""

    @property
    def work(self) -> tuple[int, ...]: ...
    @property
    def group(self) -> tuple[int, ...]: ...
    @property
    def sub(self) -> int: ...
    @property
    def whole(self) -> bool: ...
    def body(self) -> str: ...


def answered(trial: DrawnProgram, arrays: dict[str, Array]) -> None:
    """Store to the arrays of a trial what its statements say. Where they say the same of all groups, all
    of the work is one."""
    run = _FunctionRun(trial)
    names = executed(
        trial.body(),
        {
            "np": np,
            "kernel": run,
            "atomic_ref": _AtomicRef,
            "create_mapping": lambda function: function,
            **{s: s for s in SCOPES},
        },
    )
    names["scoped"] = run.scoped
    sources = [_Source(a, a) for a in arrays.values()]
    shape = trial.work if trial.whole else trial.group
    counts = [-(-w // g) for w, g in zip(trial.work, shape, strict=True)]
    with np.errstate(all="ignore"):
        for ids in np.ndindex(*counts):
            run.scope, run.here = "WorkGroup", _Group(run, trial, ids, shape)
            names["drawn"](run.here, *sources)


class _FunctionRun:
    """The decorators of functions, and the bodies of that with several."""

    def __init__(self, trial: DrawnProgram) -> None:
        self.trial, self.bodies = trial, dict[str, Any]()
        self.scope = "WorkGroup"
        self.here: Any = None

    def __call__(self, function: Any) -> Any:
        return function

    def func(self, function: Any = None, scope: str = "", inline: bool = True) -> Any:
        if not scope:
            return function or (lambda made: made)
        return lambda made: self.bodies.setdefault(scope, made)

    def scoped(self, x: Any) -> Any:
        """The function with a body for each scope."""
        return self.bodies[self.scope](self.here, x)

    def each(self, scope: str, items: Callable[[], Iterator[Any]]) -> Callable[[Any], Any]:
        """The decorator of a function of items, which runs it for each."""

        def decorated(function: Any) -> Any:
            def called() -> None:
                around = self.scope, self.here
                for item in items():
                    self.scope, self.here = scope, item
                    function(item)
                self.scope, self.here = around

            return called

        return decorated


class _Group:
    """A group: where it is, loads, stores and new tiles."""

    def __init__(
        self, run: _FunctionRun, trial: DrawnProgram, ids: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        self.ids, self.shape, self.work_shape = ids, shape, trial.work
        self.workitems = run.each("WorkItem", lambda: (_Item(self, p) for p in np.ndindex(*shape)))
        size = trial.sub or 32
        self.subgroups = run.each(
            "SubGroup", lambda: (_SubGroup(n, size) for n in range(-(-prod(shape) // size)))
        )

    def id(self) -> tuple[int, ...]:
        return self.ids

    def work_offset(self) -> tuple[int, ...]:
        """The first element of the work."""
        return tuple(i * n for i, n in zip(self.ids, self.shape, strict=True))

    def load(self, view: _Source, shape: Any, mapping: Any = None, fill: Any = None) -> Elements:
        """A tile of a part of an array."""
        if mapping is not None:
            made = view.at([np.asarray(i) for i in mapping(*np.indices(shape))], 0)
            return made if fill is None else made.filled(fill)
        if fill is not None:
            return view.filled_with(fill, shape)
        made = Elements(np.zeros(shape, view.dtype), False)
        part = tuple(slice(0, n) for n in np.minimum(shape, view.shape))
        made.data[part], made.active[part] = view.data[part], view.there
        return made

    vload = load

    def store(self, view: _Source, value: Any) -> None:
        """Write active elements to a part of an array."""
        part = tuple(slice(0, n) for n in np.minimum(value.shape, view.shape))
        if view.there:
            view.data[part] = np.where(
                value.active[part], value.data[part].astype(view.dtype), view.data[part]
            )

    def full(self, shape: Any = (), dtype: Any = np.float32, fill_value: Any = 0) -> Elements:
        """A tile of one number."""
        return Elements(np.full(shape, fill_value, dtype))

    zeros = vfull = full

    def empty(self, shape: Any, dtype: Any) -> Elements:
        """A tile without an active element."""
        return Elements(np.zeros(shape, dtype), False)


class _Item:
    """A work-item."""

    def __init__(self, group: _Group, place: tuple[int, ...]) -> None:
        self.group, self.place = group, place

    def local_id(self) -> tuple[int, ...]:
        return self.place

    def global_id(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.group.work_offset(), self.place, strict=True))


class _SubGroup:
    """A sub-group."""

    def __init__(self, number: int, size: int) -> None:
        self.subgroup_id, self.size = lambda: number, lambda: size


class _Source(Elements):
    """An array of the call, or a part of it, which shares its memory. ``origin`` and ``items``: what was
    sliced, and how; ``there``: whether all numbers among its indices exist."""

    def __init__(
        self, data: Array, origin: Array, items: tuple[Any, ...] = (), there: bool = True
    ) -> None:
        self.data, self.origin, self.items, self.there = data, origin, items, there
        self.active = np.full(data.shape, there)

    def __getitem__(self, items: Any) -> Any:
        items = plain(items if isinstance(items, tuple) else (items,))
        if any(np.ndim(data_of(i)) for i in items if not isinstance(i, slice)):
            return self.at(items)
        there = all(-n <= i < n for i, n in zip(items, self.shape, strict=False) if isinstance(i, int))
        held = tuple(i if not isinstance(i, int) or there else slice(0, 0) for i in items)
        if len(items) == self.ndim and all(isinstance(i, int) for i in items):
            return Elements(self.data[items]) if there else Elements(self.dtype.type(0), False)
        return _Source(
            self.data[held]
            if there
            else self.data[held]
            .sum(axis=tuple(a for a, i in enumerate(items) if isinstance(i, int)))
            .astype(self.dtype),
            self.data,
            items,
            self.there and there,
        )

    def __setitem__(self, items: Any, value: Any) -> None:
        items = plain(items)
        given = of(value)
        if given.active.all():
            self.data[items] = given.data

    def at(self, items: Any, least: int | None = None) -> Elements:
        """The elements at indices that are tiles; those below ``least``, by default minus the size, are
        outside."""
        chosen, inside = self.inside(items, least)
        made = Elements(np.zeros(inside.shape, self.dtype), inside)
        made.data[inside] = self.data[chosen]
        return made

    def inside(self, items: Any, least: int | None = None) -> tuple[tuple[Array, ...], Array]:
        """The indices that exist, and which do."""
        parts = [of(i) for i in items]
        shape = np.broadcast_shapes(*(p.shape for p in parts))
        inside = np.ones(shape, bool)
        for p, n in zip(parts, self.shape, strict=True):
            inside = inside & p.active & (p.data >= (-n if least is None else least)) & (p.data < n)
        return tuple(np.broadcast_to(p.data, shape)[inside] for p in parts), inside

    def filled_with(self, fill: Any, shape: tuple[int, ...]) -> Elements:
        """The elements from the starts on, which may be below 0, and a number outside."""
        items = self.items or (slice(None),) * self.ndim
        at: list[Array] = []
        inside: list[Array] = []
        rest = iter(shape)
        for n, item in zip(self.origin.shape, (*items, *[slice(None)] * self.origin.ndim), strict=False):
            if isinstance(item, slice):
                place = (item.start or 0) + (item.step or 1) * np.arange(next(rest))
                stop = slice(item.stop).indices(n)[1]
                inside.append((place >= 0) & (place < stop))
                at.append(np.clip(place, 0, max(0, n - 1)))
            else:
                inside.append(np.asarray([-n <= item < n]))
                at.append(np.asarray([item if -n <= item < n else 0]))
        where = functools.reduce(np.logical_and.outer, inside)
        made = np.full(where.shape, fill, self.dtype)
        if self.origin.size:
            made = np.where(where, self.origin[np.ix_(*at)], made)
        return Elements(made.reshape(shape))


class _AtomicRef:
    """``atomic_ref``."""

    def __init__(self, of_array: _Source) -> None:
        self.array = of_array

    def __getitem__(self, items: Any) -> _Added:
        return _Added(self.array, items)

    def __setitem__(self, items: Any, value: Any) -> None:
        assert isinstance(value, _Added)


class _Added:
    """Elements that are added to."""

    def __init__(self, array: _Source, items: Any) -> None:
        self.array, self.items = array, items if isinstance(items, tuple) else (items,)

    def __iadd__(self, value: Any) -> _Added:
        given = of(value)
        if any(np.ndim(data_of(i)) for i in self.items if not isinstance(i, slice)):
            chosen, inside = self.array.inside(self.items)
            data, active = (np.broadcast_to(a, inside.shape)[inside] for a in (given.data, given.active))
            np.add.at(self.array.data, tuple(c[active] for c in chosen), data[active])
            return self
        view = self.array.data[plain(self.items)]
        if not np.ndim(view):
            pairs = zip(self.items, self.array.shape, strict=True)
            if given.active.all() and all(-n <= operator.index(i) < n for i, n in pairs):
                self.array.data[plain(self.items)] += given.data
            return self
        part = tuple(slice(0, n) for n in np.minimum(given.shape, view.shape))
        view[part] += np.where(given.active[part], given.data[part], 0)
        return self

    def __isub__(self, value: Any) -> _Added:
        return self.__iadd__(-value)
