"""Symbols of sizes by any name, as ``sympy.abc`` has them:

    from transconv.kernel.sizes import H, W

    @kernel(work_shape=(H, W))
    def added(group, X: Buffer[H, W], row: Buffer[W], Y: Buffer[H, W]): ...

The same as ``H, W = symbols("H W")``."""

from __future__ import annotations

from typing import Any

from transconv.kernel.annotations import symbols


def __getattr__(name: str) -> Any:
    """The symbol of a name. AttributeError for names of Python's own, with underscores around."""
    if name.startswith("__"):
        raise AttributeError(name)
    return symbols(name)
