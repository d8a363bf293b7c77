"""The compiler: passes from kernel to kernel, in the order of one tuple.

In: a computation and a schedule. Out: the kernel after every pass. Knows: IR, simplifier, schedule.
"""

from transconv.passes.joined import together
from transconv.passes.pipeline import (
    PIPELINE,
    Context,
    Pass,
    lower,
    passes,
    register,
    stages,
    unregister,
)

__all__ = [
    "Context", "PIPELINE", "Pass", "lower", "passes", "register", "stages", "together",
    "unregister",
]
