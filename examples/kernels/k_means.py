"""k-means: each point goes to the nearest centre; the means of what went there are the next centres."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import C, K, N

G = (N + 255) // 256


@kernel(work_shape=N, group_shape=256, results={"near": np.int32, "sums": None, "counts": np.int32})
def assigned(
    group,
    points: Buffer[N, C],
    centres: Buffer[K, C],
    near: Buffer[N],
    sums: Buffer[G, K, C],
    counts: Buffer[G, K],
):
    (g,), (i,), (m,) = group.id(), group.work_offset(), group.shape
    x, c = group.load(points[i:], shape=(m, points.shape[1])), group.load(centres)
    nearest = ((x[:, None] - c[None]) ** 2).sum(axis=2).argmin(axis=1)
    group.store(near[i:], nearest)
    own = nearest[:, None] == np.arange(centres.shape[0])[None]
    for d in tuple(range(points.shape[1])):
        p = group.load(points[i:, d], shape=(m,))
        group.store(sums[g, :, d], np.where(own, p[:, None], 0.0).sum(axis=0))
    group.store(counts[g], own.sum(axis=0))


def k_means(points, centres, steps):
    for _ in range(steps):
        near, sums, counts = assigned(points, centres)
        centres = sums.sum(0) / counts.sum(0).clamp_min(1)[:, None]
    return centres, near
