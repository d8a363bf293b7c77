"""In which order values lie in memory between kernels: convolutions read what norms store as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.meant import by_meaning, compare
from transconv.compute import parse
from transconv.graph import backend, report

Tensor = torch.Tensor


class Normed(nn.Module):
    """Norm, convolution, a pad and an upsampling before a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(2, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(self.norm(x).relu())
        z = nn.functional.interpolate(torch.tanh(y).amax((2, 3), True) + y, scale_factor=2.0)
        return self.second(nn.functional.pad(z, (1, 1, 1, 1), mode="reflect")), y


@pytest.mark.every(2)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_images_between_convolutions_have_their_features_last(form: Any) -> None:
    network = Normed().eval().to(memory_format=form)
    x = torch.randn(1, 16, 6, 5).to(memory_format=form)
    run: Any = torch.compile(network, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        compare(network, run, [x], 1e-5)  # results with torch's strides
    norm, *rest = report(run).graphs[0].kernels
    stored = parse(norm.text).writes[0].view.tensor
    assert stored.shape == (16, 30) and stored.layout.strides() == (1, 16), "rows of features"
    first = next(parse(k.text) for k in rest if "convolution" in k.operations)
    assert first.reads[0].view.tensor.layout.strides() == (480, 1, 80, 16)


def test_values_are_stored_as_narrow_as_they_are() -> None:
    """torch upsamples bf16 in f32: the cast is computed where it is read, not stored."""
    network = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Upsample(scale_factor=2.0), nn.Conv2d(16, 16, 3))
    network.eval().requires_grad_(False).bfloat16()
    x = torch.randn(1, 16, 6, 5).bfloat16()
    run: Any = torch.compile(network, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        compare(network, run, [x], 2e-2)
    kernels = report(run).graphs[0].kernels
    assert kernels and {parse(k.text).writes[0].view.tensor.dtype.name for k in kernels} == {"bf16"}
