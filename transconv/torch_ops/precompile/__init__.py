"""Kernels compiled before a call needs them."""
