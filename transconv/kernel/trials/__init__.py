"""Trials of drawn kernels: whether all engines that run them say what plain NumPy does."""

from transconv.kernel.trials.draw import KERNELS

__all__ = ["KERNELS"]
