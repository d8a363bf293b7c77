"""Conditions of numbers that are known at run time only, at every row of their truth tables, loops
from and to any number, and places of extremes among elements of which the first are inactive."""

from __future__ import annotations

import itertools

import numpy as np

from tests.kernel.cases import Array, Case, ints, out
from transconv.kernel import Group, kernel

TABLE = np.array([*itertools.product((0, 1), repeat=3)], np.int32)


@kernel
def truths(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.id()
    a, b, c = X[i, 0] > 0, X[i, 1] > 0, X[i, 2] > 0
    found = group.zeros(shape=(8,), dtype=np.int32)
    if a and b and c:
        found[0] = 1
    if a or b or c:
        found[1] = 1
    if a and (b or not c):
        found[2] = 1
    elif c and not b:
        found[2] = 2
    else:
        found[2] = 3
    if not (a and b) or (c and True):
        found[3] = 1
    if X.shape[1] == 3 and a and X.shape[0] == 8 and c:
        found[4] = 1
    if X.shape[1] == 4 or b or X.shape[0] == 9 or a:
        found[5] = 1
    found[6] = 1 if a and not c else 2 if b or c else 3
    if 0 < X[i, 0] + X[i, 1] < 2:
        found[7] = 1
    group.store(Y[i], found)


def _truths(x: Array, y: Array) -> dict[int, Array]:
    rows = []
    for a, b, c in x.astype(bool).tolist():
        rows.append(
            [
                a and b and c,
                a or b or c,
                1 if a and (b or not c) else 2 if c and not b else 3,
                not (a and b) or c,
                a and c,
                a or b,
                1 if a and not c else 2 if b or c else 3,
                a != b,
            ]
        )
    return {1: np.array(rows, np.int32)}


@kernel
def ranges(group, X, N, Y):  # type: ignore[no-untyped-def]
    (i,) = group.id()
    first, last = N[i, 0], N[i, 1]
    found = group.zeros(shape=(8,), dtype=np.float32)
    for k in range(2, 7):
        found[0] = found[0] * 2.0 + X[k]
    for k in range(1, 8, 3):
        found[1] = found[1] * 2.0 + X[k]
    for k in range(7, 1, -2):
        found[2] = found[2] * 2.0 + X[k]
    for k in range(-3, 2):
        found[3] = found[3] * 2.0 + X[k + 3]
    for k in range(first, last):
        found[4] = found[4] * 2.0 + X[k]
    for k in range(first, 9, 2):
        found[5] = found[5] * 2.0 + X[k]
    for k in range(last, first, -1):
        found[6] = found[6] * 2.0 + X[k]
    for k in range(last, -1, -3):
        found[7] = found[7] * 2.0 + X[k]
    group.store(Y[i], found)


def _ranges(x: Array, n: Array, y: Array) -> dict[int, Array]:
    made = np.zeros((len(n), 8), np.float32)
    for row, (a, b) in zip(made, n.tolist(), strict=True):
        for at, turns in enumerate(
            (
                range(2, 7),
                range(1, 8, 3),
                range(7, 1, -2),
                range(5),
                range(a, b),
                range(a, 9, 2),
                range(b, a, -1),
                range(b, -1, -3),
            )
        ):
            for k in turns:
                row[at] = row[at] * 2 + x[k]
    return {2: made}


@kernel
def places_of_extremes(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.id()
    t = group.empty(shape=(4, 6), dtype=np.float32)
    t[1:, 2:] = 0.0  # what is in front of them is inactive
    t[1:, 4] = -np.inf
    t[1:, 5] = np.inf
    t[2, 3] = X[i]
    group.store(Y[i, 0], t.argmax(axis=0))
    group.store(Y[i, 1], t.argmin(axis=0))
    group.store(Y[i, 2], t[1:].T.argmax(axis=0))


def _places(x: Array, y: Array) -> dict[int, Array]:
    made, t = y.copy(), np.zeros((len(x), 3, 4), np.float32)
    t[:, :, 2:] = -np.inf, np.inf
    t[:, 1, 1] = x
    for row, own in zip(made, t, strict=True):
        row[0, 2:], row[1, 2:] = own.argmax(0) + 1, own.argmin(0) + 1
        row[2, :3] = own.argmax(1) + 2
    return {1: made}


BOUNDS = np.array([(0, 3), (2, 8), (5, 5), (6, 2), (8, 9), (0, 9)], np.int32)
CASES = (
    Case(truths, Group(8, 1), (TABLE, out(8, 8, dtype=np.int32)), _truths),
    Case(ranges, Group(6, 1), (ints(10).astype(np.float32), BOUNDS, out(6, 8)), _ranges),
    Case(
        places_of_extremes,
        Group(3, 1),
        (np.array([-2, 0, 3], np.float32), out(3, 3, 6, dtype=np.int32)),
        _places,
    ),
)
