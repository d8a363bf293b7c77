"""Kernels of every function at extreme values, beside NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import extremes
from transconv.kernel import Group, KernelError
from transconv.kernel.functions import FUNCTIONS
from transconv.kernel.trials.trial import loaded

TYPES = (np.float32, np.float64, np.float16, np.int32, np.uint8, np.int8, np.int64)


@pytest.mark.parametrize(
    "dtype", [t if t in (np.int32, np.uint8) else pytest.param(t, marks=pytest.mark.slow) for t in TYPES]
)
def test_every_function(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert extremes.of_kernels(np.dtype(dtype), "cpu", tmp_path) == []


def test_halves_are_held_against_functions_that_are_the_same_on_any_processor() -> None:
    zeros = np.array([0.0, -0.0] * 16, np.float16)
    odd = [FUNCTIONS[name] for name in ("expm1", "sin", "tanh", "sqrt")]
    for made in (extremes._in_numpy(row, zeros, zeros) for row in odd):
        assert made.dtype == np.float16 and np.array_equal(np.signbit(made), np.signbit(zeros))


def test_powers_of_integers_by_a_tile_are_refused(tmp_path: Path) -> None:
    """Floats would round them: 3**5 was 242."""
    made = loaded(extremes.SOURCE.format(results="R") + "    group.store(R[i:], x ** y)\n", tmp_path)
    x = np.arange(8, dtype=np.uint8)
    with pytest.raises(KernelError, match="a power of uint8 whose exponent is a tile"):
        made.lower(Group(8), x, x, x)
