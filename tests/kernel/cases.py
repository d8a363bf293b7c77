"""Kernels with their arguments and what NumPy says of them; every engine runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from transconv.kernel import Group, KernelFunction, kernel

Array = np.ndarray[Any, np.dtype[Any]]
CANARY = -77.0


@dataclass(frozen=True)
class Case:
    """``expected`` gives the arrays after the launch, by position among the arguments, from their values
    before."""

    kernel: KernelFunction
    group: Group
    arguments: tuple[Any, ...]
    expected: Callable[..., dict[int, Any]]
    within: float = 1e-5

    @property
    def name(self) -> str:
        return self.kernel.python.__name__


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ints(*shape: int, low: int = -9, high: int = 9) -> Array:
    return np.random.default_rng(1).integers(low, high, size=shape).astype(np.int32)


def out(*shape: int, dtype: Any = np.float32) -> Array:
    return np.full(shape, CANARY, dtype)


@kernel
def pairwise(group, X1, X2, D):  # type: ignore[no-untyped-def]
    gid = group.work_offset()
    x1 = group.load(X1[gid[0] :], shape=(group.shape[0], X1.shape[1]))
    x2 = group.load(X2[gid[1] :], shape=(group.shape[1], X2.shape[1]))
    diff = ((x1[:, None, :] - x2[None, :, :]) ** 2).sum(axis=2)
    group.store(D[gid[0] :, gid[1] :], np.sqrt(diff))


@kernel
def product(group, A, B, C):  # type: ignore[no-untyped-def]
    i, j = group.work_offset()
    m, n = group.shape
    acc = group.zeros(shape=(m, n), dtype=np.float32)
    for k in range(0, A.shape[1], 16):
        a = group.load(A[i:, k:], shape=(m, 16))
        b = group.load(B[k:, j:], shape=(16, n))
        acc += a @ b
    group.store(C[i:, j:], acc)


@kernel
def narrow_product(group, A, B, C):  # type: ignore[no-untyped-def]
    a = group.load(A, shape=A.shape)
    b = group.load(B)
    group.store(C, a @ b + (b.T @ a.T).T)


@kernel
def softmax(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.id()
    x = group.load(X[i], shape=(X.shape[1],))
    e = np.exp(x - x.max())
    group.store(Y[i], e / e.sum())


@kernel
def largest_of_negatives(group, X, Y, P):  # type: ignore[no-untyped-def]
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], 20))
    group.store(Y[i:], x.max(axis=1))
    group.store(P[i:], np.argmax(x, axis=1))


@kernel
def reductions(group, X, Y):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=(6, 10))
    group.store(Y[0], x.sum(axis=0))
    group.store(Y[1], np.prod(x, axis=0))
    group.store(Y[2], x.mean(axis=0))
    group.store(Y[3], np.min(x, axis=0, keepdims=True)[0])
    group.store(Y[4], (x > 0.5).any(axis=0))
    group.store(Y[5], np.all(x < 1.0, axis=0))
    group.store(Y[6, 3:4], x.sum()[None])


@kernel
def two_axes(group, X, Y):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=(3, 5, 7))
    group.store(Y, x.sum(axis=(0, 2)))


@kernel
def written_elements(group, X, Y, M):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=(8,))
    t = group.empty(shape=(8,), dtype=np.float32)
    t[1:3] = 5.0
    t[6] = x[0]
    same = t
    same[7] = -1.0
    group.store(Y, t)
    group.store(M, np.where(t.mask, 1, 0))


@kernel
def written_out(group, X, Y):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=(16,))
    total = group.zeros(shape=(16,), dtype=np.float32)
    np.add(x, 1.0, out=total)
    group.store(Y, total)


@kernel
def inactive_sum(group, X, Z, Y):  # type: ignore[no-untyped-def]
    both = group.load(X, shape=(16,)) + group.load(Z, shape=(16,))
    group.store(Y, both)
    group.store(Y[14:], both.sum()[None])


@kernel
def counted(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.work_offset()
    total = 0.0
    last = group.full(shape=group.shape, dtype=np.float32, fill_value=-1.0)
    for k in range(1, X.shape[0], 2):
        x = group.load(X[k, i:], shape=group.shape)
        total = total + x * k
        last = x
    group.store(Y[0, i:], total)
    group.store(Y[1, i:], last)


@kernel
def triangle(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.id()
    first, second = 0.0, 1.0
    for k in range(i + 1):
        first, second = second, first + X[i, k]
    group.store(Y[i], group.full(shape=(1,), dtype=np.float32, fill_value=first))


@kernel
def ragged_loop(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.id()
    seen = group.full(shape=(8,), dtype=np.float32, fill_value=7.0)
    for k in range(0, 3):
        seen = seen + group.load(X[i, k * 4 :], shape=(8,))
    group.store(Y[i], seen)


@kernel
def branches(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.id()
    x = group.load(X[i:], shape=(1,))
    y = x
    if i % 2 == 0 and i != 2:
        y = x * 10.0
    elif i == 3:
        y = -x
    if X.shape[0] == 5:
        y = y + 100.0
    group.store(Y[i:], y)


@kernel
def gathered(group, X, I, Y):  # type: ignore[no-untyped-def]  # noqa: E741
    i = group.load(I, shape=(11,))
    group.store(Y, X[i, i % 3])


@kernel
def turned(group, X, Y, Z):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=(3, 6))
    group.store(Y, np.transpose(x))
    group.store(Z, x[:, None, :] * x.T[None, :3, 0, None] if False else x.T[:, :, None] - x[None])


@kernel
def outer(group, X, Y):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=(5,))
    group.store(Y, x[:, None] * x[None, :] + np.arange(5))


@kernel
def strided(group, X, Y):  # type: ignore[no-untyped-def]
    x = group.load(X[1:-2:3, ::2], shape=(4, 4))
    group.store(Y[::2, 1:], x)


@kernel
def scaled(group, X, Y, alpha, n, flag):  # type: ignore[no-untyped-def]
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    for factor in (2, n):
        x = x * factor
    group.store(Y[i:], x * alpha if flag else x)


@kernel
def whole_numbers(group, X, Y, Z):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=X.shape)
    group.store(Y, (x // 3) * 10 + x % 3 + (x & 1) - (x << 1) + (~x))
    group.store(Z, x / 4)


@kernel
def functions(group, X, Y):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=(10,))
    y = np.tanh(x) + np.maximum(x, 0.25) - np.clip(x, -0.5, 0.5) + abs(x) ** 0.5 + np.sign(x) * x**3
    group.store(Y, y + np.floor(x) + np.rint(x * 3.0) + np.log(np.exp(x)))


@kernel
def halves(group, X, Z, Y, S):  # type: ignore[no-untyped-def]
    x, z = group.load(X, shape=(32,)), group.load(Z, shape=(32,))
    group.store(Y, np.exp(x) + z)
    group.store(S, x.sum()[None])


def _elements(x: Array, *_: Any) -> dict[int, Any]:
    return {
        1: np.array([CANARY, 5, 5, CANARY, CANARY, CANARY, x[0], -1.0]),
        2: np.array([1, 0, 0, 1, 1, 1, 0, 0]),
    }


def _reductions(x: Array, y: Array) -> dict[int, Any]:
    made = y.copy()
    made[0], made[1], made[2], made[3] = x.sum(0), x.prod(0), x.mean(0), x.min(0)
    made[4], made[5] = (x > 0.5).any(0), (x < 1.0).all(0)
    made[6, 3] = x.sum()
    return {1: made}


def _inactive(x: Array, z: Array, y: Array) -> dict[int, Any]:
    made = y.copy()
    made[:5] = x[:5] + z
    made[14] = made[:5].sum()
    return {2: made}


def _counted(x: Array, y: Array) -> dict[int, Any]:
    return {1: np.stack([sum(x[k] * k for k in range(1, len(x), 2)), x[len(x) - 1 - len(x) % 2]])}


def _triangle(x: Array, y: Array) -> dict[int, Any]:
    made = y.copy()
    for i in range(len(x)):
        first, second = 0.0, 1.0
        for k in range(i + 1):
            first, second = second, first + x[i, k]
        made[i] = first
    return {1: made}


def _ragged(x: Array, y: Array) -> dict[int, Any]:
    made = np.ma.array(np.full((len(x), 8), 7.0))
    for k in range(3):
        part = np.ma.masked_all((len(x), 8))
        n = max(0, min(8, x.shape[1] - k * 4))
        part[:, :n] = x[:, k * 4 : k * 4 + n]
        made = made + part
    return {1: np.where(np.ma.getmaskarray(made), y, made.filled(0))}


def _branches(x: Array, y: Array) -> dict[int, Any]:
    scale = np.array([10, 1, 1, -1, 10.0])
    return {1: x * scale + 100}


def _gathered(x: Array, i: Array, y: Array) -> dict[int, Any]:
    there = (i >= -len(x)) & (i < len(x))  # below 0 they count from the end
    at = np.where(there, i, 0)
    return {2: np.where(there, x[at, at % 3], y)}


def _strided(x: Array, y: Array) -> dict[int, Any]:
    made, part = y.copy(), x[1:-2:3, ::2]
    rows, cols = (min(a, b) for a, b in zip(part.shape, made[::2, 1:].shape, strict=True))
    made[::2, 1:][:rows, :cols] = part[:rows, :cols][:4, :4]
    return {1: made}


def _whole(x: Array, y: Array, z: Array) -> dict[int, Any]:
    return {1: (x // 3) * 10 + x % 3 + (x & 1) - (x << 1) + (~x), 2: x / 4}


def _functions(x: Array, y: Array) -> dict[int, Any]:
    made = np.tanh(x) + np.maximum(x, 0.25) - np.clip(x, -0.5, 0.5) + abs(x) ** 0.5 + np.sign(x) * x**3
    return {1: made + np.floor(x) + np.rint(x * np.float32(3.0)) + x}


@kernel
def odd_numbers(group, X, Z, P, K, D, R):  # type: ignore[no-untyped-def]
    at = group.work_offset()[0]
    x, z = group.load(X[at:], shape=group.shape), group.load(Z[at:], shape=group.shape)
    group.store(P[at:], np.power(x, z) + np.sign(x))
    k, d = group.load(K[at:], shape=group.shape), group.load(D[at:], shape=group.shape)
    group.store(R[at:], k % d)


BASES = np.array([-2, -2, -2, 0, 0, 1, -1, np.nan], np.float32)
EXPONENTS = np.array([2, -3, 0.5, 0, 2, np.nan, np.inf, 0], np.float32)
WHOLE = np.array([1, -1, 7, -7, 2**31 - 1, 5, -5, 0], np.int32)
DIVISORS = np.array([2**31 - 1] * 2 + [-3, 3, -(2**31 - 1), 2**31 - 1, -2, 7], np.int32)


def negatives_and_a_nan() -> Array:
    made = -abs(floats(5, 13)) - 3
    made[2, 4] = np.nan
    return made


def _softmax(x: Array, y: Array) -> dict[int, Any]:
    e = np.exp(x - x.max(1, keepdims=True))
    return {1: e / e.sum(1, keepdims=True)}


@kernel
def in_place(group, X, Z, Y):
    (i,) = group.work_offset()
    x, z = group.load(X[i:], shape=group.shape), group.load(Z[i:], shape=group.shape)
    y = x
    y += z
    y *= x
    y -= 2.0
    n = i
    n *= 0
    for _ in range(X.shape[0] // 4):
        y += z
        y -= x
        y /= 2.0
    group.store(Y[n + i :], y)


@kernel
def bounds_that_change(group, X, N, Y):
    n, m = N[0], 0
    for j in range(2):
        m = n + j
        for k in range(0, min(m, X.shape[0])):
            m = m - 1
            group.store(Y[j, k:], group.load(X[k:m], shape=(1,)))


@kernel
def stacks(group, X, Z, Y, W):
    (i,) = group.work_offset()
    x, z = (group.load(A[i:], shape=group.shape) for A in (X, Z))  # Z is shorter
    group.store(Y[i:], np.stack((x, z * x, x - z), axis=1))
    group.store(W[:2, i:], np.stack([x, z]))
    a, b = [v * n for n, v in enumerate((x, z), 1)]
    group.store(W[2, i:], a + b)
    group.store(W[3, i:], np.stack((x, z), axis=-1).max(axis=1))


def _stacks(x, z, y, w):
    n = len(z)
    y, w = y.copy(), w.copy()
    y[:, 0], y[:n, 1], y[:n, 2] = x, x[:n] * z, x[:n] - z
    w[0], w[1, :n], w[2, :n], w[3] = x, z, x[:n] + z * 2, x
    w[3, :n] = np.maximum(x[:n], z)
    return {2: y, 3: w}


def _in_place(x, z, y):
    y = (x + z) * x - 2
    for _ in range(len(x) // 4):
        y = (y + z - x) / 2
    return {2: y}


CASES = (
    Case(stacks, Group(13, 8), (floats(13), floats(11, seed=1), out(13, 3), out(4, 13)), _stacks),
    Case(
        bounds_that_change,
        Group(1),
        (floats(9), np.array([7], np.int32), out(2, 9)),
        lambda x, n, y: {2: np.where(np.arange(9) < [[3], [4]], x, y)},
    ),
    Case(in_place, Group(13, 8), (floats(13), floats(13, seed=1), out(13)), _in_place),
    Case(
        pairwise,
        Group((9, 11), (4, 8)),
        (floats(9, 5), floats(11, 5), out(9, 11)),
        lambda a, b, d: {2: np.sqrt(((a[:, None] - b[None]) ** 2).sum(2))},
    ),
    Case(
        product,
        Group((20, 37), (16, 32)),
        (floats(20, 45), floats(45, 37), out(20, 37)),
        lambda a, b, c: {2: a @ b},
        1e-4,
    ),
    Case(
        narrow_product, Group(1), (floats(3, 5), floats(5, 4), out(3, 4)), lambda a, b, c: {2: 2 * (a @ b)}
    ),
    Case(softmax, Group(3, 1), (floats(3, 20) - 9, out(3, 20)), _softmax),
    Case(
        largest_of_negatives,
        Group(5, 2),
        (negatives_and_a_nan(), out(5), out(5, dtype=np.int32)),
        lambda x, y, p: {1: x.max(1), 2: x.argmax(1)},
    ),
    Case(
        odd_numbers,
        Group(8, 4),
        (BASES, EXPONENTS, out(8), WHOLE, DIVISORS, out(8, dtype=np.int32)),
        lambda x, z, p, k, d, r: {2: np.power(x, z) + np.sign(x), 5: k % d},
    ),
    Case(reductions, Group(1), (floats(6, 10), out(7, 10)), _reductions),
    Case(two_axes, Group(1), (floats(3, 5, 7), out(5)), lambda x, y: {1: x.sum((0, 2))}),
    Case(written_elements, Group(1), (floats(8), out(8), out(8, dtype=np.int32)), _elements),
    Case(
        written_out,
        Group(1),
        (floats(10), out(16)),
        lambda x, y: {1: np.concatenate([x + 1, np.zeros(6)])},
    ),
    Case(inactive_sum, Group(1), (floats(16), floats(5, seed=3), out(15)), _inactive),
    Case(counted, Group(10, 8), (floats(6, 10), out(2, 10)), _counted),
    Case(triangle, Group(4, 1), (floats(4, 5), out(4, 1)), _triangle),
    Case(ragged_loop, Group(2, 1), (floats(2, 14), out(2, 8)), _ragged),
    Case(branches, Group(5, 1), (floats(5), out(5)), _branches),
    Case(gathered, Group(1), (floats(6, 3), ints(11), out(11)), _gathered),
    Case(
        turned,
        Group(1),
        (floats(3, 6), out(6, 3), out(6, 3, 6)),
        lambda x, y, z: {1: x.T, 2: x.T[:, :, None] - x[None]},
    ),
    Case(outer, Group(1), (floats(5), out(5, 5)), lambda x, y: {1: np.outer(x, x) + np.arange(5)}),
    Case(strided, Group(1), (floats(9, 7), out(5, 4)), _strided),
    Case(scaled, Group(10, 4), (floats(10), out(10), 0.5, 3, True), lambda x, y, *_: {1: x * 3}),
    Case(whole_numbers, Group(1), (ints(7), out(7, dtype=np.int32), out(7)), _whole),
    Case(functions, Group(1), (floats(10), out(10)), _functions),
    Case(
        halves,
        Group(1),
        (floats(32).astype(np.float16), floats(32), out(32), out(1)),
        lambda x, z, y, s: {2: np.exp(x.astype(np.float32)) + z, 3: x.astype(np.float32).sum()[None]},
        2e-2,
    ),
)
