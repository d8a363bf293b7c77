"""Groups in the simulator: what ``group.`` offers, and the sub-groups and work-items of a group.

Items run in lockstep: each to its end, or to a barrier, before the next one does. The first item runs
in the calling thread. Only if it reaches a barrier the others get threads of their own, of which one
runs at a time; so the order is the same in every simulation, and a debugger stops where it is told to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from transconv.ir import convert
from transconv.kernel.annotations import Group
from transconv.kernel.device_functions import Scope
from transconv.kernel.frontend.methods import spread_out
from transconv.kernel.frontend.reader import sizes_of
from transconv.kernel.functions import held_number
from transconv.kernel.simulator.arrays import MemoryPart, load, store, view_of
from transconv.kernel.simulator.numerics import Array, converted
from transconv.kernel.simulator.races import WHOLE, Order, users_line
from transconv.kernel.simulator.values import Masked, part_of
from transconv.kernel.source import Refusal, SourcePlace, WrongScope, dtype_of
from transconv.kernel.tiles.arrays import filling
from transconv.kernel.tiles.values import colliding, mapped_places

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
            store_by(view_of(array), value, mapping)
        else:
            store(view_of(array), value)

    def empty(self, *sizes: Any, **words: Any) -> Masked:
        """A tile without active elements."""
        self.alone("empty", "group.vzeros(shape=(16,))")
        made = self._full(sizes, words, 0, False)
        made.active[...] = False
        return made

    def alone(self, name: str, instead: str) -> None:
        """Refuse what only the whole group may do."""
        if self.order.inside:
            raise WrongScope(
                f"group.{name} by {self.order.who}", "tiles at the scope of the group; vectors", instead
            )

    def _loaded(self, array: Any, shape: Any, mapping: Any, fill: Any, vector: bool) -> Masked:
        view = view_of(array)
        if mapping is not None:
            return load_by(view, None if shape is None else sizes_of(shape), mapping, vector, fill)
        return load(view, sizes_of(view.shape if shape is None else shape), vector, fill)

    def _full(self, places: tuple[Any, ...], words: dict[str, Any], value: Any, vector: bool) -> Masked:
        unknown = [w for w in words if w not in ("shape", "dtype", "fill_value")]
        if unknown:
            raise Refusal(f"{unknown[0]}= of a tile", "shape, dtype, fill_value")
        shape, dtype, value = spread_out(
            places, words.get("shape"), words.get("dtype"), words.get("fill_value"), value
        )
        held_number(value, dtype_of(dtype))
        given, sizes = part_of(value), sizes_of(shape)
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
        items = [SubGroup(self, (n,)) for n in range(count)]
        return self._team(function, items, [f"sub-group {i.subgroup_id()}" for i in items])

    def barrier(self) -> None:
        """Order accesses of items: what was written before is read behind it. All items have to come."""
        if self.team is not None:
            self.team.barrier()

    def _team(
        self, function: Callable[..., Any], items: Sequence[Any], names: Sequence[str]
    ) -> Callable[..., None]:
        def run(*args: Any) -> None:
            if self.order.inside:
                raise WrongScope(f"items of a group begun by {self.order.who}", "the scope of the group")
            self.team = Lockstep(self.order, items, names, lambda item: function(item, *args))
            try:
                self.team.run()
            finally:
                self.team = None

        return run


def _allocates(name: str, value: int | None, vector: bool) -> Callable[..., Masked]:
    """A method that makes a tile or a vector of one value; None: of an argument."""

    def method(self: SimulatedGroup, *sizes: Any, **words: Any) -> Masked:
        if not vector:
            self.alone(name, f"group.v{name}(shape=(16,){', fill_value=1' * (value is None)})")
        return self._full(sizes, words, value, vector)

    return method


for _name, _value in {"zeros": 0, "ones": 1, "full": None}.items():
    setattr(SimulatedGroup, _name, _allocates(_name, _value, False))
    setattr(SimulatedGroup, f"v{_name}", _allocates(_name, _value, True))


class SimulatedItem:
    """Work-items or sub-groups: what one of them knows of its group."""

    def __init__(self, group: SimulatedGroup, place: tuple[int, ...]) -> None:
        self.group, self.place = group, place

    def group_id(self) -> tuple[int, ...]:
        """The place of the group among the groups."""
        return self.group.ids

    def barrier(self) -> None:
        """Wait for all items of the group."""
        self.group.barrier()


class WorkItem(SimulatedItem):
    """One work-item of a group."""

    scope = Scope.WorkItem

    def local_id(self) -> tuple[int, ...]:
        """The place in the group."""
        return self.place

    def global_id(self) -> tuple[int, ...]:
        """The place in the work; that of an item beyond it is too large."""
        return tuple(a + b for a, b in zip(self.group.work_offset(), self.place, strict=True))


class SubGroup(SimulatedItem):
    """One sub-group of a group."""

    scope = Scope.SubGroup

    def subgroup_id(self) -> int:
        """The place among the sub-groups of the group."""
        return self.place[0]

    def size(self) -> int:
        """The number of its work-items."""
        return self.group.subgroup_size


def _places(view: MemoryPart, mapping: Any, shape: tuple[int, ...]) -> list[Array]:
    """The indices of a tile's elements in an array."""
    if view.order.inside:
        raise Refusal(f"a mapping inside of {view.order.who}", "the scope of the group")
    made = mapped_places(mapping, lambda m: np.indices(shape), view.ndim)
    return [np.broadcast_to(part_of(m).data, shape) for m in made]


def load_by(
    view: MemoryPart, shape: tuple[int, ...] | None, mapping: Any, vector: bool, fill: Any = None
) -> Masked:
    """The elements at the places of a mapping; inactive where there is none."""
    if shape is None:
        raise Refusal(
            "a mapping without a shape", "shape=(...)", "group.load(X, shape=(16, 16), mapping=m)"
        )
    made = view.gathered(_places(view, mapping, shape), True)
    if fill is not None:
        filling(fill, view.dtype)
        made = made.filled(fill)
    made.vector = vector
    return made


def store_by(view: MemoryPart, value: Any, mapping: Any) -> None:
    """Write active elements to the places of a mapping. Refused where two of them have one place."""
    part = part_of(value)
    at = _places(view, mapping, part.data.shape)
    if collision := colliding([p.ravel() for p in at], part.data.shape, view.shape):
        raise Refusal(
            f"a store to {view.memory.trace.name} by a mapping in which {collision}",
            "mappings with a place for each element",
            "create_mapping(lambda i, j: (j, i))",
        )
    chosen, inside = view.chosen(at, True)
    active = part.active[inside]
    place = tuple(i[active] for i in chosen)
    view.writable()
    view.data[place] = convert(np.asarray(part.data[inside][active]), view.dtype)
    view.memory.trace.write(np.asarray(view.places[place]))


class _Ended(BaseException):
    """Ends an item that waits, after another one failed."""


class Lockstep:
    """Runs ``body(item)`` for items. ``names``: of the items, in messages."""

    def __init__(
        self, order: Order, items: Sequence[Any], names: Sequence[str], body: Callable[[Any], object]
    ) -> None:
        self.order, self.items, self.names, self.body = order, items, names, body
        # At which barrier each waits; None: it has ended, or not begun.
        self.waits: list[SourcePlace | None] = [None] * len(items)
        self.threads: list[threading.Thread] = []
        self.gates: list[threading.Semaphore] = []
        self.main = threading.Semaphore(0)
        self.failed: BaseException | None = None
        self.ended = False

    def run(self) -> None:
        """Run all items."""
        order = self.order
        here, who = order.here, order.who
        order.epoch += 1
        try:
            for number in range(len(self.items)):
                self.turn(number)
                self.body(self.items[number])
                self.waits[number] = None
                if self.threads:
                    self.others()
                    self.check()
                    break
        finally:
            self.ended = True
            for gate in self.gates:
                gate.release()
            for thread in self.threads:
                thread.join()
            order.item, order.here, order.who = WHOLE, here, who
            order.epoch += 1

    def turn(self, number: int) -> None:
        """From here on this item runs."""
        self.order.item, self.order.here = number, self.items[number]
        self.order.who = self.names[number]

    def barrier(self) -> None:
        """Wait here for all items. Refused if one of them does not come, or waits elsewhere."""
        number = self.order.item
        self.waits[number] = users_line(sys._getframe(1))
        if number and not self.threads:
            self.check()
        elif number:
            self.main.release()
            self.gates[number].acquire()
            if self.ended:
                raise _Ended
        else:
            self.others()
            self.check()
            self.order.epoch += 1
        self.turn(number)

    def others(self) -> None:
        """Let all items but the first run to their next barrier or end."""
        started = bool(self.threads)
        if not started:
            self.gates = [threading.Semaphore(0) for _ in self.items]
            self.threads = [
                threading.Thread(target=self.alone, args=(n,), daemon=True)
                for n in range(1, len(self.items))
            ]
        for number in range(1, len(self.items)):
            if not started:
                self.threads[number - 1].start()
            elif self.waits[number] is None:
                continue
            else:
                self.gates[number].release()
            self.main.acquire()
            if self.failed is not None:
                raise self.failed

    def alone(self, number: int) -> None:
        """An item in a thread of its own."""
        self.turn(number)
        try:
            self.body(self.items[number])
        except _Ended:
            return
        except BaseException as error:
            self.failed = error
        self.waits[number] = None
        self.main.release()

    def check(self) -> None:
        """Refuse barriers that not all items reach."""
        first = self.waits[0]
        for number, place in enumerate(self.waits):
            if place != first:
                raise Refusal(
                    f"a barrier that not all items reach: {self.names[0]} {_told(first)}, "
                    f"{self.names[number]} {_told(place)}",
                    "a barrier that all of them reach, outside of branches that differ between items",
                )


def _told(place: SourcePlace | None) -> str:
    return "has ended" if place is None else f"waits at {place}"
