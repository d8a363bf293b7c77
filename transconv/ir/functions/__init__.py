"""Functions and reductions that kernels can call, and the roundings of their results, in NumPy."""
