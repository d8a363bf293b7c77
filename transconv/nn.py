"""transconv.nn: torch.nn's convolution modules, computed by transconv; fused and quantised ones,
and ones that train in 8-bit floats."""

from transconv.torch_ops.fused.fused_functional import FusedConv1d, FusedConv2d, FusedConv3d
from transconv.torch_ops.modules import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    LazyConv1d,
    LazyConv2d,
    LazyConv3d,
    LazyConvTranspose1d,
    LazyConvTranspose2d,
    LazyConvTranspose3d,
)
from transconv.torch_ops.quantized.float8 import Float8Conv1d, Float8Conv2d, Float8Conv3d
from transconv.torch_ops.quantized.quantized_modules import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantLinear,
)

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Float8Conv1d",
    "Float8Conv2d",
    "Float8Conv3d",
    "FusedConv1d",
    "FusedConv2d",
    "FusedConv3d",
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantLinear",
]
