"""The sizes of the results of torch's pools and pads, by arithmetic.

torch tells them for tensors without data, too, but imports SymPy for some of these modules, which takes as
long as compiling a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from transconv.torch_ops.arguments import Ints

POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
PADS = (nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad2d)
KNOWN = frozenset((*POOLS, *ADAPTIVE, *PADS, nn.Upsample, nn.PixelShuffle))
"""Exact classes, as a subclass may do anything."""


def result(module: nn.Module, shape: Ints) -> Ints | None:
    """The shape of the result of a module of ``KNOWN`` for a batched input; None where it does not
    follow."""
    head, sides = shape[:2], shape[2:]
    kind, given = type(module), vars(module)
    if kind in POOLS:
        if given.get("return_indices"):
            return None
        kernel, stride, padding, dilation = (_each(given.get(name, 1), len(sides)) for name in (
            "kernel_size", "stride", "padding", "dilation"))
        sides = tuple(_pooled(n, k, s, p, d, given["ceil_mode"]) for n, k, s, p, d in zip(
            sides, kernel, stride, padding, dilation, strict=True))
    elif kind in ADAPTIVE:
        asked = given["output_size"]
        wanted = tuple(asked) if isinstance(asked, Sequence) else (asked,) * len(sides)
        sides = tuple(n if want is None else want for n, want in zip(sides, wanted, strict=True))
    elif kind in PADS:
        around = given["padding"]  # of the last side first
        sides = tuple(n + around[2 * at] + around[2 * at + 1]
                      for n, at in zip(sides, reversed(range(len(sides))), strict=True))
    elif kind is nn.PixelShuffle:
        times = given["upscale_factor"]
        head, sides = (head[0], head[1] // times**2), tuple(n * times for n in sides)
    elif given["size"] is not None:
        sides = _each(given["size"], len(sides))
    else:
        scales = _each(given["scale_factor"], len(sides))
        sides = tuple(int(n * by) for n, by in zip(sides, scales, strict=True))
    return (*head, *sides) if all(n > 0 for n in (*head, *sides)) else None


def _each(given: Any, count: int) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Sequence) else (given,) * count


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """The number of windows along a side: with ``ceil`` also one that runs over the end, if it begins
    before that."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = room // stride + 1
    if ceil and room % stride and count * stride < size + padding:
        count += 1
    return count
