"""The casts that torch's autocast makes for convolutions."""

from __future__ import annotations

import torch

from transconv.torch_ops.arguments import is_wide

Tensor = torch.Tensor


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """The type that autocast gives a tensor on this device; None where it is off."""
    device = input.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast(input: Tensor, weight: Tensor,
             bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The casts that torch's autocast makes for convolutions: every eligible tensor to the region's
    dtype, float64 and integers not."""
    device, dtype = input.device.type, autocast_dtype(input)
    if dtype is None:
        return input, weight, bias
    return (_cast(input, device, dtype), _cast(weight, device, dtype),
            None if bias is None else _cast(bias, device, dtype))


def traced_autocast(input: Tensor, weight: Tensor,
                    bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same for a graph, but a float32 bias stays as it is where 16-bit tensors are multiplied: the
    kernel adds it to its float32 sums, and a graph need not launch a kernel that casts it."""
    input, weight, cast = autocast(input, weight, bias)
    return input, weight, bias if is_wide(bias, input) and autocast_dtype(input) else cast


def cast_dtype(input: Tensor) -> torch.dtype:
    """The dtype of an input after autocast's cast."""
    dtype = autocast_dtype(input)
    return input.dtype if dtype is None or not _is_cast(input, input.device.type) else dtype


def cast_like(tensor: Tensor, input: Tensor) -> Tensor:
    """A further operand of an autocast call: as the cast input, where torch would cast it."""
    dtype = autocast_dtype(input)
    return tensor if dtype is None else _cast(tensor, input.device.type, dtype)


def _is_cast(tensor: Tensor, device: str) -> bool:
    return (tensor.is_floating_point() and tensor.dtype != torch.float64
            and tensor.device.type == device)


def _cast(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if _is_cast(tensor, device) else tensor
