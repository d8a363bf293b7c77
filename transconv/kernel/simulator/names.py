"""Names around a kernel that mean more for tiles than Python knows: ``math.exp(x)``, ``sum(x)``.

The function stays as it is; it finds what also takes tiles under the same names.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np

from transconv.ir import Var
from transconv.kernel.annotations import Tunable
from transconv.kernel.device_functions import DeviceFunction
from transconv.kernel.functions import function_of
from transconv.kernel.overloads import OverloadSet, family_of, of_another_scope
from transconv.kernel.refusals import Refusal, WrongScope
from transconv.kernel.simulator.builder import SimulatedBuilder, asked_of
from transconv.kernel.simulator.numerics import applied, reduced
from transconv.kernel.simulator.races import Order
from transconv.kernel.simulator.values import SimulatedOperand, factors_of, part_of
from transconv.kernel.tiles.reductions import reduction_of
from transconv.target import TARGETS

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
        made = FunctionType(function.__code__, names, function.__name__, function.__defaults__,
                            cells or None)
        known[id(function)] = made
        used = _names(function.__code__)
        names |= {n: seen(v, order, known) if n in used else v for n, v in function.__globals__.items()}
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = seen(old.cell_contents, order, known)
            except ValueError:  # bound later in the function around it
                continue
    return cast(Called, known[id(function)])


def _names(code: Any) -> set[str]:
    """The names that a function and those inside of it use."""
    return {*code.co_names}.union(*(_names(c) for c in code.co_consts if hasattr(c, "co_names")))


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
        return python if value.scope is None else lambda *args, **words: _in_scope(
            value, python, order, args, words)
    if isinstance(value, ModuleType) and any(
            isinstance(v, DeviceFunction) or family_of(v) for v in vars(value).values()):
        return _Module(value, order, known)
    return _of_tiles(value) if function_of(value) or reduction_of(value) else value


def _dispatched(family: OverloadSet, order: Order, known: dict[int, Any], args: tuple[Any, ...],
                words: dict[str, Any]) -> Any:
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


def _in_scope(body: DeviceFunction, python: Called, order: Order, args: tuple[Any, ...],
              words: dict[str, Any]) -> Any:
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
        return tile.wrapped(reduced(reduction, part_of(tile), *args[1:], **words
                                    | {"factors": factors_of(tile)}))

    own = isinstance(function, np.ufunc) or getattr(function, "__module__", "") == "numpy"  # asks tiles
    return function if own or row is None and reduction is None else called
