"""The weights of all pairs of points that are nearer than each of some radii (squared)."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def pairs(group, A, wa, B, wb, radii, sums):
    (g, h), (i, j), (m, n) = group.id(), group.work_offset(), group.shape
    x, y, z = (group.load(A[i:, 0], shape=(m,)), group.load(A[i:, 1], shape=(m,)),
               group.load(A[i:, 2], shape=(m,)))
    w, r = group.load(wa[i:], shape=(m,)), group.load(radii)
    total = group.zeros(shape=(r.shape[0], m))
    for k in range(j, min(j + n, B.shape[0])):
        apart = (x - B[k, 0])**2 + (y - B[k, 1])**2 + (z - B[k, 2])**2
        total += np.where(apart[None] <= r[:, None], w * wb[k], 0.0)
    group.store(sums[g, h], total.sum(axis=1))


def gpairs(a, wa, b, wb, radii):
    """a, b: points of three numbers; wa, wb: weights. Groups have sums of their own, which torch adds."""
    group = Group((len(a), len(b)), (64, 512))
    sums = torch.empty(*group.groups, len(radii), device=a.device)
    pairs(group, a, wa, b, wb, radii, sums)
    return sums.sum((0, 1))
