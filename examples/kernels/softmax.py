"""Softmax of each row: one group a row."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import M, N


@kernel(work_shape=M, group_shape=1, results="Y")
def softmax(group, X: Buffer[M, N], Y: Buffer[M, N]):
    (i,) = group.id()
    x = group.load(X[i]).astype(np.float32)
    e = np.exp(x - x.max())
    group.store(Y[i], e / e.sum())
