"""From a direction of a convolution problem to a plan; wraps the compiler for any workload."""

from __future__ import annotations

from dataclasses import replace

from transconv import runtime
from transconv.conv.epilogue import Epilogue
from transconv.conv.plans import CompiledDirection
from transconv.conv.problem.conv_problem import ConvProblem, Prop
from transconv.conv.workload import ConvWorkload
from transconv.passes import lower
from transconv.runtime import Choose, Planned, PlanRequest, forget, replan
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
