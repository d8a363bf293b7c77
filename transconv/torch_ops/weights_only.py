"""Convolutions of floats by weights of integers: what makes floats of the weights.

A kernel before the product writes them as floats, once in a call, or that of the product makes floats in
its registers, for every tile that reads them. Rates of the device tell which takes less time. Weights of 4
bits are always written: a byte has two of them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from transconv.target import Target
from transconv.torch_ops import arguments, dispatch, execute, four_bits, quantized, texts
from transconv.torch_ops.dispatch import Function

Tensor = torch.Tensor
Numbers = tuple[Any, ...]
Given = dict[str, Any]

# Of a product's time at the chip's rate, more where an operand passes through registers first: 27
# convolutions on an H200 (tests/cost/test_fitted_numbers.py). The two times are of two commits, between
# which products of floats became faster; beside torch's convolutions of the earlier one it is 1.0.
LATE = 1.4


def of_four_bits(f: Function, input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
                 numbers: Numbers, given: Given) -> Tensor:
    """The convolution of a packed weight, in the input's type, with other words of a quantised call.
    TensorError for scales that do not fit."""
    return _of_written(f, input, four_bits.floats(weight, scale, input.dtype), bias, numbers, given)


def of_bytes(f: Function, input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
             numbers: Numbers, given: Given) -> Tensor:
    """The same of int8 weights with a scale for each output channel."""
    given = {**given, "weight_scale": scale}
    if is_written(f, input, weight, numbers):
        return _of_written(f, input, weight.to(input.dtype), bias, numbers, given)
    made: Tensor = f.public(input, weight, bias, *numbers, **given,  # type: ignore[misc]
                            output_dtype=input.dtype)
    return made


def is_written(f: Function, input: Tensor, weight: Tensor, numbers: Numbers) -> bool:
    """Whether a weight of bytes should be written as floats before the product."""
    if not texts.served(input) or not dispatch.is_plain(input) or input.dim() != f.ndims + 2:
        return False
    stride = arguments.ints(numbers[0], f.ndims) or (1,) * f.ndims
    positions = prod(input.shape[2:]) / (1 if f.transposed else prod(stride))
    target = execute.target_of(input.device)
    moved = weight.numel() * (weight.element_size() + 2 * input.element_size())
    late = LATE * multiplied_us(weight.numel() * input.shape[0] * positions, target)
    return written_us(moved, target) < late


def multiplied_us(products: float, target: Target) -> float:
    """Microseconds of so many multiply-adds at the chip's rate."""
    return 2 * products / (target.tflops * 1e6)


def written_us(moved: int, target: Target) -> float:
    """Microseconds of a kernel in front of another one that reads and writes so many bytes."""
    rates = target.rates.triton
    return rates.copy_us + moved / (target.bandwidth_gbs * 1e3 * rates.memory_share)


def _of_written(f: Function, input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Numbers,
                given: Given) -> Tensor:
    """The convolution of a weight that was made for this call."""
    if f.transposed:
        stride, padding, output_padding, groups, dilation = numbers
    else:
        (stride, padding, dilation, groups), output_padding = numbers, 0
    return quantized.of_new_weight(f, input, weight, bias, stride, padding, output_padding, dilation,
                                   groups, {**given, "output_dtype": input.dtype})
