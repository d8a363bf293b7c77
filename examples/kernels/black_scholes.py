"""Prices of European options by the formula of Black and Scholes, element by element."""

import math

import numpy as np
import torch

from transconv.kernel import Group, kernel


@kernel
def options(group, price, strike, years, call, put, rate, volatility):
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


def black_scholes(price, strike, years, rate=0.1, volatility=0.2):
    call, put = torch.empty_like(price), torch.empty_like(price)
    options(Group(len(price), 512), price, strike, years, call, put, rate, volatility)
    return call, put
