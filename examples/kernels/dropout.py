"""Dropout: a hash of the place and a seed tells what is kept, so nothing is stored for the gradient."""

import numpy as np

from transconv.kernel import Buffer, kernel, symbols

N = symbols("N")


@kernel.func
def uniform(place, seed):
    """Numbers from 0 to 1, equally distributed: whole numbers mixed in 32 bits."""
    h = place * 747796405 + seed
    h = (h ^ (h >> 16 & 0xffff)) * 0x21f0aaad
    h = (h ^ (h >> 15 & 0x1ffff)) * 0x735a2d97
    return (h >> 8 & 0xffffff) * 2.0**-24


@kernel(work_shape=N, results="Y")
def dropout(group, X: Buffer[N], Y: Buffer[N], p, seed):
    i, = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    kept = uniform((i + np.arange(group.shape[0])).astype(np.int32), seed) >= p
    group.store(Y[i:], np.where(kept, x / (1.0 - p), 0.0))
