"""torch's own samples, a share of them; tests/gpu/test_samples.py and, here,
``TRITON_INTERPRET=1 python -m tests.functional.test_samples`` try all."""

from __future__ import annotations

import pytest
import torch

import tests.torch_ops.conftest  # noqa: F401  (stands for what torch's samples import and do not need)
import transconv
from tests.functional import elementwise
from tests.functional.samples import NONE, transformed, tried
from transconv import functional
from transconv.compute import Op

EVERY = {
    "max_pool1d": 97,
    "max_pool2d": 301,
    "max_pool3d": 401,
    "cross_entropy": 3,
    "prod": 4,
    "group_norm": 3,
    "sum": 3,
    "mean": 3,
    "amax": 3,
    "amin": 3,
    "any": 4,
    "all": 4,
    "logsumexp": 2,
    "matmul": 2,
    "linear": 2,
    "var": 2,
    "std": 2,
    "batch_norm": 2,
    "adaptive_avg_pool2d": 4,
    "adaptive_avg_pool3d": 5,
    "adaptive_max_pool2d": 11,
    "adaptive_max_pool3d": 11,
    "argmax": 5,
    "argmin": 5,
    "avg_pool3d": 5,
    "pad": 13,
    "unfold": 45,
    "interpolate": 10,
    "cat": 3,
    "avg_pool1d": 2,
    "avg_pool2d": 3,
    "adaptive_max_pool1d": 3,
    "min": 2,
    "max": 2,
}
FEW = {"adaptive_avg_pool3d": 4, "instance_norm": 2}  # others of theirs have no kernel
# How many of all samples fall back to torch, by reason.
HANDED = {
    "normalize": {"norm:order"},
    "instance_norm": {"stats:instance"},
    "cross_entropy": {"form:cross_entropy"},
    "interpolate": {"formula:none"},
    "embedding": {"form:embedding"},
    "cat": {"formula:none"},
    "gather": {"dtype:uint8"},
}


NAMES = sorted({*functional.__all__} - NONE)
THIRD = 3
ELSEWHERE = {"pad", "max_pool1d", "max_pool2d", "max_pool3d"}  # test_views.py, test_pools.py


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [n for at, n in enumerate(NAMES) if at % THIRD and n not in ELSEWHERE])
def test_a_kernel_has_the_first_sample_that_may_have_one(name: str) -> None:
    """One of each function of which ``test_samples`` and other files have none in ``make test``."""
    for at in (1, 0, 2, 3, 5, 8, 13, 3 * EVERY.get(name, 1)):
        found = tried(name, "cpu", torch.float32, only=at)
        assert found.failures == []
        if found.passed:
            return
    raise AssertionError(f"none of these samples has a kernel: {found.handed}")


@pytest.mark.every(2)
@pytest.mark.every(THIRD)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str) -> None:
    found = tried(name, "cpu", torch.float32, FEW.get(name, 3 * EVERY.get(name, 1)))  # all: make check-all
    assert found.failures == [] and found.passed
    assert found.reasons - {"shape:empty"} <= HANDED.get(name, set())


@pytest.mark.every(4)
@pytest.mark.parametrize("op", elementwise.rows(), ids=str)
def test_samples_of_operations(op: Op) -> None:
    """As texts of one line; torch's other forms of an operation, such as every second sample of
    gelu, have none."""
    found = elementwise.tried(op, "cpu", torch.float32, every=5 if op.arity == 1 else 16)
    assert found.failures == [] and (found.passed or op.numbers)
    assert found.reasons <= {"shape:empty", "another form", "other operands"}


def test_each_sample_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As passed, as torch's or as failed; one that fails does not stop the others."""
    theirs, calls = functional.normalize, iter(range(100))

    def wrong_at_first(*args: object, **named: object) -> torch.Tensor:
        return theirs(*args, **named) + (next(calls) == 0)

    monkeypatch.setattr(functional, "normalize", wrong_at_first)
    summary = (found := tried("normalize", "cpu", torch.float32)).summary()
    assert "normalize 0: AssertionError: Tensor-likes are not close" in found.failures[0]
    assert (summary["failed"], summary["fallback"]) == (1, {"norm:order": summary["fell_back"]})
    assert 0 < summary["gradients"] == summary["passed"]
    assert next(calls) == sum(summary[c] for c in ("passed", "fell_back", "failed"))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", sorted({*functional.__all__} - {"causal_conv1d_update"})
)  # has no result alone
def test_tracers_and_transforms(name: str) -> None:
    """Calls that torch must see itself fall back for that reason; traced calls contain the operator."""
    transconv.config.cpu = "fallback"  # the operator's way, without a kernel for each
    transformed(name)
    assert {*transconv.stats(reset=True).fallback} <= {"device:cpu", "transform:functorch"}


if __name__ == "__main__":
    import os
    import sys

    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton has read it by now
        raise SystemExit("kernels are interpreted: expected TRITON_INTERPRET=1 in the environment")
    transconv.config.cpu = "interpret"
    wrong = 0
    for name in sys.argv[1:] or sorted({*functional.__all__} - NONE):
        print(name, found := tried(name, "cpu", torch.float32), flush=True)
        wrong += len(found.failures)
    for op in elementwise.rows():
        print(op.name, found := elementwise.tried(op, "cpu", torch.float32), flush=True)
        wrong += len(found.failures)
    raise SystemExit(wrong > 0)
