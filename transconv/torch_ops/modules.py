"""transconv.nn: torch's twelve convolution modules on transconv's functions.

Each is a subclass of torch's module of the same name with the same state, arguments, defaults and
repr, so `module.__class__` may be exchanged in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from transconv.torch_ops import functional

Tensor = torch.Tensor

__all__ = [
    "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "LazyConv1d", "LazyConv2d", "LazyConv3d",
    "LazyConvTranspose1d", "LazyConvTranspose2d", "LazyConvTranspose3d",
]


class Convolves:
    """Mixin: `_conv_forward` by one of our functions."""

    convolve: ClassVar[Callable[..., Tensor]]

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        made: Tensor = self.convolve(
            input, weight, bias, self.stride, padding, self.dilation, self.groups)
        return made


class ConvolvesTransposed:
    """Mixin: the forward of a transposed convolution by one of our functions."""

    convolve: ClassVar[Callable[..., Tensor]]

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of ``input``; ``output_size`` picks among the sizes that the
        stride leaves open. ValueError for another padding mode than zeros or an impossible size."""
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for "
                             f"{type(self).__name__.removeprefix('Lazy')}")
        output_padding = self.output_padding
        if output_size is not None:
            output_padding = tuple(self._output_padding(
                input, output_size, self.stride, self.padding, self.kernel_size,
                len(self.kernel_size), self.dilation))
        made: Tensor = self.convolve(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups,
            self.dilation)
        return made


class Conv1d(Convolves, torch.nn.Conv1d):
    """torch.nn.Conv1d, computed by transconv.conv1d."""

    convolve = staticmethod(functional.conv1d)


class Conv2d(Convolves, torch.nn.Conv2d):
    """torch.nn.Conv2d, computed by transconv.conv2d."""

    convolve = staticmethod(functional.conv2d)


class Conv3d(Convolves, torch.nn.Conv3d):
    """torch.nn.Conv3d, computed by transconv.conv3d."""

    convolve = staticmethod(functional.conv3d)


class ConvTranspose1d(ConvolvesTransposed, torch.nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d, computed by transconv.conv_transpose1d."""

    convolve = staticmethod(functional.conv_transpose1d)


class ConvTranspose2d(ConvolvesTransposed, torch.nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d, computed by transconv.conv_transpose2d."""

    convolve = staticmethod(functional.conv_transpose2d)


class ConvTranspose3d(ConvolvesTransposed, torch.nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d, computed by transconv.conv_transpose3d."""

    convolve = staticmethod(functional.conv_transpose3d)


# A lazy module turns into `cls_to_become` in a hook, after its `forward` was already looked up for
# the first call: so the lazy classes need our forward too.


class LazyConv1d(Convolves, torch.nn.LazyConv1d):  # type: ignore[misc]
    """torch.nn.LazyConv1d; becomes our Conv1d at the first call."""

    cls_to_become = Conv1d
    convolve = staticmethod(functional.conv1d)


class LazyConv2d(Convolves, torch.nn.LazyConv2d):  # type: ignore[misc]
    """torch.nn.LazyConv2d; becomes our Conv2d at the first call."""

    cls_to_become = Conv2d
    convolve = staticmethod(functional.conv2d)


class LazyConv3d(Convolves, torch.nn.LazyConv3d):  # type: ignore[misc]
    """torch.nn.LazyConv3d; becomes our Conv3d at the first call."""

    cls_to_become = Conv3d
    convolve = staticmethod(functional.conv3d)


class LazyConvTranspose1d(ConvolvesTransposed, torch.nn.LazyConvTranspose1d):  # type: ignore[misc]
    """torch.nn.LazyConvTranspose1d; becomes our ConvTranspose1d at the first call."""

    cls_to_become = ConvTranspose1d
    convolve = staticmethod(functional.conv_transpose1d)


class LazyConvTranspose2d(ConvolvesTransposed, torch.nn.LazyConvTranspose2d):  # type: ignore[misc]
    """torch.nn.LazyConvTranspose2d; becomes our ConvTranspose2d at the first call."""

    cls_to_become = ConvTranspose2d
    convolve = staticmethod(functional.conv_transpose2d)


class LazyConvTranspose3d(ConvolvesTransposed, torch.nn.LazyConvTranspose3d):  # type: ignore[misc]
    """torch.nn.LazyConvTranspose3d; becomes our ConvTranspose3d at the first call."""

    cls_to_become = ConvTranspose3d
    convolve = staticmethod(functional.conv_transpose3d)
