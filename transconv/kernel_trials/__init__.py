"""Trials of drawn kernels: programs in the kernel language, run by its engines, compared and made simpler.

In: a seed and a number, or a line. Out: whether the simulator, Triton's interpreter, the interpreter of
the IR and the GPU say what plain NumPy does. Knows: the kernel API, and the fuzzer of verify.
"""

from transconv.kernel_trials.draw import KERNELS
from transconv.kernel_trials.trial import KernelTrial

__all__ = ["KERNELS", "KernelTrial"]
