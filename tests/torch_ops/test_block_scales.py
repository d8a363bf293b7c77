"""Weights in blocks of floats against the tables of the standard, in f64 of NumPy."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import transconv
from tests.block_tables import F4E2M1, F8E4M3, F8E8M0, halves
from transconv import errors
from transconv.backend_triton import Resources, compile_offline
from transconv.compute import execute, parse
from transconv.ir import DTYPES
from transconv.runtime import build_compute, job_of
from transconv.support import knobs
from transconv.target import TARGETS
from transconv.torch_ops.quantized import block_scales, input_quantization
from transconv.torch_ops.quantized.block_scales import BlockWeight
from transconv.torch_ops.quantized.input_quantization import KINDS

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
FLOATS = ("mxfp8", "mxfp4", "nvfp4")
LARGEST = {"mxfp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}


def codes(t: torch.Tensor) -> np.ndarray[Any, Any]:
    return t.view(torch.uint8).numpy()


def held_scales(kind: str, weight: BlockWeight) -> np.ndarray[Any, Any]:
    """The factor of each block, f64."""
    scale = (F8E4M3 if kind == "nvfp4" else F8E8M0)[codes(weight.scale)]
    return scale if weight.tensor_scale is None else scale * weight.tensor_scale.double().numpy()


def meant(kind: str, weight: BlockWeight) -> np.ndarray[Any, Any]:
    """The elements (oc, *k, padded) times their scales, f64."""
    held = codes(weight.elements)
    if kind == "mxfp8":
        values = F8E4M3[held]
    else:
        values = F4E2M1[halves(held)]
    return values * held_scales(kind, weight).repeat(KINDS[kind].group, -1)


def blocks(kind: str, weight: torch.Tensor) -> BlockWeight:
    return block_scales.quantised(weight, KINDS[kind], KINDS[kind].group)


def test_functions_of_codes_are_the_tables() -> None:
    text = """compute codes
        tensor P u8 [256]
        axes   n=256
        read   p = P[n]
        store  A[n] = f4e2m1(p % 16)
        store  B[n] = f4e2m1(p // 16)
        store  C[n] = f8e8m0(p)
    """
    at = np.arange(256)
    want = {"A": F4E2M1[at % 16], "B": F4E2M1[at // 16], "C": F8E8M0}
    got = execute(parse(text), {"P": at})
    for name, values in want.items():
        np.testing.assert_array_equal(got[name].value, values)
        np.testing.assert_array_equal(np.signbit(got[name].value[:255]), np.signbit(values[:255]))
    if knobs.interpret():
        made = {name: torch.empty(256) for name in want}
        transconv.compile(text, "interpreter").launch(P=torch.arange(256, dtype=torch.uint8), **made)
        for name, values in want.items():
            np.testing.assert_array_equal(made[name].numpy(), values)


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", [(5, 32), (7, 33, 3), (3, 75, 2, 2), (2, 130, 1, 1, 1)])
def test_weights_become_the_nearest_of_their_blocks(kind: str, shape: tuple[int, ...]) -> None:
    """Nothing is too large, scales are the least, and no float of the format is nearer."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.07
    weight[0] = 0  # blocks of zeros
    weight[-1, :2] *= 2.0**20
    made, size, most = blocks(kind, weight), KINDS[kind].group, LARGEST[kind]
    got, factor = meant(kind, made), held_scales(kind, made)
    given = np.zeros(got.shape)
    given[..., : shape[1]] = weight.double().movedim(1, -1).numpy()
    highest = np.abs(given).reshape(*given.shape[:-1], -1, size).max(-1)
    if kind != "nvfp4":
        live = highest > 0
        assert (highest <= most * factor).all() and (highest > most * factor / 2)[live].all()
    else:
        assert made.tensor_scale is not None
        whole = float(made.tensor_scale)
        least = factor == whole * 2.0**-9  # of blocks that are too small beside others
        near = np.abs(highest - most * factor) <= highest / 16 + most * whole * 2.0**-10
        assert (near | (least & (highest <= most * factor))).all()
    table = F8E4M3[np.isfinite(F8E4M3)] if kind == "mxfp8" else F4E2M1
    each = factor.repeat(size, -1)
    off = np.abs(got - given)
    best = np.abs(table[:, None] * each.reshape(1, -1) - given.reshape(1, -1)).min(0).reshape(off.shape)
    assert (off <= best + 1e-6 * each).all()
    np.testing.assert_array_equal(got[..., shape[1] :], 0)
    np.testing.assert_array_equal(
        made.unpacked(torch.float64).movedim(1, -1).numpy(), got[..., : shape[1]]
    )


def test_halves_become_even_codes() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 6.0])
    assert block_scales._code(halves).tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 14, 7]


LAYERS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv2d(40, 19, 3, 2, padding=1, dilation=(1, 2)), (2, 40, 6, 7)),
    (nn.Conv2d(64, 32, 1, bias=False), (1, 64, 3, 3)),
    (nn.Conv1d(66, 20, 3, padding="same", groups=2), (1, 66, 7)),
    (nn.Linear(75, 19), (2, 3, 75)),
]
WAYS = ["fallback", *(pytest.param(w, marks=interpreted) for w in ("written", "in the product"))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda x: str(x)[:9])
def test_layers_multiply_by_what_blocks_mean(
    layer: Any, shape: tuple[int, ...], kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small whole inputs, so that sums are exact in f32: the bits of f64, rounded once."""
    transconv.config.cpu = "fallback" if way == "fallback" else "interpret"
    monkeypatch.setenv("TRANSCONV_TRUST", "always")  # first results are checked, as on a GPU
    monkeypatch.setattr(block_scales, "pays", lambda *_: way == "written")
    began: list[str] = []

    def computed(what: str, *given: Any, asked: Any = input_quantization.computed) -> bool:
        began.append(what)
        done: bool = asked(what, *given)
        assert done
        return done

    monkeypatch.setattr(input_quantization, "computed", computed)
    rng = torch.Generator().manual_seed(3)
    layer = copy.deepcopy(layer)
    layer.weight.data = torch.randint(-9, 10, layer.weight.shape, generator=rng) / 8.0
    if layer.bias is not None:
        layer.bias.data = torch.randint(-4, 5, layer.bias.shape, generator=rng).float()
    model = nn.Sequential(copy.deepcopy(layer)).bfloat16()
    assert transconv.quantize_(model, kind).quantized == ("0",)
    made: Any = model[0]
    x = torch.randint(-3, 4, shape, generator=rng).bfloat16()
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    held = torch.from_numpy(meant(kind, made.blocks)[..., : layer.weight.shape[1]]).movedim(-1, 1)
    plain = layer.double()
    plain.weight.data = held.contiguous()
    got = model(x)
    want = plain(x.double()).bfloat16()
    assert torch.equal(got, want) and got.stride() == want.stride() and not got.requires_grad
    product = way == "in the product" and getattr(layer, "groups", 1) == 1
    bits = 8 if kind == "mxfp8" else 4
    expected = (
        []
        if way == "fallback"
        else ["products with weights in blocks" if product else f"weights of {bits} bits"]
    )
    assert began == expected


@interpreted
def test_activations_are_parts_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    transconv.config.cpu = "interpret"
    monkeypatch.setattr(block_scales, "pays", lambda *_: False)
    x = torch.randn(1, 32, 3, 3).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    for act in (nn.ReLU(), nn.SiLU(), nn.GELU()):
        model = nn.Sequential(nn.Conv2d(32, 16, 1), act).eval().bfloat16()
        assert transconv.quantize_(model, "mxfp8").folded == ("1",)
        made: Any = model[0]
        plain = nn.functional.conv2d(x.double(), made.blocks.unpacked(torch.float64), made.bias.double())
        want = act(plain)
        assert (model(x).double() - want).abs().max() <= 2**-8 * want.abs().max()


def test_both_operands_may_have_blocks() -> None:
    """As a text: scales are operands with coordinates of their own."""
    text = """compute product
        tensor A f8e4m3 [5, 64]
        tensor R u8 [5, 2]
        tensor W u8 [7, 32]
        tensor S u8 [7, 2]
        axes   m=5 n=7 | k=64
        read   a = A[m, k]
        read   r = R[m, k // 32]
        read   p = W[n, k // 2]
        read   s = S[n, k // 32]
        let    x = bf16(a*f8e8m0(r))
        let    w = bf16(f4e2m1(where(k % 2 == 0, p % 16, p // 16))*f8e8m0(s))
        store  Y[m, n] = sum(x*w; k)
    """
    rng = np.random.default_rng(0)
    a, r = rng.integers(-8, 9, (5, 64)), rng.integers(124, 130, (5, 2))
    p, s = rng.integers(0, 256, (7, 32)), rng.integers(124, 130, (7, 2))
    w = F4E2M1[np.stack([p & 15, p >> 4], -1).reshape(7, 64)] * F8E8M0[s].repeat(32, 1)
    want = (a * F8E8M0[r].repeat(32, 1)) @ w.T
    given = {"A": a.astype(float), "R": r, "W": p, "S": s}
    np.testing.assert_array_equal(execute(parse(text), given)["Y"].value, want)
    plan = build_compute(parse(text), TARGETS["sm_90"])
    assert "tl.dot(x, w" in plan.source or "tl.dot(w, x" in plan.source
    if knobs.interpret():
        y = torch.empty(5, 7)
        held = {n: torch.from_numpy(given[n]).to(torch.uint8) for n in "RWS"}
        held["A"] = torch.from_numpy(given["A"]).to(torch.float8_e4m3fn)
        transconv.compile(text, "interpreter").launch(**held, Y=y)
        np.testing.assert_array_equal(y.numpy(), want)


@pytest.mark.parametrize("chip", ["sm_90", "sm_100", "gfx950"])
@pytest.mark.parametrize("kind", FLOATS)
def test_kernels_compile(kind: str, chip: str) -> None:
    weight = blocks(kind, torch.randn(64, 96))
    image, made = torch.empty(32, 96, dtype=torch.bfloat16), torch.empty(32, 64, dtype=torch.bfloat16)
    of = DTYPES["bf16"]
    texts = [block_scales.product_text(image, weight, None, None, made), weight.text(of)]
    plans = [build_compute(parse(text), TARGETS[chip]) for text in texts]
    jobs = [job_of(step, TARGETS[chip], words=False) for plan in plans for step in plan.steps]
    for found in compile_offline(jobs):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"


@pytest.mark.parametrize("kind", FLOATS)
def test_modules_keep_their_state(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(32, 8, 3), nn.Linear(4, 40, bias=False))
    transconv.quantize_(model, kind, filter_fn=lambda m, n: n == "0")
    model[1] = transconv.nn.QuantLinear.from_float(nn.Linear(64, 8), kind=kind)
    x = torch.randn(1, 32, 3, 66)
    model[0].double()
    want = model(x)
    assert f"kind={kind}" in repr(model[0]) and f"kind={kind}" in repr(model[1])
    assert model[0].weight_scale.dtype is KINDS_OF_SCALES[kind]
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    again = nn.Sequential(
        transconv.nn.QuantConv2d(32, 8, 3, kind=kind), transconv.nn.QuantLinear(64, 8, kind=kind)
    )
    again.load_state_dict(torch.load(saved))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), again):
        assert torch.equal(other(x), want)


KINDS_OF_SCALES = {
    "mxfp8": torch.float8_e8m0fnu,
    "mxfp4": torch.float8_e8m0fnu,
    "nvfp4": torch.float8_e4m3fn,
}


class Own(nn.Linear):
    """A class whose forward may read its weight."""


def test_what_has_no_blocks_is_left_with_its_reason() -> None:
    model = nn.ModuleDict(
        {
            "few": nn.Conv1d(15, 4, 3),
            "encoder": nn.TransformerEncoderLayer(32, 4, 64),
            "depthwise": nn.Conv2d(32, 32, 3, groups=32),
            "up": nn.ConvTranspose1d(32, 4, 3),
            "own": Own(32, 4),
            "endless": nn.Linear(32, 4),
            "good": nn.Linear(16, 4),
        }
    )
    model["endless"].weight.data[0, 0] = float("inf")
    report = transconv.quantize_(model, "mxfp4")
    assert report.quantized == ("good",) and str(report).startswith("1 layer quantised (mxfp4), 8 left")
    assert report.left == {
        "few": "weights in blocks (mxfp4) are for 16 input channels and more, not 15",
        "encoder.linear1": "torch.nn.TransformerEncoderLayer reads its weight",
        "encoder.linear2": "torch.nn.TransformerEncoderLayer reads its weight",
        "encoder.self_attn.out_proj": "its class NonDynamicallyQuantizableLinear is not torch.nn.Linear "
        "itself",
        "depthwise": "weights in blocks (mxfp4) are for 16 input channels and more, not 1",
        "up": "transposed convolutions have no weights in blocks (mxfp4)",
        "own": "its class Own is not torch.nn.Linear itself",
        "endless": "weights in blocks (mxfp4) are finite, and it has elements that are not",
    }
    with pytest.raises(
        ValueError, match=r"weights in blocks alone \(mxfp8, mxfp4, nvfp4, .*nvfp4_nvfp4\), not int8"
    ):
        transconv.nn.QuantLinear.from_float(nn.Linear(32, 4), kind="int8")
    with pytest.raises(errors.TensorError, match="input: expected rows of 16 numbers"):
        model["good"](torch.zeros(2, 15))
    model["good"].weight_scale = model["good"].weight_scale[:3]
    with pytest.raises(errors.TensorError, match=r"weight_scale: expected the shape \(4, groups of 32"):
        model["good"](torch.zeros(2, 16))


def test_tracers_see_torch_s_operations() -> None:
    model = nn.Sequential(nn.Linear(40, 8)).eval()
    transconv.quantize_(model, "nvfp4")
    x = torch.randn(3, 40)
    want = model(x)
    got = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.allclose(got, want, atol=1e-6)
