"""The sizes of pools and pads are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from transconv.torch_ops.calls import precompile

MODULES = [
    nn.MaxPool1d(3),
    nn.MaxPool1d(2, 3, padding=1, ceil_mode=True),
    nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d((3, 2), (2, 1), dilation=(2, 1), ceil_mode=True),
    nn.MaxPool2d(2, 2, ceil_mode=True),
    nn.MaxPool2d(3, 5, 1, ceil_mode=True),
    nn.MaxPool3d(2),
    nn.AvgPool1d(4, 3),
    nn.AvgPool2d((2, 3), 2, 1),
    nn.AvgPool2d(3, 4, 1, ceil_mode=True),
    nn.AvgPool3d(2, ceil_mode=True),
    nn.AdaptiveAvgPool1d(3),
    nn.AdaptiveAvgPool2d((None, 2)),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool3d((1, 2, None)),
    nn.ZeroPad2d((1, 2, 3, 0)),
    nn.ZeroPad2d(-1),
    nn.ReflectionPad1d(2),
    nn.ReflectionPad2d((1, 0, 2, 3)),
    nn.ReplicationPad2d(3),
    nn.Upsample(scale_factor=1.5),
    nn.Upsample(scale_factor=(2.0, 0.7)),
    nn.Upsample((5, 9)),
    nn.PixelShuffle(2),
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_the_sizes_are_torchs(module: nn.Module) -> None:
    rank = next((int(c) for c in type(module).__name__ if c.isdigit()), 2)
    for side in (7, 10, 13):
        shape = (2, 4, *(side + 2 * at for at in range(rank)))
        assert precompile.result(module, shape) == tuple(module(torch.zeros(shape)).shape)


def test_every_class_is_tried() -> None:
    assert {type(m) for m in MODULES} == precompile.KNOWN


@pytest.mark.parametrize("module", [nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(20)], ids=str)
def test_what_does_not_follow_is_left_alone(module: nn.Module) -> None:
    assert precompile.result(module, (1, 4, 9, 9)) is None
