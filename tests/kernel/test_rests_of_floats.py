"""``%`` and ``//`` of floats over all exponents: exactly NumPy's, of whatever quotient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import transconv
from transconv.kernel import Group, kernel

MANY = 2048
Array = np.ndarray[Any, Any]


@kernel
def divided(group, X, Y, R, Q):  # type: ignore[no-untyped-def]
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    y = group.load(Y[i:], shape=group.shape)
    group.store(R[i:], x % y)
    group.store(Q[i:], x // y)


def drawn(dtype: Any) -> tuple[Array, Array]:
    """Half of every exponent, half near 1; multiples of a tenth, and what is no number."""
    random, info = np.random.default_rng(0), np.finfo(dtype)

    def each() -> Array:
        far, near = random.integers(info.minexp, info.maxexp - 1, MANY), random.integers(-6, 7, MANY)
        exponents = np.where(random.random(MANY) < 0.5, far, near)
        return (np.ldexp(1 + random.random(MANY), exponents) * random.choice([-1, 1], MANY)).astype(dtype)

    x, y = each(), each()
    x[:64], y[:64] = 1.0, (np.arange(64) + 1) * dtype(0.1)
    x[64:80], y[64:80] = min(1e9, float(info.max)), np.arange(16) + 3
    x[80:90] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1, -1, 5]
    y[80:90] = [1, 1, 2, 2, 1, np.inf, np.inf, 0, 0, np.nan]
    return x, y


def check(dtype: Any, device: str) -> None:
    x, y = drawn(dtype)
    given = [torch.from_numpy(a).to(device) for a in (x, y)]
    rests, quotients = torch.zeros_like(given[0]), torch.zeros_like(given[0])
    wide = np.float32 if dtype is np.float16 else dtype
    with np.errstate(all="ignore"):
        divided(Group(MANY, 512), *given, rests, quotients)
        want = [f(x.astype(wide), y.astype(wide)).astype(dtype) for f in (np.remainder, np.floor_divide)]
    np.testing.assert_array_equal(rests.cpu().numpy(), want[0])
    np.testing.assert_array_equal(quotients.cpu().numpy(), want[1])


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64], ids=lambda t: t.__name__)
def test_in_tritons_interpreter(dtype: Any) -> None:
    transconv.config.cpu = "interpret"
    check(dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda t: t.__name__)
def test_on_the_device(dtype: Any) -> None:
    check(dtype, "cuda")
