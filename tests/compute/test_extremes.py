"""Texts of every operation at extreme values, beside torch; numbers beyond the type of arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import transconv
from tests import extremes
from transconv.compute import execute, parse
from transconv.verify.computation import after_every_pass

OFTEN = (torch.float32, torch.int32)


@pytest.mark.parametrize(
    "dtype",
    [t if t in OFTEN else pytest.param(t, marks=pytest.mark.slow) for t in extremes.OF_TEXTS],
    ids=str,
)
def test_every_operation(dtype: torch.dtype) -> None:
    assert extremes.of_texts(dtype, "cpu") == []


@pytest.mark.parametrize("value", ["min(x, 1e300)", "x - 1e300", "x / 1e-300", "where(x < 1e300, x, 0)"])
def test_a_number_beyond_f32_is_infinite_there(value: str) -> None:
    """As in every program of f32: in the interpreters, and in what kernels are compared with."""
    made = parse(f"compute beyond\n axes n=5\n read x = X[n]\n store Y[n] = {value}")
    x = np.array([0.0, -1.0, 3e38, np.inf, np.nan], np.float32)
    big, tiny = np.float32(np.inf), np.float32(0.0)
    with np.errstate(all="ignore"):
        want = {
            "min(x, 1e300)": np.minimum(x, big),
            "x - 1e300": x - big,
            "x / 1e-300": x / tiny,
            "where(x < 1e300, x, 0)": np.where(x < big, x, 0),
        }[value]
        got = execute(made, {"X": x})["Y"].value
    np.testing.assert_array_equal(got, want)
    found = after_every_pass(made, transconv.compile(made, "interpreter"))
    assert [f"{stage}: {j.problem}" for stage, j in found if j.problem] == []
