"""The public names: what each room exports, and the public methods of its classes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

ROOMS = (
    "transconv",
    *(
        f"transconv.{name}"
        for name in (
            "nn",
            "functional",
            "graph",
            "distributed",
            "quantized",
            "kernel",
            "compute",
            "compute.library",
            "schedule",
            "target",
            "passes",
            "ir",
            "simplify",
            "cost",
            "selection",
            "runtime",
            "backend_triton",
            "conv",
            "support",
            "errors",
        )
    ),
)


def room(name: str) -> ModuleType:
    return importlib.import_module(name)


def exported(module: ModuleType) -> list[str]:
    """``__all__``; without one, the names that the module imports as themselves, and the public ones that
    it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    imports = [at for at in ast.parse(inspect.getsource(module)).body if isinstance(at, ast.ImportFrom)]
    again = {a.name for at in imports for a in at.names if a.asname == a.name}
    return [
        name
        for name, value in vars(module).items()
        if name in again
        or (not name.startswith("_") and getattr(value, "__module__", "") == module.__name__)
    ]


def functions(cls: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that a class of ours defines, with the function of each."""
    for name, value in vars(cls).items():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, value


def ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("transconv")


def said(cls: type, name: str) -> str:
    """The docstring of a method: its own, or that of the method which it overrides."""
    for at in cls.__mro__:
        for called, function in functions(at):
            if called == name and (text := inspect.getdoc(function)):
                return text
    return ""


def silent_class(cls: type) -> Iterator[str]:
    """What of a class has no docstring; the text that ``dataclass`` writes is none."""
    text = cls.__doc__ or ""
    if not text.strip() or text.startswith(f"{cls.__name__}("):
        yield cls.__name__
    yield from (
        f"{cls.__name__}.{name}"
        for name, function in functions(cls)
        if ours(function) and not said(cls, name)
    )
