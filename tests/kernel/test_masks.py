"""The rules of masks, one kernel each, beside numpy.ma: arrays are ragged, empty, larger than tiles."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transconv.ir import run
from transconv.kernel import Group, KernelFunction, kernel

Masked = Any
SHAPES = ((5, 3), (4, 8), (0, 2), (7, 11), (1, 1), (3, 0), (6, 5))
ROWS, COLS = 5, 6  # of a tile; neither is a power of two
CANARY = -77.0


def loaded(array: Any, shape: tuple[int, ...] = (ROWS, COLS)) -> Masked:
    """What ``group.load`` gives."""
    made = np.ma.masked_all(shape, array.dtype)
    box = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    made[box] = array[box]
    return made


@kernel
def both_active(group, X, Z, Y, M):
    y = group.load(X, shape=(5, 6)) * group.load(Z, shape=(5, 6))
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def broadcast(group, X, Z, Y, M):
    x, z = group.load(X, shape=(5, 6)), group.load(Z, shape=(5, 6))
    y = x[:, 0][:, None] + z[1][None, :]
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def row_sums(group, X, Z, Y, M):
    y = (group.load(X, shape=(5, 6)) + group.load(Z, shape=(5, 6))).sum(axis=1, keepdims=True)
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def column_maxima(group, X, Z, Y, M):
    y = (-abs(group.load(X, shape=(5, 6))) - 2.0).max(axis=0)[None]
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def mean_of_all(group, X, Z, Y, M):
    y = np.mean(group.load(X, shape=(5, 6)), keepdims=True)
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def products(group, X, Z, Y, M):
    y = group.load(X, shape=(5, 6)) @ group.load(Z, shape=(5, 6)).T
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def selected(group, X, Z, Y, M):
    x, z = group.load(X, shape=(5, 6)), group.load(Z, shape=(5, 6))
    y = np.where(x > 0, x, z)
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def assigned(group, X, Z, Y, M):
    y = group.load(X, shape=(5, 6))
    y[2] = 3.0
    y[:, 1:3] = 4.0
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def assigned_where(group, X, Z, Y, M):
    y, z = group.load(X, shape=(5, 6)), group.load(Z, shape=(5, 6))
    y[z > 0] = 3.0
    y[y < 0] = z[0, 0]
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def written_over(group, X, Z, Y, M):
    y = group.empty(shape=(5, 6), dtype=np.float32)
    y[...] = group.load(X, shape=(5, 6))
    np.add(group.load(Z, shape=(5, 6)), 1.0, out=y)
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def carried(group, X, Z, Y, M):
    y = group.zeros(shape=(5, 6), dtype=np.float32)
    for k in range(0, 4, 2):
        y = y + group.load(X[:, k:], shape=(5, 6))
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


@kernel
def data_masks(group, X, Z, Y, M):
    y = group.load(X, shape=(5, 6))
    y[0] = 1.0
    y = (y * group.load(Z, shape=(5, 6))).sum(axis=0)[None, :]
    group.store(Y, y)
    group.store(M, y.mask.astype(np.int32))


def _assigned(x: Masked, z: Masked, *_: Any) -> Masked:
    x[2] = 3.0
    x[:, 1:3] = 4.0
    return x


def _assigned_where(x: Masked, z: Masked, *_: Any) -> Masked:
    x[(z > 0).filled(False)] = 3.0
    if not np.ma.getmaskarray(z)[0, 0]:
        x[(x < 0).filled(False)] = z[0, 0]
    return x


def _over(x: Masked, z: Masked, *_: Any) -> Masked:
    made = x.copy()
    where = ~np.ma.getmaskarray(z)
    made[where] = z[where] + 1
    return made


def _carried(x: Masked, z: Masked, a: Any, *_: Any) -> Masked:
    return sum((loaded(a[:, k:]) for k in (0, 2)), np.ma.zeros((ROWS, COLS)))


def _data(x: Masked, z: Masked, *_: Any) -> Masked:
    x[0] = 1.0
    return (x * z).sum(axis=0)[None, :]


RULES: tuple[tuple[KernelFunction, Callable[..., Masked]], ...] = (
    (both_active, lambda x, z, *_: x * z),
    (broadcast, lambda x, z, *_: x[:, 0][:, None] + z[1][None, :]),
    (row_sums, lambda x, z, *_: (x + z).sum(axis=1, keepdims=True)),
    (column_maxima, lambda x, z, *_: (-abs(x) - 2.0).max(axis=0)[None]),
    (mean_of_all, lambda x, z, *_: np.ma.mean(x, keepdims=True)),
    (products, lambda x, z, *_: np.ma.dot(x, z.T)),
    (
        selected,
        lambda x, z, *_: np.ma.array(
            np.where(x.filled(0) > 0, x.filled(0), z.filled(0)),
            mask=np.ma.getmaskarray(x) | np.ma.getmaskarray(z),
        ),
    ),
    (assigned, _assigned),
    (assigned_where, _assigned_where),
    (written_over, _over),
    (carried, _carried),
    (data_masks, _data),
)


@pytest.mark.every(2)
@pytest.mark.parametrize(("function", "meaning"), RULES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_rule(function: KernelFunction, meaning: Callable[..., Masked]) -> None:
    draw = np.random.default_rng(3)
    for at, shape in enumerate(SHAPES):
        a = draw.normal(size=shape).astype(np.float32)
        b = draw.normal(size=SHAPES[at - 1]).astype(np.float32)
        wanted = meaning(loaded(a), loaded(b), a, b)
        y, m = np.full(wanted.shape, CANARY, np.float32), np.full(wanted.shape, 9, np.int32)
        low = function.lower(Group(1), a, b, y, m, target="sm_90")
        given = {"X": a.reshape(-1), "Z": b.reshape(-1), "Y": y.reshape(-1), "M": m.reshape(-1)}
        run(low.kernel.at(low.kernel.sizes.like) if low.kernel.sizes else low.kernel, given)
        mask = np.ma.getmaskarray(wanted)
        np.testing.assert_array_equal(m, mask, err_msg=f"the mask for {shape} and {SHAPES[at - 1]}")
        np.testing.assert_allclose(
            y,
            np.where(mask, CANARY, wanted.filled(0)),
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"{shape} and {SHAPES[at - 1]}",
        )


def test_masks_that_always_hold_are_not_in_the_text() -> None:
    """Neither in loads and stores nor in reductions; the reason is in a comment."""
    x, y = np.zeros((8, 16), np.float32), np.zeros(8, np.float32)
    text = whole_rows.show(Group(8, 4), x, y, target="sm_90")
    assert "mask=" not in text and "where(" not in text
    assert "# X: program*4 + row4[0:4] < X_d0_by8*8 is always true: " in text
    ragged = whole_rows.show(Group(7, 4), x[:7], y[:7], target="sm_90")
    assert ragged.count("mask=program * 4 + ") == 1 and ragged.count("mask=(program * 4 + ") == 1


@kernel
def whole_rows(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))
    group.store(Y[i:], x.max(axis=1) + x.sum(axis=1))
