"""Prices of European options by the formula of Black and Scholes, element by element."""

import math

import numpy as np

from transconv.kernel import Buffer, kernel, symbols

N = symbols("N")


@kernel(work_shape=N, group_shape=512, results=("call", "put"))
def black_scholes(group, price: Buffer[N], strike: Buffer[N], years: Buffer[N], call: Buffer[N],
                  put: Buffer[N], rate=0.1, volatility=0.2):
    i, = group.work_offset()
    p, s, t = (group.load(price[i:], shape=group.shape), group.load(strike[i:], shape=group.shape),
               group.load(years[i:], shape=group.shape))
    spread = volatility * np.sqrt(t)
    d1 = (np.log(p / s) + (rate + 0.5 * volatility * volatility) * t) / spread
    d2 = d1 - spread
    n1, n2 = 0.5 + 0.5 * math.erf(d1 * 0.5**0.5), 0.5 + 0.5 * math.erf(d2 * 0.5**0.5)
    now = s * np.exp(-rate * t)
    c = p * n1 - now * n2
    group.store(call[i:], c)
    group.store(put[i:], c - p + now)
