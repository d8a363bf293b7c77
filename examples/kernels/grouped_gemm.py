"""Products of several matrices with several others: rows of A belong to experts, each with its own B."""

import numpy as np
import torch

from transconv.kernel import Group, kernel

ROWS = 128


@kernel
def parts(group, A, B, C, experts, firsts, ends):
    (t, _), (_, j) = group.id(), group.work_offset()
    e, i, end = experts[t], firsts[t], ends[t]
    n = group.shape[1]
    acc = group.zeros(shape=(ROWS, n), dtype=np.float32)
    for k in range(0, A.shape[1], 64):
        a = group.load(A[i:, k:], shape=(ROWS, 64))
        b = group.load(B[e, k:, j:], shape=(64, n))
        acc += a @ b
    group.store(C[i:end, j:], acc)


def tiles(sizes, device):
    """Which expert has each tile of rows, where the tile begins, and where the expert's rows end."""
    found, begin = [], 0
    for expert, size in enumerate(sizes):
        found += [(expert, first, begin + size) for first in range(begin, begin + size, ROWS)]
        begin += size
    return torch.tensor(found, dtype=torch.int32, device=device).reshape(-1, 3).unbind(1)


def grouped_gemm(a, b, experts, firsts, ends):
    """a: all rows, those of an expert behind each other; b: experts, inner, columns."""
    c = torch.empty(len(a), b.shape[2], dtype=a.dtype, device=a.device)
    parts(Group((len(experts), b.shape[2]), (1, 128)), a, b, c, experts, firsts, ends)
    return c
