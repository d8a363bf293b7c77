"""First results of plans that no call has asked for yet: small, exact, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv.backend_triton import TritonKernel
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.conv.relation import every
from transconv.errors import Unsupported
from transconv.ir import Sizes
from transconv.runtime import check_records, compiler, first_result, first_run_check
from transconv.target import TARGETS

PROBLEM = ConvProblem.parse("mb8ic8ih56oc8oh56kh3ph1 dt=f32 tag=nhwc")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CompiledDirection:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    monkeypatch.setattr("transconv.runtime.first_run_check.SIDE", 5)
    check_records.forget()
    workload = ConvWorkload(PROBLEM, Prop.FWD, Epilogue.parse("bias"), every(PROBLEM))
    return compiler.plan(workload, TARGETS["interpreter"], None, False, CompiledDirection)


def test_a_plan_of_any_size_is_checked_at_a_small_one(
    plan: CompiledDirection, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, start = [], TritonKernel.run
    monkeypatch.setattr(TritonKernel, "run", lambda s, t, v: (seen.append(dict(v)), start(s, t, v)))
    assert not first_run_check.is_trusted(plan)
    assert first_result(plan, torch.device("cpu")).steps is plan.steps
    assert first_run_check.is_trusted(plan) and seen == [{"MB": 5, "IH": 5, "IW": 5}]


@pytest.mark.slow
def test_a_plan_that_is_wrong_is_found(plan: CompiledDirection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run_check, "MOST_REJECTED", 1)
    monkeypatch.setattr(TritonKernel, "run", lambda *_: None)
    with pytest.raises(Unsupported, match="gave wrong results"):
        first_result(plan, torch.device("cpu"))
    compiler.forget()


def test_sizes_that_are_not_allowed_are_those_of_the_example() -> None:
    from transconv.compute.symbolic_compute import sizes_of
    from transconv.runtime.first_run_check import _small

    told: Sizes = sizes_of("M=300 in 40..512, K=63 in 1..64, K % 7 == 0")
    assert _small(told) == {"M": 300, "K": 63}
    assert _small(sizes_of("M=300 in 40..512, K=63 in 1..64")) == {"M": 40, "K": 32}
