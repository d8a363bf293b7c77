"""Convolutions of int8 and uint8 tensors as torch defines them: of their type, modulo 256.

torch has them on a CPU, where sums wrap around. A kernel sums in s32, and the last eight bits are kept.
"""

from __future__ import annotations

import torch

from transconv.calls.settings import settings
from transconv.torch_ops.arguments import Params

Tensor = torch.Tensor

TYPES = (torch.int8, torch.uint8)
USUAL = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)  # scales and zero points


def takes(x: Tensor, w: Tensor) -> bool:
    """Whether kernels may compute the convolution of these tensors."""
    return (x.dtype in TYPES and w.dtype is x.dtype and (x.is_cuda or settings.cpu == "interpret")
            and x.layout is w.layout is torch.strided and x.numel() > 0 and w.numel() > 0)


def convolved(x: Tensor, w: Tensor, b: Tensor | None, p: Params) -> Tensor:
    """The result in the type of the input; sums and bias (of that type) wrap around."""
    from transconv.torch_ops.quantized import quantized_operator

    sums: Tensor = quantized_operator.operator(
        x, w, None, *p, [None] * len(USUAL), USUAL, torch.int32, "", False)
    if b is not None:
        sums += b.view(-1, *[1] * (x.dim() - 2))
    return sums.to(x.dtype)
