"""Clusters by density (DBSCAN): points with many neighbours are cores; a cluster is what they reach."""

import numpy as np
import torch

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import C, N

FAR = 2**31 - 1


@kernel.func
def near(group, X, i, k, m, n, radius):
    """Which of n points from k on are at most a radius away from m points from i on."""
    a, b = group.load(X[i:], shape=(m, X.shape[1])), group.load(X[k:], shape=(n, X.shape[1]))
    return ((a[:, None] - b[None]) ** 2).sum(axis=2) <= radius * radius


@kernel(work_shape=N, group_shape=64, results={"found": np.int32})
def counts(group, X: Buffer[N, C], found: Buffer[N], radius):
    (i,) = group.work_offset()
    total = group.zeros(shape=group.shape, dtype=np.int32)
    for k in range(0, X.shape[0], 64):
        total += near(group, X, i, k, group.shape[0], 64, radius).sum(axis=1)
    group.store(found[i:], total)


@kernel(work_shape=N, group_shape=64, results={"new": np.int32})
def reached(group, X: Buffer[N, C], found: Buffer[N], labels: Buffer[N], new: Buffer[N], radius, least):
    (i,) = group.work_offset()
    lowest = group.load(labels[i:], shape=group.shape)
    for k in range(0, X.shape[0], 64):
        core = group.load(found[k:], shape=(64,)) >= least
        other = np.where(core, group.load(labels[k:], shape=(64,)), FAR)
        close = near(group, X, i, k, group.shape[0], 64, radius)
        lowest = np.minimum(lowest, np.where(close, other[None], FAR).min(axis=1))
    group.store(new[i:], lowest)


def dbscan(x, radius, least):
    """The lowest number of a core point of each point's cluster; FAR for points of none."""
    found = counts(x, radius)
    places = torch.arange(len(x), dtype=torch.int32, device=x.device)
    labels, before = torch.where(found >= least, places, FAR), None
    while before is None or not torch.equal(labels, before):
        before, labels = labels, reached(x, found, labels, radius, least)
    return labels
