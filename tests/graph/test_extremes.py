"""Graphs of every element-wise operation at extreme values, beside torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests import extremes

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("only", ["Scalar", "hardtanh"])
def test_numbers_beside_a_type(only: str) -> None:
    """Comparisons and powers take them as the type has them; integers have bounds that are whole."""
    numbers = (0.1, 2.5, -1.5, 1.0, 16777217.0, 1e300, 2**31)
    for dtype in (torch.float16, torch.int64):
        assert extremes.of_graphs([dtype], "cpu", numbers, only) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE], ids=str)
def test_every_operation_of_one_tensor(dtype: torch.dtype) -> None:
    assert extremes.of_graphs([dtype], "cpu") == []


PAIRS = [*itertools.product((*FLOATS, *WHOLE), repeat=2)]
OFTEN = [(torch.float32, torch.float32), (torch.float64, torch.int64), (torch.int32, torch.float16)]


@pytest.mark.parametrize(
    "types", [p if p in OFTEN else pytest.param(p, marks=pytest.mark.slow) for p in PAIRS], ids=str
)
def test_every_operation_of_two_tensors(types: tuple[torch.dtype, torch.dtype]) -> None:
    """Of several types: an integer becomes torch's type of both."""
    assert extremes.of_graphs(types, "cpu") == []
    assert extremes.of_graphs((torch.bool, *types), "cpu") == []
