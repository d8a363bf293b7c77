"""What the zero point of an input adds to the sums of a convolution, known once for a frozen weight:

    sums[f, u0, h0, u1, h1, ..] = zero * sum of weight[f, c, k..] over c and the taps that are inside

where a window reaches ``u`` positions before the first element of an axis, and ``h`` behind the last one.
So it is the same for images of all sizes, and kernels read it instead of computing it in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MOST_STATES = 1024  # ways to reach beyond an image, with as many sums for each feature


def zero_sums(weight: Tensor, zero: Tensor, pad_lo: Sequence[int], pad_hi: Sequence[int],
              dilation: Sequence[int]) -> Tensor | None:
    """The sums, s32, of a weight (oc, ic/groups, *k) of integers and one zero point; None where windows
    reach beyond images in too many ways."""
    import torch

    states = [n + 1 for pair in zip(pad_lo, pad_hi, strict=True) for n in pair]
    if prod(states) > MOST_STATES:
        return None
    found = weight.detach().double().sum(1)  # exact: (oc, *k)
    ends = zip(weight.shape[2:], pad_lo, pad_hi, dilation, strict=True)
    for k, low, high, d in ends:  # the axis in front becomes the last two
        tap = torch.arange(k, device=weight.device) * d
        before = tap >= torch.arange(low + 1, device=weight.device).view(-1, 1)
        behind = tap.flip(0) >= torch.arange(high + 1, device=weight.device).view(-1, 1)
        inside = (before[:, None] & behind[None]).double()
        found = torch.einsum("ok...,uhk->o...uh", found, inside)
    return (found * zero.double()).round().to(torch.int32).contiguous()


def zero_sums_shape(channels: int, pad_lo: Sequence[int], pad_hi: Sequence[int]) -> tuple[int, ...]:
    """The shape of the sums."""
    return (channels, *(n + 1 for pair in zip(pad_lo, pad_hi, strict=True) for n in pair))
