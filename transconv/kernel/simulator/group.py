"""What ``group.`` offers in the simulator, and the sub-groups and work-items of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from transconv.kernel.device_functions import Scope
from transconv.kernel.frontend.group_scope import spread_out
from transconv.kernel.functions import held_number
from transconv.kernel.group import Group
from transconv.kernel.refusals import Refusal, WrongScope
from transconv.kernel.simulator.arrays import MemoryPart, load, store
from transconv.kernel.simulator.lockstep import Lockstep
from transconv.kernel.simulator.mapped_access import load_by, store_by
from transconv.kernel.simulator.numerics import converted
from transconv.kernel.simulator.races import Order
from transconv.kernel.simulator.values import Masked, part_of
from transconv.kernel.tiles.values import dtype_of

SUBGROUP = 32  # the work-items of a sub-group without a hint


class SimulatedGroup:
    """A group of a simulation: its shape, its place, loads, stores, allocations, and its items."""

    scope = Scope.WorkGroup

    def __init__(self, order: Order, group: Group, ids: tuple[int, ...]) -> None:
        self.order, self.ids, self.subgroup_size = order, ids, group.subgroup_size_hint or SUBGROUP
        self.shape, self.work_shape = group.shape, group.work
        self.team: Lockstep | None = None

    def id(self) -> tuple[int, ...]:
        """The place among the groups."""
        return self.ids

    group_id = id

    def work_offset(self) -> tuple[int, ...]:
        """The first element of the work."""
        return tuple(i * n for i, n in zip(self.ids, self.shape, strict=True))

    # -- tiles and vectors --

    def load(self, array: Any, shape: Any = None, mapping: Any = None, fill: Any = None) -> Masked:
        """A tile of a part of an array; inactive beyond it, or a number."""
        self.alone("load", "group.vload(X[i:], shape=(16,))")
        return self._loaded(array, shape, mapping, fill, False)

    def vload(self, array: Any, shape: Any = None, mapping: Any = None, fill: Any = None) -> Masked:
        """A vector of a part of an array; inactive beyond it, or a number."""
        return self._loaded(array, shape, mapping, fill, True)

    def store(self, array: Any, value: Any, mapping: Any = None) -> None:
        """Write active elements of a tile or vector to a part of an array."""
        if mapping is not None:
            store_by(_view(array), value, mapping)
        else:
            store(_view(array), value)

    def empty(self, *sizes: Any, **words: Any) -> Masked:
        """A tile without active elements."""
        self.alone("empty", "group.vzeros(shape=(16,))")
        made = self._full(sizes, words, 0, False)
        made.active[...] = False
        return made

    def zeros(self, *sizes: Any, **words: Any) -> Masked:
        """A tile of zeros."""
        self.alone("zeros", "group.vzeros(shape=(16,))")
        return self._full(sizes, words, 0, False)

    def ones(self, *sizes: Any, **words: Any) -> Masked:
        """A tile of ones."""
        self.alone("ones", "group.vones(shape=(16,))")
        return self._full(sizes, words, 1, False)

    def full(self, *sizes: Any, **words: Any) -> Masked:
        """A tile of one value."""
        self.alone("full", "group.vfull(shape=(16,), fill_value=1)")
        return self._full(sizes, words, None, False)

    def vzeros(self, *sizes: Any, **words: Any) -> Masked:
        """A vector of zeros."""
        return self._full(sizes, words, 0, True)

    def vones(self, *sizes: Any, **words: Any) -> Masked:
        """A vector of ones."""
        return self._full(sizes, words, 1, True)

    def vfull(self, *sizes: Any, **words: Any) -> Masked:
        """A vector of one value."""
        return self._full(sizes, words, None, True)

    def alone(self, name: str, instead: str) -> None:
        """Refuse what only the whole group may do."""
        if self.order.inside:
            raise WrongScope(f"group.{name} by {self.order.who}",
                             "tiles at the scope of the group; vectors", instead)

    def _loaded(self, array: Any, shape: Any, mapping: Any, fill: Any, vector: bool) -> Masked:
        view = _view(array)
        if mapping is not None:
            return load_by(view, None if shape is None else _shape(shape), mapping, vector, fill)
        return load(view, _shape(view.shape if shape is None else shape), vector, fill)

    def _full(self, places: tuple[Any, ...], words: dict[str, Any], value: Any, vector: bool) -> Masked:
        unknown = [w for w in words if w not in ("shape", "dtype", "fill_value")]
        if unknown:
            raise Refusal(f"{unknown[0]}= of a tile", "shape, dtype, fill_value")
        shape, dtype, fill = spread_out(places, *(words.get(n) for n in ("shape", "dtype", "fill_value")))
        if value is not None and fill is not None:
            raise Refusal("a fill_value", "shape and dtype")
        value = fill if value is None else value
        if value is None:
            raise Refusal("no fill_value", "a number", "group.full(shape=(16,), fill_value=1)")
        held_number(value, dtype_of(dtype))
        given, sizes = part_of(value), _shape(shape)
        if given.data.ndim:
            raise Refusal(f"a tile of shape {given.data.shape} as a fill value", "a number")
        made = converted(given, dtype_of(dtype))
        active = np.broadcast_to(made.active, sizes)
        return Masked(self.order, np.broadcast_to(made.data, sizes), active, made.dtype, vector)

    # -- scopes --

    def workitems(self, function: Callable[..., Any]) -> Callable[..., None]:
        """A decorator: a call of the function runs it for every work-item of the group."""
        items = [WorkItem(self, place) for place in np.ndindex(*self.shape)]
        return self._team(function, items, [f"work-item {i.local_id()}" for i in items])

    def subgroups(self, function: Callable[..., Any]) -> Callable[..., None]:
        """A decorator: a call of the function runs it for every sub-group of the group."""
        count = -(-prod(self.shape) // self.subgroup_size)
        items = [SubGroup(self, n) for n in range(count)]
        return self._team(function, items, [f"sub-group {i.subgroup_id()}" for i in items])

    def barrier(self) -> None:
        """Order accesses of items: what was written before is read behind it. All items have to come."""
        if self.team is not None:
            self.team.barrier()

    def _team(self, function: Callable[..., Any], items: Sequence[Any],
              names: Sequence[str]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            if self.order.inside:
                raise WrongScope(f"items of a group begun by {self.order.who}", "the scope of the group")
            self.team = Lockstep(self.order, items, names, lambda item: function(item, *args))
            try:
                self.team.run()
            finally:
                self.team = None
        return run


class WorkItem:
    """One work-item of a group."""

    scope = Scope.WorkItem

    def __init__(self, group: SimulatedGroup, place: tuple[int, ...]) -> None:
        self.group, self.place = group, place

    def local_id(self) -> tuple[int, ...]:
        """The place in the group."""
        return self.place

    def global_id(self) -> tuple[int, ...]:
        """The place in the work; that of an item beyond it is too large."""
        return tuple(a + b for a, b in zip(self.group.work_offset(), self.place, strict=True))

    def group_id(self) -> tuple[int, ...]:
        """The place of the group among the groups."""
        return self.group.ids

    def barrier(self) -> None:
        """Wait for all work-items of the group."""
        self.group.barrier()


class SubGroup:
    """One sub-group of a group."""

    scope = Scope.SubGroup

    def __init__(self, group: SimulatedGroup, number: int) -> None:
        self.group, self.number = group, number

    def subgroup_id(self) -> int:
        """The place among the sub-groups of the group."""
        return self.number

    def size(self) -> int:
        """The number of its work-items."""
        return self.group.subgroup_size

    def group_id(self) -> tuple[int, ...]:
        """The place of the group among the groups."""
        return self.group.ids

    def barrier(self) -> None:
        """Wait for all sub-groups of the group."""
        self.group.barrier()


def _view(array: Any) -> MemoryPart:
    if not isinstance(array, MemoryPart):
        raise Refusal(type(array).__name__, "an array of the call, or a slice of one",
                      "group.load(X[i:], shape=(16,))")
    return array


def _shape(given: Any) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise Refusal(f"{n!r} as a size of a tile", "whole numbers from 1 on",
                          "group.zeros(shape=(16, X.shape[1]), dtype=np.float32)")
    return sizes
