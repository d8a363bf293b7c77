"""The gradients of layer norm: a group goes through some rows, and adds up those of scale and shift."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def rows(group, G, X, scale, dX, dscale, dshift, eps):
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
    dx, group = torch.empty_like(x), Group(len(x), 16)
    dscale, dshift = (torch.empty(group.count, x.shape[1], device=x.device) for _ in range(2))
    rows(group, g, x, scale, dx, dscale, dshift, eps)
    return dx, dscale.sum(0), dshift.sum(0)
