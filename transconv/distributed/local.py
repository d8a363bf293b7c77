"""The convolution of a rank's own rows, in any of its three directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from transconv.calls.settings import settings
from transconv.distributed.halo import Window
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import conv_routes
from transconv.torch_ops.calls.call_attributes import request
from transconv.torch_ops.quantized.quantized_gradients import weight_gradient

Tensor = torch.Tensor


class LocalConv(NamedTuple):
    """The numbers of the convolution of some rows of src with some of dst: windows by spatial axis."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    windows: tuple[Window, ...]
    groups: int

    @property
    def params(self) -> Params:
        low, high = tuple(w.low for w in self.windows), tuple(w.high for w in self.windows)
        padding = low if low == high else low + high
        return Params(self.stride, padding, self.dilation, False, (0,) * len(low), self.groups)

    def read(self, src: Tensor) -> Tensor:
        """src without the rows at its end that are not read."""
        for dim, window in enumerate(self.windows, 2):
            if window.unread:
                src = src.narrow(dim, 0, src.shape[dim] - window.unread)
        return src

    def dst(self, src: Tensor, wei: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
        """dst of src and the weight, of this shape."""
        src = self.read(src)
        if not (src.numel() and wei.numel() and all(shape)):
            return with_bias(src.new_zeros(tuple(shape)), bias)
        made: Tensor = conv_routes.forward_route(request("", 0, *self.params), src, wei, bias,
                                            settings.mode).forward(src, wei, bias)
        return made

    def src(self, dst: Tensor, wei: Tensor, like: Tensor) -> Tensor:
        """The gradient of src, with shape and layout of ``like``, whose elements are not read."""
        read = self.read(like)
        if not (read.numel() and wei.numel() and dst.numel()):
            return torch.zeros_like(like)
        made = conv_routes.backward(self.params, dst, read, wei, (True, False, False), settings.mode)[0]
        assert made is not None
        missing = [n for w in reversed(self.windows) for n in (0, w.unread)]
        return F.pad(made, missing) if any(missing) else made

    def wei(self, dst: Tensor, src: Tensor, wei: Tensor, addend: bool = False) -> Tensor:
        """The gradient of the weight ``wei``, whose elements are not read. An ``addend`` of a sum has 32
        bits where the others have 16: the sum is rounded once."""
        src = self.read(src)
        if not (src.numel() and wei.numel() and dst.numel()):
            return torch.zeros_like(wei)
        if addend and wei.element_size() < 4:
            return weight_gradient(src, dst, wei, self.params, False)
        made = conv_routes.backward(self.params, dst, src, wei, (False, True, False), settings.mode)[1]
        assert made is not None
        return made


def with_bias(made: Tensor, bias: Tensor | None) -> Tensor:
    """The tensor plus a bias of its channels."""
    if bias is None:
        return made
    return made + bias.to(made.dtype).view(1, -1, *[1] * (made.dim() - 2))
