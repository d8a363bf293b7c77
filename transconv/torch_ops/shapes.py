"""Shapes and strides of results, for launches and for fake tensors alike.

A result is channels_last if the input or the weight suggests it, else contiguous; results of 1d
convolutions are always contiguous. Gradients follow the same rule. Shapes may be symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from transconv.torch_ops.arguments import Ints, Params, check_same, transposed_sizes

_sym_max: Callable[[int, int], int] = torch.sym_max


def output_shape(input_shape: Sequence[int], weight_shape: Sequence[int], p: Params) -> Ints:
    """Shape of the result of a checked, batched call."""
    spatial: Ints
    if p.transposed:
        channels = weight_shape[1] * p.groups
        spatial = transposed_sizes(input_shape[2:], weight_shape[2:], p)
    else:
        channels = weight_shape[0]
        spatial = tuple((i + lo + hi - (d * (k - 1) + 1)) // s + 1 for i, k, s, lo, hi, d in
                        zip(input_shape[2:], weight_shape[2:], p.stride, p.pad_lo, p.pad_hi,
                            p.dilation, strict=True))
    if input_shape[1] == 0:
        channels = 0  # torch's rule: no channels in, no channels out, whatever the weight says
    return (input_shape[0], channels, *spatial)


def check_grad(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, p: Params) -> None:
    """RuntimeError unless a gradient has the type, device and shape of the result."""
    check_same(input, "grad_output", grad)
    shape = output_shape(input.shape, weight.shape, p)
    if tuple(grad.shape) != shape:
        raise RuntimeError(f"Expected grad_output of size {list(shape)}, "
                           f"but got {list(grad.shape)}")


def bias_gradient(grad: torch.Tensor, weight: torch.Tensor, p: Params) -> torch.Tensor:
    """The sum of a result's gradient at all positions. Of an input without channels torch makes a result
    without channels, whatever the weight says: then zeros."""
    channels = weight.shape[1] * p.groups if p.transposed else weight.shape[0]
    if grad.shape[1] != channels:
        return grad.new_zeros(channels)
    return grad.sum([0, *range(2, grad.dim())])


def suggests_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch takes a tensor for channels_last; ambiguous ones (one channel, say) are not.

    Walks the dims from the channel outwards: strides must not decrease, a dim with stride 0 or two
    dims that could be swapped end it.
    """
    rank = len(shape)
    if rank not in (4, 5) or strides[1] == 0:
        return False
    least: int = 0
    for dim in (1, *range(rank - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:
            return False  # N11..1 and NCHW with one channel read the same both ways
        least = strides[dim] * shape[dim] if shape[dim] > 1 else strides[dim]
    return True


def result_strides(shape: Sequence[int], channels_last: bool) -> Ints:
    """Strides of a gapless tensor of ``shape``, in elements."""
    rank = len(shape)
    order = [1, *range(rank - 1, 1, -1), 0] if channels_last else list(range(rank - 1, -1, -1))
    strides: list[int] = [0] * rank
    step: int = 1
    for dim in order:
        strides[dim] = step
        size = shape[dim]
        step = step * (max(size, 1) if type(size) is int else _sym_max(size, 1))
    return tuple(strides)


def channels_last_result(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the results of a convolution of these two tensors are channels_last."""
    return (suggests_channels_last(input.shape, input.stride())
            or suggests_channels_last(weight.shape, weight.stride()))


def empty_result(like: torch.Tensor, shape: Sequence[int], channels_last: bool) -> torch.Tensor:
    """An uninitialised result with the strides of the rule, on the device of ``like``."""
    return like.new_empty_strided(tuple(shape), result_strides(shape, channels_last))


def fake_result(input: torch.Tensor, weight: torch.Tensor, p: Params) -> torch.Tensor:
    """The result of a checked call, without values."""
    shape = output_shape(input.shape, weight.shape, p)
    return empty_result(input, shape, channels_last_result(input, weight))


def with_result_strides(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """``tensor`` itself if its elements lie as the rule says, else a copy whose do."""
    strides = result_strides(tensor.shape, channels_last)
    if all(size <= 1 or has == wants for size, has, wants in
           zip(tensor.shape, tensor.stride(), strides, strict=True)):
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


Order = tuple[int, ...] | None


def has_gaps(t: torch.Tensor, channels_last: bool) -> bool:
    """Whether a tensor lies so that kernels for any size do not take it: with gaps, expanded, or with its
    dims in another order than torch's."""
    return order_of(t.shape, t.stride(), channels_last) is None


def order_of(shape: Sequence[int], strides: Sequence[int], channels_last: bool) -> Order:
    """The dims of a dense tensor, outermost first, as torch lays tensors out: contiguous or channels last,
    in this order of preference or the other; None for any other tensor."""
    rank = len(shape)
    ways: tuple[tuple[int, ...], ...] = ((*range(rank),), (0, *range(2, rank), 1))
    for order in reversed(ways) if channels_last else ways:
        step = 1
        for dim in reversed(order):
            size = shape[dim]
            if size != 1:
                if strides[dim] != step:
                    break
                step *= size
        else:
            return order
    return None
