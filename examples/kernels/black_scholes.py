"""Prices of European options by the formula of Black and Scholes, element by element."""

import math

import numpy as np

from transconv.kernel import Buffer, kernel
from transconv.kernel.sizes import N


@kernel(work_shape=N, group_shape=512, results=("call", "put"))
def black_scholes(
    group,
    price: Buffer[N],
    strike: Buffer[N],
    years: Buffer[N],
    call: Buffer[N],
    put: Buffer[N],
    rate=0.1,
    volatility=0.2,
):
    (i,) = group.work_offset()
    p, s, t = (group.load(X[i:], shape=group.shape) for X in (price, strike, years))
    spread = volatility * np.sqrt(t)
    d1 = (np.log(p / s) + (rate + 0.5 * volatility * volatility) * t) / spread
    n1, n2 = (0.5 + 0.5 * math.erf(d * 0.5**0.5) for d in (d1, d1 - spread))
    now = s * np.exp(-rate * t)
    c = p * n1 - now * n2
    group.store(call[i:], c)
    group.store(put[i:], c - p + now)
