"""torch's own samples of every function of transconv.functional, all of them: results and gradients are
torch's, or the call is torch's for a reason that stands in tests/functional, or because Triton's compiler
is known to be wrong about its kernel."""

from __future__ import annotations

import pytest
import torch

from tests.functional import elementwise
from tests.functional.samples import NONE, tried
from tests.functional.test_samples import HANDED
from tests.gpu import cases as c
from transconv import functional
from transconv.compute import Op

pytestmark = pytest.mark.gpu

NEAR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
MANY = {"max_pool1d": 7, "max_pool2d": 23, "max_pool3d": 23, "unfold": 3}  # samples that are nearly alike


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("name", sorted({*functional.__all__} - NONE))
def test_all_samples(name: str, dtype: torch.dtype) -> None:
    found = tried(name, c.DEVICE, dtype, MANY.get(name, 1), NEAR[dtype])
    assert found.pop("passed")
    assert {*found} - {"shape:empty", "miscompiled"} <= HANDED.get(name, set())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("op", elementwise.rows(), ids=str)
def test_all_samples_of_operations(op: Op, dtype: torch.dtype) -> None:
    found = elementwise.tried(op, c.DEVICE, dtype, NEAR[dtype])
    assert found.pop("passed", 0) or op.numbers
    assert {*found} <= {"shape:empty", "another form", "other operands"}
