"""The simulator: a kernel's Python function runs as it is, once for every group, on NumPy arrays; or
for some groups, beside the first result of a compiled kernel.

Groups run in the order of their ids and items in the order of theirs, so a simulation always gives the
same result, and a breakpoint in the kernel stops there. Slow, and strict: races, barriers that not all
items reach and decisions by inactive elements are refused with their lines.

A chip's compilers miscompile a few kernels, the same way every time. So the first launch of a kernel on
a machine is followed by a simulation of its last, its first and two other groups, on the arrays as they
were before, and the elements that these groups write are compared. The arrays stay where they are: an
element is copied from its device when a group reads it. What a group adds in one step, to which others
may add, is not compared; nor is a group that takes longer than some milliseconds: the log says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from transconv.backend_triton import Miscompiled, torch_module
from transconv.ir import DType
from transconv.kernel.annotations import Group, KernelCall
from transconv.kernel.launch.arguments import Arguments, as_tensor, plain_number, spanned, type_of
from transconv.kernel.simulator.arrays import MemoryPart, Placed, SimulatedMemory
from transconv.kernel.simulator.group import SimulatedGroup
from transconv.kernel.simulator.names import seen, seen_by_tiles
from transconv.kernel.simulator.numerics import Array
from transconv.kernel.simulator.races import AccessTrace, Order, failed_line
from transconv.kernel.source import Refusal
from transconv.runtime import Plan, check_records, first_run_check
from transconv.support import KernelError


def simulate(
    function: Callable[..., Any],
    group: Group,
    arguments: Mapping[str, Any],
    meant: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Run a function as a kernel. ``arguments``: arrays, which are written in place, and numbers, by the
    names of the function's parameters behind the group; ``meant``: the values of symbols and tunable
    numbers. Raises KernelError with the user's line."""
    order, lent = Order(), _Lent()
    running = seen_by_tiles(function, order, dict(meant))
    given = {name: lent.argument(order, name, value) for name, value in arguments.items()}
    try:
        for number, ids in enumerate(np.ndindex(*group.groups)):
            order.group = number
            order.here = SimulatedGroup(order, group, ids)
            order.who = f"group {ids}"
            running(order.here, **given)
    except Refusal as refusal:
        raise refusal.at(failed_line(refusal.__traceback__)) from None
    finally:
        lent.give_back()


class _Lent:
    """The arrays of a call as NumPy's. Those that NumPy cannot share are copied, and written back."""

    def __init__(self) -> None:
        self.memories: dict[tuple[Any, ...], SimulatedMemory] = {}
        self.copies: list[tuple[Any, Array]] = []

    def argument(self, order: Order, name: str, value: Any) -> Any:
        """What the function gets: an array of the simulator, or a number."""
        number = plain_number(value)
        if number is not None:
            return number
        if isinstance(value, ModuleType):
            return seen(value, order, {})
        if isinstance(value, np.ndarray):
            data, dtype = value, type_of(name, str(value.dtype))
        else:
            tensor = as_tensor(name, value)
            dtype = type_of(name, str(tensor.dtype).removeprefix("torch."))
            shared = tensor.device.type == "cpu" and dtype.numpy == dtype.torch
            data = tensor.numpy() if shared else tensor.cpu().to(held_by_numpy(dtype)).numpy().copy()
            if not shared:
                self.copies.append((tensor, data))
        same = data.__array_interface__["data"][0], data.shape, data.strides, dtype
        return self.memories.setdefault(same, SimulatedMemory(order, name, data, dtype)).whole()

    def give_back(self) -> None:
        """Write the copies back to the tensors that they are of."""
        for tensor, data in self.copies:
            tensor.copy_(as_tensor("", data))


def held_by_numpy(dtype: DType) -> Any:
    """torch's type of what NumPy holds numbers of a type in."""
    import torch

    return getattr(torch, dtype.numpy)


Written = dict[str, Array]
"""The places of the elements that a group writes, in the memory of each array, each once."""


class OutOfTime(Exception):
    """The signal that a group takes longer than it may."""


class GroupSamples:
    """Simulates groups. ``tensors``: arrays by name, which are written; ``rest``: the other arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        group: Group,
        tensors: Mapping[str, Any],
        rest: Mapping[str, Any],
        meant: Mapping[str, int],
    ) -> None:
        self.group, self.order, self.until = group, Order(), 0.0
        self.memories = {n: SampledMemory(self, n, t) for n, t in tensors.items()}
        self.running = seen_by_tiles(function, self.order, dict(meant))
        self.given = {
            n: seen(v, self.order, {}) if isinstance(v, ModuleType) else v for n, v in rest.items()
        } | {n: m.whole() for n, m in self.memories.items()}

    def run(self, ids: tuple[int, ...], until: float) -> Written:
        """What a group writes, but by additions in one step, to which other groups may add. Raises
        OutOfTime at a time of ``perf_counter``, and KernelError and Refusal as ``simulate``."""
        self.until, self.order.group = until, self.order.group + 1
        self.order.here = SimulatedGroup(self.order, self.group, ids)
        self.order.who = f"group {ids}"
        for memory in self.memories.values():
            memory.trace.begin()
        names = self.running.__code__.co_varnames[: self.running.__code__.co_argcount]
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
        alone, added = (
            np.unique(np.concatenate([*each, np.empty(0, np.int64)]).astype(np.int64))
            for each in (self.alone, self.added)
        )
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
            if (
                len(items) == self.ndim
                and all(np.asarray(i).dtype.kind in "iu" for i in items if not isinstance(i, slice))
                and not any(i is None or i is Ellipsis or isinstance(i, slice) for i in items)
            ):
                return self.start + sum(
                    np.asarray(i, np.int64) * s for i, s in zip(items, self.steps, strict=True)
                )
            return np.asarray(self)[items]
        rest = [i for i in items if i is not Ellipsis]
        lacking = [slice(None)] * (self.ndim - sum(i is not None for i in rest))
        at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
        shape, steps, start, own = (
            list[int](),
            list[int](),
            self.start,
            iter(zip(self.shape, self.steps, strict=True)),
        )
        for item in (*items[:at], *lacking, *items[at + 1 :]):
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


LONGEST_S = 0.02  # that a group is simulated
LEAST, ENOUGH_S = 2, 0.005  # groups that are compared, and seconds after which no more are
EXACT = 2.0**-10  # of the largest element beside it: another order of summation, functions of a chip
ROUNDED = 2.0**-7  # the same where products of float32 round their operands
UNITS = 8  # units in the last place of the coarsest type, which intermediate values may have
FEW = 16  # one of so many integers may differ where floats decide: the place of a largest element
SPEAKING = {"print", "breakpoint", "input"}  # what a kernel does in the simulator alone
log = logging.getLogger("transconv.trust")


class SimulatorMismatch(Miscompiled):
    """A kernel whose first result is not the simulator's."""


def refusal(name: str, mistake: Miscompiled) -> Exception:
    """The error for who calls a kernel that has no right machine code."""
    if not isinstance(mistake, SimulatorMismatch):
        return mistake
    return KernelError(
        f"{name} gives wrong results: {mistake.why}; expected those of the simulator "
        "(kernel.check compares all elements, TRANSCONV_TRUST=never none)"
    )


class SimulatorCheck:
    """The simulator as what the first result of a call is compared with. ``stored``: the names of arrays
    that the kernel writes, which are as they were after a wrong launch."""

    def __init__(
        self, function: Callable[..., Any], asked: KernelCall, arguments: Arguments, stored: Sequence[str]
    ) -> None:
        self.function, self.asked, self.arguments, self.stored = function, asked, arguments, stored

    def judge(self, plan: Plan, tensors: dict[str, Any], aligned: bool) -> first_run_check.FirstRunVerdict:
        """Launch, and compare some groups. Raises SimulatorMismatch for a kernel that is known to be
        wrong."""
        (step,), arrays = plan.steps, self.arguments.tensors
        if check_records.look_up(check_records.variant(step.digest, aligned)) == check_records.WRONG:
            raise SimulatorMismatch(step.triton.function, "its first result was not the simulator's")
        why, before, asked = self.why_not(), dict[str, Any](), self.asked
        try:
            before = {} if why else {n: _copied(arrays[n]) for n in self.stored}
        except first_run_check.out_of_memory():
            why = "there is no memory for copies of what it writes"
        plan.launch(**tensors)
        if why:
            return first_run_check.FirstRunVerdict(unseen=why)
        try:
            samples = GroupSamples(
                self.function,
                asked.group,
                arrays | before,
                numbers_of(asked.given, arrays),
                asked.symbols | asked.meant.tuned,
            )
        except Exception as error:  # the kernel runs on
            return first_run_check.FirstRunVerdict(unseen=f"the simulator does not begin: {error}")
        wrong, why = _Comparison(samples, self.arguments, plan.workload.math).run(asked.group)
        for name, old in before.items() if wrong else ():
            arrays[name].copy_(old)
        mismatch = SimulatorMismatch(step.triton.function, wrong)  # whose caller may try other warps
        return first_run_check.FirstRunVerdict(wrong, plan.steps, False, mismatch, why)

    def why_not(self) -> str:
        """Why a first result cannot be compared; empty if it can."""
        if self.arguments.alike:
            return "arrays share memory"
        code = getattr(self.function, "__code__", None)
        return "it speaks in the simulator" if code is None or SPEAKING & {*code.co_names} else ""


def _copied(tensor: Any) -> Any:
    """A copy whose elements lie as those of the tensor."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


class _Comparison:
    """Groups of a call that was launched, beside their simulation."""

    def __init__(self, samples: GroupSamples, arguments: Arguments, precision: str) -> None:
        self.samples, self.tensors = samples, arguments.tensors
        floats = [t.dtype for t in arguments.tensors.values() if t.is_floating_point()]
        coarse = [float(torch_module().finfo(dtype).eps) for dtype in floats]
        self.floats = bool(coarse or arguments.floats)
        self.share = max(EXACT if precision == "ieee" else ROUNDED, UNITS * max(coarse, default=0.0))

    def run(self, group: Group) -> tuple[str, str]:
        """What is wrong with the result, empty if nothing; why it was not compared."""
        began, compared, why = time.perf_counter(), 0, "its groups add to what others add to"
        for number, ids in enumerate(_sampled(group.groups)):
            now = time.perf_counter()
            if number >= LEAST and now - began > ENOUGH_S:
                break
            try:
                written = self.samples.run(ids, now + LONGEST_S)
                for name, places in written.items():
                    compared += len(places)
                    if wrong := self.difference(name, places):
                        return wrong, ""
            except OutOfTime:
                why = f"the simulator takes more than {LONGEST_S * 1e3:g} ms for a group"
                break
            except Exception as error:  # what the simulator refuses, such as a race, may be compiled
                why = f"the simulator has no result: {error}"
                break
            finally:
                self.samples.undo()
        return "", "" if compared else why

    def difference(self, name: str, places: np.ndarray[Any, Any]) -> str:
        """The first element of an array that differs; empty if none does."""
        if not len(places):
            return ""
        memory = self.samples.memories[name]
        wanted, got = memory.device.read(places), memory.device.like(self.tensors[name]).read(places)
        if wanted.dtype.kind in "fV":
            a, b = got.astype(np.float64), wanted.astype(np.float64)
            size = np.abs(b[np.isfinite(b)])
            near = self.share * (np.abs(np.nan_to_num(b)) + size.max(initial=0.0))
            with np.errstate(invalid="ignore"):
                wrong = ~((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= near))
        else:
            wrong = got != wanted
            if self.floats and wrong.sum() * FEW <= len(places):
                return ""
        if not wrong.any():
            return ""
        at = int(np.flatnonzero(wrong)[0])
        return (
            f"{_element(self.tensors[name], name, int(places[at]))} is {got[at]:.9g}, and "
            f"{wanted[at]:.9g} in the simulator ({int(wrong.sum())} of {len(places)} elements differ)"
        )


def _sampled(groups: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The last group, whose tiles may reach beyond the work, the first one, and two others."""
    count = prod(groups)
    for number in dict.fromkeys((count - 1, 0, count // 2, count * 5 // 7)):
        yield tuple(int(n) for n in np.unravel_index(number, groups))


def _element(tensor: Any, name: str, place: int) -> str:
    """An element by its place in memory, in the user's words."""
    if not tensor.is_contiguous():
        return f"the element {place} of {name}'s memory"
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(place, tuple(tensor.shape)))}]"
