"""Attention with an online softmax: the keys pass by once, with the largest score and the sum so far."""

import math

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import C, E, H, M, N


@kernel(work_shape=(H, M), group_shape=(1, 128), results="out")
def attention(group, Q: Buffer[H, M, C], K: Buffer[H, N, C], V: Buffer[H, N, E], out: Buffer[H, M, E]):
    """Heads (or images times heads), places, channels."""
    (h, _), (_, i) = group.id(), group.work_offset()
    m, d = group.shape[1], Q.shape[2]
    scale = d**-0.5 / math.log(2)
    q = group.load(Q[h, i:], shape=(m, d))
    largest = group.full(shape=(m,), dtype=np.float32, fill_value=-np.inf)
    total = group.zeros(shape=(m,), dtype=np.float32)
    acc = group.zeros(shape=(m, V.shape[2]), dtype=np.float32)
    for k in range(0, K.shape[1], 64):
        scores = q @ group.load(K[h, k:], shape=(64, d)).T * scale
        most = np.maximum(largest, scores.max(axis=1))
        e, old = np.exp2(scores - most[:, None]), np.exp2(largest - most)
        total = total * old + e.sum(axis=1)
        acc = acc * old[:, None] + e.astype(V.dtype) @ group.load(V[h, k:], shape=(64, V.shape[2]))
        largest = most
    group.store(out[h, i:], acc / total[:, None])
