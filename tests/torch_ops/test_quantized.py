"""transconv.quantized: results beside f64, and errors that name the argument."""

from __future__ import annotations

import inspect
import itertools
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv import errors, quantized
from transconv.calls import guard
from transconv.runtime import Plan
from transconv.support import knobs
from transconv.torch_ops.calls import call_attributes, route
from transconv.torch_ops.quantized import quantized_route
from transconv.torch_ops.quantized.quantized_functional import _CONV2D

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
Given = dict[str, Any]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    known = torch.iinfo(dtype)
    return torch.randint(known.min, known.max + 1, shape, generator=generator).to(dtype)


def expected(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, numbers: Given, q: Given
) -> torch.Tensor:
    """Exact sums, and behind them the operations in f32, unrounded."""
    convolve = getattr(F, ("conv_transpose" if "transposed" in numbers else "conv") + f"{x.dim() - 2}d")
    numbers = {n: v for n, v in numbers.items() if n != "transposed"}

    def along(value: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.as_tensor(value).to(dtype).view(-1, *[1] * (x.dim() - 2))

    sums = convolve(
        x.double() - along(q.get("input_zero_point", 0), torch.float64),
        w.double() - along(q.get("weight_zero_point", 0), torch.float64),
        **numbers,
    )
    if q["output_dtype"] is torch.int32:
        return sums
    real = sums.float() * (along(q.get("input_scale", 1)) * along(q.get("weight_scale", 1)))
    real = real + (0 if bias is None else along(bias))
    real = real.relu() if q.get("activation") else real
    return real / along(q.get("output_scale", 1)) + along(q.get("output_zero_point", 0))


CASES: list[tuple[Any, ...]] = [
    (
        ((2, 8, 7, 7), (6, 8, 3, 3)),
        (torch.uint8, torch.int8),
        {"padding": 1},
        {
            "input_scale": 0.02,
            "weight_scale": torch.rand(6) * 0.01 + 0.001,
            "input_zero_point": 128,
            "weight_zero_point": 3,
            "output_scale": 0.1,
            "output_zero_point": -3,
            "output_dtype": torch.int8,
            "activation": "relu",
        },
    ),
    (
        ((2, 8, 9), (4, 4, 3)),
        (torch.int8, torch.int8),
        {"stride": 2, "padding": 2, "groups": 2},
        {"input_zero_point": torch.arange(8) - 4, "output_dtype": torch.int32},
    ),
    (
        ((1, 4, 4, 4, 4), (4, 4, 3, 3, 3)),
        (torch.int8, torch.uint8),
        {"padding": 1},
        {
            "weight_scale": 0.01,
            "output_scale": torch.rand(4) + 0.5,
            "output_zero_point": torch.tensor([1, 2, 3, 250]),
            "output_dtype": torch.uint8,
        },
    ),
    (
        ((1, 16, 6, 6), (8, 16, 3, 3)),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        {},
        {"input_scale": torch.tensor(2.0), "output_dtype": torch.float8_e4m3fn},
    ),
    (
        ((2, 8, 5), (8, 3, 4)),
        (torch.uint8, torch.int8),
        {"transposed": True, "stride": 3, "padding": 1, "output_padding": 2, "groups": 2},
        {
            "input_scale": 0.02,
            "weight_scale": torch.rand(6) * 0.01 + 0.005,
            "input_zero_point": 131,
            "output_scale": 0.3,
            "output_zero_point": 7,
            "output_dtype": torch.int8,
            "activation": "relu",
        },
    ),
    (
        ((1, 6, 4, 3), (6, 4, 3, 2)),
        (torch.int8, torch.int8),
        {"transposed": True, "padding": 1},
        {
            "input_zero_point": torch.arange(6) - 3,
            "weight_zero_point": torch.arange(4),
            "output_dtype": torch.int32,
        },
    ),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["fallback", pytest.param("interpret", marks=interpreted)])
@pytest.mark.parametrize(("shapes", "types", "numbers", "q"), CASES)
def test_results(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    types: tuple[torch.dtype, torch.dtype],
    numbers: Given,
    q: Given,
    way: str,
) -> None:
    """Integers are the same in every bit, computed by a kernel and by torch."""
    transconv.config.cpu = way
    x, w = (drawn(s, t, i) for i, (s, t) in enumerate(zip(shapes, types, strict=True)))
    transposed = "transposed" in numbers
    bias = torch.randn(w.shape[1] * 2 if transposed else w.shape[0]) if q.get("activation") else None
    name = f"conv{'_transpose' * transposed}{x.dim() - 2}d"
    given = {n: v for n, v in numbers.items() if n != "transposed"}
    got, want = getattr(quantized, name)(x, w, bias, **given, **q), expected(x, w, bias, numbers, q)
    assert got.dtype is q["output_dtype"] and got.shape == want.shape
    assert [*transconv.stats().fallback] == ["device:cpu"] * (way == "fallback")
    if got.is_floating_point():
        want = want.clamp(-448, 448)
        assert ((got.double() - want).abs() <= 2**-4 * want.abs() * 1.001 + 2**-10).all()
        return
    known = torch.iinfo(got.dtype)
    assert torch.equal(got, want.double().round().clamp(known.min, known.max).to(got.dtype))
    assert len(got.unique()) > 5


# -- calls that come back --------------------------------------------------------------------------


@pytest.mark.slow
@interpreted
def test_a_start_that_is_there_before_the_first_launch_makes_the_type_of_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where sizes are arguments, the kernel may have run for others: it is started, never launched."""
    transconv.config.cpu, transconv.config.sizes = "interpret", "any"
    monkeypatch.setattr(route, "current_device", lambda: None)
    monkeypatch.setattr(
        route, "_empty", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    monkeypatch.setattr(
        Plan,
        "starter",
        lambda plan, device, aligned, order, *_: (
            lambda *given: plan.launch(**dict(zip(order, given, strict=True)))
        ),
    )
    monkeypatch.setattr(route.ConvCall, "launch", lambda *_: pytest.fail("it was not started"))
    x, w = drawn((1, 4, 5), torch.int8, 1), drawn((6, 4, 3), torch.int8, 2)
    try:
        for made in (torch.float32, torch.int32):
            got = quantized.conv1d(x, w, None, 1, 1, output_dtype=made)
            want = expected(x, w, None, {"padding": 1}, {"output_dtype": torch.int32})
            assert got.dtype is made and torch.equal(got, want.to(made))
        assert transconv.stats().native == {"fwd any size": 2}
    finally:
        transconv.config.sizes = "exact"


@pytest.mark.slow
@interpreted
def test_repeated_calls_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start the kernel with the tensors in its order, or go the general way if they are others."""
    transconv.config.cpu = "interpret"
    started: list[tuple[Any, ...]] = []

    def starter(plan: Plan, device: Any, aligned: bool, order: tuple[str, ...], *_: bool) -> Any:
        def start(*given: torch.Tensor) -> None:
            started.append(order)
            reading = {n: t for n, t in zip(order, given, strict=True) if n not in ("src", "wei", "dst")}
            shaped = {t.name: reading[t.name].view(t.shape) for t in plan.workload.tensors[3:]}
            plan.launch(**dict(zip(order, given, strict=True)) | shaped)

        return start

    monkeypatch.setattr(Plan, "starter", starter)
    monkeypatch.setattr(route, "current_device", lambda: None)
    monkeypatch.setattr(
        route, "_empty", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    x, w, b = drawn((1, 4, 5), torch.int8, 1), drawn((6, 4, 3), torch.int8, 2), torch.randn(6)
    q: Given = {
        "input_scale": torch.tensor(0.1),
        "weight_scale": torch.rand(6) + 0.01,
        "input_zero_point": torch.tensor([3], dtype=torch.int32),
        "output_scale": 3.0,
        "output_dtype": torch.int8,
    }
    for _ in range(guard.PATIENCE + 2):
        quantized.conv1d(x, w, b, 1, 1, **q)
    asked: list[Any] = []
    find = quantized_route.find
    monkeypatch.setattr(quantized_route, "find", lambda *given: asked.append(given) or find(*given))
    started.clear()
    again = drawn((1, 4, 5), torch.int8, 7)
    got = quantized.conv1d(again, w, b, 1, 1, **q)
    want = expected(again, w, b, {"padding": 1}, q).round().clamp(-128, 127)
    assert torch.equal(got, want.to(torch.int8))
    assert not asked and started == [("src", "wei", "arg0", "arg1", "arg2", "arg3", "src_zero", "dst")]
    assert transconv.stats().native == {"fwd": guard.PATIENCE + 3}
    for other in (
        {**q, "output_scale": 4.0},
        {**q, "output_dtype": torch.uint8},
        {**q, "activation": "relu"},
        {**q, "activation": None},
        {**q, "input_scale": torch.tensor([0.1])},
        {n: q[n] for n in [*q][::-1]},
    ):
        asked.clear()
        got = quantized.conv1d(x, w, b, 1, 1, **other)
        limits = torch.iinfo(got.dtype)
        want = expected(x, w, b, {"padding": 1}, other).round().clamp(limits.min, limits.max)
        assert asked and torch.equal(got, want.to(got.dtype))


@interpreted
def test_sums_of_8_bit_floats_may_stay_in_the_matrix_unit() -> None:
    transconv.config.cpu = "interpret"
    x, w = (drawn(s, torch.float8_e4m3fn, 1) for s in ((1, 16, 6, 6), (16, 16, 3, 3)))
    made, texts = [], []
    for fast in ({}, {"use_fast_accum": True}):
        made.append(quantized.conv2d(x, w, **fast))
        req = call_attributes.requested(_CONV2D, 1, 0, 0, 1, 1)
        route = quantized_route.find(req, x, w, None, fast).route
        texts.append(route.compiled.workload.text)
    assert ["math=ieee" in t for t in texts] == [True, False]
    torch.testing.assert_close(*made)  # the interpreter has no matrix unit


@pytest.mark.parametrize("padding", ["same", 1])
def test_compilers_see_one_operator(padding: Any) -> None:
    x, w = drawn((1, 4, 5, 5), torch.uint8, 1), drawn((8, 4, 2, 3), torch.int8, 2)
    q = {"input_zero_point": 120, "input_scale": torch.tensor(0.1), "output_dtype": torch.int8}

    def layer(x: torch.Tensor) -> torch.Tensor:
        return quantized.conv2d(x, w, None, 1, padding, **q).float() + 1

    graphs: list[str] = []

    def seen(module: Any, _: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    assert torch.equal(torch.compile(layer, backend=seen, fullgraph=True)(x), layer(x))
    assert "transconv.quantized_convolution" in graphs[0]


def test_a_call_that_torch_may_not_compute() -> None:
    transconv.config.fallback = "error"
    with pytest.raises(errors.Unsupported, match="device:cpu"):
        quantized.conv2d(X, W)


def test_fake_tensors_have_the_result_of_torch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    last = X.contiguous(memory_format=torch.channels_last)
    with FakeTensorMode() as mode:
        x, w = mode.from_tensor(last), mode.from_tensor(W)
        got = quantized.conv2d(x, w, padding=1, input_zero_point=3, output_dtype=torch.int8)
    assert got.shape == (1, 8, 5, 5) and got.dtype is torch.int8 and got.stride()[1] == 1


X, W = torch.zeros(1, 4, 5, 5, dtype=torch.int8), torch.zeros(8, 4, 3, 3, dtype=torch.int8)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"weight_scale": torch.ones(3)}, r"weight_scale: expected one number, or the shape \(8,\), got"),
        (
            {"input_zero_point": 128},
            "input_zero_point: expected an integer from -128 to 127, the range of i8",
        ),
        ({"input_zero_point": 0.5}, "input_zero_point: expected an integer"),
        (
            {"output_zero_point": 3},
            "output_zero_point: zero points are of integers, and this tensor is f32",
        ),
        ({"weight_zero_point": torch.zeros(4).char()}, "weight_zero_point: expected one number, or"),
        ({"weight_zero_point": torch.zeros(1)}, "weight_zero_point: expected integers, got torch.float32"),
        (
            {"output_scale": torch.ones(1, dtype=torch.int32)},
            "output_scale: expected floats, got torch.int32",
        ),
        ({"output_scale": [1.0]}, "output_scale: expected a number or a tensor, got list"),
        (
            {"weight_scale": torch.ones(8, device="meta")},
            "weight_scale: expected a tensor on cpu, where the",
        ),
        ({"activation": "swoosh"}, "activation: epilogue 'swoosh' has 'swoosh', expected one of"),
        ({"activation": "res"}, "activation: expected functions of one value, got 'res'"),
        ({"groups": 1.0}, "groups: expected an integer, got 1.0"),
        (
            {"use_fast_accum": True},
            "use_fast_accum: it is for products of 8-bit floats, got torch.int8 and",
        ),
        ({"use_fast_accum": 1}, "use_fast_accum: expected True or False, got 1"),
        ({"input_scale": -1.0}, "input_scale: expected a scale above 0 that f32 holds, got -1"),
        ({"input_scale": "one"}, "input_scale: expected a number or a tensor, got str"),
        ({"output_dtype": torch.int16}, "output_dtype: expected one of int8 uint8 .* got torch.int16"),
        ({"weight": W.half()}, "weight: expected integers, as the input, got torch.float16"),
        ({"input": X.short()}, "input: expected a tensor of int8 uint8 .* got torch.int16"),
        ({"input": X[0]}, "input: expected 4 dimensions, got 3"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, "bias: expected floats, in real numbers"),
        ({"stride": 1.5}, "stride: expected an integer, or 2 of them, got 1.5"),
        ({"weight_scale": torch.ones(8, 1, 1, 1)}, r"weight_scale: .* \(8,\), got \(8, 1, 1, 1\)"),
        ({"input_scale": torch.ones(4)}, r"input_scale: expected one number, got \(4,\)"),
        ({"input_scale": torch.tensor(1j)}, "input_scale: expected floats, got torch.complex64"),
        ({"input_scale": 1e-50}, "input_scale: expected a scale above 0 that f32 holds, got 1e-50"),
        ({"output_scale": 1e300}, "output_scale: expected a scale above 0 that f32 holds, got 1e.300"),
        ({"weight_scale": float("nan")}, "weight_scale: expected a scale above 0 that f32 holds, got nan"),
        ({"weight_scale": True}, "weight_scale: expected a number or a tensor, got bool"),
        (
            {"input_zero_point": torch.zeros(5).int()},
            r"input_zero_point: .* or the shape \(4,\), got \(5,\)",
        ),
        (
            {"weight_zero_point": torch.tensor(1j)},
            "weight_zero_point: expected integers, got torch.complex64",
        ),
        (
            {"input_zero_point": torch.tensor([True])},
            "input_zero_point: expected integers, got torch.bool",
        ),
        ({"output_zero_point": -1, "output_dtype": torch.uint8}, "expected an integer from 0 to 255"),
        ({"input": X.half(), "input_zero_point": 1}, "input_zero_point: zero points are of integers"),
        (
            {"input": X.to(torch.float8_e4m3fn)},
            "weight: f8e4m3 is multiplied by i8, but f8e4m3 has not all",
        ),
        ({"weight": W.to(torch.float8_e4m3fnuz)}, "weight: expected a tensor of int8 .*e4m3fnuz"),
        ({"bias": [0.0] * 8}, "bias: expected floats, in real numbers, got list"),
        ({"activation": 3}, "activation: expected words of an epilogue, got 3"),
        ({"output_dtype": "int8"}, "output_dtype: expected one of int8 uint8 .* got int8"),
    ],
)
def test_errors_name_the_argument(given: Given, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs: no kernel, and no function of torch."""
    monkeypatch.setattr(quantized_route.ConvCall, "forward", lambda *_: pytest.fail("something ran"))
    with pytest.raises(errors.TensorError, match=f"transconv.quantized.conv2d: .*{reason}"):
        quantized.conv2d(**{"input": X, "weight": W, **given})


def test_what_is_not_there() -> None:
    with pytest.raises(TypeError, match="conv2d: it has no argument 'scale_of_input'; expected .*"):
        quantized.conv2d(X, W, scale_of_input=1.0)
    with pytest.raises(errors.Unsupported, match="has no gradients"):
        quantized.conv2d(X, W, torch.zeros(8, requires_grad=True))
    with pytest.raises(RuntimeError, match="expected input"):
        quantized.conv2d(X, W[:, :3])
    with pytest.raises(RuntimeError, match="output padding must be smaller"):
        quantized.conv_transpose2d(X, W.transpose(0, 1).contiguous(), output_padding=1)


@interpreted
def test_torchs_convolutions_of_bytes_run_where_torch_has_none() -> None:
    """Modulo 256, as torch computes them on a CPU; on a GPU it is "unable to find an engine"."""
    x, w, b = (drawn(s, torch.int8, i) for i, s in enumerate(((2, 16, 5), (8, 8, 3), (8,))))
    up, bytes_ = drawn((16, 4, 3), torch.int8, 4), drawn((1, 4, 6), torch.uint8, 5)
    made = []
    for way in ("interpret", "fallback"):
        transconv.config.cpu = way
        transconv.stats(reset=True)
        for _ in range(2):  # the second call is found by its key
            results = (
                transconv.conv1d(x, w, b, 2, 1, 1, 2),
                transconv.conv1d(bytes_, drawn((5, 4, 3), torch.uint8, 6)),
            )
        made.append(results)
        assert bool(transconv.stats().fallback) is (way == "fallback")
    for ours, theirs in zip(*made, strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    transconv.config.cpu = "interpret"
    want = F.conv_transpose1d(x.double(), up.double(), stride=2, groups=2).long().to(torch.int8)
    assert torch.equal(transconv.conv_transpose1d(x, up, stride=2, groups=2), want)


def test_results_without_values_have_a_shape() -> None:
    """Of tensors on ``meta``, in every type of whole numbers."""
    for dtype in (torch.int8, torch.uint8):
        x = torch.empty(2, 4, 6, 5, dtype=dtype, device="meta")
        w = torch.empty(8, 4, 3, 3, dtype=torch.int8, device="meta")
        made = transconv.quantized.conv2d(x, w, padding=1, stride=(2, 1))
        assert made.is_meta and made.shape == (2, 8, 3, 5) and made.dtype is torch.float32


@interpreted
@pytest.mark.parametrize("enabled_before", [False, True])
def test_results_have_the_class_that_torch_s_have(enabled_before: bool) -> None:
    class Other(torch.Tensor):
        pass

    transconv.config.cpu = "interpret"
    over = threading.Event()
    if enabled_before:  # beside another thread, so that what was put in front of aten stays there, unused
        threading.Thread(target=over.wait, daemon=True).start()
        with transconv.use("cpu"):
            pass
    x, w = (torch.randint(-9, 9, shape).char() for shape in ((1, 16, 5, 4), (8, 16, 3, 3)))
    want = F.conv2d(x.double(), w.double())
    for classes in itertools.product((torch.Tensor, Other), repeat=2):
        a, b = (t.as_subclass(of) for t, of in zip((x, w), classes, strict=True))
        made = quantized.conv2d(a, b)
        assert type(made) is type(F.conv2d(a.float(), b.float()))
        assert torch.equal(made.as_subclass(torch.Tensor).double(), want)
    over.set()
    assert transconv.stats(reset=True).native == {"fwd": 1}, "a kernel computes those of torch's own class"


@pytest.mark.parametrize("name", [n for n in quantized.__all__ if n.startswith("conv")])
def test_parameters_are_torchs_and_those_of_quantities(name: str) -> None:
    """As help() shows them: what torch's function takes in its order, and the quantities by name."""
    shown = inspect.signature(getattr(quantized, name)).parameters
    own = inspect.signature(getattr(transconv, name)).parameters
    assert [p for p in shown if p in own] == [*own]
    more = {n: p for n, p in shown.items() if n not in own}
    assert more.keys() == {*quantized.Quantities.__slots__}
    assert all(p.kind is p.KEYWORD_ONLY for p in more.values()) and more["input_scale"].default == 1.0
