"""Sums, means and products of 16-bit tiles: computed in float32 and rounded once, in the
simulator as on the device, beside NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import transconv
from transconv.kernel import Group, kernel

ROWS, MANY = 4, 4096


@kernel
def reduced(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))
    group.store(Y[0, i:], x.sum(axis=1))
    group.store(Y[1, i:], x.mean(axis=1))
    group.store(Y[2, i:], (x * 0.5).sum(axis=1))
    group.store(Y[3, i:], np.sqrt(x).sum(axis=1))


@kernel
def multiplied(group, A, B, C):  # type: ignore[no-untyped-def]
    (i,) = group.work_offset()
    a = group.load(A[i:], shape=(group.shape[0], A.shape[1]))
    b = group.load(B, shape=(A.shape[1], 16))
    group.store(C[i:], a @ b)


@kernel
def all_of_it(group, X, Y):  # type: ignore[no-untyped-def]
    x = group.load(X, shape=X.shape)
    group.store(Y, x.sum()[None])
    group.store(Y[1:], (x - 1.0).prod()[None])


def given(rows: int, kind: str) -> np.ndarray[Any, Any]:
    ones = np.ones((rows, MANY), np.float32)
    return {"ones": ones, "small": ones * 0.1, "steps": np.tile(np.arange(MANY) % 7 / 8, (rows, 1))}[
        kind
    ].astype(np.float16)


def ways(function: Any, group: Group, *arguments: np.ndarray[Any, Any]) -> list[list[Any]]:
    """The arguments after the simulator's run, and after that of Triton's interpreter."""
    simulated = [a.copy() for a in arguments]
    function.simulate(group, *simulated)
    transconv.config.cpu = "interpret"
    tensors = [torch.from_numpy(a.copy()) for a in arguments]
    function(group, *tensors)
    return [simulated, [t.numpy() for t in tensors]]


@pytest.mark.parametrize("kind", ["ones", "small", "steps"])
def test_reductions_are_rounded_once(kind: str) -> None:
    """Sums of 16 bits stop at 2048 where 1 is added to them one by one."""
    x = given(ROWS, kind)
    wide = x.astype(np.float64)
    want = np.stack(
        [
            wide.sum(1),
            wide.mean(1),
            (wide * 0.5).sum(1),
            np.sqrt(wide).astype(np.float16).astype(np.float64).sum(1),
        ]
    )
    for found in ways(reduced, Group(ROWS, 2), x, np.zeros((4, ROWS), np.float16)):
        np.testing.assert_allclose(found[1].astype(np.float64), want, rtol=2.0**-10)
    for found in ways(reduced, Group(ROWS, 2), x, np.zeros((4, ROWS), np.float32)):
        np.testing.assert_allclose(found[1][[0, 2]], want[[0, 2]], rtol=2.0**-10)


def test_products_of_tiles_are_added_in_float32() -> None:
    """And stay so: 4097 is no number of 16 bits."""
    a, b = np.ones((ROWS, MANY), np.float16), np.ones((MANY, 16), np.float16)
    b[0] = 2
    for found in ways(multiplied, Group(ROWS, 2), a, b, np.zeros((ROWS, 16), np.float32)):
        assert (found[2] == MANY + 1).all()


def test_means_of_what_adds_up_beyond_16_bits() -> None:
    x = np.full((ROWS, MANY), 60.0, np.float16)
    for found in ways(reduced, Group(ROWS, 2), x, np.zeros((4, ROWS), np.float16)):
        assert (found[1][1] == 60).all() and np.isinf(found[1][0]).all()


@pytest.mark.parametrize(("value", "sums"), [(1.0, 4096.0), (2.0, 8192.0), (0.25, 1024.0)])
def test_all_of_a_tile(value: float, sums: float) -> None:
    x = np.full((64, 64), value, np.float16)
    for found in ways(all_of_it, Group(1), x, np.zeros(2, np.float32)):
        assert found[1][0] == sums and found[1][1] == np.float32((value - 1.0) ** 4096)
