"""Constants of every type in every place of a compiled kernel are those that the IR computes with, and
casts to every type are torch's."""

from __future__ import annotations

import pytest
import torch

from tests import casts, constants
from tests.kernel.test_rounding import SHORT_AND_WIDE, numbers_beside_tiles
from transconv import ir

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("of", constants.TYPES, ids=str)
def test_constants_in_every_place(of: ir.DType) -> None:
    assert constants.wrong(of, "cuda") == []


@pytest.mark.parametrize("dtype", SHORT_AND_WIDE)
def test_numbers_beside_tiles_have_their_type(dtype: str) -> None:
    """Triton writes numbers of bf16 with six digits behind the point."""
    torch.testing.assert_close(*numbers_beside_tiles(dtype, "cuda"), rtol=0, atol=0)


@pytest.mark.parametrize("of", casts.TYPES, ids=str)
def test_casts_to_every_type(of: ir.DType) -> None:
    assert casts.wrong(of, "cuda") == []
