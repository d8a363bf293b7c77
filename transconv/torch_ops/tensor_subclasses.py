"""Tensor classes that a room above serves: it is imported when their library is, and registers itself.

load()    imports the rooms whose library the program has imported
serve()   is called by a room: its class, a convolution of it and its gradients, what `enable` tells it
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import torch

from transconv.runtime import torch_internals
from transconv.torch_ops.conversion import aten_convolutions

# The module of a class, and the room that serves it.
ROOMS = {"torch.distributed.tensor": "transconv.distributed"}

_modes: Callable[[], int] = torch_internals.dispatch_modes


@dataclass(frozen=True, slots=True)
class ServedClass:
    """What ``serve`` was given for a class; ``of``: all of them, by their classes."""

    of: ClassVar[dict[type, ServedClass]] = {}
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    replaced: Callable[[frozenset[str]], None]


def load() -> None:
    """Import the rooms for classes that can exist, or soon may, in this program."""
    distributed = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)()
    for library, room in ROOMS.items():
        if (distributed or library in sys.modules) and room not in sys.modules:
            importlib.import_module(room)


class _Together(MetaPathFinder):
    """Imports a room at the end of the first import of its library, before a tensor of it can exist."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ROOMS:
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((s for s in found if s is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, ROOMS[name])
        return spec


class _Then(Loader):
    """A loader that imports another module behind its own."""

    def __init__(self, loader: Loader, room: str) -> None:
        self.loader, self.room = loader, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        importlib.import_module(self.room)


_together = _Together()


def serve(
    kind: type,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    replaced: Callable[[frozenset[str]], None],
) -> None:
    """Serve tensors of a class. ``forward`` and ``backward`` take what ``transconv::convolution`` and
    ``transconv::convolution_backward`` take; ``replaced`` the devices on which aten's convolution is
    transconv's, now and at every change."""
    ServedClass.of[kind] = ServedClass(forward, backward, replaced)
    replaced(aten_convolutions.replacement.devices)


def tell(devices: frozenset[str]) -> None:
    """aten's convolution is now transconv's on these devices."""
    if devices:
        load()
        if _together not in sys.meta_path:
            sys.meta_path.insert(0, _together)
    for of_class in ServedClass.of.values():
        of_class.replaced(devices)


def at_once(tensor: Any) -> ServedClass | None:
    """What serves a tensor's class, without the way through torch's dispatcher, on which nobody is to
    see the call."""
    if torch.compiler.is_compiling() or _modes():
        return None
    return ServedClass.of.get(type(tensor))


def served(tensor: Any) -> bool:
    """Whether the operators take tensors of this class."""
    if type(tensor) not in ServedClass.of:
        load()
    return type(tensor) in ServedClass.of
