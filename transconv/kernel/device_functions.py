"""``@kernel.func``: functions that kernels call; their bodies are read in the place of the call. Additions
to elements of an array that no other one comes between, and random numbers from a place and a seed:
nothing is stored, and every engine has the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from transconv.errors import KernelError
from transconv.kernel.frontend.source import FunctionSource


class Scope(Enum):
    """Who executes a line: all of a group at once, each sub-group, or each work-item."""

    WorkGroup = "work-groups"
    SubGroup = "sub-groups"
    WorkItem = "work-items"


class DeviceFunction:
    """A function of tiles, numbers and arrays. Outside of kernels it is the Python function. ``scope``:
    the only one that it is for; its first argument is then the group, sub-group or work-item, which calls
    in kernels leave out. ``inline``: whether its body is read in the place of the call."""

    def __init__(self, function: Callable[..., Any], scope: Scope | None = None,
                 inline: bool = True) -> None:
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
                raise KernelError(f"{place}: found parameters with defaults, * or /; allowed: plain "
                                  f"parameters\n    {place.text.strip()}\n"
                                  f"  for example: def {made.name}(x, y):")
            if self.scope is not None and not a.args:
                raise KernelError(f"{place}: found a body for {self.scope.value} without parameters; "
                                  f"allowed: the group, sub-group or work-item first\n"
                                  f"    {place.text.strip()}\n  for example: def {made.name}(item, x):")
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
    raise KernelError("atomic_ref is for arrays inside of kernels; expected atomic_ref(X)[i] += value "
                      "there")


@DeviceFunction
def uniform(place: Any, seed: Any) -> Any:
    """Numbers from 0 to below 1, multiples of 2**-24, one for each whole number of ``place`` (of 32 bits).
    A hash with two multiplications: for dropout and noise, not for cryptography."""
    h = place.astype(np.int32) * 747796405 + seed
    h = (h ^ (h >> 16 & 0xffff)) * 0x21f0aaad
    h = (h ^ (h >> 15 & 0x1ffff)) * 0x735a2d97
    return (h >> 8 & 0xffffff) * 2.0**-24
