"""The interpreter of the IR: executes kernels in NumPy, and finds races and deadlocks.

In: a kernel and arrays. Out: the arrays after it. Knows: the nodes of the IR."""
