"""A digest of all that reading a kernel's function depends on: its lines and those of the functions that
it calls, and the values of the names around them.

    tile = 64                                   tile of the closure: int 64
    @kernel
    def scaled(group, X, Y):                    scaled.py:12, its lines
        ... lib.silu(x) * SCALE[0] ...          lib.silu: its lines and names; SCALE: tuple 2.0 0.5

Names are taken from the trees of the functions, so the digest has more than a trace reads, and never
less. A value that no text tells from others, such as a user's object with methods, has no digest."""

from __future__ import annotations

import ast
import hashlib
import platform
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from transconv.ir import Expr, text_of
from transconv.kernel.device_functions import DeviceFunction, OverloadSet, family_of
from transconv.kernel.source import FunctionSource, outside, used_names
from transconv.support import KernelError

PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range)
LIBRARIES = ("builtins", "cmath", "math", "numpy", "operator", "torch", "transconv")
"""What lies in these changes with a version alone, which the digest has."""


class Untold(Exception):
    """A value that no text tells from others."""


def trace_digest(source: FunctionSource, modules: dict[str, Any]) -> str:
    """The digest of a kernel's function. ``modules``: arguments that are modules, by parameter. Raises
    Untold, with the name, where there is none."""
    told = _DigestLines()
    told.function(source.function, modules)
    versions = platform.python_version(), np.__version__
    return hashlib.blake2b(repr((versions, told.lines)).encode(), digest_size=16).hexdigest()


class _DigestLines:
    """The lines that the digest is of. ``known``: functions that have a number."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[int, int] = {}

    def function(self, function: Any, more: dict[str, Any] | None = None) -> None:
        """A function of Python."""
        if id(function) in self.known:
            self.lines.append(f"function {self.known[id(function)]}")
            return
        self.known[id(function)] = len(self.known)
        for value in (function.__defaults__, function.__kwdefaults__):
            self.value("a default", value)
        around, used = outside(function) | (more or {}), {*used_names(function.__code__)}
        try:
            source = FunctionSource.of(function)
        except KernelError:  # a lambda: what Python made of it
            self.lines += _instructions(function.__code__)
            chains: set[tuple[str, tuple[str, ...]]] = {(name, ()) for name in used}
        else:
            self.lines += [f"{Path(source.file).name}:{source.first}", *source.lines]
            chains = _chains(source.tree)
        for root, attributes in sorted(chains):
            if root in around and (root in used or (more and root in more)):
                self.chain(root, around[root], attributes)

    def chain(self, name: str, value: Any, attributes: tuple[str, ...]) -> None:
        """The value of a name around a function, or that of its attributes that are named."""
        for at, attribute in enumerate(attributes):
            if isinstance(value, PLAIN):
                break
            if _is_library(value):
                name = ".".join((name, *attributes[at:]))
                break
            name = f"{name}.{attribute}"
            if not hasattr(value, attribute):
                self.lines.append(f"{name}: missing")
                return
            value = getattr(value, attribute)
        self.lines.append(name)
        self.value(name, value)

    def value(self, name: str, value: Any) -> None:
        """A value. Raises Untold."""
        kind = type(value)
        if isinstance(value, Expr):
            self.lines.append(f"{kind.__name__} {text_of(value)}")
        elif kind in PLAIN:
            self.lines.append(f"{kind.__name__} {value!r}")
        elif kind in (tuple, list, dict, set, frozenset):
            items = (
                [x for pair in value.items() for x in pair]
                if kind is dict
                else (sorted(value, key=repr) if kind in (set, frozenset) else value)
            )
            self.lines.append(f"{kind.__name__} {len(value)}")
            for item in items:
                self.value(name, item)
        elif isinstance(value, Enum):
            self.lines.append(f"{kind.__qualname__} {value.name}")
        elif (family := family_of(value)) is not None:
            self.family(name, family)
        elif isinstance(value, DeviceFunction):
            self.lines.append(f"func {value.scope} {value.inline}")
            self.function(value.python)
        elif _is_library(value):
            self.lines.append(_title(value))
        elif isinstance(value, FunctionType):
            self.function(value)
        elif isinstance(value, np.dtype) or kind.__module__ == "torch":
            self.lines.append(f"{kind.__name__} {value}")
        elif is_dataclass(value) and _is_library(kind):
            self.lines.append(kind.__qualname__)
            for field in fields(value):
                self.value(name, getattr(value, field.name))
        else:
            raise Untold(name)

    def family(self, name: str, family: OverloadSet) -> None:
        """A function with several bodies. What intrinsics decide by is any Python, which has no digest."""
        if family.intrinsics:
            raise Untold(f"{name}, which has intrinsics")
        self.lines.append(f"family {[str(s) for s in family.bodies]} {family.own is not None}")
        for body in (family.own, *family.bodies.values()):
            if body is not None:
                self.lines.append(f"func {body.scope} {body.inline}")
                self.function(body.python)


def _is_library(value: Any) -> bool:
    """Whether a module, a type or a function is of what changes with a version alone."""
    if isinstance(value, ModuleType):
        module = value.__name__
    elif isinstance(value, (type, BuiltinFunctionType, FunctionType)):
        module = value.__module__ or "builtins"
    else:
        own = type(value).__module__.partition(".")[0]
        return isinstance(value, np.ufunc) or (own == "numpy" and callable(value))
    return module.partition(".")[0] in LIBRARIES


def _title(value: Any) -> str:
    named = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
    return f"{getattr(value, '__module__', '')} {named}"


def _instructions(code: CodeType) -> list[str]:
    """A function without source, as text."""
    inside = [line for c in code.co_consts if isinstance(c, CodeType) for line in _instructions(c)]
    plain = [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]
    return [code.co_code.hex(), *plain, *code.co_names, *code.co_varnames, *inside]


@lru_cache(maxsize=1024)
def _chains(tree: ast.FunctionDef) -> set[tuple[str, tuple[str, ...]]]:
    """The names of a tree, each with the attributes that are read of it."""
    return {*_chains_in(tree)}


def _chains_in(at: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    names, root = [], at
    while isinstance(root, ast.Attribute):
        names.append(root.attr)
        root = root.value
    if isinstance(root, ast.Name):
        yield root.id, tuple(reversed(names))
        return
    for child in ast.iter_child_nodes(root):
        yield from _chains_in(child)
