"""An intrinsic: base-2 functions of NVIDIA's chips in assembly, their Python bodies elsewhere."""

import numpy as np
import torch

from transconv.kernel import Group, kernel


def exp2(x):
    return np.exp2(x)


@kernel.intrinsic(exp2)
def exp2_of_nvidia(x, chip):
    if x.dtype == "float32" and chip.backend == "cuda":
        return lambda builder, x: builder.asm("ex2.approx.ftz.f32 $0, $1;", x)
    return None


@kernel
def smooth(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    group.store(Y[i:], np.maximum(x, 0.0) + np.log(1.0 + exp2(-1.4426950408889634 * abs(x))))


def softplus(x):
    y = torch.empty_like(x)
    smooth(Group(x.shape[0], 256), x, y)
    return y
