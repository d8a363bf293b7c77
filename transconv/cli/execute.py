"""Runs one direction of one problem and judges the result, for ``run`` and ``demo``; see verify/case.py.

The data are small whole numbers: products and sums are exact, so a right kernel gives the same bits
as the answer in f64 after one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transconv.conv import ConvProblem, Prop
from transconv.schedule import Schedule
from transconv.target import Target

if TYPE_CHECKING:
    from transconv.conv import CompiledDirection


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. ``max_error``: largest difference to the answer; ``milliseconds``: on a
    GPU; ``problem``: the failure, empty if there was none."""

    compiled: CompiledDirection
    max_error: float
    milliseconds: float | None
    problem: str

    @property
    def right(self) -> bool:
        return not self.problem


def device() -> str:
    """Where kernels run. Without a GPU, Triton's interpreter is switched on: call this before
    anything imports triton."""
    from transconv.verify.machine import device

    return device()


def executable(target: Target, where: str) -> Target:
    """The target as it runs here, see ``verify.machine.executable``."""
    from transconv.verify.machine import executable

    return executable(target, where)


def execute(problem: ConvProblem, prop: Prop, target: Target, schedule: Schedule | None = None,
            time: bool = True, epilogue: str = "") -> Outcome:
    """Generate, execute, compare. Raises the compiler's errors (ScheduleError, Unsupported)."""
    from transconv.verify.case import ProblemCase

    case = ProblemCase(problem, prop, epilogue, target=target)
    compiled = case.plan(schedule or "")
    found = case.judge(compiled, "exact")
    spent = None
    if case.where == "cuda" and time:
        from triton.testing import do_bench

        spent = float(do_bench(lambda: case.launch(compiled)))
    return Outcome(compiled, found.max_err, spent, found.reason)
