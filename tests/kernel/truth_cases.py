"""Conditions of numbers that are known at run time only, at every row of their truth tables."""

from __future__ import annotations

import itertools

import numpy as np

from tests.kernel.cases import Array, Case, out
from transconv.kernel import Group, kernel

TABLE = np.array([*itertools.product((0, 1), repeat=3)], np.int32)


@kernel
def truths(group, X, Y):  # type: ignore[no-untyped-def]
    i, = group.id()
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
    if not (a and b) or c and True:
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
        rows.append([a and b and c, a or b or c, 1 if a and (b or not c) else 2 if c and not b else 3,
                     not (a and b) or c, a and c, a or b, 1 if a and not c else 2 if b or c else 3,
                     a != b])
    return {1: np.array(rows, np.int32)}


CASES = (Case(truths, Group(8, 1), (TABLE, out(8, 8, dtype=np.int32)), _truths),)
