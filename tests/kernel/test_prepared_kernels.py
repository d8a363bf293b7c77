"""Kernels that are compiled before their first call: ``transconv.prepare`` records what a model asks for,
and a process that compiles finds their plans on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
from transconv.errors import Unsupported
from transconv.kernel import Buffer, kernel, symbols
from transconv.kernel.launch.arguments import tensors_of
from transconv.kernel.launch.kernel_plan import KernelWorkload, read_workload
from transconv.runtime import PlanRequest, collecting, compiler, is_ready
from transconv.runtime.compilation import compile_child
from transconv.target import Target

N = symbols("N")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")


@kernel(work_shape=N, results="Y")
def tripled(group: Any, X: Buffer[N], Y: Buffer[N]) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) * 3)


class Tripled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tripled(x)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    compiler.forget()


def test_prepare_asks_for_the_kernels_of_a_model() -> None:
    found = transconv.prepare(Tripled(), torch.ones(1000), progress=False)
    assert [p.split()[0] for p in found.problems] == ["tripled"] and not found.failures
    assert tripled(torch.ones(1000)).eq(3).all()


def test_a_process_finds_the_plan_that_the_call_left_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the text of the request alone, compiles what the call launches, and makes nothing anew."""
    target, x = Target.parse("sm_90"), torch.ones(1000)
    monkeypatch.setattr(type(tripled._launches), "target_of", lambda *_: target)
    with collecting() as questions:
        tripled(x)
    (question,) = questions
    assert isinstance(question.workload, KernelWorkload) and question.target is target
    again = PlanRequest.of_job(question.job)
    assert again == question and read_workload("conv", "", "") is None
    compiled: list[str] = []
    monkeypatch.setattr(compile_child, "pretend", lambda *_: None)
    monkeypatch.setattr(
        "transconv.backend_triton.launch.triton_kernel.TritonKernel.compile",
        lambda self, *_: compiled.append(self.source),
    )
    assert not is_ready(question)
    asked = tripled.asked((x,), {})
    made, _ = tripled._launches.of(asked, tensors_of(asked.given), target)
    monkeypatch.setattr(compiler, "build", lambda *_: pytest.fail("made anew"))
    assert compile_child.answer(question.job)["kernels"] == 1
    assert compiled == [made.step.source]


def test_a_kernel_that_is_not_on_disk_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = Target.parse("sm_90")
    monkeypatch.setattr(type(tripled._launches), "target_of", lambda *_: target)
    with collecting() as questions:
        tripled(torch.ones(500))
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "other"))
    with pytest.raises(Unsupported, match="tripled is not on disk, and is lowered where"):
        compile_child.answer(next(iter(questions)).job)
