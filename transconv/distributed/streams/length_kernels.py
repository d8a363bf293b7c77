"""Convolutions along a stream by kernels to which the length is an argument: one plan for all lengths, so
that a piece has the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


class LengthKernels:
    """The plans of a stream's convolutions."""

    def convolve(
        self,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        more: Sequence[int],
        groups: int,
        at: int,
    ) -> Tensor:
        """torch's convolution; along spatial dim ``at`` lies time."""
        made: Any = torch.ops.aten.convolution.default
        return made(x, w, b, stride, padding, dilation, transposed, more, groups)
