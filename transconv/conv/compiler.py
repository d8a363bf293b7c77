"""From a direction of a convolution problem to a plan; wraps the compiler for any workload.

Also here: plans of convolutions: launches on src, wei and dst, cleared blocked padding, torch's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transconv import runtime
from transconv.conv.epilogue import Epilogue
from transconv.conv.problem.conv_problem import ConvProblem, Prop
from transconv.conv.workload import ConvWorkload
from transconv.ir import f32
from transconv.passes import lower
from transconv.runtime import Choose, Plan, Planned, PlanRequest, forget, replan
from transconv.schedule import Schedule
from transconv.target import Target

__all__ = ["build", "forget", "lower", "plan", "plan_steps", "question", "replan"]


def build(problem: ConvProblem, prop: Prop, target: Target, schedule: Schedule | None = None,
          epilogue: Epilogue | None = None, choose: Choose | None = None,
          deterministic: bool = False) -> CompiledDirection:
    """Compile one direction of a problem, as ``runtime.build`` does a workload."""
    return runtime.build(ConvWorkload(problem, prop, epilogue or Epilogue()), target, schedule, choose,
                         deterministic, CompiledDirection)


def plan(problem: ConvProblem, prop: Prop, target: Target, schedule: Schedule | str | None = None,
         epilogue: Epilogue | str = "", *, aligned: bool = True, deterministic: bool = False,
         mode: str = "now") -> CompiledDirection:
    """``build``, cached: equal arguments give the same plan, which is compiled once per process.

    ``aligned``: every tensor will begin at a multiple of 16 bytes, as boxes need. ``deterministic``:
    results have the same bits in every run. Only ``reduce=atomic`` does not: a tuned schedule with it is
    skipped, a given one raises ScheduleError. ``mode``: what to do if the kernels are not compiled yet
    (see ``runtime.ready``).
    """
    if isinstance(schedule, str):
        schedule = Schedule.parse(schedule)
    asked = question(problem, prop, target, epilogue, aligned=aligned, deterministic=deterministic)
    return runtime.ready(
        asked.workload, asked.target, schedule, deterministic, CompiledDirection, aligned, mode
    )


def question(problem: ConvProblem, prop: Prop, target: Target, epilogue: Epilogue | str = "", *,
             aligned: bool = True, deterministic: bool = False) -> PlanRequest:
    """The arguments of ``plan`` as the key of its cache."""
    if isinstance(epilogue, str):
        epilogue = Epilogue.parse(epilogue)
    return PlanRequest(
        ConvWorkload(problem, prop, epilogue), suited(target, aligned), deterministic, aligned
    )


def suited(target: Target, aligned: bool) -> Target:
    """The target as it can be used for tensors that are ``aligned``: boxes begin at multiples of 16
    bytes."""
    return target if aligned else replace(target, features=target.features - {"box"})


def plan_steps(problem: ConvProblem, prop: Prop, target: Target, schedule: Schedule | None,
               epilogue: Epilogue, choose: Choose | None = None) -> Planned:
    """The computations to run, in order, each with its schedule: see ``runtime.plan_steps``."""
    return runtime.plan_steps(ConvWorkload(problem, prop, epilogue), target, schedule, choose)


NAMES = ("src", "wei", "dst")


@dataclass(slots=True)
class CompiledDirection(Plan):
    """The plan of one direction of a problem."""

    workload: ConvWorkload
    order: tuple[int, ...] = ()  # of src, wei, dst as arguments, if the plan is one kernel of these alone

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        if self.required:
            return
        result = getattr(self.problem, self.prop.result).layout
        shape = self.problem.shapes[self.prop.result]
        self.padding = result.padding(shape) if result.extents != shape else []
        if self.padding:
            return
        if len(self.steps) == 1 and not self.workspaces and self.steps[0].zero is None and (
                all(p in NAMES for p in self.steps[0].params)):
            self.order = tuple(NAMES.index(p) for p in self.steps[0].params)

    @property
    def problem(self) -> ConvProblem:
        """The problem."""
        return self.workload.problem

    @property
    def prop(self) -> Prop:
        """The direction."""
        return self.workload.prop

    @property
    def epilogue(self) -> Epilogue:
        """The operations on the sum before it is stored."""
        return self.workload.epilogue

    @property
    def obeys(self) -> frozenset[str]:
        """The numeric settings of torch that affect this plan: ``deterministic`` if it uses atomic
        additions; ``precision`` if the matrix unit multiplies float32, or would with another setting. Only
        depthwise problems never use the matrix unit."""
        p = self.problem
        found = {"deterministic" for s in self.steps if s.schedule.reduce == "atomic"}
        if any(getattr(p, n).dtype is f32 for n in self.prop.operands) and (
                not p.g == p.ic == p.oc or any(s.schedule.unit == "mma" for s in self.steps)):
            found.add("precision")
        return frozenset(found)

    def starter(self, device: int, aligned: bool, names: tuple[str, ...] = NAMES,
                spaces: bool = False) -> Callable[..., None] | None:
        """As ``Plan.starter``; also None if padding must be cleared after the launches."""
        return None if self.padding else Plan.starter(self, device, aligned, names, spaces)

    def launch(self, src: Any, wei: Any, dst: Any, **extra: Any) -> None:  # type: ignore[override]
        """Run on torch tensors that match the problem; the direction's result is written in place. Raises
        TensorError for tensors that do not match.

        ``extra``: ``bia`` and ``res``, if the epilogue reads them. Launches go to the current stream.
        Split sums and packed operands take workspaces from torch's allocator during the call. A plan with
        boxes needs tensors that begin at multiples of 16 bytes (``plan(..., aligned=True)``).
        """
        tensors = {"src": src, "wei": wei, "dst": dst, **extra}
        self.check(tensors)
        if self.order and not extra:
            given = (src, wei, dst)
            self.steps[0].launcher.start([given[i] for i in self.order])
            return
        self.run(tensors)
        if self.padding:
            self._clear_padding(tensors[self.prop.result])

    def _clear_padding(self, result: Any) -> None:
        """Store zeros where blocks reach beyond the result's shape, as oneDNN requires."""
        layout = getattr(self.problem, self.prop.result).layout
        blocks = result.as_strided([b.size for b in layout.blocks], [b.stride for b in layout.blocks],
                                   result.storage_offset() + layout.offset)
        for box in self.padding:
            blocks[box].zero_()
