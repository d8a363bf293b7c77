"""The compiler: passes from kernel to kernel, in the order of one tuple.

In: a computation and a schedule. Out: the kernel after every pass. Knows: IR, simplifier, schedule.
"""

from transconv.passes.footprints import told_addresses
from transconv.passes.lowering.gridwise import STEP
from transconv.passes.lowering.launch_fusion import together
from transconv.passes.pipeline import (
    EMIT,
    NAIVE,
    PIPELINE,
    PROBLEM,
    SCHEDULE,
    STAGES,
    TOGETHER,
    Context,
    Form,
    Pass,
    Stage,
    finish,
    forms,
    leave,
    levels,
    lower,
    passes,
    register,
    running,
    stages,
    unregister,
)
from transconv.passes.scope import decided, resolved

__all__ = [
    "EMIT",
    "NAIVE",
    "PIPELINE",
    "PROBLEM",
    "SCHEDULE",
    "STAGES",
    "STEP",
    "TOGETHER",
    "Context",
    "Form",
    "Pass",
    "Stage",
    "decided",
    "finish",
    "forms",
    "leave",
    "levels",
    "lower",
    "passes",
    "register",
    "resolved",
    "running",
    "stages",
    "together",
    "told_addresses",
    "unregister",
]
