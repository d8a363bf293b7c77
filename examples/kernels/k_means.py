"""k-means: each point goes to the nearest centre, then each centre to the mean of its points."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def nearest(group, points, centres, near):
    i, = group.work_offset()
    x = group.load(points[i:], shape=(group.shape[0], points.shape[1]))
    c = group.load(centres)
    group.store(near[i:], ((x[:, None] - c[None])**2).sum(axis=2).argmin(axis=1))


@kernel
def means(group, points, near, centres):
    first, = group.work_offset()
    m, d = group.shape[0], points.shape[1]
    total, count = group.zeros(shape=(m, d)), group.zeros(shape=(m, 1))
    for k in range(0, points.shape[0], 32):
        x = group.load(points[k:], shape=(32, d))
        own = group.load(near[k:], shape=(32,))[None, :] == (first + np.arange(m))[:, None]
        total += np.where(own[:, :, None], x[None], 0.0).sum(axis=1)
        count += np.where(own, 1.0, 0.0).sum(axis=1, keepdims=True)
    group.store(centres[first:], total / np.maximum(count, 1.0))


def k_means(points, centres, steps):
    centres, near = centres.clone(), torch.empty(len(points), dtype=torch.int32, device=points.device)
    for _ in range(steps):
        nearest(Group(len(points), 32), points, centres, near)
        means(Group(len(centres), 4), points, near, centres)
    return centres, near
