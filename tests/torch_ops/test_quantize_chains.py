"""What quantize_ folds into convolutions, and what fold makes of quantised models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from transconv.__main__ import main
from transconv.conv import Epilogue, zero_sums, zero_sums_shape
from transconv.support import knobs
from transconv.target import TARGETS
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.quantized import quantized_modules
from transconv.torch_ops.quantized.quantized_functional import FUNCTIONS
from transconv.torch_ops.quantized.quantized_modules import FusedQuantConv2d

Tensor = torch.Tensor
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
Identity = nn.Identity


def normed(model: nn.Module) -> Any:
    """In eval mode, with statistics that change values."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            for t in (m.running_mean, m.running_var, m.weight, m.bias):
                nn.init.uniform_(t, 0.4, 1.2)
    return model.requires_grad_(False).eval()


def twice(module: nn.Module, given: Any, made: Tensor) -> Tensor:
    return made * 2


class Parts(nn.Module):
    """Modules of every kind, of which some are needed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.second, self.other, self.silu = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU()
        self.third, self.seen = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.last, self.hooked = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        self.hooked.register_forward_hook(twice)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x)))
        x = self.silu(self.other(self.second(x)))
        y = self.third(x)
        x = self.relu(self.seen(y) + y)  # its second call: neither is folded
        return self.hooked(self.last(x))


def test_what_is_folded() -> None:
    torch.manual_seed(0)
    model, x = normed(Parts()), torch.randn(2, 4, 6, 6)
    want = model(x)
    report = transconv.quantize_(model, "int8", calibration=[x])
    assert len(report.quantized) == 4 and report.folded == ("norm", "other", "silu")
    assert "4 convolutions quantised (int8), 0 left, 3 modules folded into them" in str(report)
    assert type(model.norm) is type(model.silu) is Identity and type(model.relu) is nn.ReLU
    assert type(model.seen) is type(model.hooked) is nn.BatchNorm2d
    assert model.second.activation == "silu" and "activation=silu" in repr(model.second)
    assert model.second.bias is not None and (model(x) - want).norm() < 0.03 * want.norm()
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("case", ["training", "asked", "not traced"])
def test_what_is_not(case: str) -> None:
    class Branches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    parts = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    model = normed((Branches if case == "not traced" else nn.Sequential)(*parts))
    report = transconv.quantize_(model.train(case == "training"), fold=case != "asked")
    assert report.quantized == ("0",) and not report.folded and type(model[1]) is nn.BatchNorm2d


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(4, 8, 3, groups=2, bias=False), (2, 4, 9)),
        (nn.Conv3d(2, 4, 2), (1, 2, 3, 4, 3)),
        (nn.ConvTranspose2d(4, 8, 3, 2, groups=2), (1, 4, 4, 5)),
        (nn.ConvTranspose1d(4, 4, 2), (1, 4, 5)),
    ],
)
def test_norms_scale_weights(conv: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = getattr(nn, f"BatchNorm{len(shape) - 2}d")(conv.out_channels)
    model, x = normed(nn.Sequential(copy.deepcopy(conv), norm, nn.ReLU())), torch.randn(shape)
    want = model(x)
    transconv.quantize_(model, "int8_weight_only")
    assert [*map(type, model)][1:] == [Identity, Identity]
    assert (model(x) - want).norm() < 0.01 * want.norm() and float(want.norm()) > 0


class Block(nn.Module):
    """Two convolutions and a shortcut, with a sum that broadcasts or has another type."""

    def __init__(self, gate: str = "") -> None:
        super().__init__()
        self.gate = gate
        self.one, self.norm, self.relu = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()
        self.two = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        added = x.mean((2, 3), True) if self.gate == "mean" else x.double() if self.gate == "f64" else x
        return torch.relu(self.two(self.relu(self.norm(self.one(x)))) + added)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fallback", pytest.param("interpret", marks=interpreted)])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4_weight_only"])
def test_folded_models_hand_over_bytes(kind: str, way: str) -> None:
    transconv.config.cpu = way
    torch.manual_seed(0)
    model, x = normed(nn.Sequential(Block())), torch.randn(2, 8, 5, 6).bfloat16()
    model = model.bfloat16()
    x = x.contiguous(memory_format=torch.channels_last)
    plain = model(x)
    transconv.quantize_(model, kind, calibration=[x])
    folded = transconv.fold(model)
    convs = [m for m in folded.modules() if isinstance(m, FusedQuantConv2d)]
    assert len(convs) == 2 and len(folded.graph.nodes) == 4 and convs[1].activation == "relu"
    assert convs[0].output_scale is convs[1].input_scale
    seen: list[torch.dtype] = []
    convs[1].register_forward_pre_hook(lambda m, given: seen.append(given[0].dtype))
    got = folded(x)
    assert seen == [{"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.bfloat16)]
    assert got.dtype is torch.bfloat16 and got.is_contiguous(memory_format=torch.channels_last)
    assert (got - model(x)).norm() < 0.03 * plain.norm() and (got - plain).norm() < 0.1 * plain.norm()
    assert torch.equal(folded(x[0]), got[0])
    assert transconv.stats().native if way == "interpret" else transconv.stats().fallback
    half = copy.deepcopy(folded).half()
    assert half(x.half()).dtype is torch.float16


@pytest.mark.parametrize("gate", ["mean", "f64"])
def test_other_sums_are_torchs(gate: str) -> None:
    torch.manual_seed(0)
    model, x = normed(nn.Sequential(Block(gate))), torch.randn(2, 8, 5, 6)
    transconv.quantize_(model, "int8", calibration=[x])
    folded, want = transconv.fold(model), model(x)
    assert folded(x).dtype is want.dtype
    torch.testing.assert_close(folded(x), want, rtol=0.02, atol=0.02)


def test_results_stay_floats_where_readers_differ() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.a, self.b = (nn.Conv2d(4, 4, 1) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.one(x)
            return self.a(y), self.b(y), y

    model, x = normed(Two()), torch.randn(1, 4, 3, 3)
    transconv.quantize_(model, "fp8", calibration=[x])
    folded = transconv.fold(model)
    assert folded.one.output_scale is None  # it is a result, too
    torch.testing.assert_close(folded(x), model(x))


# -- what zero points add --------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(12))
def test_sums_of_zero_points(seed: int) -> None:
    """Those of an image that is the zero point everywhere, at every position."""
    draw = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high, (), generator=draw))  # noqa: E731
    rank, groups = 1 + seed % 3, 1 + seed % 2
    k, d, s, low, high = (
        [pick(a, b) for _ in range(rank)] for a, b in ((1, 4), (1, 3), (1, 4), (0, 3), (0, 3))
    )
    n = [max(pick(1, 6), (k[i] - 1) * d[i] + 1 - low[i] - high[i]) for i in range(rank)]
    weight = torch.randint(-128, 128, (4, 3, *k), generator=draw).char()
    found = zero_sums(weight, torch.tensor([-7]), low, high, d)
    assert found is not None and found.shape == zero_sums_shape(4, low, high)
    image = F.pad(
        torch.full((1, 3 * groups, *n), -7.0).double(),
        [p for i in reversed(range(rank)) for p in (low[i], high[i])],
    )
    want = getattr(F, f"conv{rank}d")(image, weight.double(), stride=s, dilation=d, groups=groups)[0]
    places: list[Tensor] = []
    for i in range(rank):
        first = torch.arange(want.shape[1 + i]) * s[i] - low[i]
        shape = [-1 if j == i else 1 for j in range(rank)]
        reach = first + (k[i] - 1) * d[i] - (n[i] - 1)
        places += [(-first).clamp(min=0).view(shape), reach.clamp(min=0).view(shape)]
    assert torch.equal(found[(slice(None), *places)].double(), want)


def test_no_sums_of_many_borders() -> None:
    weight, sides = torch.ones(1, 1, 31, 31).char(), (15, 15)
    assert zero_sums(weight, torch.tensor([1]), sides, sides, (1, 1)) is None


@pytest.mark.slow
@interpreted
def test_known_sums_as_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """A word of epilogues, which the checks of problems take, too."""
    words = "zero:src:known:2x2x2x2"
    assert str(Epilogue.parse(f"{words}+mul:0.25")) == f"{words}+mul:0.25"
    line = "mb1g2ic32ih4oc32oh4kh3ph1 dt=s8:s8:s8"
    assert main(["run", line, "--prop", "fwd", "--epilogue", f"{words}+mul:0.25"]) == 0
    assert main(["run", line, "--prop", "fwd", "--epilogue", "zero:src:known:1x2x2x2"]) == 1
    assert "expected those of windows that reach [1, 1, 1, 1] positions" in capsys.readouterr().out
    assert main(["run", line.replace("s8:", "u8:", 1), "--prop", "fwd", "--epilogue", words]) == 1
    assert "for forward convolutions of s8" in capsys.readouterr().out


def test_words_that_are_wrong() -> None:
    x, w = torch.zeros(1, 4, 5, 5).char(), torch.zeros(8, 4, 3, 3).char()
    for given, said in (
        ({"input_zero_sums": torch.zeros(8, 1)}, "input_zero_sums: expected None or an int32"),
        ({"residual": torch.zeros(1, 8, 2, 2)}, "residual: expected the result's shape"),
        ({"residual": x}, "residual: expected floats in the shape of the result, got torch.int8"),
    ):
        with pytest.raises(transconv.errors.TensorError, match=said):
            transconv.quantized.conv2d(x, w, **given)


# -- weights alone ---------------------------------------------------------------------------------


def test_weights_are_written_where_many_positions_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_call, "target_of", lambda device: TARGETS["sm_90"])
    transconv.config.cpu = "interpret"
    f, weight = FUNCTIONS[2, False], torch.empty(640, 640, 3, 3, dtype=torch.int8, device="meta")
    large, small = (torch.empty(2, 640, n, n).bfloat16() for n in (32, 4))
    assert quantized_modules.is_written(f, large, weight, (1, 1, 1, 1))
    assert not quantized_modules.is_written(f, large, weight, (16, 1, 1, 1))
    assert not quantized_modules.is_written(f, small, weight, (1, 1, 1, 1))
