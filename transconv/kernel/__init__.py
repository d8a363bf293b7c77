"""Kernels written in Python: NumPy on the tiles of a group, with masks that travel with the values.

In: a Python function, a group, arrays. Out: a kernel of the IR, its Triton text, its launch. Knows: the
passes, emitters and launches below it, nothing of convolutions.
"""

from transconv.errors import KernelError
from transconv.kernel.declared import Buffer, Constant, Tunable, symbols
from transconv.kernel.decorator import KernelDecorator, KernelFunction, kernel
from transconv.kernel.device_functions import DeviceFunction
from transconv.kernel.group import Group

__all__ = ["Buffer", "Constant", "DeviceFunction", "Group", "KernelDecorator", "KernelError",
           "KernelFunction", "Tunable", "kernel", "symbols"]
