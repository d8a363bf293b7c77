"""torch's own samples: results and gradients of each are torch's, or the call is torch's for a reason that
stands here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import transconv
from transconv import functional

EVERY = {"max_pool2d": 67, "cross_entropy": 3, "prod": 4, "group_norm": 3, "sum": 3, "mean": 3, "amax": 3,
         "amin": 3, "any": 4, "all": 4, "logsumexp": 2, "matmul": 2, "linear": 2, "var": 2, "std": 2,
         "adaptive_avg_pool2d": 2, "batch_norm": 2}
ROOT = {"softmax", "log_softmax", "sum", "mean", "prod", "amax", "amin", "var", "std", "logsumexp", "any",
        "all", "matmul", "bmm"}
# Samples that torch computes, of those that are run here, and why.
HANDED = {
    "normalize": {"norm:order": 5},
    "adaptive_avg_pool2d": {"formula:none": 4},
    "instance_norm": {"stats:instance": 8},
    "cross_entropy": {"form:cross_entropy": 4},
    "max_pool2d": {"form:return_indices": 11},
}


def op_of(name: str) -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    dotted = name if name in ROOT else f"nn.functional.{name}"
    return next(op for op in op_db if op.name == dotted and op.variant_test_name in ("", "unbiased_off"))


@pytest.mark.parametrize("name", sorted(functional.__all__))
def test_samples(name: str) -> None:
    op, ours = op_of(name), getattr(functional, name)
    dtype = torch.float32
    tried = passed = 0
    handed: Counter[str] = Counter()
    for at, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)):
        if at % EVERY.get(name, 1):
            continue
        tried += 1
        transconv.stats(reset=True)
        args = (sample.input, *sample.args)
        got, want = ours(*args, **sample.kwargs), op.op(*args, **sample.kwargs)
        _same(got, want)
        leaves = [t for t in (*args, *sample.kwargs.values())
                  if isinstance(t, torch.Tensor) and t.requires_grad]
        if isinstance(want, torch.Tensor) and want.requires_grad:
            assert got.stride() == want.stride() or not want.numel()
            g = torch.randn_like(want)
            _same(*(torch.autograd.grad(y, leaves, g, allow_unused=True) for y in (got, want)))
        away = transconv.stats().fallback
        handed.update({**away})
        passed += not away
    assert {k: n for k, n in handed.items() if k != "shape:empty"} == HANDED.get(name, {})
    assert passed + sum(handed.values()) >= tried and passed


def _same(got: Any, want: Any) -> None:
    # A row of one element has gradients that are zero but for the rounding of its mean.
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-4)
