"""Stage: one row of the compiler's pipeline, a named function with a description (see pipeline.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transconv.compute import Compute
from transconv.ir import Kernel
from transconv.schedule import Schedule, Scheduled
from transconv.target import Target


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may ask: what is computed, the schedule, the target, and how f32 is multiplied."""

    whole: Scheduled
    precision: str = "tf32"

    @property
    def compute(self) -> Compute:
        """The computation of the main kernel: groups merged, over the copies."""
        return self.whole.main

    @property
    def schedule(self) -> Schedule:
        """How it is computed."""
        return self.whole.schedule

    @property
    def target(self) -> Target:
        """The chip."""
        return self.whole.target

    @property
    def dot_precision(self) -> str:
        """How a product multiplies f32: the precision asked for, if the chip has it, else ``ieee``."""
        if self.target.upcast16 or self.precision not in self.target.precisions:
            return "ieee"
        return self.precision


@dataclass(frozen=True, slots=True)
class Stage:
    """A step on the way from a problem to a text, with a phrase about it. ``takes`` and ``gives`` are
    words: problem, compute, schedule, kernel, text. ``level``: of what it gives (``ir.LEVELS``); empty
    where that is the level of the stage before."""

    name: str
    phrase: str
    takes: str = field(default="kernel", kw_only=True)
    gives: str = field(default="kernel", kw_only=True)
    level: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class Form(Stage):
    """A computation in one of the forms that it has before there is a kernel."""

    of: Callable[[Scheduled], Compute]
    takes: str = field(default="compute", kw_only=True)
    gives: str = field(default="compute", kw_only=True)


@dataclass(frozen=True, slots=True)
class Pass(Stage):
    """A function from kernel to kernel. An optional one can be switched off and the kernel is still
    right."""

    run: Callable[[Kernel, Context], Kernel]
    optional: bool = True
    default: bool = True
