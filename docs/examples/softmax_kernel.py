"""Softmax of each row, as a kernel: one group a row."""

import numpy as np

from transconv.kernel import kernel


@kernel
def softmax(group, X, Y):
    (i,) = group.id()
    x = group.load(X[i], shape=(X.shape[1],))
    e = np.exp(x - x.max())
    group.store(Y[i], e / e.sum())
