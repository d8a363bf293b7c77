"""A kernel as an operator of torch, with a second kernel for the gradient: it works in torch.compile."""

import numpy as np

from transconv.kernel import Group, kernel


@kernel
def forward(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    group.store(Y[i:], x / (1.0 + np.exp(-x)))


@kernel
def backward(group, X, grad_Y, grad_X):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    s = 1.0 / (1.0 + np.exp(-x))
    group.store(grad_X[i:], group.load(grad_Y[i:], shape=group.shape) * s * (1.0 + x * (1.0 - s)))


silu = forward.as_operator(
    "examples::silu", group=lambda X: Group(X.shape[0], 256), results="Y", backward=backward
)
