"""The length of each row."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import C, N


@kernel(work_shape=N, group_shape=512, results="Y")
def l2_norm(group, X: Buffer[N, C], Y: Buffer[N]):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))
    group.store(Y[i:], np.sqrt((x * x).sum(axis=1)))
