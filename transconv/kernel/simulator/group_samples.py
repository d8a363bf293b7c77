"""Some groups of a simulation, on arrays that stay where they are: an element is copied from its device
when a group reads it. Each group runs as if alone, and stops at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from transconv.backend_triton import torch_module
from transconv.kernel.group import Group
from transconv.kernel.launch.arguments import plain_number, spanned, type_of
from transconv.kernel.simulator.arrays import MemoryPart, Placed, SimulatedMemory
from transconv.kernel.simulator.execution import held_by_numpy
from transconv.kernel.simulator.group import SimulatedGroup
from transconv.kernel.simulator.names import seen, seen_by_tiles
from transconv.kernel.simulator.numerics import Array
from transconv.kernel.simulator.races import AccessTrace, Order

Written = dict[str, Array]
"""The places of the elements that a group writes, in the memory of each array, each once."""


class OutOfTime(Exception):
    """A group takes longer than it may."""


class GroupSamples:
    """Simulates groups. ``tensors``: arrays by name, which are written; ``rest``: the other arguments."""

    def __init__(self, function: Callable[..., Any], group: Group, tensors: Mapping[str, Any],
                 rest: Mapping[str, Any], meant: Mapping[str, int]) -> None:
        self.group, self.order, self.until = group, Order(), 0.0
        self.memories = {n: SampledMemory(self, n, t) for n, t in tensors.items()}
        self.running = seen_by_tiles(function, self.order, dict(meant))
        self.given = {n: seen(v, self.order, {}) if isinstance(v, ModuleType) else v
                      for n, v in rest.items()} | {n: m.whole() for n, m in self.memories.items()}

    def run(self, ids: tuple[int, ...], until: float) -> Written:
        """What a group writes, but by additions in one step, to which other groups may add. Raises
        OutOfTime at a time of ``perf_counter``, and KernelError and Refusal as ``simulate``."""
        self.until, self.order.group = until, self.order.group + 1
        self.order.here = SimulatedGroup(self.order, self.group, ids)
        self.order.who = f"group {ids}"
        for memory in self.memories.values():
            memory.trace.begin()
        names = self.running.__code__.co_varnames[:self.running.__code__.co_argcount]
        with np.errstate(all="ignore"):
            self.running(self.order.here, *(self.given[n] for n in names[1:]))
        return {n: memory.trace.places() for n, memory in self.memories.items()}

    def undo(self) -> None:
        """Have the arrays as they were."""
        for memory in self.memories.values():
            memory.device.undo()


def numbers_of(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are no arrays, numbers as Python's."""
    found = {n: (plain_number(v), v) for n, v in given.items() if n not in tensors}
    return {n: v if number is None else number for n, (number, v) in found.items()}


class SampledMemory(SimulatedMemory):
    """An array on its device."""

    trace: WriteTrace

    def __init__(self, samples: GroupSamples, name: str, tensor: Any) -> None:
        self.order, self.dtype = samples.order, type_of(name, str(tensor.dtype).removeprefix("torch."))
        self.device, self.trace = DeviceElements(tensor, self.dtype), WriteTrace(samples, name)
        self.places = PlaceNumbers(tuple(tensor.shape), tuple(tensor.stride()))
        self.data = Placed(self.device, self.places)

    def whole(self) -> MemoryPart:
        return MemoryPart(self, self.data, self.places)


class WriteTrace(AccessTrace):
    """Which elements of an array a group writes. ``alone``: by itself; ``added``: in one step each."""

    def __init__(self, samples: GroupSamples, name: str) -> None:
        self.samples, self.name = samples, name
        self.begin()

    def begin(self) -> None:
        """A group begins."""
        self.alone: list[Array] = []
        self.added: list[Array] = []

    def read(self, places: Array) -> None:
        """The current line reads elements."""
        if time.perf_counter() > self.samples.until:
            raise OutOfTime

    def write(self, places: Array, atomic: bool = False) -> None:
        """The current line writes elements."""
        self.read(places)
        (self.added if atomic else self.alone).append(places.ravel())

    def places(self) -> Array:
        """The elements that it alone wrote."""
        alone, added = (np.unique(np.concatenate([*each, np.empty(0, np.int64)]).astype(np.int64))
                        for each in (self.alone, self.added))
        return np.setdiff1d(alone, added)


class DeviceElements:
    """The memory of a tensor, read and written by the places of its elements."""

    def __init__(self, tensor: Any, dtype: Any) -> None:
        span = spanned(tensor) // tensor.element_size()
        self.flat = tensor.detach().as_strided((span,), (1,))
        self.type, self.held, self.dtype = dtype, held_by_numpy(dtype), np.dtype(dtype.numpy)
        self.before: list[tuple[Any, Any]] = []

    def like(self, tensor: Any) -> DeviceElements:
        """Those of another tensor of such elements."""
        return DeviceElements(tensor, self.type)

    def read(self, places: Array) -> Array:
        """Elements."""
        found = self.flat[self.index(places)].to(self.held).cpu().numpy()
        return np.asarray(found, self.dtype).reshape(places.shape)

    def __getitem__(self, at: Any) -> Array:
        return self.read(np.asarray(at))

    def add(self, at: Any, values: Array) -> None:
        """Add to elements, to one several times where its place is there so often."""
        places, each = np.unique(np.asarray(at).ravel(), return_inverse=True)
        sums = self.read(places)
        np.add.at(sums, each.reshape(-1), values.reshape(-1))
        self[places] = sums

    def __setitem__(self, at: Any, value: Any) -> None:
        places = np.asarray(at)
        index = self.index(places)
        values = np.broadcast_to(np.asarray(value, self.dtype), places.shape).copy()
        self.before.append((index, self.flat[index]))
        self.flat[index] = torch_module().from_numpy(values.reshape(-1)).to(self.flat)

    def index(self, places: Array) -> Any:
        """Places as torch has them."""
        found = torch_module().from_numpy(np.ascontiguousarray(places, np.int64).reshape(-1))
        return found.to(self.flat.device)

    def undo(self) -> None:
        """Have the elements as they were before the first write."""
        while self.before:
            index, old = self.before.pop()
            self.flat[index] = old


class PlaceNumbers:
    """The places of an array's elements in memory, which are computed where they are asked for."""

    def __init__(self, shape: Sequence[int], steps: Sequence[int], start: int = 0) -> None:
        self.shape, self.steps, self.start = tuple(shape), tuple(steps), start
        self.ndim, self.size, self.dtype = len(self.shape), prod(self.shape), np.dtype(np.int64)

    @property
    def T(self) -> PlaceNumbers:
        """With its dimensions reversed."""
        return PlaceNumbers(self.shape[::-1], self.steps[::-1], self.start)

    def ravel(self) -> Array:
        """All of them."""
        return np.asarray(self).ravel()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        made = np.full(self.shape, self.start, np.int64)
        for d, (n, step) in enumerate(zip(self.shape, self.steps, strict=True)):
            made += (np.arange(n) * step).reshape(-1, *[1] * (self.ndim - d - 1))
        return made if dtype is None else made.astype(dtype)

    def __getitem__(self, items: Any) -> Any:
        items = items if isinstance(items, tuple) else (items,)
        if any(isinstance(i, np.ndarray) and i.ndim for i in items):
            if len(items) == self.ndim and all(np.asarray(i).dtype.kind in "iu" for i in items
                                               if not isinstance(i, slice)) and not any(
                    i is None or i is Ellipsis or isinstance(i, slice) for i in items):
                return self.start + sum(np.asarray(i, np.int64) * s
                                        for i, s in zip(items, self.steps, strict=True))
            return np.asarray(self)[items]
        rest = [i for i in items if i is not Ellipsis]
        lacking = [slice(None)] * (self.ndim - sum(i is not None for i in rest))
        at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
        shape, steps, start, own = list[int](), list[int](), self.start, iter(zip(self.shape, self.steps,
                                                                                  strict=True))
        for item in (*items[:at], *lacking, *items[at + 1:]):
            if item is None:
                shape.append(1)
                steps.append(0)
                continue
            n, step = next(own)
            if isinstance(item, slice):
                first, last, by = item.indices(n)
                shape.append(len(range(first, last, by)))
                steps.append(by * step)
                start += first * step
            else:
                place = range(n)[int(item)]
                start += place * step
        return PlaceNumbers(shape, steps, start)
