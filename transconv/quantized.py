"""transconv.quantized: convolutions of 8-bit integers and floats, with scales and zero points."""

from transconv.torch_ops.quantized import Quantities, conv1d, conv2d, conv3d

__all__ = ["Quantities", "conv1d", "conv2d", "conv3d"]
