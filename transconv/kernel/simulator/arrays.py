"""Arrays of the call in the simulator: slices by NumPy's rules, loads and stores that know the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transconv.ir import DType, convert
from transconv.kernel.functions import held_number
from transconv.kernel.simulator.numerics import Array, MaskedValues
from transconv.kernel.simulator.races import AccessTrace, Order
from transconv.kernel.simulator.values import Masked, SimulatedOperand, part_of
from transconv.kernel.source import Refusal
from transconv.kernel.tiles.arrays import filling
from transconv.kernel.tiles.values import IndexMap, broadcast, each_dimension


class SimulatedMemory:
    """An array of the call: its elements, their type, and who accessed them."""

    def __init__(self, order: Order, name: str, data: Any, dtype: DType) -> None:
        self.order, self.data, self.dtype = order, data, dtype
        self.trace = AccessTrace(order, name, data.size)

    def whole(self) -> MemoryPart:
        """All of it."""
        return MemoryPart(self, self.data, np.arange(self.data.size).reshape(self.data.shape))


class MemoryPart(SimulatedOperand):
    """A part of an array. ``places``: of its elements in the array; ``there``: False for what an index
    beyond the array picks, which has no active elements."""

    def __init__(
        self, memory: SimulatedMemory, data: Any, places: Any, there: bool = True, collision: str = ""
    ) -> None:
        self.memory, self.data, self.places, self.there = memory, data, places, there
        self.order, self.collision = memory.order, collision
        self.before: tuple[MemoryPart, tuple[int, ...]] | None = None  # see ``padded``

    def laid_out(self, layout: IndexMap) -> MemoryPart:
        """An array of one dimension as one with a layout."""
        if self.ndim != 1 or len(self) < layout.storage_size:
            raise Refusal(
                f"a layout of {layout.storage_size} elements for an array of shape {self.shape}",
                "an array of the call that has one dimension, and as many elements",
                "layout(X)",
            )
        (at,) = layout.mapping.places(np.indices(layout.shape))
        at = np.broadcast_to(at, layout.shape)
        return MemoryPart(
            self.memory, Placed(self.data, at), self.places[at], self.there, layout.collision
        )

    def writable(self) -> None:
        """Refuse a store where two elements are in one place."""
        if self.collision:
            raise Refusal(
                f"a store to {self.memory.trace.name} by a layout in which {self.collision}",
                "layouts with a place for each element",
                "index_map((H, W), lambda i, j: i * W + j)",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return int(self.data.ndim)

    @property
    def dtype(self) -> DType:
        """The type of the elements."""
        return self.memory.dtype

    @property
    def T(self) -> MemoryPart:
        """The view with its dimensions reversed."""
        made = MemoryPart(self.memory, self.data.T, self.places.T, self.there, self.collision)
        if self.before is not None:
            made.before = self.before[0].T, self.before[1][::-1]
        return made

    def padded(self) -> tuple[MemoryPart, tuple[int, ...]]:
        """The view with starts of slices below 0 as places before the array, and how many elements are
        missing before each dimension."""
        return self.before or (self, (0,) * self.ndim)

    def __repr__(self) -> str:
        return f"array {self.dtype}{list(self.shape)}\n{np.asarray(self.data)}"

    def __len__(self) -> int:
        return self.shape[0]

    def part(self) -> MaskedValues:
        return load(self, self.shape).part()

    def __getitem__(self, items: Any) -> MemoryPart | Masked:
        items = each_dimension(items if isinstance(items, tuple) else (items,), self.ndim)
        if any(isinstance(i, (SimulatedOperand, np.ndarray)) and i.ndim for i in items):
            return self.gathered(items)
        view = self.sliced(items)
        return view if view.ndim else load(view, ())

    def sliced(self, items: Sequence[Any]) -> MemoryPart:
        """The view of slices, numbers and None."""
        plain: list[Any] = []
        there, sizes = self.there, [1 if i is None else None for i in items]
        for item, size in zip((i for i in items if i is not None), self.shape, strict=True):
            if isinstance(item, slice):
                plain.append(
                    slice(
                        *(None if b is None else b.__index__() for b in (item.start, item.stop, item.step))
                    )
                )
            else:
                plain.append(item.__index__())
                there = there and -size <= plain[-1] < size
        if not there:  # an empty view of the right number of dimensions
            empty = tuple(
                1 if n else 0
                for n, i in zip(sizes, items, strict=True)
                if i is None or isinstance(i, slice)
            )
            return MemoryPart(self.memory, np.zeros(empty, self.data.dtype), np.zeros(empty, int), False)
        made = self.at(items, plain)
        starts = [p.start or 0 if isinstance(p, slice) else 0 for p in plain]
        if min(starts, default=0) < 0:
            steps = [p.step or 1 if isinstance(p, slice) else 1 for p in plain]
            lacking = [max(0, -(s // n)) for s, n in zip(starts, steps, strict=True)]
            moved = [
                slice(s + k * n, p.stop, p.step) if k else p
                for p, s, n, k in zip(plain, starts, steps, lacking, strict=True)
            ]
            rest = iter(lacking)
            front = [(i, 0 if i is None else next(rest)) for i in items]
            made.before = (
                self.at(items, moved),
                tuple(k for i, k in front if i is None or isinstance(i, slice)),
            )
        return made

    def at(self, items: Sequence[Any], plain: Sequence[Any]) -> MemoryPart:
        """The view of ``items`` with ``plain`` for those that are not None."""
        rest = iter(plain)
        index = tuple(None if i is None else next(rest) for i in items)
        return MemoryPart(
            self.memory, self.data[(..., *index)], self.places[(..., *index)], collision=self.collision
        )

    def gathered(self, items: Sequence[Any], mapped: bool = False) -> Masked:
        """The elements at indices that are tiles; inactive where one is beyond the array."""
        chosen, inside = self.chosen(items, mapped)
        data = np.zeros(inside.shape, self.data.dtype)
        data[inside] = self.data[chosen]
        self.memory.trace.read(self.places[chosen])
        return Masked(self.order, data, inside, self.dtype, self.order.inside)

    def chosen(self, items: Sequence[Any], mapped: bool = False) -> tuple[tuple[Array, ...], Array]:
        """The places of the elements at indices that are tiles, for those that exist, and which do.
        Indices below 0 count from the end; ``mapped``: they are those of a mapping, and outside."""
        if any(i is None or isinstance(i, slice) for i in items):
            raise Refusal("a slice beside a tile as an index", "an index for each dimension", "X[i, j]")
        parts = [part_of(i) for i in items]
        if not all(p.dtype.is_integer for p in parts):
            raise Refusal("floats as an index", "whole numbers", "i.astype(np.int32)")
        shape = broadcast(*(p.data.shape for p in parts))
        at = [np.broadcast_to(p.data, shape).astype(np.int64) for p in parts]
        at = at if mapped else [np.where(i < 0, i + n, i) for i, n in zip(at, self.shape, strict=True)]
        inside = np.logical_and.reduce(
            [np.full(shape, self.there)]
            + [p.active & (i >= 0) & (i < n) for p, i, n in zip(parts, at, self.shape, strict=True)]
        )
        return tuple(i[inside] for i in at), inside

    def atomic(self) -> Atomic:
        """What ``atomic_ref`` gives."""
        return Atomic(self)

    def __setitem__(self, items: Any, value: Any) -> None:
        view = self.sliced(each_dimension(items if isinstance(items, tuple) else (items,), self.ndim))
        held_number(value, view.dtype)
        given = part_of(value)
        if self.order.inside and not given.data.ndim:
            data, active = (np.broadcast_to(a, view.shape) for a in (given.data, given.active))
            value = Masked(self.order, data, active, given.dtype, True)
        if view.ndim and part_of(value).data.ndim != view.ndim:
            raise Refusal(
                "a value of other dimensions assigned to a slice of an array",
                "group.store",
                "group.store(Y[i:], y)",
            )
        store(view, value)


class Placed:
    """The elements of memory at places: an array that shares it."""

    def __init__(self, base: Any, at: Any) -> None:
        self.base, self.at = base, at
        self.shape, self.ndim, self.dtype, self.size = at.shape, at.ndim, base.dtype, at.size

    @property
    def T(self) -> Placed:
        """With its dimensions reversed."""
        return Placed(self.base, self.at.T)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        made = np.asarray(self.base[self.at])
        return made if dtype is None else made.astype(dtype)

    def __getitem__(self, items: Any) -> Any:
        return Placed(self.base, self.at[items])

    def __setitem__(self, items: Any, value: Any) -> None:
        self.base[self.at[items]] = value

    def add(self, items: Any, values: Array) -> None:
        """Add to elements, to one several times where it is there so often."""
        if isinstance(self.base, np.ndarray):
            np.add.at(self.base, self.at[items], values)
        else:
            self.base.add(self.at[items], values)


class Atomic:
    """An array, to elements of which is added: ``atomic[i] += v`` and ``-=``."""

    def __init__(self, view: MemoryPart) -> None:
        self.view = view

    def __getitem__(self, items: Any) -> Added:
        return Added(self.view, items if isinstance(items, tuple) else (items,))

    def __setitem__(self, items: Any, value: Any) -> None:
        if not isinstance(value, Added):
            raise Refusal(
                "an assignment to an element of atomic_ref", "+= and -=", "atomic_ref(X)[i] += x"
            )


class Added:
    """Elements that are added to."""

    def __init__(self, view: MemoryPart, items: tuple[Any, ...]) -> None:
        self.view, self.items = view, each_dimension(items, view.ndim)

    def __iadd__(self, value: Any) -> Added:
        part, view = part_of(value), self.view
        if any(isinstance(i, (SimulatedOperand, np.ndarray)) and i.ndim for i in self.items):
            chosen, inside = view.chosen(self.items)
            data, active = (np.broadcast_to(a, inside.shape)[inside] for a in (part.data, part.active))
        else:
            view = view.sliced(self.items)
            if part.data.ndim != view.ndim:
                raise Refusal(
                    f"a value of {part.data.ndim} dimensions added to an array of {view.ndim}",
                    "as many dimensions",
                    "atomic_ref(Y)[i:] += y",
                )
            shape = tuple(min(n, m) for n, m in zip(part.data.shape, view.shape, strict=True))
            part_at = tuple(slice(0, n) for n in shape)
            chosen = tuple(np.indices(shape).reshape(len(shape), -1)) if shape else ()
            data, active = part.data[part_at].ravel(), part.active[part_at].ravel()
        if not view.there or not active.any():
            return self
        held = convert(np.asarray(data[active]), view.dtype)
        at = tuple(i[active] for i in chosen) if chosen else ()
        view.writable()
        places = view.places[at]
        if isinstance(view.data, Placed):
            view.data.add(at, held.reshape(np.shape(places)))
        else:
            np.add.at(view.data, at, held.reshape(np.shape(places)))
        view.memory.trace.write(np.asarray(places), atomic=True)
        return self

    def __isub__(self, value: Any) -> Added:
        return self.__iadd__(-value)


def load(view: MemoryPart, shape: tuple[int, ...], vector: bool = False, fill: Any = None) -> Masked:
    """The elements of a view as a tile of a shape; inactive where the view has none. ``fill``: a number
    for elements outside, which are then active; starts of slices below the array are before it."""
    if len(shape) != view.ndim:
        raise Refusal(
            f"the shape {shape} for an array of {view.ndim} dimensions",
            f"{view.ndim} sizes",
            "group.load(X[i:], shape=(16, X.shape[1]))",
        )
    number = 0 if fill is None else filling(fill, view.dtype)
    data, active = np.full(shape, number, view.dtype.numpy), np.full(shape, fill is not None)
    if view.there:
        view, lacking = view.padded() if fill is not None else (view, (0,) * view.ndim)
        counts = [max(0, min(n - k, m)) for n, m, k in zip(shape, view.shape, lacking, strict=True)]
        part = tuple(slice(0, n) for n in counts)
        there = tuple(slice(k, k + n) for n, k in zip(counts, lacking, strict=True))
        data[there], active[there] = np.asarray(view.data[part]), True
        view.memory.trace.read(np.asarray(view.places[part]))
    return Masked(view.order, data, active, view.dtype, vector or view.order.inside)


def store(view: MemoryPart, value: Any) -> None:
    """Write the active elements of a value that are inside of a view."""
    held_number(value, view.dtype)
    part = part_of(value)
    if part.data.ndim != view.ndim:
        raise Refusal(
            f"a value of {part.data.ndim} dimensions stored to an array of {view.ndim}",
            "as many dimensions",
            "group.store(Y[i:], y)",
        )
    inside = tuple(slice(0, min(n, m)) for n, m in zip(part.data.shape, view.shape, strict=True))
    active = part.active[inside]
    view.writable()
    if view.there and active.any():
        written = convert(np.asarray(part.data[inside]), view.dtype)
        view.data[inside] = np.where(active, written, view.data[inside])
        view.memory.trace.write(np.asarray(view.places[inside])[active])


def view_of(array: Any) -> MemoryPart:
    """An array, or a part of one. Refuses others."""
    if not isinstance(array, MemoryPart):
        raise Refusal(
            type(array).__name__,
            "an array of the call, or a slice of one",
            "group.load(X[i:], shape=(16,))",
        )
    return array
