"""The weights of all pairs of points that are nearer than each of some radii (squared)."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def pairs(group, A, wa, B, wb, radii, sums):
    (g,), (i,), m = group.id(), group.work_offset(), group.shape[0]
    x, y, z = (group.load(A[i:, 0], shape=(m,)), group.load(A[i:, 1], shape=(m,)),
               group.load(A[i:, 2], shape=(m,)))
    w, r = group.load(wa[i:], shape=(m,)), group.load(radii)
    total = group.zeros(shape=r.shape)
    for k in range(0, B.shape[0], 32):
        u, v, t = (group.load(B[k:, 0], shape=(32,)), group.load(B[k:, 1], shape=(32,)),
                   group.load(B[k:, 2], shape=(32,)))
        apart = (x[:, None] - u[None])**2 + (y[:, None] - v[None])**2 + (z[:, None] - t[None])**2
        weight = w[:, None] * group.load(wb[k:], shape=(32,))[None]
        total += np.where(apart[None] <= r[:, None, None], weight[None], 0.0).sum(axis=(1, 2))
    group.store(sums[g], total)


def gpairs(a, wa, b, wb, radii):
    """a, b: points of three numbers; wa, wb: weights. Groups have sums of their own, which torch adds."""
    group = Group(len(a), 32)
    sums = torch.empty(group.count, len(radii), device=a.device)
    pairs(group, a, wa, b, wb, radii, sums)
    return sums.sum(0)
