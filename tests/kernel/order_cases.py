"""Kernels that move elements of tiles, with what numpy.ma says of them, as cases.py has them."""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from tests.kernel.cases import Case, floats, ints, out
from transconv.kernel import Group, kernel

dtyp = np.float16  # a type by a name of the module


def loaded(a, *shape):
    """A tile of a shape, as numpy.ma has it."""
    made = np.ma.masked_all(shape, a.dtype)
    made[tuple(map(slice, a.shape))] = a
    return made


@kernel
def reshaped(group, X, Y, Z):
    x = group.load(X, shape=(6, 10))
    group.store(Y, np.reshape(x, (4, -1)).filled(-7.0))
    group.store(Z, x.reshape(1, 2, 3, 10)[0].reshape(2, 1, 5, 6).filled(-7.0)[:, 0])


@kernel
def regrouped(group, X, Y):
    x = group.load(X, shape=(4, 16)) * 2.0
    group.store(Y, x.reshape((4, 4, 2, 2)) + x.reshape(64).reshape(4, 4, 4)[:, :, 1:3, None])


@kernel
def concatenated(group, X, Z, Y, W):
    x, z = group.load(X, shape=(3, 5)), group.load(Z, shape=(3, 4))
    group.store(Y, np.concatenate((x, z, x[:, :2]), axis=1).filled(-7))
    group.store(W, np.concatenate([z, x[:2, :4] * 2]).filled(-7))


@kernel
def running(group, X, Y, Z):
    x = group.load(X, shape=(5, 11))
    group.store(Y, np.cumsum(x, axis=1).filled(-7))
    group.store(Z, x.cumprod(0).filled(-7) + (x > 0).cumsum(axis=-1).filled(9))


@kernel
def ordered(group, X, Y, Z, I):  # noqa: E741
    x = group.load(X, shape=(5, 11))
    group.store(Y, np.sort(x).filled(-7.0))
    group.store(Z, np.sort(x, axis=0).filled(-7.0))
    group.store(I, np.sort((x * 3.0).astype(np.int32).reshape(55)).filled(99))


@kernel
def picked(group, X, I, Y, Z, W):  # noqa: E741
    x, i = group.load(X, shape=(6, 5)), group.load(I, shape=(4,))
    group.store(Y, x[i].filled(-7.0))
    group.store(Z, x[:5:2, i[:, None] - np.arange(3)].filled(-7.0))
    group.store(W, x[np.abs(i), np.arange(2)[:, None]].filled(-7.0).astype(dtyp))


@kernel
def handed_over(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(8, 5))
    rows = x.sum(axis=1)
    total = rows.cumsum()

    @group.subgroups
    def each(sg):
        k = sg.subgroup_id()
        group.store(Y[i + 2 * k :], x[2 * k : 2 * k + 2] + rows[k] - x[7 - k] * total[-1])

    each()


@kernel
def looked_up(group, X, Y):
    x = group.load(X, shape=(8,))

    @group.workitems
    def each(item):
        (k,) = item.global_id()
        if k < Y.shape[0]:
            Y[k] = x[7 - k] + x[(k * k) % 5]

    each()


def _reshaped(x, y, z):
    tile = loaded(x, 6, 10)
    return {1: tile.reshape(4, 15).filled(-7), 2: tile.reshape(2, 5, 6).filled(-7)}


def _regrouped(x, y):
    return {1: 2 * x.reshape(y.shape) + 2 * x.reshape(4, 4, 4)[:, :, 1:3, None]}


def _concatenated(x, z, y, w):
    a, b = loaded(x, 3, 5), loaded(z, 3, 4)
    return {
        2: np.ma.concatenate((a, b, a[:, :2]), axis=1).filled(-7),
        3: np.ma.concatenate((b, a[:2, :4] * 2)).filled(-7),
    }


def _running(x, y, z):
    a = loaded(x, 5, 11)
    counted = np.where(np.ma.getmaskarray(a), 9, (a.filled(0) > 0).cumsum(axis=-1))
    return {1: np.ma.cumsum(a, axis=1).filled(-7), 2: a.cumprod(0).filled(-7) + counted}


def _ordered(x, y, z, i):
    a = loaded(x, 5, 11)
    made = [np.ma.sort(a, axis=axis, fill_value=np.inf).filled(-7) for axis in (1, 0)]
    whole = (np.nan_to_num(a.filled(0)) * np.float32(3)).astype(np.int32)
    flat = np.sort(np.ma.array(whole, mask=np.ma.getmaskarray(a)).compressed())
    return {1: made[0], 2: made[1], 3: np.concatenate((flat, np.full(55 - len(flat), 99)))}


def _at(x, i, n):
    """Where places are inside, and places that are."""
    i = np.where(i < 0, i + n, i)
    return (i >= 0) & (i < n), np.clip(i, 0, n - 1)


def _picked(x, i, y, z, w):
    a, three = loaded(x, 6, 5).filled(-7), np.arange(3)
    there, at = _at(x, i, 6)
    y = np.where(there[:, None], a[at], -7)
    there, at = _at(x, i[:, None] - three, 5)
    z = np.where(there, a[:5:2, at], -7)
    there, at = _at(x, abs(i), 6)
    return {2: y, 3: z, 4: np.where(there, a[at, np.arange(2)[:, None]], -7)}


def _handed_over(x, y):
    y = y.copy()
    for at in range(0, len(x), 8):
        part = loaded(x[at : at + 8], 8, 5).filled(0)
        rows, k = part.sum(1), np.repeat(np.arange(4), 2)
        y[at : at + 8] = (part + rows[k][:, None] - part[7 - k] * rows.sum())[: len(y) - at]
    return {1: y}


WITH_NAN = np.where(floats(4, 9, seed=2) > 1.2, np.nan, floats(4, 9)).astype(np.float32)
REPEATED = ints(4, 10, low=-2, high=3).astype(np.float32)
CASES = (
    Case(reshaped, Group(1), (floats(5, 9), out(4, 15), out(2, 5, 6)), _reshaped),
    Case(regrouped, Group(1), (floats(4, 16), out(4, 4, 2, 2)), _regrouped),
    Case(
        concatenated,
        Group(1),
        (ints(3, 4), ints(2, 4), *(out(*s, dtype=np.int32) for s in ((3, 11), (5, 4)))),
        _concatenated,
    ),
    Case(running, Group(1), (floats(4, 10), out(5, 11), out(5, 11)), _running),
    Case(ordered, Group(1), (REPEATED, out(5, 11), out(5, 11), out(55, dtype=np.int32)), _ordered),
    Case(
        picked,
        Group(1),
        (
            floats(5, 5),
            np.array([2, -1, 7, -6], np.int32),
            out(4, 5),
            out(3, 4, 3),
            out(2, 4, dtype=np.float16),
        ),
        _picked,
        1e-3,
    ),
    Case(
        handed_over,
        Group(16, 8, subgroup_size_hint=2),
        (ints(16, 5).astype(np.float32), out(16, 5)),
        _handed_over,
    ),
    Case(
        looked_up,
        Group(8),
        (floats(8), out(6)),
        lambda x, y: {1: x[7 - np.arange(6)] + x[np.arange(6) ** 2 % 5]},
    ),
)
