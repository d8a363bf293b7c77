"""Modules with quantised weights, and ``quantize_``: the numbers of an integer reference in torch."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from transconv import errors
from transconv.calls import guard
from transconv.ir import DTYPES
from transconv.runtime import Plan, launch
from transconv.support import knobs
from transconv.torch_ops.calls import route
from transconv.torch_ops.quantized import (
    block_scales,
    input_quantization,
    quantized_functional,
    quantized_route,
)
from transconv.torch_ops.quantized.input_quantization import KINDS, quantised, ranged

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


class Causal(nn.Conv1d):
    """Pads on one side, as models of speech and video do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (2, 0)))


class Standardised(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(input, self.weight * 2, self.bias)


class Own(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.conv2d(input, self.weight)


def reference(module: nn.Module, x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """What int8 quantisation of a float convolution means: integers, exact sums, one factor."""
    scale = (max(high, 0) - min(low, 0)) / 255
    scale = torch.tensor(scale, dtype=torch.float32)
    zero = float((-128 - (min(low, 0) / scale).round()).clamp(-128, 127))
    given = ((x * (1 / scale)).round() + zero).clamp(-128, 127).double()
    weight = module.weight.detach()
    axes = [d for d in range(weight.dim()) if d != int(module.transposed)]
    step = weight.abs().amax(axes) / 127
    along = step.view(-1, *[1] * (weight.dim() - 1 - module.transposed))
    whole = (weight * (1 / along)).round().clamp(-127, 127).double()
    convolve = getattr(F, f"conv{'_transpose' * module.transposed}{weight.dim() - 2}d")
    sums = convolve(given - zero, whole, None, module.stride, module.padding).float()
    shape = (-1, *[1] * (weight.dim() - 2))
    return sums * (scale * step).view(shape) + module.bias.detach().view(shape)


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["fallback", pytest.param("interpret", marks=interpreted)])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv1d(4, 6, 3, 2, 1), (2, 4, 9)), (nn.ConvTranspose1d(4, 6, 3, 2, 1), (2, 4, 5))],
)
def test_int8_is_the_integer_reference(
    layer: Any, shape: tuple[int, ...], calibrated: bool, way: str
) -> None:
    transconv.config.cpu = way
    x, model = torch.randn(shape).clamp(min=-0.5), nn.Sequential(copy.deepcopy(layer))
    batches = [x[:1], x[1:] * 0.5]
    report = transconv.quantize_(model, "int8", calibration=batches if calibrated else None)
    assert report.quantized == ("0",) and not report.left
    seen = torch.cat(batches) if calibrated else x
    assert torch.equal(model(x), reference(layer, x, float(seen.min()), float(seen.max())))
    assert transconv.stats().native if way == "interpret" else transconv.stats().fallback


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["fallback", pytest.param("interpret", marks=interpreted)])
@pytest.mark.parametrize(
    ("kind", "dtype", "off"),
    [
        ("fp8", torch.float32, 0.1),
        ("int8_weight_only", torch.bfloat16, 0.02),
        ("int8_weight_only", torch.float16, 0.02),
    ],
)
def test_other_kinds_are_near(kind: str, dtype: torch.dtype, off: float, way: str) -> None:
    transconv.config.cpu = way
    layer, x = nn.Conv1d(16, 8, 3, padding=1), torch.randn(1, 16, 7)
    made = transconv.nn.QuantConv1d.from_float(layer, kind=kind)
    y = made(x.to(dtype))
    assert y.dtype is dtype and layer.weight.dtype is torch.float32
    assert (y.float() - layer(x)).abs().max() < off * layer(x).abs().max()
    assert transconv.stats().native if way == "interpret" else transconv.stats().fallback


FOUR_BITS: list[tuple[Any, tuple[int, ...], int, torch.dtype]] = [
    (nn.Conv2d(64, 24, 3, padding=(1, 2)), (1, 64, 5, 5), 32, torch.bfloat16),
    (nn.Conv1d(32, 16, 3, 2, padding=2, groups=2, bias=False), (2, 32, 9), 16, torch.float16),
    (nn.Conv1d(6, 4, 4, padding="same"), (1, 6, 7), 32, torch.bfloat16),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["fallback", pytest.param("interpret", marks=interpreted)])
@pytest.mark.parametrize(("layer", "shape", "group", "dtype"), FOUR_BITS)
def test_weights_of_4_bits(
    layer: Any, shape: tuple[int, ...], group: int, dtype: torch.dtype, way: str
) -> None:
    """The convolution of the unpacked weights, of which each is off by half a step of its group."""
    transconv.config.cpu = way
    model = nn.Sequential(copy.deepcopy(layer))
    assert transconv.quantize_(model, Int4WeightOnlyConfig(group)).quantized == ("0",)
    made, channels = model[0], layer.weight.shape[1]
    groups = channels // (group if channels % group == 0 else channels)
    assert made.weight.dtype is torch.uint8 and made.weight.numel() * 2 == layer.weight.numel()
    assert made.weight_scale.shape == (len(layer.weight), groups)
    plain = copy.deepcopy(layer)
    held = made.blocks.unpacked(torch.float32)
    steps = made.weight_scale.repeat_interleave(channels // groups, 1)
    off = (held - layer.weight).abs() / steps.view(*steps.shape, *[1] * (held.dim() - 2))
    assert off.max() < 0.501 and (held - layer.weight).abs().max() > 0
    x = (
        torch.randn(shape)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format)
    )
    plain.weight.data = made.blocks.unpacked(dtype).float()
    got, want = model(x), plain(x.float())
    assert got.dtype is dtype and got.is_contiguous(
        memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format
    )
    assert (got - want).abs().max() < 2**-7 * want.abs().max()
    assert transconv.stats().native if way == "interpret" else "device:cpu" in transconv.stats().fallback
    again = type(made)(
        *[getattr(layer, n) for n in ("in_channels", "out_channels", "kernel_size")],
        groups=layer.groups,
        bias=layer.bias is not None,
        kind="int4_weight_only",
    )
    if group == 32:
        again.load_state_dict(made.state_dict())
        assert torch.equal(again.weight, made.weight) and again.double().weight.dtype is torch.uint8


def test_layers_without_weights_of_4_bits() -> None:
    model = nn.ModuleDict({"odd": nn.Conv1d(3, 4, 3), "up": nn.ConvTranspose1d(4, 4, 3)})
    assert transconv.quantize_(model, "int4_weight_only").left == {
        "odd": "weights of 4 bits are for even numbers of input channels, not 3",
        "up": "transposed convolutions have no weights of 4 bits",
    }
    with pytest.raises(ValueError, match="QuantConvTranspose1d: transposed convolutions have no weights"):
        transconv.nn.QuantConvTranspose1d.from_float(model["up"], kind="int4_weight_only")
    made = transconv.nn.QuantConv1d.from_float(nn.Conv1d(4, 4, 3), kind="int4_weight_only")
    made.weight_scale = torch.ones(4)
    with pytest.raises(errors.TensorError, match=r"weight_scale: expected the shape \(4, groups of 4"):
        made(torch.randn(1, 4, 5))


def test_what_is_quantised_and_what_is_left() -> None:
    model = nn.ModuleDict(
        {
            "causal": Causal(4, 4, 3),
            "standard": Standardised(4, 4, 3),
            "own": Own(4, 4, 3),
            "plain": nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
            "idle": nn.Conv2d(4, 4, 1),
            "out": nn.Conv2d(4, 4, 1),
            "linear": nn.Linear(4, 4),
            "tied": nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
        }
    )
    before = copy.deepcopy(model)
    transconv.convert_(model, lambda m, name: name == "plain")

    def run(model: Any) -> None:
        assert not model.training
        model["plain"](torch.ones(1, 4, 5, 5))
        model["standard"](torch.ones(1, 4, 5, 5))
        model["causal"](torch.randn(1, 4, 9))

    report = transconv.quantize_(model, calibration=run, filter_fn=lambda m, name: name != "out")
    assert report.quantized == ("causal", "plain") and model.training
    assert {n: w.partition(",")[0] for n, w in report.left.items()} == {
        "standard": "its forward passes another weight than the module's",
        "own": "its class Own has a forward of its own",
        "idle": "calibration did not call it",
        "out": "filter_fn said no",
        "tied": "its parameters are computed (torch.nn.utils.parametrize)",
    }
    assert "2 convolutions quantised (int8), 5 left" in str(report)
    assert isinstance(model["causal"], Causal) and isinstance(model["plain"], transconv.nn.QuantConv2d)
    x = torch.randn(1, 4, 9)
    torch.testing.assert_close(model["causal"](x), before["causal"](x), atol=0.1, rtol=0.1)
    again = transconv.quantize_(model)
    assert again.left["plain"] == "it is quantised already" and "idle" in again.quantized
    assert not transconv.convert_(model, lambda m, name: name == "plain").converted


def test_another_weight_without_calibration_is_an_error() -> None:
    model = Standardised(4, 4, 3)
    transconv.quantize_(model)
    with pytest.raises(errors.Unsupported, match="passes another weight than the module's"):
        model(torch.ones(1, 4, 5, 5))


@pytest.mark.every(2)
@pytest.mark.parametrize("static", [True, False])
def test_state_and_casts(static: bool) -> None:
    layer, x = nn.Conv2d(3, 5, 3), torch.randn(1, 3, 6, 6)
    scale = {"input_scale": 0.03, "input_zero_point": 4} if static else {}
    made = transconv.nn.QuantConv2d.from_float(layer, **scale)
    want = made(x)
    other = transconv.nn.QuantConv2d(3, 5, 3)
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), want) and torch.equal(pickle.loads(pickle.dumps(made))(x), want)
    model = nn.Sequential(Causal(3, 3, 3))
    transconv.quantize_(model)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert type(again[0]) is type(model[0]) and torch.equal(again(x[0, :, 0]), model(x[0, :, 0]))
    half = copy.deepcopy(made).half()
    assert half.bias.dtype is torch.float16 and half.weight_scale.dtype is torch.float32
    assert half(x.half()).dtype is torch.float16
    fp8 = transconv.nn.QuantConv2d.from_float(layer, kind="fp8").to("meta", torch.bfloat16)
    assert fp8.weight.dtype is torch.float8_e4m3fn and fp8.weight.is_meta
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype is torch.bfloat16
    assert "kind=int8, input_scale=" in repr(made)
    assert not made(x.requires_grad_()).requires_grad and made(x[0]).shape == (5, 4, 4)


class Float8DynamicActivationFloat8WeightConfig:
    mm_config = SimpleNamespace(use_fast_accum=True)


class Int4WeightOnlyConfig:
    def __init__(self, group_size: int) -> None:
        self.group_size = group_size


class Int8WeightOnlyConfig:
    """Has the name of torchao's, by which it is recognised."""

    def __init__(self, group_size: int | None = None) -> None:
        self.group_size = group_size


def test_configurations_of_torchao() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match="group_size: expected None, .* got 32"):
        transconv.quantize_(model, Int8WeightOnlyConfig(32))
    with pytest.raises(ValueError, match="object means no quantised convolution; expected one of"):
        transconv.quantize_(model, object())
    with pytest.raises(ValueError, match="kind 'int4' is unknown"):
        transconv.quantize_(model, "int4")
    assert transconv.quantize_(model, Int8WeightOnlyConfig()).kind == "int8_weight_only"
    fast = nn.Sequential(nn.Conv2d(4, 4, 3))
    assert transconv.quantize_(fast, Float8DynamicActivationFloat8WeightConfig()).kind == "fp8"
    assert fast[0].use_fast_accum and "use_fast_accum=True" in repr(fast)


def test_fast_sums_are_of_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    convolve = quantized_functional.of_reals
    monkeypatch.setattr(
        quantized_functional, "of_reals", lambda *said: given.append(said[-1]) or convolve(*said)
    )
    x, layer = torch.randn(1, 4, 5, 5), nn.Conv2d(4, 4, 3)
    for made in (
        transconv.nn.QuantConv2d.from_float(layer, kind="fp8", use_fast_accum=True),
        transconv.nn.QuantConv2d(4, 4, 3, kind="fp8"),
    ):
        made(x)
    assert ["use_fast_accum" in g for g in given] == [True, False]
    with pytest.raises(ValueError, match="use_fast_accum is for products of 8-bit floats"):
        transconv.quantize_(nn.Sequential(layer), "int8", use_fast_accum=True)
    with pytest.raises(TypeError, match="calibration: expected batches, or a function .* got int"):
        transconv.quantize_(nn.Sequential(layer), "int8", calibration=5)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"input_scale": 0.0}, "input_scale: expected one scale above 0, got 0.0"),
        ({"input_scale": torch.ones(3)}, "input_scale: expected one scale above 0"),
        (
            {"input_scale": 1.0, "input_zero_point": 128},
            "input_zero_point: expected an integer from -128 to",
        ),
        ({"input_zero_point": 3}, "input_zero_point: expected an input_scale beside it"),
        ({"input_scale": 1.0, "input_zero_point": 1, "kind": "fp8"}, "zero points are of integers, and"),
        ({"input_scale": 1.0, "kind": "int8_weight_only"}, "inputs of int8_weight_only are not quantised"),
    ],
)
def test_refused_quantities(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.TensorError, match=reason):
        transconv.nn.QuantConv2d.from_float(nn.Conv2d(3, 3, 1), **given)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Conv2d, got Own; transconv.quantize_ takes"):
        transconv.nn.QuantConv2d.from_float(Own(3, 3, 1))


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize(("held", "zero"), [("i8", 3), ("u8", None), ("f8e4m3", None), ("f8e5m2", None)])
def test_inputs_are_quantised_by_one_kernel(
    held: str, zero: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of torch's operations, also of what has gaps in memory."""
    transconv.config.cpu, transconv.config.fallback = "interpret", "warn"
    row, point = DTYPES[held], None if zero is None else torch.tensor([zero], dtype=torch.int32)
    x = (torch.randn(2, 6, 5, 7) * 3).bfloat16().contiguous(memory_format=torch.channels_last)
    scale = torch.tensor(0.01 if held == "f8e4m3" else 0.03)
    by_torch: list[torch.Tensor] = []
    monkeypatch.setattr(
        input_quantization, "quantised", lambda x, *rest: by_torch.append(x) or quantised(x, *rest)
    )
    for given, kernels in (
        (x, True),
        (x.float(), True),
        (x[:, :, :, ::2], True),
        (x.mT, True),
        (x[:0], False),
        (x.double(), False),
    ):
        by_torch.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got, want = (f(given, scale, point, row) for f in (input_quantization.quantise, quantised))
        assert [str(w.message) for w in said if w.category is transconv.FallbackWarning] == [
            "transconv hands the quantising of inputs to torch (dtype:float64): there is no kernel for "
            "tensors of this type; cast them"
        ] * (given.dtype is torch.float64)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) and got.stride() == want.stride()
        assert bool(by_torch) is not kernels


@interpreted
def test_what_has_no_kernel_is_told_once_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What quantises inputs and what makes floats of weights, as convolutions do."""
    transconv.config.cpu, transconv.config.fallback = "interpret", "warn"
    x, scale = torch.randn(3, 5), torch.tensor(0.1)
    weight = block_scales.quantised(torch.randn(4, 8, 3), KINDS["int4_weight_only"], 8)

    def both() -> None:
        input_quantization.quantise(x, scale, None, DTYPES["i8"])
        weight.floats(torch.float32)

    def refused(*given: Any) -> None:
        raise errors.Unsupported("schedule:refused", "none fits")

    with monkeypatch.context() as patched:
        patched.setattr(launch, "ready", refused)
        with pytest.warns(transconv.FallbackWarning) as said:
            both()
            both()
        assert sorted(str(w.message) for w in said) == [
            "transconv hands the quantising of inputs to torch (schedule:refused): none fits",
            "transconv hands weights of 4 bits to torch (schedule:refused): none fits",
        ]
        transconv.config.fallback = "error"
        for _ in range(2):
            with pytest.raises(errors.Unsupported, match="none fits"):
                input_quantization.quantise(x, scale, None, DTYPES["i8"])
            with pytest.raises(errors.Unsupported, match="none fits"):
                weight.floats(torch.float32)
    transconv.config.fallback = "error"  # a change asks again
    both()


@interpreted
def test_repeated_calls_start_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One guard is asked; an input of another kind goes the general way."""
    transconv.config.cpu = "interpret"
    point, held = torch.tensor([3], dtype=torch.int32), DTYPES["i8"]
    begun: list[torch.Tensor] = []

    def begin(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, y: torch.Tensor) -> None:
        begun.append(x)
        y.copy_(quantised(x, scale, zero, held))

    def started(plan: Plan, device: Any, aligned: bool, order: tuple[str, ...], *_: bool) -> Any:
        own = {t.name: t.shape for t in plan.workload.tensors}
        return lambda *given: plan.launch(**{n: t.view(own[n]) for n, t in zip(order, given, strict=True)})

    monkeypatch.setattr(Plan, "starter", started)
    for room in (route, guard):
        monkeypatch.setattr(room, "current_device", lambda: None)
    takes = input_quantization.starter
    monkeypatch.setattr(
        input_quantization,
        "starter",
        lambda x, *rest: begin if input_quantization._takes(x) else takes(x, *rest),
    )
    empty = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(route, "_empty", empty)
    monkeypatch.setattr(quantized_functional.torch_internals, "quickest", lambda: empty)
    module = transconv.nn.QuantConv2d.from_float(nn.Conv2d(4, 6, 3), 0.02, point)
    inputs = [torch.randn(1, 4, 5, 6) for _ in range(2 * guard.PATIENCE + 3)]
    want = copy.deepcopy(module)  # whose weight no call has seen
    asked: list[Any] = []
    find = quantized_route.find
    monkeypatch.setattr(quantized_route, "find", lambda *given: asked.append(given) or find(*given))
    for x in inputs:
        asked.clear()
        made = module(x)
    assert not asked and begun[-1] is x
    assert torch.equal(made, want(x))
    wide = torch.randn(1, 4, 5, 12)[..., ::2]
    for other in (wide, x.bfloat16(), x[:, :, :4], x.contiguous(memory_format=torch.channels_last)):
        begun.clear()
        asked.clear()
        assert torch.equal(module(other), want(other))
        assert len(asked) == 2 and not begun, other.shape
    module.activation = want.activation = "relu"
    assert torch.equal(module(x), want(x)) and not bool((module(x) < 0).any())


def test_ranges() -> None:
    scale, zero = ranged(torch.tensor(0.5), torch.tensor(2.55), KINDS["int8"])
    assert float(scale) == pytest.approx(0.01) and zero is not None and int(zero) == -128
    assert quantised(torch.tensor([0.0, 2.55, 9.0]), scale, zero, KINDS["int8"].weight).tolist() == [
        -128,
        127,
        127,
    ]
    scale, zero = ranged(torch.tensor(-896.0), torch.tensor(3.0), KINDS["fp8"])
    assert float(scale) == 2 and zero is None
