"""``@kernel.intrinsic``: what a call becomes on a chip, decided by the types of its arguments.

    @kernel.intrinsic(fast_exp2)
    def fast_exp2_impl(x, chip):
        if x.dtype == "float32" and chip.backend == "cuda":
            return lambda builder, x: builder.asm("ex2.approx.ftz.f32 $0, $1;", x)
        return None                                     the body of fast_exp2 is taken
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transconv.errors import KernelError
from transconv.kernel.frontend.source import FunctionSource
from transconv.kernel.overloads import Scope, family_for
from transconv.kernel.refusals import Refusal
from transconv.kernel.tiles.values import ArrayView, Tile, named
from transconv.target import Target


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
    if isinstance(value, (bool, int, float)):
        return IntrinsicArgument("number", type(value).__name__, value=value)
    return IntrinsicArgument("other", value=value)


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
            raise Refusal(f"{made!r}, which the intrinsic {self.name} returns",
                          "a function of the builder and the arguments, or None")
        return made


def intrinsic(function: Any, *, scope: Scope | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Make a function decide what calls of ``function`` become on a chip. It is called with what is known
    of the arguments (``IntrinsicArgument``: dtype, shape, strides ...), and with the chip if it has a
    parameter ``chip``. It returns a function of a ``Builder`` and the arguments, or None; then the next
    intrinsic is asked, and at last the body of ``function`` is read. The simulator executes that body.

    ``scope``: the scope that it is for; by default every one.
    """
    if scope is not None and not isinstance(scope, Scope):
        raise KernelError(f"scope={scope!r}; expected WorkGroup, SubGroup or WorkItem")
    family = family_for(function)

    def made(decides: Callable[..., Any]) -> Callable[..., Any]:
        given = Intrinsic(decides, scope)
        family.intrinsics[getattr(decides, "__qualname__", given.name), scope] = given
        return decides
    return made
