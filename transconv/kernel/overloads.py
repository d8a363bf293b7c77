"""Functions with several bodies: one for each scope, and intrinsics of a chip. Which one a call gets.

    intrinsics of the scope, then those of every scope: the first one that gives a builder
    the body for the scope, with the group, sub-group or work-item as its first argument
    the body of the function itself
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from transconv.errors import KernelError
from transconv.kernel.device_functions import DeviceFunction
from transconv.kernel.frontend.source import FunctionSource
from transconv.kernel.refusals import WrongScope

if TYPE_CHECKING:
    from transconv.kernel.intrinsics import Intrinsic

HELD = "__transconv_family__"  # the attribute of a function that holds its family


class Scope(Enum):
    """Who executes a line: all of a group at once, each sub-group, or each work-item."""

    WorkGroup = "work-groups"
    SubGroup = "sub-groups"
    WorkItem = "work-items"


@dataclass(slots=True, eq=False)
class OverloadSet:
    """The bodies of a function. ``own``: that of the function itself, None if it says nothing."""

    name: str
    own: DeviceFunction | None
    bodies: dict[Scope, DeviceFunction] = field(default_factory=dict)
    intrinsics: dict[tuple[str, Scope | None], Intrinsic] = field(default_factory=dict)

    def body(self, scope: Scope) -> DeviceFunction | None:
        """The body in Python for a scope; None if there is none."""
        return self.bodies.get(scope) or self.own

    def asked(self, scope: Scope) -> Iterator[Intrinsic]:
        """The intrinsics to ask in a scope, in order: those that are for it alone first."""
        yield from (i for i in self.intrinsics.values() if i.scope is scope)
        yield from (i for i in self.intrinsics.values() if i.scope is None)

    def candidates(self) -> str:
        """All bodies, each with its scope and its line."""
        told = [f"for {s.value} at {f.place}" for s, f in self.bodies.items()]
        told += [f"the intrinsic {i.name} for {i.scope.value if i.scope else 'every scope'} at {i.place}"
                 for i in self.intrinsics.values()]
        return "; ".join(told)


def family_of(callee: Any) -> OverloadSet | None:
    """The family of a function; None if it has none."""
    found = getattr(_python(callee), "__dict__", None)
    return found.get(HELD) if isinstance(found, dict) else None


def family_for(function: Any) -> OverloadSet:
    """The family of a function, made if there is none yet. Raises KernelError for what is no function of
    Python."""
    if (found := family_of(function)) is not None:
        return found
    python = _python(function)
    if not hasattr(python, "__code__"):
        raise KernelError(f"{function!r} has no bodies for scopes; expected a function that is defined by "
                          "def")
    own = function if isinstance(function, DeviceFunction) else DeviceFunction(python)
    made = OverloadSet(python.__name__, own if _says_something(python) else None)
    setattr(python, HELD, made)
    return made


def of_another_scope(body: DeviceFunction, scope: Scope) -> WrongScope:
    """Why a body cannot be called in a scope."""
    assert body.scope is not None
    return WrongScope(f"a call of {body.source.name} by {scope.value}, which is for {body.scope.value} "
                      f"({body.place})", f"calls by {body.scope.value}")


def _python(callee: Any) -> Any:
    return callee.python if isinstance(callee, DeviceFunction) else callee


def _says_something(function: Callable[..., Any]) -> bool:
    """Whether the body is more than ``pass``, ``...`` and a text."""
    return not all(isinstance(s, ast.Pass) or isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
                   for s in FunctionSource.of(function).tree.body)
