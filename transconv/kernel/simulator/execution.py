"""The simulator: a kernel's Python function runs as it is, once for every group, on NumPy arrays.

Groups run in the order of their ids and items in the order of theirs, so a simulation always gives the
same result, and a breakpoint in the kernel stops there. Slow, and strict: races, barriers that not all
items reach and decisions by inactive elements are refused with their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from transconv.ir import DType
from transconv.kernel.group import Group
from transconv.kernel.launch.arguments import as_tensor, plain_number, type_of
from transconv.kernel.refusals import Refusal
from transconv.kernel.simulator.arrays import SimulatedMemory
from transconv.kernel.simulator.group import SimulatedGroup
from transconv.kernel.simulator.names import seen, seen_by_tiles
from transconv.kernel.simulator.numerics import Array
from transconv.kernel.simulator.races import Order, failed_line


def simulate(function: Callable[..., Any], group: Group, arguments: Mapping[str, Any],
             meant: Mapping[str, int] = MappingProxyType({})) -> None:
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
