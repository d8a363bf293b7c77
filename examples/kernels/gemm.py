"""A matrix product of any sizes: a group computes a part of the result, in steps along the inner size."""

import numpy as np

from transconv.kernel import Buffer, Group, kernel
from transconv.kernel.sizes import K, M, N


@kernel(results="C")
def parts(group, A: Buffer[M, K], B: Buffer[K, N], C: Buffer[M, N]):
    i, j = group.work_offset()
    m, n = group.shape
    acc = group.zeros(shape=(m, n), dtype=np.float32)
    for k in range(0, A.shape[1], 64):
        a = group.load(A[i:, k:], shape=(m, 64))
        b = group.load(B[k:, j:], shape=(64, n))
        acc += a @ b
    group.store(C[i:, j:], acc)


def gemm(a, b):
    return parts(Group((len(a), b.shape[1]), (128, 256) if a.element_size() < 4 else (64, 64)), a, b)
