"""torch's own convolutions, for what has no kernel of ours: those that `enable` has replaced, too; and
those of int8 and uint8 as torch defines them, of their type, modulo 256."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.torch_ops.arguments import Params, is_wide

Tensor = torch.Tensor


class Original(NamedTuple):
    """aten's kernels of a device, with the keys that they are called with, and the library that replaces
    them."""

    keys: Any
    forward: Any
    backward: Any
    library: Any


@dataclass
class AtenReplacement:
    """The ``devices`` on which aten's convolution is replaced, and the kernels that aten had before
    `enable` put ours in front, by device type. Fallbacks must call these, or they would come back to
    us."""

    devices: frozenset[str] = frozenset()
    originals: dict[str, Original] = field(default_factory=dict)

    def original(self, device: str) -> Original | None:
        """aten's own kernels, where they are replaced."""
        return self.originals.get(device) if device in self.devices else None


replacement = AtenReplacement()


class ByTorch(threading.local):
    """Whether this thread's convolutions are torch's, those of this package's operators among them."""

    on = False


by_torch = ByTorch()


def _one_sided(x: Tensor, p: Params) -> tuple[Tensor, list[int]]:
    """aten takes one padding per dim: pad the longer sides first, pass the shorter to aten."""
    least = [min(lo, hi) for lo, hi in zip(p.pad_lo, p.pad_hi, strict=True)]
    extra: list[int] = []
    for low, lo, hi in reversed(list(zip(least, p.pad_lo, p.pad_hi, strict=True))):
        extra += [lo - low, hi - low]
    return torch.nn.functional.pad(x, extra), least


def aten_forward(x: Tensor, w: Tensor, b: Tensor | None, p: Params, dual: bool = False) -> Tensor:
    """torch's convolution; never one that `enable` replaced, but for ``dual`` numbers: see
    aten_backward."""
    padding: Sequence[int] = p.padding
    if b is not None and is_wide(b, x):
        b = b.to(x.dtype)
    if not p.symmetric:
        x, padding = _one_sided(x, p)
    args = (x, w, b, p.stride, padding, p.dilation, p.transposed, p.output_padding, p.groups)
    original = replacement.original(x.device.type)
    if original is not None and not dual:
        made: Tensor = original.forward.call_boxed(original.keys, *args)
        return made
    return torch.convolution(*args)  # the same operator, without the way through torch.ops


def aten_backward(
    grad: Tensor, x: Tensor, w: Tensor, p: Params, mask: Sequence[bool], dual: bool = False
) -> tuple[Tensor | None, ...]:
    """torch's gradients of input, weight and bias; None where ``mask`` is False. ``dual`` numbers go to
    the operator: the kernel that `enable` keeps ignores tangents."""
    padding: Sequence[int] = p.padding
    sizes = x.shape
    if not p.symmetric:
        x, padding = _one_sided(x, p)
    channels = w.shape[1] * p.groups if p.transposed else w.shape[0]  # of no input grad has none
    args = (
        grad,
        x,
        w,
        [channels] if mask[2] else None,
        p.stride,
        padding,
        p.dilation,
        p.transposed,
        p.output_padding,
        p.groups,
        list(mask),
    )
    original = replacement.original(x.device.type)
    if original is not None and not dual:
        dx, dw, db = original.backward.call_boxed(original.keys, *args)
    else:
        dx, dw, db = torch.ops.aten.convolution_backward.default(*args)
    if dx is not None and mask[0] and not p.symmetric:
        for dim, (size, lo, hi) in enumerate(zip(sizes[2:], p.pad_lo, p.pad_hi, strict=True), 2):
            dx = dx.narrow(dim, lo - min(lo, hi), size)
    return tuple(t if wanted else None for t, wanted in zip((dx, dw, db), mask, strict=True))


def dual(input: Tensor | None) -> bool:
    """Whether tensors may carry tangents: then torch computes, whose operators have rules for them."""
    if forward_ad._current_level < 0 or input is None:
        return False
    if input.device.type not in replacement.devices:  # else torch's operator calls ours again
        stats.handed_over("transform:forward_ad")
    return True


# -- small integers --------------------------------------------------------------------------------
# torch has them on a CPU, where sums wrap around. A kernel sums in s32, and the last eight bits are kept.

WHOLE = (torch.int8, torch.uint8)
USUAL = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)  # scales and zero points


def takes_whole(x: Tensor, w: Tensor) -> bool:
    """Whether kernels may compute the convolution of these integers."""
    return (
        x.dtype in WHOLE
        and w.dtype is x.dtype
        and (x.is_cuda or settings.cpu == "interpret")
        and x.layout is w.layout is torch.strided
        and x.numel() > 0
        and w.numel() > 0
    )


def whole_forward(x: Tensor, w: Tensor, b: Tensor | None, p: Params) -> Tensor:
    """The result in the type of the input; sums and bias (of that type) wrap around."""
    sums: Tensor = torch.ops.transconv.quantized_convolution.default(
        x, w, None, *p, [None] * len(USUAL), USUAL, torch.int32, "", False
    )
    if b is not None:
        sums += b.view(-1, *[1] * (x.dim() - 2))
    return sums.to(x.dtype)
