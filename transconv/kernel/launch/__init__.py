"""Launches of kernels written in Python: arguments, lowering, caches, tuning."""
