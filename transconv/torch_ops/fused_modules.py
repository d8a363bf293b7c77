"""Torch border, step 9b. Modules of the fused calls: a convolution with its activation, whose forward
takes a residual."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transconv.torch_ops import arguments, modules, shapes
from transconv.torch_ops.fused import fused_conv1d, fused_conv2d, fused_conv3d
from transconv.torch_ops.fused_route import ACTIVATIONS

Tensor = torch.Tensor


class Activates:
    """Mixin: a convolution module with an activation, whose call takes a residual."""

    fused: Any
    activation: str = ""

    def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """activation(conv(input) + residual); a residual of another shape is broadcast as torch's
        addition would."""
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        numbers = (self.stride, padding, self.dilation, self.groups)
        if residual is not None and not self._fits(input, residual, padding):
            y = self.convolve(input, self.weight, self.bias, *numbers) + residual
            return ACTIVATIONS[self.activation](y)
        return self.fused(  # type: ignore[no-any-return]
            input, self.weight, self.bias, *numbers, activation=self.activation, residual=residual)

    def _fits(self: Any, input: Tensor, residual: Tensor, padding: Any) -> bool:
        if input.dim() != self.weight.dim() or residual.dtype != input.dtype:
            return False
        p = arguments.resolve(input.shape, self.weight.shape, None, self.stride,
                              padding if isinstance(padding, (str, tuple)) else (padding,),
                              self.dilation, False, (0,), self.groups)
        return tuple(residual.shape) == shapes.output_shape(input.shape, self.weight.shape, p)

    def extra_repr(self: Any) -> str:
        shown: str = super().extra_repr()  # type: ignore[misc]
        return f"{shown}, activation={self.activation or None}"


class FusedConv1d(Activates, modules.Conv1d):
    """Conv1d with ``activation``; ``forward(input, residual=None)``."""

    fused = staticmethod(fused_conv1d)


class FusedConv2d(Activates, modules.Conv2d):
    """Conv2d with ``activation``; ``forward(input, residual=None)``."""

    fused = staticmethod(fused_conv2d)


class FusedConv3d(Activates, modules.Conv3d):
    """Conv3d with ``activation``; ``forward(input, residual=None)``."""

    fused = staticmethod(fused_conv3d)
