"""Models that quantize_ quantised, compiled: bytes between convolutions, the numbers of eager calls."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from tests.graph.meant import by_meaning
from transconv.graph import backend
from transconv.graph.graph_report import TorchRow
from transconv.support import knobs

Tensor = torch.Tensor
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
pytestmark = interpreted


class Block(nn.Module):
    """1x1, 3x3 with a stride, 1x1, and a shortcut, as in ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(16, 8, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 1),
            nn.BatchNorm2d(16),
        )
        self.shortcut = nn.Conv2d(16, 16, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def block(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Block())
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        for t in (norm.running_mean, norm.weight, norm.bias, norm.running_var):
            nn.init.uniform_(t, 0.3, 1)
    model = model.requires_grad_(False).eval().to(dtype, memory_format=torch.channels_last)
    return model, torch.randn(2, 3, 9, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)


def rows_of(f: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, list[Any], list[str]]:
    """The result, the rows of the report, and the texts."""
    made: list[Any] = []

    def noted(gm: Any, inputs: Any) -> Any:
        run = backend(gm, inputs, options={"rest": "eager"})
        made.append(run.transconv)  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    with by_meaning() as texts, torch.no_grad():
        found = torch.compile(f, backend=noted)(*tensors)
    return found, [r for m in made for g in m.graphs for r in g.rows], texts


@pytest.mark.every(2)
@pytest.mark.parametrize(("kind", "stored"), [("int8", "i8"), ("fp8", "f8e4m3")])
def test_convolutions_hand_over_bytes(kind: str, stored: str) -> None:
    """Each convolution is a kernel with what follows it; one more may quantise the image."""
    model, x = block()
    plain = model(x)
    assert len(transconv.quantize_(model, kind, calibration=[x]).quantized) == 5
    want = model(x)
    got, rows, texts = rows_of(model, x)
    assert not any(isinstance(r, TorchRow) for r in rows) and len(rows) <= 6
    stores = [line for t in texts for line in t.splitlines() if f" {stored} [" in line and " Y" in line]
    assert not re.search(r"round\(|nearest\(|(?<!1|0) / ", str(texts))  # neither for each element
    assert len(stores) >= 4  # between them: the first one's for two others
    assert (got - plain).norm() < 0.1 * plain.norm()
    if kind == "int8":  # NumPy does not round a factor that a kernel computes in 8-bit floats
        assert (got - want).abs().max() <= 2 * (want.max() - want.min()) / 255
        assert ((got - want).abs() > 1e-5 * want.abs().max()).float().mean() < 0.02  # halves


LAYERS: list[tuple[Any, tuple[int, ...], str]] = [
    (nn.Conv2d(8, 16, 3, 2, (1, 2), 2), (2, 8, 9, 7), "NumPy"),
    (nn.Conv2d(8, 8, (4, 3), padding="same"), (1, 8, 6, 5), "NumPy"),
    (nn.Conv3d(4, 8, 2, padding=1), (1, 4, 3, 4, 2), "NumPy"),
    (nn.Conv2d(8, 8, (3, 2), padding=(2, 1)), (2, 8, 4, 5), "Triton"),
    (nn.Conv1d(16, 32, 5, 3, 4, groups=2), (2, 16, 11), "Triton"),
    (nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), (1, 8, 4, 4), "Triton"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("layer", "shape", "mode"), LAYERS)
def test_zero_points_are_exact_at_borders(layer: Any, shape: tuple[int, ...], mode: str) -> None:
    """Every bit of an integer reference, whose sums are exact, also where windows leave the image: in
    compiled graphs, and in eager calls."""
    torch.manual_seed(1)
    x = torch.randn(shape).clamp(min=-0.3)
    model = nn.Sequential(copy.deepcopy(layer)).eval()
    transconv.quantize_(model, "int8", calibration=[x])
    assert float(model[0].input_zero_point) < -64 and model[0].input_zero_sums is not None
    model[0].weight_scale.fill_(2.0**-6)
    model[0].input_scale.fill_(2.0**-5)
    model[0].bias = nn.Parameter((model[0].bias * 8).round() / 8, requires_grad=False)
    want = model(x)
    if mode == "NumPy":
        got, rows, _ = rows_of(model, x)
        assert not any(isinstance(r, TorchRow) for r in rows)
    else:
        transconv.config.cpu, transconv.config.fallback = "interpret", "error"
        got = model(x)
        assert transconv.stats().native
    assert torch.equal(got, want)


@pytest.mark.slow
def test_what_has_a_kernel_of_its_own() -> None:
    """Without calibration no sums of the zero point are known."""
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3)), torch.randn(1, 4, 6, 6)
    transconv.quantize_(model, "int8")
    want = model(x)
    got, rows, _ = rows_of(model, x)
    own = [r for r in rows if isinstance(r, TorchRow)]
    assert torch.equal(got, want) and "no input_zero_sums tell what the zero point adds" in str(own)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8_weight_only", "int4_weight_only"])
def test_weights_become_floats_in_graphs(kind: str) -> None:
    x = torch.randn(1, 16, 6, 6).bfloat16()
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1)).bfloat16()
    model.eval()
    transconv.quantize_(model, kind)
    want = model(x)
    got, rows, _ = rows_of(model, x)
    assert sum("convolution" in str(r) for r in rows if not isinstance(r, TorchRow)) == 2
    assert (got - want).norm() < 0.01 * want.norm()


def test_casts_to_bytes() -> None:
    """Clamped floats are cast by kernels, others by torch."""
    x = torch.tensor([-300.7, -2.5, -0.5, 0.5, 1.5, 127.49, 300.0, 3.7]).repeat(4)
    for f in (
        lambda x: (x * 1).clamp(-128, 127).to(torch.int8),
        lambda x: x.clamp(0, 255).to(torch.uint8),
        lambda x: (x * 2).clamp(-448, 448).to(torch.float8_e4m3fn),
        lambda x: x.round().clamp(-128, 127).to(torch.int8).float() * 0.5,
    ):
        got, rows, _ = rows_of(f, x)
        assert torch.equal(got.float(), f(x).float()) and got.dtype is f(x).dtype
        assert not any(isinstance(r, TorchRow) for r in rows)
    for f, why in (
        (lambda x: (x * 2).to(torch.int8), "a float is cast to a whole number"),
        (lambda x: x.clamp(-200, 127).to(torch.int8), "a float is cast to a whole number"),
        (lambda x: x.clamp(-1000, 448).to(torch.float8_e4m3fn), "that is not clamped is cast"),
    ):
        _, rows, _ = rows_of(f, x)
        assert why in str([r for r in rows if isinstance(r, TorchRow)])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_reductions_of_bytes_are_kernels(dtype: torch.dtype) -> None:
    """All of them, the least and the largest numbers too."""
    info = torch.iinfo(dtype)
    for shape in ((5, 33), (4, 7, 9)):
        x = torch.randint(info.min, info.max + 1, shape).to(dtype)
        x[0, ..., 0], x[-1, ..., -1] = info.min, info.max

        def f(x: Tensor) -> tuple[Tensor, ...]:
            most, place = x.max(-1)
            least, all_of = x.amin(0), x.sum((0, -1))
            return (
                x.amax((0, 1)),
                least,
                most,
                place,
                x.argmin(0),
                all_of,
                x[:, :5].prod(1),
                x.float().mean(-1),
            )

        got, rows, _ = rows_of(f, x)
        assert not any(isinstance(r, TorchRow) for r in rows), rows
        for found, want in zip(got, f(x), strict=True):
            assert found.dtype is want.dtype
            torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
