"""From a plan to what the offline compiler has to know of each of its launches."""

from __future__ import annotations

from transconv.backend_triton import CompileJob, is_explicit
from transconv.conv import ConvProblem, Epilogue, Prop, compiler
from transconv.runtime import PlanStep
from transconv.schedule import Schedule
from transconv.target import Target


def jobs_of(problem: ConvProblem, prop: Prop, target: Target, schedule: Schedule | None = None,
            epilogue: Epilogue | None = None, text: str = "") -> list[CompileJob]:
    """One job for each launch of a direction. Raises as ``compiler.build``."""
    return [job_of(s, target, text) for s in compiler.build(problem, prop, target, schedule,
                                                            epilogue).steps]


def job_of(step: PlanStep, target: Target, text: str = "") -> CompileJob:
    """One launch; ``text`` names an intermediate text to bring back."""
    boxes = step.launcher.boxes or (None,) * len(step.kernel.params)
    params = tuple((p.dtype.name, box[1] if box else ())
                   for p, box in zip(step.kernel.params, boxes, strict=True))
    return CompileJob(step.source, step.kernel.name, params, target.name, target.backend, target.arch,
               target.warp_size, step.schedule.warps, step.schedule.stages, (text,) if text else (),
               is_explicit(step.kernel),
               sizes=len(step.kernel.sizes.each) if step.kernel.sizes else 0)
