"""Trials of drawn kernels: whether all engines that run them agree with plain NumPy."""

from transconv.kernel.trials.draw import KERNELS

__all__ = ["KERNELS"]
