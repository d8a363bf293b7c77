"""Offline compilation: kernels compiled in child processes for chips that are not there."""
