"""The class that replaces a convolution module's class, and the way back.

A module of torch's gets transconv's class of the same name. A module of a subclass gets a new class that
inherits from the subclass and then from transconv's: its own forward still runs first, and where that
calls `super().forward` or `_conv_forward`, it reaches transconv's instead of torch's. Parametrized
classes are built again on transconv's base.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from transconv.torch_ops import modules
from transconv.torch_ops.modules import Convolves, ConvolvesTransposed

_OURS: dict[type, type] = {getattr(torch.nn, name): getattr(modules, name)
                           for name in modules.__all__}
_TORCHS: dict[type, type] = {ours: theirs for theirs, ours in _OURS.items()}
_CALLS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
          "convolution"}


def expect_module(model: object, function: str) -> None:
    """Raises TypeError for what is no module; ``function``: what was called with it."""
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"transconv.{function}: expected a torch.nn.Module, got {what}")


def is_ours(kind: type) -> bool:
    """Whether modules of a class are computed by transconv: quantised ones, too."""
    return issubclass(kind, (Convolves, ConvolvesTransposed))


def why_not(module: torch.nn.Module) -> str:
    """Why no class of ours replaces a module's class; empty if one does."""
    kind = type(module)
    theirs = next((c for c in kind.__mro__ if c in _OURS), None)
    if theirs is None:
        return f"its class {kind.__qualname__} is none of torch.nn's convolutions"
    transposed = issubclass(theirs, torch.nn.modules.conv._ConvTransposeNd)
    if transposed and "forward" in vars(module):
        return "it has a forward of its own, beside that of its class"
    for owner in kind.__mro__[:kind.__mro__.index(theirs)]:
        for method in ("forward", "_conv_forward"):
            own = vars(owner).get(method)
            if own is not None and not _goes_on(own, method, theirs, transposed):
                return (f"its class {kind.__qualname__} has a {method} of its own, which does not end "
                        f"in {'super().forward' if transposed else '_conv_forward'}")
    return ""


def _goes_on(method: Any, name: str, theirs: type, transposed: bool) -> bool:
    """Whether a method leaves the convolution to the next class: its code names that method, and no
    convolution function."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if not isinstance(code, CodeType):
        return False
    names = _names(code)
    if names & _CALLS:
        return False
    above = "super" in names and name in names
    if transposed:
        return above
    return above or name == "forward" and (
        "_conv_forward" in names or {theirs.__name__, "forward"} <= names)


def _names(code: CodeType) -> set[str]:
    """The names in a function's code, inner functions included."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def exchanged(kind: type, ours: Mapping[type, type] = _OURS) -> type:
    """The class of ours for a class of torch's, or a subclass of one."""
    theirs = next(c for c in kind.__mro__ if c in _OURS)
    return ours[theirs] if kind is theirs else _mixed_with(kind, ours[theirs])


@functools.cache
def _mixed_with(kind: type, ours: type) -> type:
    return type(kind.__name__, (kind, ours), {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
        "exchanged_for": kind, "exchanged_with": ours, "__reduce_ex__": _reduce})


def restored(kind: type) -> type | None:
    """The class that one of transconv's replaced; None for a class that replaced none."""
    found: type | None = _TORCHS.get(kind) or vars(kind).get("exchanged_for")
    return found


def exchange(module: torch.nn.Module, back: bool = False) -> bool:
    """Give a module the other class, in place; False where there is none."""
    kind = type(module)
    parametrized = is_parametrized(module) and kind.__name__.startswith("Parametrized")
    base = kind.__bases__[0] if parametrized else kind
    other = restored(base) if back else exchanged(base)
    if other is None:
        return False
    if parametrized:  # a class for this one module; parametrize restores its first base
        own = {name: value for name, value in vars(kind).items()
               if name not in ("__dict__", "__weakref__")}
        other = type(kind.__name__, (other,), own)
    module.__class__ = other
    return True


def _reduce(self: Any, protocol: Any) -> Any:
    """Classes made here cannot be imported by name: a pickle names the class that they replaced."""
    kind = type(self)
    made = super(kind, self).__reduce_ex__(protocol)
    if made[0] is copyreg.__newobj__ and made[1] == (kind,):  # type: ignore[attr-defined]
        return _new, (kind.exchanged_for, kind.exchanged_with), *made[2:]
    return made


def _new(kind: type, ours: type) -> Any:
    made: Any = _mixed_with(kind, ours)
    return made.__new__(made)
