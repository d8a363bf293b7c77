"""The class of each point by a vote of the k nearest points whose classes are known."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import C, M, N


@kernel(work_shape=M, group_shape=16, results={"found": np.int32})
def nearest_neighbours(
    group, known: Buffer[N, C], classes: Buffer[N], points: Buffer[M, C], found: Buffer[M], k, kinds
):
    (i,) = group.work_offset()
    m, n = group.shape[0], known.shape[0]
    x = group.load(points[i:], shape=(m, points.shape[1]))
    apart = ((x[:, None] - group.load(known)[None]) ** 2).sum(axis=2)
    votes = group.zeros(shape=(m, kinds), dtype=np.int32)
    for _ in range(k):
        best = apart.argmin(axis=1)
        votes += classes[best][:, None] == np.arange(kinds)[None, :]
        apart = np.where(np.arange(n)[None, :] == best[:, None], np.inf, apart)
    group.store(found[i:], votes.argmax(axis=1))
