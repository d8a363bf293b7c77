"""The weights of all pairs of points that are nearer than each of some radii (squared)."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def pairs(group, A, wa, B, wb, radii, sums):
    (g,), (i,) = group.id(), group.work_offset()
    a, w = group.load(A[i:], shape=(group.shape[0], 3)), group.load(wa[i:], shape=group.shape)
    r = group.load(radii)
    total = group.zeros(shape=r.shape)
    for k in range(0, B.shape[0], 16):
        b, v = group.load(B[k:], shape=(16, 3)), group.load(wb[k:], shape=(16,))
        apart = ((a[:, None] - b[None])**2).sum(axis=2)
        weight = w[:, None] * v[None, :]
        total += np.where(apart[None] <= r[:, None, None], weight[None], 0.0).sum(axis=(1, 2))
    group.store(sums[g], total)


def gpairs(a, wa, b, wb, radii):
    """a, b: points of three numbers; wa, wb: weights. Groups have sums of their own, which torch adds."""
    group = Group(len(a), 16)
    sums = torch.empty(group.count, len(radii), device=a.device)
    pairs(group, a, wa, b, wb, radii, sums)
    return sums.sum(0)
