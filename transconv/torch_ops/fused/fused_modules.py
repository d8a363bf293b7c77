"""Modules of the fused calls: a convolution with its activation, whose forward takes a residual."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transconv.torch_ops import modules
from transconv.torch_ops.fused.fused_functional import (
    BROADCASTING,
    Kinds,
    broadcasting,
    fused_conv1d,
    fused_conv2d,
    fused_conv3d,
)
from transconv.torch_ops.fused.fused_route import refuse

Tensor = torch.Tensor


class Activates:
    """Mixin: a convolution module with an activation, whose call takes a residual."""

    fused: Any
    kinds: Kinds
    activation: str = ""

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        if activation not in self.kinds:
            refuse(activation)
        super().__init__(*args, **kwargs)
        self.activation = activation or ""

    def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """activation(conv(input) + residual); a residual of another shape is broadcast as torch's
        addition would."""
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        if residual is None:
            made: Tensor = self.fused(input, self.weight, self.bias, self.stride, padding,
                                      self.dilation, self.groups, activation=self.activation)
            return made
        return broadcasting(
            self.kinds, input, self.weight, self.bias, self.stride, padding, self.dilation,
            self.groups, self.activation, residual)

    def extra_repr(self: Any) -> str:
        inherited: Any = super()
        shown: str = inherited.extra_repr()
        return f"{shown}, activation={self.activation or None}"


class FusedConv1d(Activates, modules.Conv1d):
    """Conv1d with ``activation``, an argument by name: as fused_conv1d's; ``forward(input,
    residual=None)``. RuntimeError for an unknown activation."""

    fused = staticmethod(fused_conv1d)
    kinds = BROADCASTING[1]


class FusedConv2d(Activates, modules.Conv2d):
    """Conv2d with ``activation``; ``forward(input, residual=None)``: see FusedConv1d."""

    fused = staticmethod(fused_conv2d)
    kinds = BROADCASTING[2]


class FusedConv3d(Activates, modules.Conv3d):
    """Conv3d with ``activation``; ``forward(input, residual=None)``: see FusedConv1d."""

    fused = staticmethod(fused_conv3d)
    kinds = BROADCASTING[3]
