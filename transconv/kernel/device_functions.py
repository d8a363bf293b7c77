"""``@kernel.func``: functions that kernels call; their bodies are read in the place of the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transconv.errors import KernelError
from transconv.kernel.source import Source


class DeviceFunction:
    """A function of tiles, numbers and arrays. Outside of kernels it is the Python function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.python = function
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        """The function's tree and lines. Raises KernelError if it cannot be read."""
        if self._source is None:
            made = Source.of(self.python)
            a, place = made.tree.args, made.place(made.tree)
            if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or a.defaults:
                raise KernelError(f"{place}: found parameters with defaults, * or /; allowed: plain "
                                  f"parameters\n    {place.text.strip()}\n"
                                  f"  for example: def {made.name}(x, y):")
            self._source = made
        return self._source

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self.python(*args, **words)


def func(function: Callable[..., Any]) -> DeviceFunction:
    """Make a function that kernels may call:

        @kernel.func
        def silu(x):
            return x / (1.0 + np.exp(-x))

    Its body is read where it is called, with the types and shapes of that call. It may not call itself.
    """
    if not callable(function):
        raise KernelError("kernel.func is used without arguments; overloads by scope are not built")
    return DeviceFunction(function)
