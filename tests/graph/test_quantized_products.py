"""Convolutions of dequantised tensors in graphs, as products of integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.meant import by_meaning
from transconv.graph import backend  # which defines torch's operators
from transconv.graph.graph_report import TorchRow
from transconv.graph.lowerings import quantization
from transconv.support import knobs

Tensor = torch.Tensor
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
WHOLE = (-128, 127, torch.int8)
SCALE, ZERO = 2.0**-5, 3


def layer(x: Tensor, w: Tensor, s: Tensor, z: Tensor | None, b: Tensor, groups: int = 1) -> Tensor:
    """What PT2E writes: activations with a zero point, weights with a scale for each output channel."""
    ops = torch.ops.quantized_decomposed
    wide = ops.dequantize_per_channel(w, s, z, 0, -127, 127, torch.int8)
    y = F.conv2d(ops.dequantize_per_tensor(x, SCALE, ZERO, *WHOLE), wide, b, padding=1, groups=groups)
    return ops.quantize_per_tensor(y.relu(), 0.3, 7, *WHOLE)  # type: ignore[no-any-return]


def given(channels: int, groups: int = 1) -> tuple[Tensor, ...]:
    drawn = torch.Generator().manual_seed(1)
    x, w = (
        torch.randint(-128, 128, shape, generator=drawn).char()
        for shape in ((2, channels, 6, 5), (channels, channels // groups, 3, 3))
    )
    each = torch.rand(channels, generator=drawn) * 0.004 + 0.001
    return x, w, each, torch.arange(channels) % 5 - 2, torch.randn(channels, generator=drawn)


def rows_of(f: Any, *tensors: Any) -> tuple[Tensor, list[Any]]:
    made: list[Any] = []

    def noted(gm: Any, inputs: Any) -> Any:
        run = backend(gm, inputs, options={"rest": "eager"})
        made.append(run.transconv)  # type: ignore[attr-defined]
        return run

    with by_meaning(), torch.no_grad():
        found = torch.compile(f, backend=noted)(*tensors)
    return found, [r for m in made for g in m.graphs for r in g.rows]


@interpreted
def test_one_kernel_computes_integers_from_integers() -> None:
    tensors = given(16)
    got, rows = rows_of(layer, *tensors)
    want = layer(*tensors)
    assert got.dtype is torch.int8 and int((got.int() - want.int()).abs().max()) <= 1
    assert float((got != want).float().mean()) < 0.01 and len(want.unique()) > 40
    own = [r for r in rows if "quantized_convolution" in str(r)]
    assert len(rows) == len(own) == 1 and isinstance(own[0], TorchRow)
    assert "it has a kernel of its own" in str(own[0])


@interpreted
@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (32, 2)])
def test_others_stay_products_of_floats(channels: int, groups: int) -> None:
    """Few channels, and zero points of weights in several groups."""
    tensors = given(channels, groups)
    got, rows = rows_of(lambda *t: layer(*t, groups=groups), *tensors)
    assert not any("quantized_convolution" in str(r) for r in rows)
    assert int((got.int() - layer(*tensors, groups=groups).int()).abs().max()) <= 1


@pytest.mark.parametrize(("dtype", "joined"), [(torch.int8, 1), (torch.uint8, 1), (torch.int32, 0)])
def test_which_integers_are_multiplied(dtype: torch.dtype, joined: int) -> None:
    """Bytes, with and without a sign."""

    def one(x: Tensor, w: Tensor, s: Tensor, z: Tensor, b: Tensor) -> Tensor:
        ops = torch.ops.quantized_decomposed
        wide = ops.dequantize_per_tensor(x, SCALE, ZERO, 0, 127, dtype)
        return F.conv2d(wide, ops.dequantize_per_channel(w, s, z, 0, -127, 127, torch.int8), b)

    x, *others = given(16)
    made = make_fx(one, tracing_mode="fake")(x.to(dtype), *others)
    quantization.joined(made.graph)
    found = [n for n in made.graph.nodes if "quantized_convolution" in str(n.target)]
    assert len(found) == joined
