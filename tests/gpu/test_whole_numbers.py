"""Whole numbers of kernels on a GPU beside NumPy, and names whose tile an operand changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel.test_named_tiles import SAME, X, made
from tests.kernel.test_whole_numbers import TYPES, at_the_ends, pairs, quick, wrong
from transconv.kernel import Group

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TYPES)
def test_all_pairs_of_8_bits(dtype: Any, tmp_path: Path) -> None:
    assert not wrong(quick(dtype), *pairs(dtype), tmp_path, "device")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_ends_of_wider_types(dtype: Any, tmp_path: Path) -> None:
    divided, every, x, y = at_the_ends(dtype)
    assert not wrong([*divided, *every], x, y, tmp_path, "device")


@pytest.mark.parametrize(("text", "want"), SAME)
def test_names(text: str, want: Any, tmp_path: Path) -> None:
    out = torch.full((8,), -77.0, device="cuda")
    made(text, tmp_path)(Group(8, 4), torch.from_numpy(X.copy()).cuda(), out)
    np.testing.assert_array_equal(out.cpu().numpy(), np.asarray(want, np.float32))
