"""A kernel that declares its sizes, its group, and a number that tuning may choose."""

import numpy as np
import torch

from transconv.kernel import Buffer, Tunable, kernel, symbols

M, N = symbols("M N")
ROWS = Tunable("ROWS", 4, (1, 2, 4, 8, 16))


@kernel(work_shape=(M, N), group_shape=(ROWS, 128))
def scaled(group, X: Buffer[M, N], Y: Buffer[M, N], scale: Buffer[N]):
    i, j = group.work_offset()
    x = group.load(X[i:, j:], shape=group.shape)
    group.store(Y[i:, j:], x * group.load(scale[j:], shape=(group.shape[1],)))


if __name__ == "__main__":
    for m, n in ((5, 300), (64, 1000), (0, 7)):
        x, scale = np.random.rand(m, n).astype(np.float32), np.random.rand(n).astype(np.float32)
        y = np.zeros_like(x)
        scaled.simulate(x, y, scale)
        assert np.array_equal(y, x * scale)
    arrays = [torch.empty(s, device="meta") for s in ((64, 1000), (64, 1000), (1000,))]
    print(scaled.explain(*arrays, target="sm_90"))
