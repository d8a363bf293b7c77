"""What kernels mean: executed in NumPy, with races and deadlocks found.

In: a kernel and arrays. Out: the arrays after it. Knows: the nodes of the IR.
"""
