"""Kernels written in Python: NumPy on the tiles of a group, with masks that travel with the values.

In: a Python function, a group, arrays. Out: a kernel of the IR, its Triton text, its launch. Knows: the
passes, emitters and launches below it, nothing of convolutions."""

import sys
from types import ModuleType
from typing import NoReturn

from transconv.kernel.annotations import Buffer, Constant, Group, Tunable, symbols
from transconv.kernel.decorator import KernelDecorator, KernelFunction, kernel
from transconv.kernel.device_functions import DeviceFunction, IntrinsicArgument, Scope, atomic_ref, uniform
from transconv.kernel.tiles.intrinsic_builder import Builder
from transconv.kernel.tiles.values import IndexMap, Mapping, create_mapping, index_map
from transconv.support import KernelError, ScopeError

WorkGroup = Scope.WorkGroup
"""The scope of a group: its tiles, all work-items at once."""
SubGroup = Scope.SubGroup
"""The scope of each sub-group, ``@group.subgroups``."""
WorkItem = Scope.WorkItem
"""The scope of each work-item, ``@group.workitems``."""

__all__ = [
    "Buffer",
    "Builder",
    "Constant",
    "DeviceFunction",
    "Group",
    "IndexMap",
    "IntrinsicArgument",
    "KernelDecorator",
    "KernelError",
    "KernelFunction",
    "Mapping",
    "Scope",
    "ScopeError",
    "SubGroup",
    "Tunable",
    "WorkGroup",
    "WorkItem",
    "atomic_ref",
    "create_mapping",
    "index_map",
    "kernel",
    "symbols",
    "uniform",
]


class _Room(ModuleType):
    def __call__(self, *given: object, **named: object) -> NoReturn:
        raise TypeError(
            "transconv.kernel is a module; expected its decorator: from transconv.kernel import kernel"
        )


sys.modules[__name__].__class__ = _Room
