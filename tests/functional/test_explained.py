"""explain() of functions: which kernel would run, and which requirement keeps others away."""

from __future__ import annotations

import pytest
import torch

import transconv
import transconv.functional as TF
from transconv.backend_triton import TritonKernel


@pytest.fixture(autouse=True)
def any_size(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernel, "run", lambda *_: pytest.fail("something was launched"))
    transconv.config.cpu, transconv.config.sizes = "interpret", "any"


def test_the_plan_and_what_the_others_require() -> None:
    x = torch.randn(6, 300, requires_grad=True)
    found = TF.explain(TF.softmax, x, -1)
    assert found.native and [p.computes for p in found.parts] == ["result", "gradient of X"]
    result = found.parts[0]
    assert result.text == "softmax" and result.schedule in str(found)
    assert "for any size of this call, by its estimate" in result.why and "1..1024" in result.why
    refused = [line for line in result.others if "K=300 is not in 1..128" in line]
    assert len(refused) == 1 and len(result.others) == 4
    assert sum(line.startswith("taken") for line in result.others) == 1
    assert not transconv.stats(reset=True).total
    assert TF.softmax.__name__ == found.function


def test_what_has_no_form_is_said() -> None:
    found = TF.explain(TF.matmul, torch.randn(16, 16), torch.randn(16, 16))
    assert found.native and found.parts[0].schedule and not found.parts[0].others


def test_why_torch() -> None:
    transconv.config.cpu = "fallback"
    assert str(TF.explain(TF.softmax, torch.randn(2, 3), -1)).endswith("result: torch, because device:cpu")
    transconv.config.cpu = "interpret"
    assert TF.explain(TF.softmax, torch.empty(0, 3), -1).parts[0].reason == "shape:empty"
    with pytest.raises(TypeError, match="no function of transconv.functional"):
        TF.explain(torch.add, torch.ones(2), torch.ones(2))
    with pytest.raises(IndexError, match="Dimension out of range"):
        TF.explain(TF.softmax, torch.randn(2, 3), 7)
