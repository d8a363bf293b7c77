"""The weights of all pairs of points that are nearer than each of some radii (squared)."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import M, N, R

G, H = (M + 63) // 64, (N + 511) // 512


@kernel(work_shape=(M, N), group_shape=(64, 512), results="sums")
def pairs(
    group,
    A: Buffer[M, 3],
    wa: Buffer[M],
    B: Buffer[N, 3],
    wb: Buffer[N],
    radii: Buffer[R],
    sums: Buffer[G, H, R],
):
    (g, h), (i, j), (m, n) = group.id(), group.work_offset(), group.shape
    x, y, z = (group.load(A[i:, c], shape=(m,)) for c in range(3))
    w, r = group.load(wa[i:], shape=(m,)), group.load(radii)
    total = group.zeros(shape=(r.shape[0], m))
    for k in range(j, min(j + n, B.shape[0])):
        apart = (x - B[k, 0]) ** 2 + (y - B[k, 1]) ** 2 + (z - B[k, 2]) ** 2
        total += np.where(apart[None] <= r[:, None], w * wb[k], 0.0)
    group.store(sums[g, h], total.sum(axis=1))


def gpairs(a, wa, b, wb, radii):
    """a, b: points of three numbers; wa, wb: weights. Groups have sums of their own, which torch adds."""
    return pairs(a, wa, b, wb, radii).sum((0, 1))
