"""The distances between the points of two sets, by broadcasting."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def parts(group, X1, X2, D):
    i, j = group.work_offset()
    m, n = group.shape
    x1 = group.load(X1[i:], shape=(m, X1.shape[1]))
    x2 = group.load(X2[j:], shape=(n, X2.shape[1]))
    group.store(D[i:, j:], np.sqrt(((x1[:, None] - x2[None])**2).sum(axis=2)))


def pairwise_distance(x1, x2):
    d = torch.empty(len(x1), len(x2), device=x1.device)
    parts(Group(tuple(d.shape), (32, 64)), x1, x2, d)
    return d
