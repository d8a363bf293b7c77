"""Names around a kernel that mean more for tiles than Python knows: ``math.exp(x)``, ``sum(x)``.

The function stays as it is; it finds what also takes tiles under the same names.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import numpy as np

from transconv.ir import Var
from transconv.kernel.declared import Tunable
from transconv.kernel.device_functions import DeviceFunction
from transconv.kernel.functions import function_of
from transconv.kernel.reductions import reduction_of
from transconv.kernel.simulator_math import applied, reduced
from transconv.kernel.simulator_values import Operand, part_of

BUILTINS = ("sum", "max", "min", "any", "all")
Called = Callable[..., Any]


def seen_by_tiles(function: Called, known: dict[Any, Any] | None = None) -> Called:
    """A function of the same code with such names for tiles, as the functions of kernels it calls.
    ``known``: the values of symbols and tunable numbers by name, and what was made already by id."""
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
        names |= {n: _seen(v, known) if n in used else v for n, v in function.__globals__.items()}
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = _seen(old.cell_contents, known)
            except ValueError:  # bound later in the function around it
                continue
    return known[id(function)]  # type: ignore[no-any-return]


def _names(code: Any) -> set[str]:
    """The names that a function and those inside of it use."""
    return {*code.co_names}.union(*(_names(c) for c in code.co_consts if hasattr(c, "co_names")))


def _seen(value: Any, known: dict[Any, Any]) -> Any:
    if isinstance(value, (Tunable, Var)):
        return known.get(value.name, value)
    if value is math:
        return _Math()
    if isinstance(value, DeviceFunction):
        return seen_by_tiles(value.python, known)
    return _of_tiles(value) if function_of(value) or reduction_of(value) else value


class _Math:
    """Python's ``math``."""

    def __getattr__(self, name: str) -> Any:
        return _of_tiles(getattr(math, name))


def _of_tiles(function: Any) -> Any:
    """A function that has a row, for tiles too."""
    row, reduction = function_of(function), reduction_of(function)

    def called(*args: Any, **words: Any) -> Any:
        tile = next((a for a in args if isinstance(a, Operand)), None)
        if tile is None:
            return function(*args, **words)
        if function in (max, min) and len(args) > 1:
            pick = np.maximum if function is max else np.minimum
            return pick(args[0], args[1] if len(args) == 2 else called(*args[1:]))
        if row is not None:
            return tile.wrapped(applied(row, [part_of(a) for a in args]))
        assert reduction is not None
        return tile.wrapped(reduced(reduction, part_of(tile), *args[1:], **words))

    own = isinstance(function, np.ufunc) or getattr(function, "__module__", "") == "numpy"  # asks tiles
    return function if own or row is None and reduction is None else called
