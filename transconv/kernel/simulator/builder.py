"""What an intrinsic builds with in the simulator, where a function has no body in Python: all that is no
text of a chip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from transconv.ir import CALLS, convert
from transconv.kernel.functions import FUNCTIONS
from transconv.kernel.intrinsics import IntrinsicArgument
from transconv.kernel.refusals import Refusal
from transconv.kernel.simulator.arrays import MemoryPart, load, store
from transconv.kernel.simulator.numerics import MaskedValues, applied, converted
from transconv.kernel.simulator.races import Order
from transconv.kernel.simulator.values import Masked, part_of
from transconv.kernel.tiles.values import named
from transconv.target import TARGETS, Target


class SimulatedBuilder:
    """As ``Builder``, on values of the simulator."""

    def __init__(self, order: Order, stem: str) -> None:
        self.order, self.stem = order, stem

    @property
    def chip(self) -> Target:
        """That of Triton's interpreter."""
        return TARGETS["interpreter"]

    def create(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """An operation of this builder, or of a library."""
        own = getattr(self, getattr(operation, "__name__", ""), None)
        home = getattr(operation, "__qualname__", "").split(".")[0]
        return own if own is not None and home == "Builder" else functools.partial(operation, self)

    def call(self, name: str, *values: Any, dtype: Any = None) -> Masked:
        """A function by its name."""
        parts = [part_of(v) for v in values]
        if name in FUNCTIONS:
            return self._value(applied(FUNCTIONS[name], parts))
        if name not in CALLS:
            raise self._only_there(name)
        active = np.logical_and.reduce(np.broadcast_arrays(*(p.active for p in parts)))
        data = CALLS[name].numpy(*np.broadcast_arrays(*(p.data for p in parts)))
        return self._value(MaskedValues(convert(np.asarray(data), parts[0].dtype), active, parts[0].dtype))

    def text(self, spelling: str, *values: Any, dtype: Any = None) -> Masked:
        """Refused: there is no Triton here."""
        raise self._only_there("text of Triton")

    def asm(self, text: str, *values: Any, **words: Any) -> Masked:
        """Refused: there is no chip here."""
        raise self._only_there("assembly")

    def dot(self, a: Any, b: Any, acc: Any = None) -> Any:
        """``a @ b``, or ``acc + a @ b``, which ``acc`` becomes."""
        made = np.matmul(a, b)
        if acc is None:
            return made
        if not isinstance(acc, Masked) or acc.shape != made.shape:
            raise Refusal("the sum of a product of another shape", "a tile of the product's shape")
        total = converted(part_of(acc + made), acc.dtype)
        acc.data[...], acc.active[...] = total.data, total.active
        return acc

    def load(self, array: Any, shape: Any = None) -> Masked:
        """The elements of a part of an array."""
        if not isinstance(array, MemoryPart):
            raise Refusal(type(array).__name__, "an array of the call, or a slice of one")
        sizes = array.shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        return load(array, sizes, True)

    def store(self, array: Any, value: Any) -> None:
        """Write the active elements of a value to a part of an array."""
        store(array, value)

    def _value(self, part: MaskedValues) -> Masked:
        return Masked(self.order, part.data, part.active, part.dtype, True)

    def _only_there(self, what: str) -> Refusal:
        return Refusal(f"{self.stem}, which is {what} without a body in Python",
                       "a body, which the simulator executes", f"def {self.stem}(x): return x * 2.0")


def asked_of(value: Any) -> IntrinsicArgument:
    """What an intrinsic is told of an argument."""
    if isinstance(value, MemoryPart):
        return IntrinsicArgument("array", named(value.dtype), value.shape)
    if isinstance(value, Masked):
        kind = "number" if not value.shape else "vector" if value.vector else "tile"
        return IntrinsicArgument(
            kind, named(value.dtype), value.shape, masked=not bool(value.active.all())
        )
    if isinstance(value, (bool, int, float)):
        return IntrinsicArgument("number", type(value).__name__, value=value)
    return IntrinsicArgument("other", value=value)


