"""Short reductions are written out where nothing is computed twice, and mean the same."""

# mypy: ignore-errors

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.kernel.cases import Case, floats, out
from tests.kernel.test_engines import check, copies, interpreted
from transconv.kernel import Group, kernel


@kernel
def distances(group, X, Z, Y):
    i, j = group.work_offset()
    x = group.load(X[i:], shape=(4, X.shape[1]))
    z = group.load(Z[j:], shape=(8, X.shape[1]))
    group.store(Y[i:, j:], ((x[:, None] - z[None]) ** 2).sum(axis=2))


@kernel
def extremes(group, X, Z, Y):
    x, z = group.load(X, shape=(4, 6)), group.load(Z, shape=(4, 6))
    group.store(Y[0], np.maximum(x[:, None], z[None]).max(axis=2))
    group.store(Y[1], (x[:, None] * z[None]).min(axis=2))
    group.store(Y[2], (x[:, None] + z[None] > 0.5).any(axis=2).astype(np.float32))
    group.store(Y[3], (x[:, None] * z[None]).prod(axis=2))


@kernel
def read_again(group, X, Z, Y):
    x, z = group.load(X, shape=(4, 3)), group.load(Z, shape=(8, 3))
    d = x[:, None] - z[None]
    group.store(Y, (d * d.sum(axis=2, keepdims=True)).sum(axis=2))


@kernel
def rows(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))
    group.store(Y[i:], (x * x).sum(axis=1))


@kernel
def changing(group, X, Z, Y):
    x, z = group.load(X, shape=(4, 3)), group.load(Z, shape=(8, 3))
    total = group.zeros(shape=(4, 8))
    for _ in range(Z.shape[0]):
        total += (x[:, None] * z[None]).sum(axis=2)
        x = x * 0.5
    group.store(Y, total)


def products(x, z):
    made = np.zeros((4, 8), np.float32)
    for _ in z:
        made += (x[:, None] * z[None]).sum(2)
        x = x * 0.5
    return {2: made}


def apart(x, z):
    return ((x[:, None] - z[None]) ** 2).sum(2)


def ends(x, z):
    return {
        2: np.stack(
            [
                np.maximum(x[:, None], z[None]).max(2),
                (x[:, None] * z[None]).min(2),
                (x[:, None] + z[None] > 0.5).any(2),
                (x[:, None] * z[None]).prod(2),
            ]
        )
    }


X, Z = floats(7, 3), floats(13, 3, seed=1)
# The case, and how many reductions are left.
CASES = (
    (Case(distances, Group((7, 13), (4, 8)), (X, Z, out(7, 13)), lambda x, z, y: {2: apart(x, z)}), 0),
    (
        Case(
            distances,
            Group((7, 13), (4, 8)),
            (floats(7, 15), floats(13, 15), out(7, 13)),
            lambda x, z, y: {2: apart(x, z)},
        ),
        0,
    ),
    (
        Case(
            distances,
            Group((7, 13), (4, 8)),
            (floats(7, 17), floats(13, 17), out(7, 13)),
            lambda x, z, y: {2: apart(x, z)},
        ),
        1,
    ),
    (
        Case(
            extremes,
            Group(1),
            (floats(4, 5), floats(4, 5, seed=1), out(4, 4, 4)),
            lambda x, z, y: ends(x, z),
        ),
        0,
    ),
    (Case(rows, Group(7, 4), (X, out(7)), lambda x, y: {1: (x * x).sum(1)}), 0),
    (Case(rows, Group(7, 4), (floats(7, 9), out(7)), lambda x, y: {1: (x * x).sum(1)}), 1),
    (
        Case(
            read_again,
            Group(1),
            (X[:4], Z[:8], out(4, 8)),
            lambda x, z, y: {2: ((d := x[:, None] - z[None]) * d.sum(2, keepdims=True)).sum(2)},
        ),
        2,
    ),
    (Case(changing, Group(1), (X[:4], Z[:8], out(4, 8)), lambda x, z, y: products(x, z)), 1),
)


@pytest.mark.parametrize(("case", "left"), CASES, ids=lambda c: getattr(c, "name", None))
def test_what_is_written_out(case: Case, left: int) -> None:
    low = case.kernel.lower(case.group, *case.arguments, target="sm_90")
    assert low.source.count("tl.sum(") + low.source.count("tl.reduce(") == left
    for _, made in (low.stages[0], low.stages[-1]):
        check(case, interpreted(case, made))


@pytest.mark.every(2)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize(("case", "left"), CASES, ids=lambda c: getattr(c, "name", None))
def test_in_tritons_interpreter(case: Case, left: int) -> None:
    given = copies(case)
    case.kernel(case.group, *given)
    check(case, given)
