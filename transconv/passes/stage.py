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
    """What a pass may use: the computation, the schedule, the target, and the precision of f32
    products. ``scheduled``: None for a kernel that was written by hand, for which passes that ask for a
    computation or a schedule do not run; ``chip``: its target."""

    scheduled: Scheduled | None
    precision: str = "tf32"
    chip: Target | None = None

    @property
    def whole(self) -> Scheduled:
        """The computation with its schedule."""
        assert self.scheduled is not None, "a kernel that was written by hand has no schedule"
        return self.scheduled

    @property
    def compute(self) -> Compute:
        """The computation of the main kernel: groups merged, over the copies."""
        return self.whole.main

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.whole.schedule

    @property
    def target(self) -> Target:
        """The chip."""
        return self.chip or self.whole.target

    @property
    def dot_precision(self) -> str:
        """The precision of products of f32: the requested one if the chip has it, else ``ieee``."""
        if self.target.upcast16 or self.precision not in self.target.precisions:
            return "ieee"
        return self.precision


@dataclass(frozen=True, slots=True)
class Stage:
    """A step from a problem to a text, with a phrase about it. ``takes`` and ``gives`` are each one of
    problem, compute, schedule, kernel, text. ``level``: that of its result (a key of ``ir.LEVELS``); empty
    if it is the level of the stage before."""

    name: str
    phrase: str
    takes: str = field(default="kernel", kw_only=True)
    gives: str = field(default="kernel", kw_only=True)
    level: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class Form(Stage):
    """A stage that gives a form of the computation; ``of`` derives it."""

    of: Callable[[Scheduled], Compute]
    takes: str = field(default="compute", kw_only=True)
    gives: str = field(default="compute", kw_only=True)


@dataclass(frozen=True, slots=True)
class Pass(Stage):
    """A function ``run`` from kernel to kernel. Without an ``optional`` pass the kernel is still correct.
    ``default``: whether an optional pass runs unless TRANSCONV_PASSES says otherwise. ``scheduled``: it
    asks for the computation or the schedule."""

    run: Callable[[Kernel, Context], Kernel]
    optional: bool = True
    default: bool = True
    scheduled: bool = False
