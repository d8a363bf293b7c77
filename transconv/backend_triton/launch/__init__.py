"""Kernels of Triton: compiled, loaded and started; descriptors, records of what is compiled."""
