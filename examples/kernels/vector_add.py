"""The sum of two vectors."""

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import N


@kernel(work_shape=N, results="Z")
def vector_add(group, X: Buffer[N], Y: Buffer[N], Z: Buffer[N]):
    (i,) = group.work_offset()
    group.store(Z[i:], group.load(X[i:], shape=group.shape) + group.load(Y[i:], shape=group.shape))
