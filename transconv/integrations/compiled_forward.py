"""A module's forward, compiled in place: by itself, or below what accelerate's offloading puts around it.

    compile_forward(module)      from now on its calls are compiled graphs
    restore_forward(module)      undoes it

Class, state dict and hooks of the module stay; a copy of it compiles for itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from transconv.graph.backend_options import compiled_alone
from transconv.graph.torch_compile import backend

# Where a forward may stand beside that of the class: accelerate calls the latter from its own.
PLACES = ("_old_forward", "forward")


class CompiledForward:
    """A module's ``forward`` as a compiled graph of that of its class. A copy or a pickle
    of the module has one of its own, which compiles at its first call."""

    def __init__(self, module: nn.Module, rest: str = "inductor") -> None:
        self.__setstate__({"module": module, "rest": rest})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "rest": self.rest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module, self.rest = state["module"], state["rest"]
        self.compiled: Callable[..., Any] | None = None
        functools.update_wrapper(self, type(self.module).forward)
        self.__wrapped__ = MethodType(type(self.module).forward, self.module)  # for its signature

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.compiled is None:
            options = {"rest": self.rest}
            self.compiled = compiled_alone(
                self.__wrapped__, type(self.module).__name__, backend, options=options
            )
        return self.compiled(*given, **named)


def compiled_forward(module: nn.Module) -> CompiledForward | None:
    """The one in a module's place of its forward."""
    found = (vars(module).get(place) for place in PLACES)
    return next((f for f in found if isinstance(f, CompiledForward)), None)


def compile_forward(module: nn.Module, rest: str = "inductor") -> bool:
    """Compile a module's forward, in place; ``rest``: who computes what has no kernel. False where it is
    compiled already, or the module has a forward of its own that is not accelerate's."""
    place = next((p for p in PLACES if p in vars(module)), "forward")
    own = vars(module).get(place)
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return False
    setattr(module, place, CompiledForward(module, rest))
    return True


def restore_forward(module: nn.Module) -> None:
    """Undo ``compile_forward``."""
    for place in PLACES:
        if isinstance(vars(module).get(place), CompiledForward):
            if place == "forward":
                del module.forward
            else:
                setattr(module, place, MethodType(type(module).forward, module))
