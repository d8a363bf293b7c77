"""Momenta of particles from uniform random numbers (the generator RAMBO's first step)."""

import math

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import N


@kernel(work_shape=N, group_shape=512, results="out")
def momenta(group, cosines: Buffer[N], angles: Buffer[N], energies: Buffer[N], out: Buffer[N, 4]):
    (i,) = group.work_offset()
    x, y, z = (group.load(A[i:], shape=group.shape) for A in (cosines, angles, energies))
    c, f, e = 2.0 * x - 1.0, 2.0 * math.pi * y, -np.log(z)
    across = e * np.sqrt(1.0 - c * c)
    group.store(out[i:], np.stack((e, across * np.sin(f), across * np.cos(f), e * c), axis=1))


def rambo(cosines, angles, energies):
    return momenta(*(t.flatten() for t in (cosines, angles, energies))).view(*cosines.shape, 4)
