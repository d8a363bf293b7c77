"""The sum of two vectors."""

import torch

from transconv.kernel import Group, kernel


@kernel
def parts(group, X, Y, Z):
    i, = group.work_offset()
    group.store(Z[i:], group.load(X[i:], shape=group.shape) + group.load(Y[i:], shape=group.shape))


def vector_add(x, y):
    z = torch.empty_like(x)
    parts(Group(len(x)), x, y, z)
    return z
