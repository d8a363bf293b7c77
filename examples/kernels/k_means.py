"""k-means: each point goes to the nearest centre; the means of what went there are the next centres."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def assigned(group, points, centres, near, sums, counts):
    (g,), (i,), (m,) = group.id(), group.work_offset(), group.shape
    x, c = group.load(points[i:], shape=(m, points.shape[1])), group.load(centres)
    nearest = ((x[:, None] - c[None])**2).sum(axis=2).argmin(axis=1)
    group.store(near[i:], nearest)
    own = nearest[:, None] == np.arange(centres.shape[0])[None]
    for d in tuple(range(points.shape[1])):
        p = group.load(points[i:, d], shape=(m,))
        group.store(sums[g, :, d], np.where(own, p[:, None], 0.0).sum(axis=0))
    group.store(counts[g], own.sum(axis=0))


def k_means(points, centres, steps):
    group = Group(len(points), 256)
    near = torch.empty(len(points), dtype=torch.int32, device=points.device)
    sums = torch.empty(group.count, *centres.shape, device=points.device)
    counts = torch.empty(group.count, len(centres), dtype=torch.int32, device=points.device)
    for _ in range(steps):
        assigned(group, points, centres, near, sums, counts)
        centres = sums.sum(0) / counts.sum(0).clamp_min(1)[:, None]
    return centres, near
