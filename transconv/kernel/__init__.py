"""Kernels written in Python: NumPy on the tiles of a group, with masks that travel with the values.

In: a Python function, a group, arrays. Out: a kernel of the IR, its Triton text, its launch. Knows: the
passes, emitters and launches below it, nothing of convolutions.
"""

from transconv.errors import KernelError
from transconv.kernel.decorator import KernelFunction, kernel
from transconv.kernel.group import Group

__all__ = ["Group", "KernelError", "KernelFunction", "kernel"]
