"""Constants of every type in every place of a compiled kernel are those that the IR computes with."""

from __future__ import annotations

import pytest

from tests import constants
from transconv import ir

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("of", constants.TYPES, ids=str)
def test_constants_in_every_place(of: ir.DType) -> None:
    assert constants.wrong(of, "cuda") == []
