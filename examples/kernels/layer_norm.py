"""Layer norm of each row: one group a row; the mean is over the elements that are there."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import M, N


@kernel(work_shape=M, group_shape=1, results="Y")
def layer_norm(group, X: Buffer[M, N], scale: Buffer[N], shift: Buffer[N], Y: Buffer[M, N], eps=1e-5):
    (i,) = group.id()
    x = group.load(X[i]).astype(np.float32)
    d = x - x.mean()
    y = d / np.sqrt((d * d).mean() + eps)
    group.store(Y[i], y * group.load(scale) + group.load(shift))
