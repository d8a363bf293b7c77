"""The arguments of a convolution call, checked in torch's order and converted to integers; the casts that
torch's autocast makes for them; and the shapes and strides of results.

The eager path, the registered operators and their fakes all come through here, so a wrong call gets
the same exception class and sentence everywhere. Shapes may hold symbolic integers.

Shapes and strides of results serve launches and fake tensors alike. A result is channels_last if the input
or the weight suggests it, else contiguous; results of 1d convolutions are always contiguous. Gradients
follow the same rule. Shapes may be symbolic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from transconv.calls.guard import at_multiple, means_more
from transconv.calls.settings import settings
from transconv.ir import multiplied

Ints = tuple[int, ...]
SHORT = tuple(getattr(torch, t.torch) for t in multiplied("float") if t.bits == 16)


class Params(NamedTuple):
    """The numbers of one convolution, one entry per spatial dim.

    ``padding`` has one entry per spatial dim, or two (all low sides, then all high sides) where the
    sides differ, as with ``padding="same"`` and an even kernel."""

    stride: Ints
    padding: Ints
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int

    @property
    def pad_lo(self) -> Ints:
        return self.padding[: len(self.stride)]

    @property
    def pad_hi(self) -> Ints:
        return self.padding[-len(self.stride) :]

    @property
    def symmetric(self) -> bool:
        return self.pad_lo == self.pad_hi


def sides(p: Params) -> tuple[Ints, Ints]:
    """``pad_lo`` and ``pad_hi``; torch 2.10's compiler traces no loop over a property."""
    n = len(p.stride)
    return p.padding[:n], p.padding[-n:]


def integer(value: Any) -> int | None:
    """The integer that torch's argument parser makes of ``value``, one of numpy's and of an enum
    included; None for anything else (a float, a bool, a tensor ...)."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return None


def ints(value: Any, ndims: int) -> Ints | None:
    """The integers that torch's argument parser makes of ``value``; None if its form is not plain,
    which is then left to torch to accept or refuse."""
    if not isinstance(value, (tuple, list)):
        one = integer(value)
        return None if one is None else (one,) * ndims
    found = [integer(v) for v in value]
    plain = tuple([n for n in found if n is not None])
    return plain if len(plain) == len(found) else None


def batched(name: str, ndims: int, input_shape: Sequence[int]) -> bool:
    """Whether the input has a batch dim. RuntimeError if its rank is not one of the two legal."""
    if len(input_shape) == ndims + 2:
        return True
    if len(input_shape) == ndims + 1:
        return False
    raise RuntimeError(
        f"Expected {ndims + 1}D (unbatched) or {ndims + 2}D (batched) input to {name}, "
        f"but got input of size: {list(input_shape)}"
    )


def check_bias_dtype(input: torch.Tensor, bias: torch.Tensor | None) -> None:
    """torch compares these two before it looks at any shape (not for transposed convolutions, not
    for string paddings)."""
    if bias is not None and bias.dtype != input.dtype:
        raise RuntimeError(
            f"Input type ({_type_name(input)}) and bias type ({_type_name(bias)}) should be the same"
        )


def same_padding(
    input_shape: Sequence[int], weight_shape: Sequence[int], stride: Ints, dilation: Ints, groups: int
) -> Ints:
    """The padding that keeps the size: per dim, or low sides then high sides where they differ."""
    rank = len(weight_shape)
    ndims = rank - 2
    if ndims < 1:
        raise RuntimeError("weight should have at least three dimensions")
    if groups <= 0:
        raise RuntimeError("non-positive groups is not supported")
    if rank != len(input_shape):
        raise RuntimeError(_rank_mismatch(input_shape, weight_shape))
    for name, value in (("stride", stride), ("dilation", dilation)):
        if len(value) not in (1, ndims):
            raise RuntimeError(f"{name} cannot broadcast to {ndims} dimensions")
    if any(s != 1 for s in stride):
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    steps = dilation if len(dilation) == ndims else dilation * ndims
    total = [d * (k - 1) for d, k in zip(steps, weight_shape[2:], strict=True)]
    lo = tuple(t // 2 for t in total)
    hi = tuple(t - low for t, low in zip(total, lo, strict=True))
    return lo if lo == hi else lo + hi


def resolve_call(input: Any, weight: Any, bias: Any, *numbers: Any, two_sided: bool = False) -> Params:
    """``resolve`` for the shapes of tensors."""
    sizes = None if bias is None else bias.shape
    return resolve(input.shape, weight.shape, sizes, *numbers, two_sided=two_sided)


def resolve(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
    *,
    two_sided: bool = False,
) -> Params:
    """All shape checks of a batched call, in torch's order; every list spread to one entry per dim.

    ``two_sided`` allows a padding list of low sides and high sides, which only the registered
    operators take. RuntimeError with torch's sentence if something does not fit."""
    if isinstance(padding, str):
        if padding == "same":
            padding = same_padding(input_shape, weight_shape, stride, dilation, groups)
            two_sided = True
        elif padding == "valid":
            padding = (0,)
        else:
            raise RuntimeError(f"Invalid padding string: '{padding}'")
    ndims = len(weight_shape) - 2
    if ndims < 1:
        raise RuntimeError("weight should have at least three dimensions")
    if groups <= 0:
        raise RuntimeError("non-positive groups is not supported")
    two_sided = two_sided and not transposed and len(padding) == 2 * ndims
    params = Params(
        _spread("stride", stride, ndims),
        tuple(padding) if two_sided else _spread("padding", padding, ndims),
        _spread("dilation", dilation, ndims),
        bool(transposed),
        _spread("output_padding", output_padding, ndims),
        groups,
    )
    _check_signs(params)
    check_shapes(input_shape, weight_shape, bias_shape, params)
    return params


def spelled_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy with its values in memory. A copy may have other strides, so this
    comes before any look-up or plan for them."""
    return tensor.clone() if means_more(tensor) else tensor


def is_wide(bias: torch.Tensor | None, input: torch.Tensor) -> bool:
    """Whether a bias is float32 beside 16-bit tensors: the kernel adds it as it is."""
    return bias is not None and bias.dtype is torch.float32 and input.dtype in SHORT


def check_tensors(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool = False
) -> None:
    """Element types and devices must agree; torch lets some mixes with meta tensors through and
    returns uninitialised memory, we do not. A ``wide`` bias may be float32."""
    check_same(input, "weight", weight)
    if bias is not None and not (wide and is_wide(bias, input) and bias.device == input.device):
        check_same(input, "bias", bias)


def check_same(input: torch.Tensor | None, role: str, other: torch.Tensor | None) -> None:
    """RuntimeError unless both are there, of one type and on one device. torch's schemas take None for
    a tensor."""
    if input is None or other is None:
        raise RuntimeError(f"Expected a tensor, but got None as {'input' if input is None else role}")
    if other.dtype == input.dtype and other.device == input.device:
        return
    text = f"Input type ({_type_name(input)}) and {role} type ({_type_name(other)}) should be the same"
    if other.device != input.device:
        text += f", but they are on {input.device} and {other.device}"
    raise RuntimeError(text)


def _type_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return name if tensor.device.type == "cpu" else f"{tensor.device.type} {name}"


def _spread(name: str, value: Ints, ndims: int) -> Ints:
    if len(value) == ndims:
        return tuple(value)
    if len(value) == 1:
        return tuple(value) * ndims
    raise RuntimeError(
        f"expected {name} to be a single integer value or a list of {ndims} values to match the "
        f"convolution dimensions, but got {name}={list(value)}"
    )


def _check_signs(p: Params) -> None:
    if any(v < 0 for v in p.padding):
        raise RuntimeError("negative padding is not supported")
    if any(v < 0 for v in p.output_padding):
        raise RuntimeError("negative output_padding is not supported")
    if any(v <= 0 for v in p.stride):
        raise RuntimeError("non-positive stride is not supported")
    if any(v <= 0 for v in p.dilation):
        raise RuntimeError("non-positive dilation is not supported, dilation should be greater than zero")


def _rank_mismatch(input_shape: Sequence[int], weight_shape: Sequence[int]) -> str:
    rank = len(weight_shape)
    return (
        f"Expected {rank}-dimensional input for {rank}-dimensional weight {list(weight_shape)}, but got "
        f"{len(input_shape)}-dimensional input of size {list(input_shape)} instead"
    )


def check_shapes(
    input_shape: Sequence[int], weight_shape: Sequence[int], bias_shape: Sequence[int] | None, p: Params
) -> None:
    """RuntimeError, in torch's order and words, where shapes do not fit each other."""
    weight, groups = list(weight_shape), p.groups
    if len(weight) != len(input_shape):
        raise RuntimeError(_rank_mismatch(input_shape, weight_shape))
    if weight[0] < groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, "
            f"but got weight of size {weight} instead"
        )
    if weight[0] % groups != 0:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, "
            f"but got weight of size {weight} instead"
        )
    takes, makes = (weight[0], weight[1] * groups) if p.transposed else (weight[1] * groups, weight[0])
    if input_shape[1] != takes:
        # Only here: a compiler that traces the checks has no text for a symbolic number of groups.
        given = "transposed=1" if p.transposed else f"groups={groups}"
        raise RuntimeError(
            f"Given {given}, weight of size {weight}, expected input{list(input_shape)} to have "
            f"{takes} channels, but got {input_shape[1]} channels instead"
        )
    if bias_shape is not None and (len(bias_shape) != 1 or bias_shape[0] != makes):
        given = "transposed=1, weight" if p.transposed else "weight"
        raise RuntimeError(
            f"Given {given} of size {weight}, expected bias to be 1-dimensional with {makes} "
            f"elements, but got bias of size {list(bias_shape)} instead"
        )
    if any(k < 1 for k in weight[2:]):
        raise RuntimeError(f"kernel size should be greater than zero, but got {weight[2:]}")
    if not p.transposed:
        _check_kernel_fits(input_shape, weight_shape, p)
    if input_shape[0] == 0 or input_shape[1] == 0:
        return  # an empty result: torch checks no more
    if any(s == 0 for s in input_shape[2:]):
        raise RuntimeError(
            "Only zero batch or zero channel inputs are supported, but got input "
            f"shape: {list(input_shape)}"
        )
    if p.transposed:
        _check_transposed(input_shape, weight_shape, p)


def _check_kernel_fits(input_shape: Sequence[int], weight_shape: Sequence[int], p: Params) -> None:
    sizes = [i + lo + hi for i, lo, hi in zip(input_shape[2:], *sides(p), strict=True)]
    reach = [d * (k - 1) + 1 for d, k in zip(p.dilation, weight_shape[2:], strict=True)]
    if any(s < r for s, r in zip(sizes, reach, strict=True)):
        raise RuntimeError(
            f"Calculated padded input size per channel: ({' x '.join(map(str, sizes))}). Kernel size: "
            f"({' x '.join(map(str, reach))}). Kernel size can't be greater than actual input size"
        )


def _check_transposed(input_shape: Sequence[int], weight_shape: Sequence[int], p: Params) -> None:
    if any(o >= s and o >= d for o, s, d in zip(p.output_padding, p.stride, p.dilation, strict=True)):
        names = ("depth", "height", "width")[-len(p.stride) :]
        shown = " ".join(
            f"{what}_{name}: {value}"
            for what, values in (
                ("output_padding", p.output_padding),
                ("stride", p.stride),
                ("dilation", p.dilation),
            )
            for name, value in zip(names, values, strict=True)
        )
        raise RuntimeError(
            f"output padding must be smaller than either stride or dilation, but got {shown}"
        )
    if weight_shape[1] == 0:
        raise RuntimeError(
            "a transposed convolution needs at least one output channel, but got "
            f"weight of size {list(weight_shape)}"
        )
    sizes = transposed_sizes(input_shape[2:], weight_shape[2:], p)
    if any(s < 0 for s in sizes):  # torch's kernels decide about an empty result
        shape = " x ".join(map(str, input_shape[2:]))
        raise RuntimeError(
            f"Given input size per channel: ({shape}). Calculated output size per channel: "
            f"({' x '.join(map(str, sizes))}). Output size is too small"
        )


def transposed_sizes(sizes: Sequence[int], kernel: Sequence[int], p: Params) -> Ints:
    """Spatial sizes of a transposed convolution's result."""
    return tuple(
        (i - 1) * s - lo - hi + d * (k - 1) + 1 + extra
        for i, k, s, lo, hi, d, extra in zip(
            sizes, kernel, p.stride, *sides(p), p.dilation, p.output_padding, strict=True
        )
    )


Tensor = torch.Tensor


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """The type that autocast gives a tensor on this device; None where it is off."""
    device = input.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The casts that torch's autocast makes for convolutions: every eligible tensor to the region's
    dtype, float64 and integers not."""
    device, dtype = input.device.type, autocast_dtype(input)
    if dtype is None:
        return input, weight, bias
    return (
        _cast(input, device, dtype),
        _cast(weight, device, dtype),
        None if bias is None else _cast(bias, device, dtype),
    )


def traced_autocast(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
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
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device


def _cast(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if _is_cast(tensor, device) else tensor


def expect_module(model: object, function: str, filter_fn: object = None) -> None:
    """Raises TypeError for what is no module, and for a filter of modules that is no function;
    ``function``: what was called with them."""
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"transconv.{function}: expected a torch.nn.Module, got {what}")
    if filter_fn is not None and not callable(filter_fn):
        what = type(filter_fn).__name__
        raise TypeError(f"transconv.{function}: filter_fn: expected a function(module, name), got {what}")


_sym_max: Callable[[int, int], int] = torch.sym_max


def output_shape(input_shape: Sequence[int], weight_shape: Sequence[int], p: Params) -> Ints:
    """Shape of the result of a checked, batched call."""
    spatial: Ints
    if p.transposed:
        channels = weight_shape[1] * p.groups
        spatial = transposed_sizes(input_shape[2:], weight_shape[2:], p)
    else:
        channels = weight_shape[0]
        spatial = tuple(
            (i + lo + hi - (d * (k - 1) + 1)) // s + 1
            for i, k, s, lo, hi, d in zip(
                input_shape[2:], weight_shape[2:], p.stride, *sides(p), p.dilation, strict=True
            )
        )
    if input_shape[1] == 0:
        channels = 0  # torch's rule: no channels in, no channels out, whatever the weight says
    return (input_shape[0], channels, *spatial)


def check_grad(grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, p: Params) -> None:
    """RuntimeError unless a gradient has the type, device and shape of the result."""
    check_same(input, "grad_output", grad)
    shape = output_shape(input.shape, weight.shape, p)
    if tuple(grad.shape) != shape:
        raise RuntimeError(f"Expected grad_output of size {list(shape)}, but got {list(grad.shape)}")


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
    dims that could be swapped end it."""
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
    return suggests_channels_last(input.shape, input.stride()) or suggests_channels_last(
        weight.shape, weight.stride()
    )


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
    if all(
        size <= 1 or has == wants
        for size, has, wants in zip(tensor.shape, tensor.stride(), strides, strict=True)
    ):
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def in_any_batch(input: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """In invariant mode a tensor of images as it lies in a batch of any number of them: images outermost,
    without gaps, from a multiple of 16 bytes on; a copy if it does not. Otherwise itself. ``like``: the
    tensor with which it decides whether results are channels_last."""
    if not settings.invariant or not input.numel():
        return input
    shape, strides = input.shape, input.stride()
    step = max(n * s for n, s in zip(shape[1:], strides[1:], strict=True))
    if shape[0] == 1 and strides[0] < step:  # torch says any stride of a dim of one
        input = input.as_strided(shape, (step, *strides[1:]))
    last = channels_last_result(input, like)
    return at_multiple(with_result_strides(input, last) if has_gaps(input, last) else input)


def in_any_place(t: torch.Tensor) -> torch.Tensor:
    """In invariant mode a tensor from a multiple of 16 bytes on, a copy if it begins elsewhere: its place
    in a batch must not decide which kernel is asked for. Otherwise itself."""
    return at_multiple(t) if settings.invariant else t


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
