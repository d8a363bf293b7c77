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
from transconv.torch_ops import arguments
from transconv.torch_ops.calls import dispatch, lower_call
from transconv.torch_ops.calls.dispatch import ConvFunction
from transconv.torch_ops.fused import helper_kernels
from transconv.torch_ops.quantization import int4_weights
from transconv.torch_ops.quantized import quantized_functional

Tensor = torch.Tensor
Numbers = tuple[Any, ...]
Given = dict[str, Any]


def of_four_bits(f: ConvFunction, input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
                 numbers: Numbers, given: Given) -> Tensor:
    """The convolution of a packed weight, in the input's type, with other words of a quantised call.
    TensorError for scales that do not fit."""
    return _of_written(f, input, int4_weights.floats(weight, scale, input.dtype), bias, numbers, given)


def of_bytes(f: ConvFunction, input: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None,
             numbers: Numbers, given: Given) -> Tensor:
    """The same of int8 weights with a scale for each output channel."""
    given = {**given, "weight_scale": scale}
    if is_written(f, input, weight, numbers):
        return _of_written(f, input, weight.to(input.dtype), bias, numbers, given)
    made: Tensor = f.public(input, weight, bias, *numbers, **given,  # type: ignore[misc]
                            output_dtype=input.dtype)
    return made


def is_written(f: ConvFunction, input: Tensor, weight: Tensor, numbers: Numbers) -> bool:
    """Whether a weight of bytes should be written as floats before the product."""
    if not helper_kernels.served(input) or not dispatch.is_plain(input) or input.dim() != f.ndims + 2:
        return False
    stride = arguments.ints(numbers[0], f.ndims) or (1,) * f.ndims
    positions = prod(input.shape[2:]) / (1 if f.transposed else prod(stride))
    target = lower_call.target_of(input.device)
    moved = weight.numel() * (weight.element_size() + 2 * input.element_size())
    product = multiplied_us(weight.numel() * input.shape[0] * positions, target)
    return written_us(moved, target) < target.rates.issue.converted_late * product


def multiplied_us(products: float, target: Target) -> float:
    """Microseconds of so many multiply-adds at the chip's rate."""
    return 2 * products / (target.tflops * 1e6)


def written_us(moved: int, target: Target) -> float:
    """Microseconds of a kernel in front of another one that reads and writes so many bytes."""
    rates = target.rates.triton
    return rates.copy_us + moved / (target.bandwidth_gbs * 1e3 * rates.memory_share)


def _of_written(f: ConvFunction, input: Tensor, weight: Tensor, bias: Tensor | None, numbers: Numbers,
                given: Given) -> Tensor:
    """The convolution of a weight that was made for this call."""
    if f.transposed:
        stride, padding, output_padding, groups, dilation = numbers
    else:
        (stride, padding, dilation, groups), output_padding = numbers, 0
    return quantized_functional.of_new_weight(
        f,
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        {**given, "output_dtype": input.dtype},
    )
