"""How convolutions are quantised: the types, and the scales and zero points of ranges.

    int8               weights int8, inputs int8 with a scale and a zero point
    fp8                weights float8_e4m3fn, inputs float8_e4m3fn with a scale
    int8_weight_only   weights int8, inputs as they are (float16, bfloat16, float32)
    int4_weight_only   weights of 4 bits, inputs as they are (quantization/int4_weights.py)

Weights are symmetric, with a scale for each output channel; those of 4 bits have one for every ``group``
of its input channels, or for all where that does not divide them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from transconv.ir import DTYPES, DType
from transconv.support import TensorError

Tensor = torch.Tensor


@dataclass(frozen=True)
class QuantizationScheme:
    """A way to quantise. ``input``: the type that inputs become, None if they stay; ``most``: the largest
    quantised weight; ``group``: input channels with one scale, of weights of 4 bits, else 0."""

    name: str
    weight: DType
    input: DType | None
    most: float
    group: int = 0
    dtype: torch.dtype = field(init=False)  # the weights'
    input_dtype: torch.dtype | None = field(init=False)  # of quantised inputs

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", getattr(torch, self.weight.torch))
        object.__setattr__(self, "input_dtype", self.input and getattr(torch, self.input.torch))

    def channels(self, weight: Tensor) -> int:
        """The input channels with one scale of a weight (oc, ic/groups, *k) of 4 bits."""
        return self.group if weight.shape[1] % self.group == 0 else weight.shape[1]

    def why_not(self, weight: Tensor, transposed: bool) -> str:
        """Why a weight has no form of this kind; empty if it has."""
        if not self.group or not transposed and self.channels(weight) % 2 == 0:
            return ""
        return ("transposed convolutions have no weights of 4 bits" if transposed else
                f"weights of 4 bits are for even numbers of input channels, not {weight.shape[1]}")

    def check_fast(self, fast: bool) -> None:
        """ValueError for ``use_fast_accum`` where nothing multiplies 8-bit floats."""
        if fast and not (self.input is not None and self.input.is_short):
            raise ValueError(f"use_fast_accum is for products of 8-bit floats (fp8), not for {self.name}")


_i8, _f8 = DTYPES["i8"], DTYPES["f8e4m3"]
KINDS = {
    k.name: k
    for k in (
        QuantizationScheme("int8", _i8, _i8, 127),
        QuantizationScheme("fp8", _f8, _f8, _f8.largest),
        QuantizationScheme("int8_weight_only", _i8, None, 127),
        QuantizationScheme("int4_weight_only", DTYPES["u8"], None, 7, 32),
    )
}
"""The ways to quantise, by name."""

def kind_named(name: str) -> QuantizationScheme:
    """ValueError for an unknown one."""
    if name not in KINDS:
        raise ValueError(f"kind '{name}' is unknown; expected one of: {', '.join(KINDS)}")
    return KINDS[name]


def ranged(low: Tensor, high: Tensor, kind: QuantizationScheme) -> tuple[Tensor, Tensor | None]:
    """The scale () and the zero point (1,), if inputs have one, for numbers from ``low`` to ``high``: f32
    and s32. 0 has a number of its own."""
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    tiny = torch.finfo(torch.float32).tiny
    if kind.input is None or kind.input.kind != "int":
        return (torch.maximum(-low, high) / kind.most).clamp(min=tiny), None
    least, most = kind.input.limits
    scale = ((high - low) / (most - least)).clamp(min=tiny)
    return scale, (least - (low / scale).round()).clamp(least, most).int().view(1)


def quantised(x: Tensor, scale: Tensor, zero: Tensor | None, held: DType) -> Tensor:
    """``x`` times the reciprocal of the scale in f32, with the zero point, rounded to nearest even and
    saturated."""
    made = x.float() * (1 / scale)
    if held.kind == "int":
        made = made.round() if zero is None else made.round() + zero
    return made.clamp(*held.range).to(getattr(torch, held.torch))


def quantised_weight(
    weight: Tensor, groups: int, transposed: bool, kind: QuantizationScheme
) -> tuple[Tensor, Tensor]:
    """A weight in the kind's type, with the strides that it has, and its scale for each output channel
    (oc,), f32."""
    wide = weight.detach().float()
    rows = wide
    if transposed:  # (ic, oc/groups, *k): the output channels of a group are the second dimension
        rows = wide.reshape(groups, -1, *wide.shape[1:]).transpose(1, 2).flatten(0, 1)
    scale = (rows.abs().flatten(1).amax(1) / kind.most).clamp(min=torch.finfo(torch.float32).tiny)
    along = scale.view(-1, *[1] * (weight.dim() - 1))
    if transposed:
        each = scale.view(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1)
        along = each.reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))
    return quantised(wide, along, None, kind.weight), scale


def of_input(name: str, kind: QuantizationScheme, scale: Any, zero: Any,
              device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The quantities of inputs as buffers. TensorError for ones that the kind does not have."""
    if scale is None or kind.input is None:
        if zero is not None or scale is not None:
            raise TensorError(f"{name}: input_zero_point: expected an input_scale beside it"
                              if scale is None else
                              f"{name}: input_scale: inputs of {kind.name} are not quantised")
        return None, None
    held = torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(-1)
    if held.numel() != 1 or not bool(held > 0):
        raise TensorError(f"{name}: input_scale: expected one scale above 0, got {scale!r}")
    if kind.input.kind != "int":
        if zero is not None:
            raise TensorError(f"{name}: input_zero_point: zero points are of integers, and inputs are "
                              f"{kind.input}")
        return held.view(()), None
    point = torch.as_tensor(0 if zero is None else zero, device=device).reshape(-1)
    low, high = kind.input.limits
    if point.numel() != 1 or point.is_floating_point() or not low <= int(point) <= high:
        raise TensorError(f"{name}: input_zero_point: expected an integer from {low} to {high}, got "
                          f"{zero!r}")
    return held.view(()), point.int()
