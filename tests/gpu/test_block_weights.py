"""Weights in blocks on a GPU: every bit of what exact sums give, over drawn sizes.

Inputs are small whole numbers and scales powers of two, so that sums are exact in f32 in any order, and a
result is that of f64, rounded once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import transconv
from tests.gpu import cases as c
from transconv.torch_ops.quantized import block_scales, quantized_modules
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


def weight_of(layer: Drawn, kind: str, device: str) -> BlockWeight:
    """Drawn elements, which are small, and scales, which are powers of two near 1."""
    how, total = KINDS[kind], layer.rows * layer.groups
    taps = layer.kernel if how.of_floats else ()
    padded = -(-layer.channels // layer.size) * layer.size
    shape = (total, *layer.kernel, padded)
    two = 2.0 ** torch.randint(-3, 2, (total, *taps, padded // layer.size), device=device)
    if kind == "mxfp8":
        elements = torch.randint(-8, 9, shape, device=device).to(how.dtype)
    else:
        elements = torch.randint(0, 256, (*shape[:-1], padded // 2), device=device, dtype=torch.uint8)
    if how.scale.kind == "int":
        scale = two.to(torch.float8_e8m0fnu)
    else:
        scale = two.to(torch.float8_e4m3fn if how.of_floats else torch.float32)
    whole = torch.full((1,), 0.5, device=device) if kind == "nvfp4" else None
    return BlockWeight(how, layer.channels, elements, scale, whole)


def differing(layer: Drawn, kind: str, dtype: torch.dtype, last: bool, device: str) -> int:
    """Elements that are not those of f64, rounded once."""
    whole: dict[str, Any] = {"device": device, "dtype": torch.float32}
    rank, total = len(layer.image), layer.rows * layer.groups
    x = torch.randint(-3, 4, (layer.batch, layer.channels * layer.groups, *layer.image), **whole).to(dtype)
    if last and rank > 1:
        x = x.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[rank - 2])
    if last and rank == 1:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    weight = weight_of(layer, kind, device)
    bias = torch.randint(-8, 9, (total,), **whole).to(dtype) if layer.bias else None
    words = layer.stride, layer.padding, layer.dilation, layer.groups
    got = quantized_modules.convolved(FUNCTIONS[rank, False], x, weight, bias, words, {})
    plain = weight.unpacked(torch.float64)
    want = CALLS[rank - 1](x.double(), plain, None if bias is None else bias.double(), *words)
    assert got.dtype is dtype and got.shape == want.shape
    return int((got != want.to(dtype)).sum())


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_sums_of_drawn_layers_are_exact(first: int, cases: c.Cases) -> None:
    transconv.config.fallback = "error"
    for seed in range(first, first + 6):
        layer, dtype = drawn(seed), (torch.bfloat16, torch.float16)[seed % 2]
        for last in (True, False) if seed % 3 == 0 else (True,):
            with cases.case(f"seed {seed} {layer} {dtype} {'last' if last else ''}"):
                assert differing(layer, "int4_weight_only", dtype, last, c.DEVICE) == 0
                assert transconv.stats().native
    cases.finish(6)


@pytest.mark.parametrize("layer", LARGE, ids=str)
def test_sums_of_large_layers_are_exact(layer: Drawn) -> None:
    if c.DEVICE == "cpu":
        pytest.skip("a minute each in an interpreter")
    transconv.config.fallback = "error"
    assert differing(layer, "int4_weight_only", torch.bfloat16, True, c.DEVICE) == 0
    assert transconv.stats().native


FLOATS = ("mxfp8", "mxfp4", "nvfp4")


def in_blocks(layer: Drawn, kind: str, seed: int) -> Drawn:
    """The layer with channels that end within a block."""
    channels = (16, 17, 33, 40, 63, 64, 96, 130)[seed % 8]
    return replace(layer, channels=channels, size=KINDS[kind].group)


@pytest.mark.parametrize("written", [True, False], ids=["written", "in the product"])
@pytest.mark.parametrize("kind", FLOATS)
def test_sums_of_drawn_layers_with_blocks_are_exact(
    kind: str, written: bool, cases: c.Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    transconv.config.fallback = "error"
    monkeypatch.setattr(block_scales, "pays", lambda *_: written)
    for seed in range(100, 108):
        layer, dtype = in_blocks(drawn(seed), kind, seed), (torch.bfloat16, torch.float16)[seed % 2]
        with cases.case(f"seed {seed} {layer} {dtype}"):
            assert differing(layer, kind, dtype, True, c.DEVICE) == 0
    cases.finish(8)


@pytest.mark.parametrize("written", [True, False], ids=["written", "in the product"])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("layer", LARGE, ids=str)
def test_sums_of_large_layers_with_blocks_are_exact(
    layer: Drawn, kind: str, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if c.DEVICE == "cpu":
        pytest.skip("a minute each in an interpreter")
    transconv.config.fallback = "error"
    monkeypatch.setattr(block_scales, "pays", lambda *_: written)
    layer = replace(layer, size=KINDS[kind].group)
    assert differing(layer, kind, torch.bfloat16, True, c.DEVICE) == 0


@pytest.mark.parametrize("written", [True, False], ids=["written", "in the product"])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(("rows", "channels", "out"), [(1, 40, 33), (17, 129, 64), (300, 512, 1024)])
def test_sums_of_linear_layers_with_blocks_are_exact(
    kind: str, rows: int, channels: int, out: int, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if c.DEVICE == "cpu" and rows == 300:
        pytest.skip("a minute in an interpreter")
    transconv.config.fallback = "error"
    monkeypatch.setattr(block_scales, "pays", lambda *_: written)
    layer = Drawn(rows, channels, KINDS[kind].group, out, 1, (), (), (), (), (), False)
    weight = weight_of(layer, kind, c.DEVICE)
    x = torch.randint(-3, 4, (rows, channels), device=c.DEVICE).to(torch.bfloat16)
    want = x.double() @ weight.unpacked(torch.float64).T
    assert torch.equal(block_scales.linear(x, weight, None), want.to(torch.bfloat16))
