"""Convolutions of torchao's 8-bit floats: the numbers of the same quantised tensors in f64."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from transconv.errors import Unsupported
from transconv.quantized import serve_torchao
from transconv.torch_ops.quantized import quantized_route

pytest.importorskip("torchao.quantization", reason="needs torchao")
from torchao.float8.inference import Float8MMConfig
from torchao.quantization import Float8Tensor, PerRow, PerTensor
from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

E4M3 = torch.float8_e4m3fn
LAYERS = [
    (nn.Conv1d(32, 48, 3, padding=1), (2, 32, 9)),
    (nn.Conv2d(32, 48, 3, padding=1, stride=2, groups=2), (2, 32, 9, 7)),
    (nn.Conv2d(32, 16, (3, 1), padding="same", padding_mode="circular"), (2, 32, 5, 7)),
    (nn.Conv3d(16, 32, 3, dilation=2, bias=False), (1, 16, 5, 6, 7)),
    (nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1), (2, 32, 5, 4)),
]


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Float8Tensor, "_ATEN_OP_TABLE", {c: dict(t) for c, t in Float8Tensor._ATEN_OP_TABLE.items()}
    )
    serve_torchao()


def quantised(
    layer: nn.Module, shape: tuple[int, ...], inputs: bool = True, per: Any = None
) -> tuple[nn.Module, torch.Tensor]:
    """The layer in bf16 with a weight of torchao's, and an input."""
    torch.manual_seed(0)
    made = type(layer)(
        **{
            n: getattr(layer, n)
            for n in (
                "in_channels",
                "out_channels",
                "kernel_size",
                "stride",
                "padding",
                "dilation",
                "groups",
                "padding_mode",
            )
        },
        bias=layer.bias is not None,
        **({"output_padding": layer.output_padding} if layer.transposed else {}),
    ).bfloat16()
    how = QuantizeTensorToFloat8Kwargs(E4M3, PerTensor()) if inputs else None
    weight = Float8Tensor.from_hp(made.weight.detach(), E4M3, per or PerTensor(), act_quant_kwargs=how)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made.requires_grad_(False), torch.randn(shape, dtype=torch.bfloat16)


def exact(layer: nn.Module, x: torch.Tensor, inputs: bool = True) -> torch.Tensor:
    """The result in f64, of what the quantised tensors mean."""
    if inputs:
        held = Float8Tensor.from_hp(x, E4M3, PerTensor())
        x = held.qdata.double() * held.scale.double()
    x = x.double()
    w = layer.weight.qdata.double() * layer.weight.scale.double()
    bias = None if layer.bias is None else layer.bias.double()
    if layer.transposed:
        return F.conv_transpose2d(
            x, w, bias, layer.stride, layer.padding, layer.output_padding, layer.groups
        )
    padding = layer.padding
    if padding == "same":
        x, padding = F.pad(x, (0, 0, 1, 1), mode="circular"), 0
    convolved = getattr(F, f"conv{x.dim() - 2}d")
    return convolved(x, w, bias, layer.stride, padding, layer.dilation, layer.groups)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda v: type(v).__name__)
def test_layers(layer: nn.Module, shape: tuple[int, ...], inference: bool) -> None:
    made, x = quantised(layer, shape)
    with torch.inference_mode(inference):
        result = made(x)
    want = exact(made, x)
    assert type(result) is torch.Tensor and result.dtype is torch.bfloat16
    assert (result.double() - want).abs().max() <= 2**-8 * want.abs().max()


def test_a_scale_of_each_output_channel() -> None:
    layer, x = quantised(nn.Conv2d(16, 32, 3), (1, 16, 5, 5))
    scale = torch.linspace(0.5, 2, 32).view(-1, 1, 1, 1) * layer.weight.scale
    layer.weight = nn.Parameter(
        Float8Tensor(
            layer.weight.qdata,
            scale,
            [1, 16, 3, 3],
            act_quant_kwargs=layer.weight.act_quant_kwargs,
            dtype=torch.bfloat16,
        ),
        requires_grad=False,
    )
    want = exact(layer, x)
    assert (layer(x).double() - want).abs().max() <= 2**-8 * want.abs().max()


def test_a_scale_of_each_row_is_refused() -> None:
    layer, x = quantised(nn.Conv2d(16, 32, 3), (1, 16, 5, 5), per=PerRow())
    with pytest.raises(
        Unsupported,
        match=r"weight: expected one scale, or one for each output channel, "
        r"got scales of shape \(32, 16, 3, 1\)",
    ):
        layer(x)


@pytest.mark.parametrize(
    ("config", "fast"),
    [
        (None, False),
        (Float8MMConfig(use_fast_accum=False), False),
        (Float8MMConfig(use_fast_accum=True), True),
    ],
)
def test_sums_stay_in_the_matrix_unit_where_the_weight_says_so(
    config: Any, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, find = list[Any](), quantized_route.find

    def noted(*call: Any) -> Any:
        asked.append(find(*call))
        return asked[-1]

    monkeypatch.setattr(quantized_route, "find", noted)
    transconv.config.cpu = "interpret"
    layer, x = quantised(*LAYERS[1])
    layer.weight.mm_config = config
    want = exact(layer, x)
    assert (layer(x).double() - want).abs().max() <= 2**-8 * want.abs().max()
    (found,) = asked
    assert ("math=ieee" in found.route.compiled.workload.text) is not fast


def test_weights_alone() -> None:
    layer, x = quantised(nn.Conv2d(16, 32, 3), (1, 16, 5, 5), inputs=False)
    want = exact(layer, x, inputs=False)
    assert (layer(x).double() - want).abs().max() <= 2**-7 * want.abs().max()


def test_an_input_beside_a_plain_weight() -> None:
    x = Float8Tensor.from_hp(torch.randn(1, 16, 5, 5).bfloat16(), E4M3, PerTensor())
    with pytest.raises(Unsupported, match="weight: expected a Float8Tensor beside an input of that class"):
        F.conv2d(x, torch.randn(8, 16, 3, 3).bfloat16())


def test_compiled_as_one_operator() -> None:
    layer, x = quantised(nn.Conv2d(16, 32, 3, padding=1), (1, 16, 5, 5))
    seen = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        from torch._dynamo.backends.common import aot_autograd

        compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
        assert torch.equal(compiled(x), layer(x))
    assert seen.count("transconv.quantized_convolution.default") == 1


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r'pip install "transconv\[torchao\]"'):
        serve_torchao()
