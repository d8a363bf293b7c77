"""Softmax of each row: one group a row."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def rows(group, X, Y):
    i, = group.id()
    x = group.load(X[i], shape=(X.shape[1],)).astype(np.float32)
    e = np.exp(x - x.max())
    group.store(Y[i], e / e.sum())


def softmax(x):
    y = torch.empty_like(x)
    rows(Group(x.shape[0], 1), x, y)
    return y
