"""The distances between the points of two sets, by broadcasting."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import C, M, N


@kernel(work_shape=(M, N), group_shape=(32, 64), results="D")
def pairwise_distance(group, X1: Buffer[M, C], X2: Buffer[N, C], D: Buffer[M, N]):
    i, j = group.work_offset()
    m, n = group.shape
    x1 = group.load(X1[i:], shape=(m, X1.shape[1]))
    x2 = group.load(X2[j:], shape=(n, X2.shape[1]))
    group.store(D[i:, j:], np.sqrt(((x1[:, None] - x2[None]) ** 2).sum(axis=2)))
