"""Kernels with work-items and with functions, as cases.py has them."""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from tests.kernel.cases import Case, floats, out
from tests.kernel.proposal_cases import by_hand, of_items
from transconv.kernel import Group, kernel


@kernel
def branches_of_items(group, X, Y, Z):
    @group.workitems
    def inner(item):
        (i,) = item.global_id()
        (local,) = item.local_id()
        x = X[i]
        y = x * 2.0
        if x > 0.5:
            y = y + 100.0
            if i % 2 == 0:
                y = y + 1000.0
        elif x < -0.5:
            y = -y
            only = 5.0
        else:
            y = 0.0
        Y[i] = y
        if x < -0.5:
            Z[i] = only + local

    inner()


@kernel.func
def scaled(x, factor):
    if factor == 1:
        return x
    return x * factor


@kernel.func
def total_of(x, rows):
    acc = 0.0
    for k in range(rows):
        acc = acc + scaled(x, 2) * k
    return acc


@kernel
def with_functions(group, X, Y):
    (i,) = group.work_offset()
    acc = scaled(group.load(X[i:], shape=group.shape), 1)
    for _ in range(2):
        acc = acc + total_of(acc, 3)
    group.store(Y[i:], scaled(factor=3, x=acc))


@kernel
def functions_of_items(group, X, I, Y):  # noqa: E741
    @group.workitems
    def inner(item):
        (i,) = item.global_id()
        if i < 11:
            Y[I[i], 1] = scaled(X[i], 4).max() + total_of(X[i, 0], 2)

    inner()


@kernel
def values_of_one_dimension(group, X, Z, Y):
    @group.workitems
    def inner(item):
        i, j = item.global_id()
        if i < Y.shape[0] and j < Y.shape[1]:
            most = Z[j].max()  # the same for all i, but active only where i is inside
            Y[i, j] = (X[i] * most).sum()

    inner()


def distances(a, b, d):
    return {2: np.sqrt(((a[:, None] - b[None]) ** 2).sum(2))}


def _branches(x, y, z):
    i = np.arange(len(x))
    high = x * 2 + 100 + np.where(i % 2 == 0, 1000, 0)
    made = np.where(x > 0.5, high, np.where(x < -0.5, -x * 2, 0))
    return {1: made, 2: np.where(x < -0.5, 5.0 + i % 8, z)}


def _scatter(x, i, y):
    made = y.copy()
    made[i, 1] = (x * 4).max(1) + x[:, 0] * 2
    return {2: made}


PLACES = np.random.default_rng(5).permutation(12)[:11].astype(np.int32)
PAIRS = floats(9, 5), floats(11, 5, seed=2), out(9, 11)
CASES = (
    Case(of_items, Group((9, 11), (4, 8)), PAIRS, distances),
    Case(by_hand, Group((9, 11), (4, 6)), PAIRS, distances),
    Case(
        values_of_one_dimension,
        Group((9, 9), (8, 8)),
        (floats(9, 3), floats(9, 5, seed=3), out(9, 9)),
        lambda x, z, y: {2: x.sum(1)[:, None] * z.max(1)[None]},
    ),
    Case(branches_of_items, Group(24, 8), (floats(24), out(24), out(24)), _branches),
    Case(with_functions, Group(10, 8), (floats(10), out(10)), lambda x, y: {1: x * 49 * 3}, 1e-4),
    Case(functions_of_items, Group(11, 4), (floats(11, 3), PLACES, out(12, 2)), _scatter),
)
