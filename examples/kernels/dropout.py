"""Dropout: a hash of the place and a seed tells what is kept, so nothing is stored for the gradient."""

import numpy as np

from transconv.kernel import Buffer, kernel, uniform
from transconv.kernel.sizes import N


@kernel(work_shape=N, results="Y")
def dropout(group, X: Buffer[N], Y: Buffer[N], p, seed):
    (i,) = group.work_offset()
    kept = uniform(i + np.arange(group.shape[0]), seed) >= p
    group.store(Y[i:], np.where(kept, group.load(X[i:], shape=group.shape) / (1.0 - p), 0.0))
