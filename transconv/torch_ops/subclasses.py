"""Tensor classes that a room above serves: it is imported when their library is, and registers itself.

    load()    imports the rooms whose library the program has imported
    serve()   is called by a room: its class, the gradients of a convolution of it, what `enable` tells it
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from transconv.torch_ops import execute

# The module of a class, and the room that serves it.
ROOMS = {"torch.distributed.tensor": "transconv.distributed"}

gradients: dict[type, Callable[..., Any]] = {}
_listeners: list[Callable[[frozenset[str]], None]] = []


def load() -> None:
    """Import the rooms for classes that can exist, or soon may, in this program."""
    distributed = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)()
    for library, room in ROOMS.items():
        if (distributed or library in sys.modules) and room not in sys.modules:
            importlib.import_module(room)


def serve(kind: type, backward: Callable[..., Any],
          replaced: Callable[[frozenset[str]], None]) -> None:
    """Serve tensors of a class. ``backward`` takes what ``transconv::convolution_backward`` takes;
    ``replaced`` the devices on which aten's convolution is transconv's, now and at every change."""
    gradients[kind] = backward
    _listeners.append(replaced)
    replaced(execute.replaced)


def tell(devices: frozenset[str]) -> None:
    """aten's convolution is now transconv's on these devices."""
    if devices:
        load()
    for listener in _listeners:
        listener(devices)


def served(tensor: Any) -> bool:
    """Whether the operators take tensors of this class."""
    if type(tensor) not in gradients:
        load()
    return type(tensor) in gradients
