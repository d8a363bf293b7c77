"""transconv.quantized: convolutions of 8-bit integers and floats, with scales and zero points."""

from transconv.torch_ops.quantized.qparams import Quantities
from transconv.torch_ops.quantized.quantized_functional import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
    serve_torchao,
)

__all__ = [
    "Quantities",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "serve_torchao",
]
