"""Quantised convolutions on a GPU: the integers of torch's fallback, routes that start kernels, models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import transconv
import transconv.graph
from transconv import quantized
from transconv.calls import guard
from transconv.ir import DTYPES
from transconv.torch_ops.quantized import input_quantization, quantized_route
from transconv.torch_ops.quantized.input_quantization import quantised

pytestmark = pytest.mark.gpu

TYPES = (torch.int8, torch.uint8)


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    known = torch.iinfo(dtype)
    made = torch.randint(known.min, known.max + 1, shape, dtype=torch.int32).to(dtype)
    return made.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("weight", TYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_integers_are_those_of_torch(source: torch.dtype, weight: torch.dtype, transposed: bool) -> None:
    """Of the sums, in every bit; after scales, but where f32 is at a half."""
    x, w = whole((2, 64, 14, 14), source), whole((64, 48 if transposed else 64, 3, 3), weight)
    call = quantized.conv_transpose2d if transposed else quantized.conv2d
    q: dict[str, Any] = {"input_zero_point": torch.tensor([5], dtype=torch.int32), "weight_zero_point": 3}
    on_gpu = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in q.items()}
    transconv.config.fallback = "silent"
    want = call(x, w, None, 2, 1, **q, output_dtype=torch.int32)
    transconv.config.fallback = "error"
    sums = call(x.cuda(), w.cuda(), None, 2, 1, **on_gpu, output_dtype=torch.int32)
    assert torch.equal(sums.cpu(), want)
    scales = {"input_scale": 2.0**-7, "weight_scale": 2.0**-7, "output_dtype": torch.int8}
    got = call(x.cuda(), w.cuda(), None, 2, 1, **on_gpu, **scales).cpu()
    assert torch.equal(got, (want.double() * 2.0**-14).round().clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize("held", ["i8", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_are_quantised_by_one_kernel(
    held: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, scale = DTYPES[held], torch.tensor(0.011).cuda()
    zero = torch.tensor([5], dtype=torch.int32).cuda() if held == "i8" else None
    for shape in ((32, 64, 56, 56), (3, 5, 7, 9)):
        x = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
        want = quantised(x, scale, zero, row)
        monkeypatch.setattr(input_quantization, "quantised", lambda *_: pytest.fail("no kernel"))
        for _ in range(2):
            got = input_quantization.quantise(x, scale, zero, row)
            off = (got.view(torch.uint8) != want.view(torch.uint8)).sum()
            assert int(off) == 0 and got.stride() == want.stride()


def test_calls_that_come_back_only_start_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = whole((2, 64, 8, 8), torch.int8).cuda(), whole((64, 64, 3, 3), torch.int8).cuda(), None
    scale, each = torch.tensor(0.1).cuda(), torch.full((64,), 0.01).cuda()
    call = lambda: quantized.conv2d(x, w, b, padding=1, input_scale=scale, weight_scale=each)  # noqa: E731
    want = call()
    for _ in range(guard.PATIENCE + 2):
        call()
    monkeypatch.setattr(quantized_route, "find", lambda *_: pytest.fail("decided anew"))
    assert torch.equal(call(), want)


@pytest.mark.parametrize(
    ("kind", "dtype", "off"),
    [
        ("int8", torch.float32, 0.05),
        ("fp8", torch.bfloat16, 0.15),
        ("int8_weight_only", torch.bfloat16, 0.03),
        ("int8_weight_only", torch.float16, 0.03),
    ],
)
def test_models(kind: str, dtype: torch.dtype, off: float) -> None:
    model = (
        nn.Sequential(
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 2, 1),
            nn.ConvTranspose2d(64, 32, 4, 2, 1),
        )
        .cuda()
        .eval()
    )
    x = torch.randn(2, 32, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        want, held = model(x), copy.deepcopy(model).to(dtype)
        transconv.config.fallback = "error"
        report = transconv.quantize_(held, kind, calibration=[x.to(dtype)])
        got = held(x.to(dtype)).float()
    assert not report.left and (got - want).abs().max() <= off * want.abs().max()


class Block(nn.Module):
    """A part of ResNet: bytes between its convolutions, floats for the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(128, 64, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, 3, 1, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 128, 1, bias=False),
            nn.BatchNorm2d(128),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + x)


@pytest.mark.parametrize(("kind", "off"), [("int8", 0.02), ("fp8", 0.06), ("int4_weight_only", 0.02)])
def test_folded_and_compiled_models(kind: str, off: float) -> None:
    """Near the calls of one convolution after another, of which int8 ones have the integers of torch."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).cuda().eval().requires_grad_(False)
    model = model.bfloat16().to(memory_format=torch.channels_last)
    x = torch.randn(4, 128, 15, 14, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    transconv.config.fallback = "error"
    with torch.no_grad():
        assert len(transconv.quantize_(model, kind, calibration=[x]).folded) == 10
        want = model(x)
        folded = transconv.fold(model)
        compiled = torch.compile(model, backend="transconv")
        for _ in range(3):
            assert (folded(x) - want).norm() <= off * want.norm()
            assert (compiled(x) - want).norm() <= off * want.norm()
    rows = [r for g in transconv.graph.report(compiled).graphs for r in g.rows]
    regions = [r for r in rows if isinstance(r, transconv.graph.TorchRow)]
    assert len(regions) == (kind == "int4_weight_only") and len(rows) - len(regions) <= 8
