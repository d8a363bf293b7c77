"""The gradients of layer norm: a group goes through some rows, and adds up those of scale and shift."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import M, N

PARTS = (M + 15) // 16


@kernel(work_shape=M, group_shape=16, results={"dX": None, "dscale": np.float32, "dshift": np.float32})
def rows(
    group,
    G: Buffer[M, N],
    X: Buffer[M, N],
    scale: Buffer[N],
    dX: Buffer[M, N],
    dscale: Buffer[PARTS, N],
    dshift: Buffer[PARTS, N],
    eps=1e-5,
):
    (part,), (first,) = group.id(), group.work_offset()
    w, n = group.load(scale), X.shape[1]
    a, b = group.zeros(shape=(n,)), group.zeros(shape=(n,))
    for i in range(first, min(first + group.shape[0], X.shape[0])):
        x, g = group.load(X[i]).astype(np.float32), group.load(G[i]).astype(np.float32)
        d = x - x.mean()
        s = 1.0 / np.sqrt((d * d).mean() + eps)
        y, wg = d * s, w * g
        group.store(dX[i], (wg - (wg * y).mean() * y - wg.mean()) * s)
        a += g * y
        b += g
    group.store(dscale[part], a)
    group.store(dshift[part], b)


def layer_norm_backward(g, x, scale, eps=1e-5):
    dx, dscale, dshift = rows(g, x, scale, eps)
    return dx, dscale.sum(0), dshift.sum(0)
