"""torch's own samples of every function of transconv.functional, all of them: results and gradients are
torch's, or the call is torch's for a reason that stands in tests/functional, or because Triton's compiler
is known to be wrong about its kernel. ``python -m bench samples`` makes a table of the counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.functional import elementwise
from tests.functional.samples import NONE, tried
from tests.functional.test_samples import HANDED
from tests.gpu import cases as c
from transconv import functional
from transconv.compute import Op

pytestmark = pytest.mark.gpu

Record = Callable[[str, Any], None]
NEAR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
MANY = {"max_pool1d": 7, "max_pool2d": 23, "max_pool3d": 23, "unfold": 3}  # samples that are nearly alike


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("name", sorted({*functional.__all__} - NONE))
def test_all_samples(name: str, dtype: torch.dtype, record_property: Record) -> None:
    found = tried(name, c.DEVICE, dtype, MANY.get(name, 1), NEAR[dtype])
    record_property("cases", found.summary())
    assert found.failures == [] and found.passed
    assert found.reasons - {"shape:empty", "miscompiled"} <= HANDED.get(name, set())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("op", elementwise.rows(), ids=lambda op: op.name)
def test_all_samples_of_operations(op: Op, dtype: torch.dtype, record_property: Record) -> None:
    found = elementwise.tried(op, c.DEVICE, dtype, NEAR[dtype])
    record_property("cases", found.summary())
    assert found.failures == [] and (found.passed or op.numbers)
    assert found.reasons <= {"shape:empty", "another form", "other operands"}
