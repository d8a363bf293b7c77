"""``@kernel.intrinsic``: what a call becomes on a chip, decided by the types of its arguments.

    @kernel.intrinsic(fast_exp2)
    def fast_exp2_impl(x, chip):
        if x.dtype == "float32" and chip.backend == "cuda":
            return lambda builder, x: builder.asm("ex2.approx.ftz.f32 $0, $1;", x)
        return None                                     the body of fast_exp2 is taken
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transconv.kernel.tiles.values import ArrayView, Tile, named


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
