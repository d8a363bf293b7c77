"""Quantised convolutions in a folded model: with a residual, and results that are quantised already for
the convolutions that read them.

    int8 -> conv + bias [+ residual] [-> activation] -> int8, or the type of the model's floats
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from transconv.compute import OPS, named
from transconv.torch_ops import arguments, shapes
from transconv.torch_ops.quantization.quantized_modules import QuantConv1d, QuantConv2d, QuantConv3d
from transconv.torch_ops.quantization.schemes import KINDS
from transconv.torch_ops.quantized.input_quantization import quantise

Tensor = torch.Tensor


class _Joined:
    """Mixin: ``forward(input, residual=None)``."""

    computed: ClassVar[Callable[..., Tensor]]

    def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """activation(conv(input) + residual), quantised where that is what its readers take. A residual
        of another shape or type is added as torch's addition would."""
        if residual is not None and input.dim() == residual.dim() == len(self.kernel_size) + 1:
            one: Tensor = self.forward(input.unsqueeze(0), residual.unsqueeze(0)).squeeze(0)
            return one
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        numbers = self.stride, padding, self.dilation, self.groups
        made: Tensor
        if residual is None:
            made = self.convolve(input, self.weight, self.bias, *numbers)
        elif input.dim() == len(self.kernel_size) + 2 and self._takes(input, residual, numbers):
            made = self.computed(input, self.bias, numbers, residual)
        else:
            made = self._apart(input, residual, numbers)
        return made

    def _takes(self: Any, input: Tensor, residual: Tensor, numbers: tuple[Any, ...]) -> bool:
        """Whether a residual has the shape and type of the result."""
        made = self.real if input.dtype is KINDS[self.kind].input_dtype else input.dtype
        logical = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        return (residual.dtype is made and residual.device == input.device
                and not torch.is_autocast_enabled(input.device.type)
                and residual.shape == _shape(tuple(input.shape), logical, *numbers))

    def _apart(self: Any, input: Tensor, residual: Tensor, numbers: tuple[Any, ...]) -> Tensor:
        """The same in steps."""
        word, scale, zero = self.activation, self.output_scale, self.output_zero_point
        plain = _plain(self)
        made = plain.convolve(input, plain.weight, plain.bias, *numbers) + residual
        made = named(OPS[word].torch)(made, **dict(OPS[word].options)) if word else made
        held = KINDS[self.kind].input
        return made if scale is None or held is None else quantise(made, scale, zero, held)


def _plain(module: Any) -> Any:
    """A module without what follows its sum."""
    made = object.__new__(type(module))
    made.__dict__ = {**module.__dict__, "activation": "", "_buffers": {
        **module._buffers, "output_scale": None, "output_zero_point": None}}
    return made


@lru_cache(maxsize=4096)
def _shape(input: tuple[int, ...], weight: tuple[int, ...], stride: Any, padding: Any, dilation: Any,
           groups: int) -> tuple[int, ...]:
    padding = (padding,) if isinstance(padding, int) else padding
    return shapes.output_shape(input, weight, arguments.resolve(
        input, weight, None, stride, padding, dilation, False, (0,), groups))


class FusedQuantConv1d(_Joined, QuantConv1d):
    """QuantConv1d whose forward takes a residual, and whose result may be quantised."""


class FusedQuantConv2d(_Joined, QuantConv2d):
    """QuantConv2d whose forward takes a residual, and whose result may be quantised."""


class FusedQuantConv3d(_Joined, QuantConv3d):
    """QuantConv3d whose forward takes a residual, and whose result may be quantised."""


FUSED: dict[type, type] = {kind: ours for ours in (FusedQuantConv1d, FusedQuantConv2d, FusedQuantConv3d)
                           for kind in (ours, ours.__bases__[1])}
"""The class that a quantised convolution becomes."""


def quantises_for(module: Any, readers: list[Any]) -> bool:
    """Have a module's results quantised as all modules that read them would quantise them; False where
    these differ, or quantise nothing."""
    first, kind = readers[0], KINDS[module.kind]
    if kind.input is None or first.input_scale is None:
        return False
    for reader in readers:
        if reader.kind != module.kind or reader.padding_mode != "zeros" or not (
                _same(reader.input_scale, first.input_scale)
                and _same(reader.input_zero_point, first.input_zero_point)):
            return False
    module.output_scale, module.output_zero_point = first.input_scale, first.input_zero_point
    return True


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or one is not None and other is not None and torch.equal(one, other)
