"""Momenta of particles from uniform random numbers (the generator RAMBO's first step)."""

import math

import numpy as np

from transconv.kernel import Buffer, kernel, symbols

N = symbols("N")


@kernel(work_shape=N, group_shape=512, results="out")
def momenta(group, cosines: Buffer[N], angles: Buffer[N], energies: Buffer[N], out: Buffer[N, 4]):
    i, = group.work_offset()
    c = 2.0 * group.load(cosines[i:], shape=group.shape) - 1.0
    f = 2.0 * math.pi * group.load(angles[i:], shape=group.shape)
    e = -np.log(group.load(energies[i:], shape=group.shape))
    across = e * np.sqrt(1.0 - c * c)
    x, y, z, part = across * np.sin(f), across * np.cos(f), e * c, np.arange(4)
    low = np.where(part == 0, e[:, None], x[:, None])
    high = np.where(part == 2, y[:, None], z[:, None])
    group.store(out[i:], np.where(part < 2, low, high))


def rambo(cosines, angles, energies):
    return momenta(*(t.flatten() for t in (cosines, angles, energies))).view(*cosines.shape, 4)
