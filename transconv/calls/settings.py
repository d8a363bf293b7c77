"""transconv.config: settings that a program may change while it runs.

    transconv.config.fallback = "silent" | "warn" | "error"    what a call that torch must do means
    transconv.config.cpu      = "fallback" | "interpret"       what a call on CPU tensors means; without a
                                GPU "interpret" starts Triton's interpreter
    transconv.config.compile  = "now" | "background" | "never"   what a call does without its kernel
    transconv.config.sizes    = "exact" | "any"                whether kernels are for one size each

A wrong word is a ValueError that lists the legal ones. The environment gives the first values.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

from transconv import knobs
from transconv.errors import nearest

WORDS = {
    "fallback": ("silent", "warn", "error"),
    "cpu": ("fallback", "interpret"),
    "compile": ("now", "background", "never"),
    "sizes": ("exact", "any"),
}


class Settings:
    """The switches."""

    fallback: str
    cpu: str
    compile: str
    sizes: str

    def __init__(self) -> None:
        object.__setattr__(self, "_listeners", [])
        knobs.name_unknown()
        self.fallback = knobs.fallback()
        self.cpu = "fallback"
        self.compile = knobs.compile()
        self.sizes = knobs.sizes()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in WORDS:
            raise AttributeError(f"transconv.config has no switch '{name}'; "
                                 f"expected one of: {', '.join(WORDS)}{nearest(name, WORDS)}")
        if value not in WORDS[name]:
            raise ValueError(f"transconv.config.{name} = {value!r}; "
                             f"expected one of: {', '.join(WORDS[name])}"
                             f"{nearest(str(value), WORDS[name])}")
        object.__setattr__(self, name, value)
        if value == "interpret":
            _begin_interpreter()
        for listener in self._listeners:
            listener()

    def __getattr__(self, name: str) -> Any:
        # Config, Block: what a module of this dotted name held before it became transconv.schedule.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("transconv.schedule.schedule"), name)

    def __dir__(self) -> list[str]:
        return [*WORDS, "on_change"]

    def __repr__(self) -> str:
        return "transconv.config(" + ", ".join(f"{n}={getattr(self, n)!r}" for n in WORDS) + ")"

    @property
    def mode(self) -> str:
        """``compile``, but ``now`` where torch may not compute meanwhile."""
        background = self.compile == "background" and self.fallback == "error"
        return "now" if background else self.compile

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change."""
        self._listeners.append(listener)


def _begin_interpreter() -> None:
    """Have Triton interpret kernels, where there is no GPU for which it would compile them. Warns at the
    caller's line where Triton is loaded already, which it decides then."""
    if knobs.interpret() or importlib.import_module("torch").cuda.is_available():
        return
    if "triton.language" not in sys.modules:
        knobs.use_interpreter()
        return
    warnings.warn(
        'transconv.config.cpu = "interpret" comes too late: Triton is loaded without its interpreter, and '
        "torch computes calls on CPU tensors; set it at the beginning of the program, before a kernel or "
        "torch.compile loads Triton, or start the program with TRITON_INTERPRET=1", stacklevel=3)


settings = Settings()
