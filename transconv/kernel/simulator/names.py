"""Names around a kernel that mean more for tiles than Python knows: ``math.exp(x)``, ``sum(x)``.

The function stays as it is; it finds what also takes tiles under the same names. So a Python body means
something for arrays, too, which a chip may spell in another way. Where a function has no body in
Python, an intrinsic builds in the simulator all that is no text of a chip."""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np

from transconv.ir import CALLS, DTYPES, Var, convert
from transconv.kernel.annotations import Tunable
from transconv.kernel.device_functions import (
    DeviceFunction,
    IntrinsicArgument,
    OverloadSet,
    family_of,
    of_another_scope,
)
from transconv.kernel.functions import FUNCTIONS, function_of, reduction_of
from transconv.kernel.simulator.arrays import MemoryPart, load, store, view_of
from transconv.kernel.simulator.numerics import MaskedValues, applied, converted, reduced
from transconv.kernel.simulator.races import Order
from transconv.kernel.simulator.values import Masked, SimulatedOperand, factors_of, part_of
from transconv.kernel.source import Refusal, WrongScope, named, used_names
from transconv.target import TARGETS, Target

BUILTINS = ("sum", "max", "min", "any", "all")
Called = Callable[..., Any]


def seen_by_tiles(function: Called, order: Order, known: dict[Any, Any] | None = None) -> Called:
    """A function of the same code with such names for tiles, as the functions of kernels it calls.
    ``order``: knows the group, sub-group or work-item that calls; ``known``: the values of symbols and
    tunable numbers by name, and what was made already by id."""
    known = {} if known is None else known
    if not isinstance(function, FunctionType):
        return function
    if id(function) not in known:
        names: dict[str, Any] = {n: _of_tiles(getattr(builtins, n)) for n in BUILTINS}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, cells or None
        )
        known[id(function)] = made
        used = {*used_names(function.__code__)}
        names |= {n: seen(v, order, known) if n in used else v for n, v in function.__globals__.items()}
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = seen(old.cell_contents, order, known)
            except ValueError:  # bound later in the function around it
                continue
    return cast(Called, known[id(function)])


def seen(value: Any, order: Order, known: dict[Any, Any]) -> Any:
    """What a name around a kernel is for tiles."""
    if isinstance(value, (Tunable, Var)):
        return known.get(value.name, value)
    if value is math:
        return _Math()
    if (family := family_of(value)) is not None:
        return lambda *args, **words: _dispatched(family, order, known, args, words)
    if isinstance(value, DeviceFunction):
        python = seen_by_tiles(value.python, order, known)
        return (
            python
            if value.scope is None
            else lambda *args, **words: _in_scope(value, python, order, args, words)
        )
    if isinstance(value, ModuleType) and any(
        isinstance(v, DeviceFunction) or family_of(v) for v in vars(value).values()
    ):
        return _Module(value, order, known)
    return _of_tiles(value) if function_of(value) or reduction_of(value) else value


def _dispatched(
    family: OverloadSet, order: Order, known: dict[int, Any], args: tuple[Any, ...], words: dict[str, Any]
) -> Any:
    """A call of a function with several bodies: that in Python, else what an intrinsic builds."""
    scope = order.here.scope
    if (body := family.body(scope)) is not None:
        return _in_scope(body, seen_by_tiles(body.python, order, known), order, args, words)
    reasons: list[str] = []
    for intrinsic in family.asked(scope):
        build = intrinsic.built([asked_of(a) for a in args], TARGETS["interpreter"])
        if build is not None:
            return build(SimulatedBuilder(order, family.name), *args)
        reasons.append(f"{intrinsic.name} has nothing for such arguments")
    told = f" ({'; '.join(reasons)})" if reasons else ""
    error = Refusal if reasons else WrongScope
    raise error(f"a call of {family.name}, which has no body for {scope.value}{told}", family.candidates())


def _in_scope(
    body: DeviceFunction, python: Called, order: Order, args: tuple[Any, ...], words: dict[str, Any]
) -> Any:
    """A call of a body, with the group or item first where it is for one scope."""
    if body.scope is None:
        return python(*args, **words)
    if body.scope is not order.here.scope:
        raise of_another_scope(body, order.here.scope)
    return python(order.here, *args, **words)


class _Module:
    """A module of functions for kernels."""

    def __init__(self, module: ModuleType, order: Order, known: dict[int, Any]) -> None:
        self._held = module, order, known

    def __getattr__(self, name: str) -> Any:
        module, order, known = self._held
        return seen(getattr(module, name), order, known)


class _Math:
    """Python's ``math``."""

    def __getattr__(self, name: str) -> Any:
        return _of_tiles(getattr(math, name))


def _of_tiles(function: Any) -> Any:
    """A function that has a row, for tiles too."""
    row, reduction = function_of(function), reduction_of(function)

    def called(*args: Any, **words: Any) -> Any:
        tile = next((a for a in args if isinstance(a, SimulatedOperand)), None)
        if tile is None:
            return function(*args, **words)
        if function in (max, min) and len(args) > 1:
            pick = np.maximum if function is max else np.minimum
            return pick(args[0], args[1] if len(args) == 2 else called(*args[1:]))
        if row is not None:
            return tile.wrapped(applied(row, [part_of(a) for a in args]))
        assert reduction is not None
        return tile.wrapped(
            reduced(reduction, part_of(tile), *args[1:], **words | {"factors": factors_of(tile)})
        )

    own = isinstance(function, np.ufunc) or getattr(function, "__module__", "") == "numpy"  # asks tiles
    return function if own or (row is None and reduction is None) else called


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
        view = view_of(array)
        sizes = view.shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        return load(view, sizes, True)

    def store(self, array: Any, value: Any) -> None:
        """Write the active elements of a value to a part of an array."""
        store(array, value)

    def _value(self, part: MaskedValues) -> Masked:
        return Masked(self.order, part.data, part.active, part.dtype, True)

    def _only_there(self, what: str) -> Refusal:
        return Refusal(
            f"{self.stem}, which is {what} without a body in Python",
            "a body, which the simulator executes",
            f"def {self.stem}(x): return x * 2.0",
        )


def asked_of(value: Any) -> IntrinsicArgument:
    """What an intrinsic is told of an argument."""
    if isinstance(value, MemoryPart):
        return IntrinsicArgument("array", named(value.dtype), value.shape)
    if isinstance(value, Masked):
        kind = "number" if not value.shape else "vector" if value.vector else "tile"
        return IntrinsicArgument(
            kind, named(value.dtype), value.shape, masked=not bool(value.active.all())
        )
    return IntrinsicArgument.plain(value)


Array = np.ndarray[Any, np.dtype[Any]]


def meaning_of(body: DeviceFunction | None) -> Callable[..., Array] | None:
    """The function of NumPy arrays that a body of tiles is, with the types of kernels; None without a
    body, and for one that needs the group."""
    if body is None or body.scope is not None:
        return None
    python = body.python

    def meaning(*values: Array) -> Array:
        order = Order()
        held = {t.numpy: t for t in DTYPES.values() if t.torch and t.within is None and t.numpy == t.torch}
        given = np.broadcast_arrays(*values)
        tiles = [Masked(order, v, np.ones(v.shape, bool), held[str(v.dtype)]) for v in given]
        return part_of(seen_by_tiles(python, order)(*tiles)).data

    return meaning
