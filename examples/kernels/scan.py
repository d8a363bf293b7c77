"""Running sums of each row: a part of the row at a time, with the sum of what is before it."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def rows(group, X, Y):
    (i,) = group.id()
    at = np.arange(32)
    before = 0.0
    for k in range(0, X.shape[1], 32):
        x = group.load(X[i, k:], shape=(32,))
        sums = np.where(at[None, :] <= at[:, None], x[None, :], 0.0).sum(axis=1)
        group.store(Y[i, k:], before + sums)
        before = before + x.sum()


def scan(x):
    y = torch.empty_like(x)
    rows(Group(x.shape[0], 1), x, y)
    return y
