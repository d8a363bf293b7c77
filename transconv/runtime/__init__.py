"""Plans: the launches that answer a workload, kept once per process, and checked when new.

In: a workload, a target. Out: a plan whose first result was checked. Knows: everything below.
"""

from transconv.runtime.compiler import build, build_compute, forget, plan, replan
from transconv.runtime.plans import Plan, Step
from transconv.runtime.steps import Choose, Planned, header, kernel_name, plan_steps

__all__ = [
    "Choose", "Plan", "Planned", "Step", "build", "build_compute", "forget", "header", "kernel_name",
    "plan", "plan_steps", "replan",
]
