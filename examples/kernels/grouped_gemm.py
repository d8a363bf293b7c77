"""Products of several matrices with several others: rows of A belong to experts, each with its own B."""

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import E, K, M, N, T

ROWS = 128


@kernel(work_shape=(T, N), group_shape=(1, 128), results="C")
def grouped_gemm(
    group,
    A: Buffer[M, K],
    B: Buffer[E, K, N],
    C: Buffer[M, N],
    experts: Buffer[T],
    firsts: Buffer[T],
    ends: Buffer[T],
):
    """For each tile of 128 rows of A: its expert, where it begins, and where the expert's rows end."""
    (t, _), (_, j) = group.id(), group.work_offset()
    e, i, end = experts[t], firsts[t], ends[t]
    n = group.shape[1]
    acc = group.zeros(shape=(ROWS, n), dtype=np.float32)
    for k in range(0, A.shape[1], 64):
        a = group.load(A[i:, k:], shape=(ROWS, 64))
        b = group.load(B[e, k:, j:], shape=(64, n))
        acc += a @ b
    group.store(C[i:end, j:], acc)
