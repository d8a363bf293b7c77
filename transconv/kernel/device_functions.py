"""``@kernel.func``: functions that kernels call; their bodies are read in the place of the call. A
function may have several bodies, one for each scope, and intrinsics of a chip. Which one a call gets:

    intrinsics of the scope, then those of every scope: the first one that gives a builder
    the body for the scope, with the group, sub-group or work-item as its first argument
    the body of the function itself

An intrinsic decides by the types of the arguments what a call becomes:

    @kernel.intrinsic(fast_exp2)
    def fast_exp2_impl(x, chip):
        if x.dtype == "float32" and chip.backend == "cuda":
            return lambda builder, x: builder.asm("ex2.approx.ftz.f32 $0, $1;", x)
        return None                                     the body of fast_exp2 is taken

Also additions to elements of an array that no other one comes between, and random numbers from a place
and a seed: nothing is stored, and every engine has the same."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from transconv.kernel.source import FunctionSource, Refusal, WrongScope, named
from transconv.kernel.tiles.values import ArrayView, Tile
from transconv.support import KernelError
from transconv.target import Target


class Scope(Enum):
    """The scope of a line, by what executes it: all of a group at once, each sub-group, or each
    work-item."""

    WorkGroup = "work-groups"
    SubGroup = "sub-groups"
    WorkItem = "work-items"


class DeviceFunction:
    """A function of tiles, numbers and arrays. Outside of kernels it is the Python function. ``scope``:
    the only one that it is for; its first argument is then the group, sub-group or work-item, which calls
    in kernels leave out. ``inline``: whether its body is read in the place of the call."""

    def __init__(
        self, function: Callable[..., Any], scope: Scope | None = None, inline: bool = True
    ) -> None:
        functools.update_wrapper(self, function)
        self.python, self.scope, self.inline = function, scope, inline
        self._source: FunctionSource | None = None

    @property
    def source(self) -> FunctionSource:
        """The function's tree and lines. Raises KernelError if it cannot be read."""
        if self._source is None:
            made = FunctionSource.of(self.python)
            a, place = made.tree.args, made.place(made.tree)
            if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or a.defaults:
                raise KernelError(
                    f"{place}: found parameters with defaults, * or /; allowed: plain "
                    f"parameters\n    {place.text.strip()}\n"
                    f"  for example: def {made.name}(x, y):"
                )
            if self.scope is not None and not a.args:
                raise KernelError(
                    f"{place}: found a body for {self.scope.value} without parameters; "
                    f"allowed: the group, sub-group or work-item first\n"
                    f"    {place.text.strip()}\n  for example: def {made.name}(item, x):"
                )
            self._source = made
        return self._source

    @property
    def place(self) -> str:
        """The file and the line of the function."""
        return str(self.source.place(self.source.tree))

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self.python(*args, **words)


def atomic_ref(array: Any) -> Any:
    """An array of which elements are added to: ``atomic_ref(H)[i] += 1``. Groups and items may add to the
    same elements. Sums of floats depend on the order, which is not the same in every run. For kernels;
    KernelError outside of them."""
    if hasattr(array, "atomic"):
        return array.atomic()
    raise KernelError(
        "atomic_ref is for arrays inside of kernels; expected atomic_ref(X)[i] += value there"
    )


@DeviceFunction
def uniform(place: Any, seed: Any) -> Any:
    """Numbers from 0 to below 1, multiples of 2**-24, one for each integer of ``place`` (of 32 bits).
    A hash with two multiplications: for dropout and noise, not for cryptography."""
    h = place.astype(np.int32) * 747796405 + seed
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x21F0AAAD
    h = (h ^ (h >> 15 & 0x1FFFF)) * 0x735A2D97
    return (h >> 8 & 0xFFFFFF) * 2.0**-24


HELD = "__transconv_family__"  # the attribute of a function that holds its family


class Intrinsic:
    """A function that decides what a call becomes. ``scope``: the only one that it is for."""

    def __init__(self, function: Callable[..., Any], scope: Scope | None) -> None:
        self.python, self.scope = function, scope
        self.name = getattr(function, "__name__", "intrinsic")
        self.asks_for_chip = "chip" in inspect.signature(function).parameters

    @property
    def place(self) -> str:
        """The file and the line of the function."""
        source = FunctionSource.of(self.python)
        return str(source.place(source.tree))

    def built(self, arguments: Sequence[IntrinsicArgument], chip: Target) -> Callable[..., Any] | None:
        """The function of a builder and the arguments for arguments of these types; None if there is
        none. Refuses what is neither."""
        words = {"chip": chip} if self.asks_for_chip else {}
        try:
            made: Callable[..., Any] | None = self.python(*arguments, **words)
        except TypeError as error:
            raise Refusal(f"the intrinsic {self.name}, which fails for such arguments ({error})") from None
        if made is not None and not callable(made):
            raise Refusal(
                f"{made!r}, which the intrinsic {self.name} returns",
                "a function of the builder and the arguments, or None",
            )
        return made


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
        told += [
            f"the intrinsic {i.name} for {i.scope.value if i.scope else 'every scope'} at {i.place}"
            for i in self.intrinsics.values()
        ]
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
        raise KernelError(
            f"{function!r} has no bodies for scopes; expected a function that is defined by def"
        )
    own = function if isinstance(function, DeviceFunction) else DeviceFunction(python)
    made = OverloadSet(python.__name__, own if _says_something(python) else None)
    setattr(python, HELD, made)
    return made


def of_another_scope(body: DeviceFunction, scope: Scope) -> WrongScope:
    """Why a body cannot be called in a scope."""
    assert body.scope is not None
    return WrongScope(
        f"a call of {body.source.name} by {scope.value}, which is for {body.scope.value} ({body.place})",
        f"calls by {body.scope.value}",
    )


def _python(callee: Any) -> Any:
    return callee.python if isinstance(callee, DeviceFunction) else callee


def _says_something(function: Callable[..., Any]) -> bool:
    """Whether the body is more than ``pass``, ``...`` and a text."""
    return not all(
        isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in FunctionSource.of(function).tree.body
    )


# -- what declares bodies ----------------------------------------------------------------------------


def func(function: Any = None, *, scope: Scope | None = None, inline: bool = True) -> Any:
    """Make a function that kernels may call:

        @kernel.func
        def silu(x):
            return x / (1.0 + np.exp(-x))

    Its body is read where it is called, with the types and shapes of that call. It may not call itself.
    ``@kernel.func(inline=False)``: a function of Triton of its own, of element-wise operations alone.

    ``@kernel.func(silu, scope=WorkItem)`` makes the body of ``silu`` for one scope, WorkGroup, SubGroup or
    WorkItem; its first parameter is the group, sub-group or work-item, which calls leave out."""
    if scope is not None and not isinstance(scope, Scope):
        raise KernelError(f"scope={scope!r}; expected WorkGroup, SubGroup or WorkItem")
    if scope is None and function is not None:
        if not callable(function):
            raise KernelError(f"kernel.func({function!r}); expected a function")
        return DeviceFunction(function, inline=inline)

    def made(body: Callable[..., Any]) -> DeviceFunction:
        given = DeviceFunction(body, scope, inline)
        if function is not None and scope is not None:
            family_for(function).bodies[scope] = given
        return given

    return made


def intrinsic(function: Any, *, scope: Scope | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Make a function decide what calls of ``function`` become on a chip. It is called with what is known
    of the arguments (``IntrinsicArgument``: dtype, shape, strides ...), and with the chip if it has a
    parameter ``chip``. It returns a function of a ``Builder`` and the arguments, or None; then the next
    intrinsic is asked, and at last the body of ``function`` is read. The simulator executes that body.

    ``scope``: the scope that it is for; by default every one."""
    if scope is not None and not isinstance(scope, Scope):
        raise KernelError(f"scope={scope!r}; expected WorkGroup, SubGroup or WorkItem")
    family = family_for(function)

    def made(decides: Callable[..., Any]) -> Callable[..., Any]:
        given = Intrinsic(decides, scope)
        family.intrinsics[getattr(decides, "__qualname__", given.name), scope] = given
        return decides

    return made


@dataclass(frozen=True, slots=True)
class IntrinsicArgument:
    """What an intrinsic is told of an argument. ``kind``: ``tile``, ``vector``, ``array``, ``number`` or
    ``other``; ``dtype``: NumPy's or torch's name of the type, ``int`` of positions; ``shape``: sizes, None
    where one is known at run time only; ``strides``: of an array whose sizes are known, in elements;
    ``masked``: whether elements may be inactive; ``value``: what is known already."""

    kind: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    strides: tuple[int, ...] = ()
    masked: bool = False
    value: Any = None

    @staticmethod
    def plain(value: Any) -> IntrinsicArgument:
        """A number of Python, or another of its objects."""
        if isinstance(value, (bool, int, float)):
            return IntrinsicArgument("number", type(value).__name__, value=value)
        return IntrinsicArgument("other", value=value)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __str__(self) -> str:
        sizes = ", ".join("?" if n is None else str(n) for n in self.shape)
        return f"{self.dtype or self.kind}[{sizes}]" if self.shape else self.dtype or self.kind


def asked(value: Any, sizes: Callable[[ArrayView], tuple[Any, ...]]) -> IntrinsicArgument:
    """What is known of an argument. ``sizes``: of a view."""
    if isinstance(value, Tile):
        kind = "number" if not value.own else "vector" if value.vector else "tile"
        return IntrinsicArgument(kind, named(value.dtype), value.own, masked=bool(value.mask))
    if isinstance(value, ArrayView):
        shape = tuple(n if isinstance(n, int) else None for n in sizes(value))
        steps = {b.dim: b.stride for b in value.tensor.layout.blocks}
        fixed = not value.tensor.extents and value.layout is None
        strides = tuple(0 if a is None else steps[a.dim] * a.step for a in value.along) if fixed else ()
        return IntrinsicArgument("array", named(value.tensor.dtype), shape, strides)
    return IntrinsicArgument.plain(value)
