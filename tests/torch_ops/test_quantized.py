"""transconv.quantized: results beside f64, and errors that name the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from transconv import errors, knobs, quantized

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
Given = dict[str, Any]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    known = torch.iinfo(dtype)
    return torch.randint(known.min, known.max + 1, shape, generator=generator).to(dtype)


def expected(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, numbers: Given,
             q: Given) -> torch.Tensor:
    """In f64, unrounded."""
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]

    def along(value: Any) -> torch.Tensor:
        return torch.as_tensor(value).double().view(-1, *[1] * (x.dim() - 2))

    real = convolve(x.double() - along(q.get("input_zero_point", 0)),
                    w.double() - along(q.get("weight_zero_point", 0)), **numbers)
    real = real * along(q.get("input_scale", 1)) * along(q.get("weight_scale", 1))
    real = real + (0 if bias is None else along(bias))
    real = real.relu() if q.get("activation") else real
    return real / along(q.get("output_scale", 1)) + along(q.get("output_zero_point", 0))


@interpreted
@pytest.mark.parametrize(("shapes", "types", "numbers", "q"), [
    (((2, 8, 7, 7), (6, 8, 3, 3)), (torch.uint8, torch.int8), {"padding": 1},
     {"input_scale": 0.02, "weight_scale": torch.rand(6) * 0.01 + 0.001, "input_zero_point": 128,
      "weight_zero_point": 3, "output_scale": 0.1, "output_zero_point": -3, "output_dtype": torch.int8,
      "activation": "relu"}),
    (((2, 8, 9), (4, 4, 3)), (torch.int8, torch.int8), {"stride": 2, "padding": 2, "groups": 2},
     {"input_zero_point": torch.arange(8) - 4, "output_dtype": torch.int32}),
    (((1, 4, 4, 4, 4), (4, 4, 3, 3, 3)), (torch.int8, torch.uint8), {"padding": 1},
     {"weight_scale": 0.01, "output_scale": torch.rand(4) + 0.5,
      "output_zero_point": torch.tensor([1, 2, 3, 250]), "output_dtype": torch.uint8}),
    (((1, 16, 6, 6), (8, 16, 3, 3)), (torch.float8_e4m3fn, torch.float8_e5m2), {},
     {"input_scale": torch.tensor(2.0), "output_dtype": torch.float8_e4m3fn}),
])
def test_results(shapes: tuple[tuple[int, ...], tuple[int, ...]], types: tuple[torch.dtype, torch.dtype],
                 numbers: Given, q: Given) -> None:
    x, w = (drawn(s, t, i) for i, (s, t) in enumerate(zip(shapes, types, strict=True)))
    bias = torch.randn(w.shape[0]) if q.get("activation") else None
    call = {3: quantized.conv1d, 4: quantized.conv2d, 5: quantized.conv3d}[x.dim()]
    got, want = call(x, w, bias, **numbers, **q), expected(x, w, bias, numbers, q)
    assert got.dtype is q["output_dtype"] and got.shape == want.shape
    if got.is_floating_point():
        want = want.clamp(-448, 448)
        assert ((got.double() - want).abs() <= 2**-4 * want.abs() * 1.001 + 2**-10).all()
        return
    known = torch.iinfo(got.dtype)
    assert ((got.double() - want.clamp(known.min, known.max)).abs() <= 0.5 + 1e-4).all()
    assert len(got.unique()) > 5


X, W = torch.zeros(1, 4, 5, 5, dtype=torch.int8), torch.zeros(8, 4, 3, 3, dtype=torch.int8)


@pytest.mark.parametrize(("given", "reason"), [
    ({"weight_scale": torch.ones(3)}, r"weight_scale: expected one number, or the shape \(8,\), got"),
    ({"input_zero_point": 128}, "input_zero_point: expected an integer from -128 to 127, the range of i8"),
    ({"input_zero_point": 0.5}, "input_zero_point: expected an integer"),
    ({"output_zero_point": 3}, "output_zero_point: zero points are of integers, and this tensor is f32"),
    ({"weight_zero_point": torch.zeros(4)}, r"weight_zero_point: expected one number, or the shape"),
    ({"input_scale": -1.0}, "input_scale: expected a scale above 0, got -1"),
    ({"input_scale": "one"}, "input_scale: expected a number or a tensor, got str"),
    ({"output_dtype": torch.int16}, "output_dtype: expected one of int8 uint8 .* got torch.int16"),
    ({"weight": W.half()}, "weight: expected integers, as the input, got torch.float16"),
    ({"input": X.short()}, "input: expected a tensor of int8 uint8 .* got torch.int16"),
    ({"input": X[0]}, "input: expected 4 dimensions, got 3"),
    ({"bias": torch.zeros(8, dtype=torch.int32)}, "bias: expected floats, in real numbers"),
    ({"stride": 1.5}, "stride: expected an integer, or 2 of them, got 1.5"),
])
def test_errors_name_the_argument(given: Given, reason: str) -> None:
    with pytest.raises(errors.TensorError, match=reason):
        quantized.conv2d(**{"input": X, "weight": W, **given})


def test_what_is_not_there() -> None:
    with pytest.raises(TypeError, match="scale_of_input"):
        quantized.conv2d(X, W, scale_of_input=1.0)
    with pytest.raises(errors.Unsupported, match="has no gradients"):
        quantized.conv2d(X, W, torch.zeros(8, requires_grad=True))
    with pytest.raises(RuntimeError, match="expected input"):
        quantized.conv2d(X, W[:, :3])
