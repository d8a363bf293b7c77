"""Passes of warp-specialized kernels: roles, rings of shared memory, loads of the epilogue."""
