"""Tensors of Intel's GPUs, of which none is here: torch's module for them is a stub, elements lie on the
CPU, and Triton's interpreter stands for its compiler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import transconv
from transconv.compute import parse
from transconv.functional.calls import compiled_launch
from transconv.runtime import build_compute, on_device
from transconv.schedule import Schedule
from transconv.support import TensorError, Unsupported, knobs
from transconv.target import TARGETS
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.conversion import aten_convolutions
from transconv.torch_ops.conversion.aten_replacement import _devices

XPU = torch.device("xpu", 0)
SCALED = (
    "compute scaled\ntensor X f32 [300]\ntensor Y f32 [300]\naxes n=300\nread x = X[n]\nstore Y[n] = x*2"
)


class OnXpu(torch.Tensor):
    """A tensor of the CPU that says that it is on an Intel GPU."""

    device = XPU  # type: ignore[assignment]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Max 1550, as torch tells of it; the devices that were made the current one."""
    current: list[torch.device] = []

    def device(at: torch.device) -> Any:
        current.append(at)
        return nullcontext()

    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda at=None: "Intel(R) Data Center GPU Max 1550")
    monkeypatch.setattr(torch.xpu, "device", device)
    return current


def test_tensors_are_taken() -> None:
    with FakeTensorMode():
        x, w = torch.empty(1, 8, 5, 5, device="xpu"), torch.empty(4, 8, 3, 3, device="xpu")
        other = torch.empty(3, device="mtia")
    assert lower_call.reasons(x, w) == [] and compiled_launch.refused([x, w]) == ""
    assert lower_call.reasons(other, w) == compiled_launch.refused([other]).split() == ["device:mtia"]


def test_aten_is_replaced_where_torch_has_the_device(card: list[torch.device]) -> None:
    assert "xpu" in _devices(None) and _devices("xpu") == ("xpu",)
    transconv.enable("xpu")
    try:
        assert aten_convolutions.replacement.devices == {"xpu"}
    finally:
        transconv.disable()
    with pytest.raises(ValueError, match="on 'mtia'; expected one of: cuda, xpu, cpu"):
        transconv.enable("mtia")


def test_kernels_are_made_for_its_card(card: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "interpret", lambda: False)
    assert lower_call.target_of(XPU) is TARGETS["pvc"]
    assert compiled_launch.question(SCALED, XPU).target is TARGETS["pvc"]
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda at=None: "Intel(R) UHD Graphics")
    with pytest.raises(Unsupported, match="no record for Intel"):
        lower_call.target_of(XPU)


def test_kernels_are_started_by_triton_on_its_device(card: list[torch.device]) -> None:
    plan = build_compute(parse(SCALED), TARGETS["interpreter"], Schedule.parse("n:128 | fma"))
    x, y = torch.randn(300), torch.full((300,), float("nan"))
    with on_device(XPU):
        plan.launch(X=x.as_subclass(OnXpu), Y=y.as_subclass(OnXpu))
    assert torch.equal(y, x * 2) and card == [XPU, XPU]
    with pytest.raises(TensorError, match="where X is, got cpu"):
        plan.launch(X=x.as_subclass(OnXpu), Y=y)
