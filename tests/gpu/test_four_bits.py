"""Weights of 4 bits on a GPU: every bit of what exact sums give, over drawn sizes.

Inputs are small whole numbers and scales powers of two, so that sums are exact in f32 in any order, and a
result is that of f64, rounded once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import transconv
from tests.gpu import cases as c
from transconv.torch_ops.quantized import block_scales
from transconv.torch_ops.quantized.block_scales import BlockWeight
from transconv.torch_ops.quantized.input_quantization import KINDS
from transconv.torch_ops.quantized.quantized_functional import FUNCTIONS

pytestmark = pytest.mark.gpu

CALLS = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)


@dataclass(frozen=True)
class Drawn:
    """A layer. ``size``: input channels that share a scale."""

    batch: int
    channels: int  # of one group
    size: int
    rows: int  # of one group
    groups: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: bool


def drawn(seed: int) -> Drawn:
    """Channels that no tile divides, groups of scales that end within a tile, kernels as large as the
    padded image, strides that leave elements unread."""
    r = random.Random(seed)
    rank = r.choice((1, 2, 2, 2, 3))
    size = r.choice((2, 4, 6, 16, 32, 48))
    groups = r.choice((1, 1, 1, 2, 3))
    kernel = tuple(r.choice((1, 2, 3, 3, 5)) for _ in range(rank))
    dilation = tuple(r.choice((1, 1, 2)) for _ in range(rank))
    padding = tuple(r.randrange(k) for k in kernel)
    least = [max(1, (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    return Drawn(
        r.choice((1, 2, 5)),
        size * r.choice((1, 2, 3)),
        size,
        r.choice((1, 7, 16, 33, 64, 130)),
        groups,
        tuple(n + r.choice((0, 1, 7, 14)) for n in least),
        kernel,
        tuple(r.choice((1, 1, 2, 3)) for _ in range(rank)),
        padding,
        dilation,
        r.random() < 0.5,
    )


LARGE = (
    Drawn(4, 256, 32, 256, 1, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), True),
    Drawn(8, 512, 128, 384, 1, (28, 28), (1, 1), (1, 1), (0, 0), (1, 1), False),
    Drawn(2, 320, 32, 320, 1, (64, 64), (3, 3), (2, 2), (1, 1), (1, 1), True),
    Drawn(2, 128, 128, 1280, 1, (300,), (3,), (1,), (1,), (1,), False),
)


def differing(layer: Drawn, dtype: torch.dtype, last: bool, device: str) -> int:
    """Elements that are not those of f64, rounded once."""
    whole: dict[str, Any] = {"device": device, "dtype": torch.float32}
    rank, total = len(layer.image), layer.rows * layer.groups
    x = torch.randint(-3, 4, (layer.batch, layer.channels * layer.groups, *layer.image), **whole).to(dtype)
    if last and rank > 1:
        x = x.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[rank - 2])
    weight = torch.randint(
        0, 256, (total, *layer.kernel, layer.channels // 2), device=device, dtype=torch.uint8
    )
    scale = 2.0 ** torch.randint(-3, 2, (total, layer.channels // layer.size), **whole)
    bias = torch.randint(-8, 9, (total,), **whole).to(dtype) if layer.bias else None
    words = layer.stride, layer.padding, layer.dilation, layer.groups
    held = BlockWeight(KINDS["int4_weight_only"], layer.channels, weight, scale)
    got = block_scales.convolved(FUNCTIONS[rank, False], x, held, bias, words, {})
    plain = held.unpacked(torch.float32)
    want = CALLS[rank - 1](x.double(), plain.double(), None if bias is None else bias.double(), *words)
    assert got.dtype is dtype and got.shape == want.shape
    return int((got != want.to(dtype)).sum())


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_sums_of_drawn_layers_are_exact(first: int, cases: c.Cases) -> None:
    transconv.config.fallback = "error"
    for seed in range(first, first + 6):
        layer, dtype = drawn(seed), (torch.bfloat16, torch.float16)[seed % 2]
        for last in (True, False) if seed % 3 == 0 else (True,):
            with cases.case(f"seed {seed} {layer} {dtype} {'last' if last else ''}"):
                assert differing(layer, dtype, last, c.DEVICE) == 0
                assert transconv.stats().native
    cases.finish(6)


@pytest.mark.parametrize("layer", LARGE, ids=str)
def test_sums_of_large_layers_are_exact(layer: Drawn) -> None:
    if c.DEVICE == "cpu":
        pytest.skip("a minute each in an interpreter")
    transconv.config.fallback = "error"
    assert differing(layer, torch.bfloat16, True, c.DEVICE) == 0
    assert transconv.stats().native
