"""Inputs in blocks, and layers of inputs and weights in blocks, against the tables of the standard.

What blocks should hold is found by trying every float of the format (tests/block_tables.py), in f64 of
NumPy, whatever the package does.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import transconv
from tests.block_tables import F4E2M1, F8E4M3, F8E8M0, halves
from transconv.backend_triton import Resources, compile_offline
from transconv.compute import parse
from transconv.ir import DTYPES
from transconv.runtime import build_compute, job_of
from transconv.support import knobs
from transconv.target import TARGETS
from transconv.torch_ops.quantized import block_inputs, block_scales, input_quantization
from transconv.torch_ops.quantized.block_scales import BlockWeight
from transconv.torch_ops.quantized.input_quantization import KINDS

Array = np.ndarray[Any, Any]
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
FLOATS = ("mxfp8", "mxfp4", "nvfp4")
BOTH = ("mxfp8_mxfp8", "mxfp4_mxfp8", "mxfp4_mxfp4", "nvfp4_nvfp4")
LARGEST = {"mxfp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}
WAYS = ["fallback", pytest.param("interpret", marks=interpreted)]


def held(kind: str, made: BlockWeight) -> tuple[Array, Array]:
    """Elements and the factors of their blocks, f64."""
    codes, scales = (t.view(torch.uint8).numpy() for t in (made.elements, made.scale))
    values = F8E4M3[codes] if kind == "mxfp8" else F4E2M1[halves(codes)]
    factors = (F8E4M3 if kind == "nvfp4" else F8E8M0)[scales]
    return values, factors if made.tensor_scale is None else factors * made.tensor_scale.double().numpy()


def meant(kind: str, made: BlockWeight) -> Array:
    values, factors = held(kind, made)
    product: Array = values * factors.repeat(KINDS[kind].group, -1)
    return product


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 75 with blocks of zeros, of ties, at the bounds of powers of two, of few digits."""
    x = torch.randn(9, 75, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x[1, :40] = 0
    x[2] = torch.arange(75) / 8 - 4.5
    x[3, 0], x[3, 1:32] = 448, 1.0625
    x[4, 0], x[4, 40] = 449, 6.25
    x[5] *= 2.0**-14
    x[6, :32], x[6, 32:64] = 2.0**15, -(2.0**-3)
    return x.to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", FLOATS)
def test_elements_are_the_nearest_of_their_blocks(kind: str, dtype: torch.dtype, way: str) -> None:
    transconv.config.cpu = way
    x, size, most = rows_of(dtype), KINDS[kind].group, LARGEST[kind]
    made = block_inputs.blocks_of(x, KINDS[kind])
    values, factors = held(kind, made)
    given = np.zeros(values.shape)
    given[:, :75] = x.double().numpy()
    highest = np.abs(given).reshape(len(given), -1, size).max(-1)
    if kind == "nvfp4":  # some scale of 4 digits near that of the largest element, at least the least one
        assert made.tensor_scale is not None
        least = float(made.tensor_scale) * 2.0**-9
        assert (np.abs(highest - most * factors) <= np.maximum(highest / 15, 6 * least)).all()
    else:  # the least power of two by which nothing is too large
        assert (highest <= most * factors).all()
        assert ((highest > most * factors / 2) | (highest < most * 2.0**-126)).all()
    table = F8E4M3[np.isfinite(F8E4M3)] if kind == "mxfp8" else F4E2M1
    each = factors.repeat(size, 1)
    best = np.abs(table[:, None, None] * each - given).min(0)
    off = np.abs(values * each - np.clip(given, -most * each, most * each))
    beyond = np.abs(given) - most * each
    assert (off <= np.maximum(best, beyond) * (1 + 1e-6) + 1e-6 * each * (kind == "nvfp4")).all()
    np.testing.assert_array_equal(values[:, 75:], 0)


@interpreted
@pytest.mark.parametrize("kind", FLOATS)
def test_kernels_and_torch_make_the_same_blocks(kind: str) -> None:
    x = rows_of(torch.bfloat16)
    transconv.config.cpu = "interpret"
    ours = block_inputs.blocks_of(x, KINDS[kind])
    transconv.config.cpu = "fallback"
    theirs = block_inputs.blocks_of(x, KINDS[kind])
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        np.testing.assert_array_equal(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", FLOATS)
def test_what_is_not_finite_shows(kind: str, odd: float, way: str) -> None:
    """All of its block is NaN, in nvfp4 all of the tensor; of others nothing."""
    transconv.config.cpu = way
    x = torch.ones(2, 64)
    x[1, 33] = odd
    found = block_inputs.blocks_of(x, KINDS[kind]).unpacked(torch.float32).isnan()
    wanted = torch.zeros(2, 64, dtype=torch.bool)
    wanted[1, 32:] = True
    assert torch.equal(found, wanted if kind != "nvfp4" else torch.ones_like(wanted))


LAYERS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Linear(75, 19), (2, 3, 75)),
    (nn.Linear(64, 40, bias=False), (1, 64)),
    (nn.Conv2d(40, 19, 3, 2, padding=1, dilation=(1, 2)), (2, 40, 6, 7)),
    (nn.Conv1d(66, 20, 3, padding="same", groups=2), (1, 66, 7)),
]


@pytest.mark.parametrize(
    "way", ["fallback", *(pytest.param(w, marks=interpreted) for w in ("floats", "blocks"))]
)
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda x: str(x)[:9])
def test_layers_multiply_what_both_blocks_mean(
    layer: Any, shape: tuple[int, ...], kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small whole numbers, whose sums are exact in f32: the bits of f64, rounded once."""
    transconv.config.cpu = "fallback" if way == "fallback" else "interpret"
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    began: list[str] = []

    def computed(what: str, *given: Any, asked: Any = input_quantization.computed) -> bool:
        began.append(what)
        return bool(asked(what, *given))

    monkeypatch.setattr(input_quantization, "computed", computed)
    monkeypatch.setattr(block_inputs, "takes_blocks", lambda *_: way == "blocks")
    rng = torch.Generator().manual_seed(3)
    layer, how = copy.deepcopy(layer), KINDS[kind]
    layer.weight.data = torch.randint(-9, 10, layer.weight.shape, generator=rng) / 8.0
    if layer.bias is not None:
        layer.bias.data = torch.randint(-4, 5, layer.bias.shape, generator=rng).float()
    model = nn.Sequential(copy.deepcopy(layer)).bfloat16()
    assert transconv.quantize_(model, kind).quantized == ("0",)
    made: Any = model[0]
    x = torch.randint(-3, 4, shape, generator=rng).bfloat16()
    groups, channels = getattr(layer, "groups", 1), layer.weight.shape[1]
    image = x if x.dim() < 3 or isinstance(layer, nn.Linear) else x.movedim(1, -1)
    rows = image.reshape(-1, channels)
    blocks = block_scales.quantised(rows, KINDS[how.inputs], KINDS[how.inputs].group)
    real = torch.from_numpy(meant(how.inputs, blocks)[:, :channels]).reshape(image.shape)
    real = real if image is x else real.movedim(-1, 1)
    plain = layer.double()
    weight = meant(how.form, made.blocks)[..., :channels]
    plain.weight.data = torch.from_numpy(weight).movedim(-1, 1).contiguous()
    got = model(x)
    want = plain(real)
    assert got.dtype is x.dtype and got.shape == want.shape
    assert (got.double() - want).abs().max() <= want.abs().max() * 2.0**-8
    if "nvfp4" not in kind:
        assert torch.equal(got, want.bfloat16())
    assert (block_inputs.PRODUCTS in began) is (way == "blocks" and groups == 1)
    assert (block_inputs.WHAT in began) is (way != "fallback")


@interpreted
def test_only_some_chips_multiply_blocks() -> None:
    f8, f4, nv = (KINDS[k] for k in FLOATS)
    chips = {n: TARGETS[n] for n in ("sm_90", "sm_100", "sm_120", "gfx950", "gfx942")}
    found = {
        n: [block_inputs.takes_blocks(t, *p) for p in ((f8, f8), (f8, f4), (f4, f4), (nv, nv))]
        for n, t in chips.items()
    }
    assert found == {
        "sm_90": [False] * 4,
        "sm_100": [True] * 4,
        "sm_120": [True, False, True, True],
        "gfx950": [True, True, True, False],
        "gfx942": [False] * 4,
    }


COMPILED = [(chip, kind) for chip in ("sm_100", "sm_120", "gfx950") for kind in BOTH]


@pytest.mark.parametrize(
    ("chip", "name"), [COMPILED[1], *(pytest.param(*c, marks=pytest.mark.slow) for c in COMPILED)]
)
def test_kernels_of_layers_compile(chip: str, name: str) -> None:
    """A layer's two kernels: that of blocks, and the product by tl.dot_scaled."""
    of, kind = DTYPES["bf16"], KINDS[name]
    if not block_inputs.takes_blocks(TARGETS[chip], KINDS[kind.inputs], kind):
        pytest.skip("the matrix unit does not multiply them")
    weight = block_scales.quantised(torch.randn(256, 192), kind, kind.group)
    image = block_scales.quantised(torch.randn(512, 192), KINDS[kind.inputs], kind.group)
    made = torch.empty(512, 256, dtype=torch.bfloat16)
    product = build_compute(parse(block_scales.product_text(image, weight, of, None, made)), TARGETS[chip])
    assert "tl.dot_scaled" in product.source
    blocks = build_compute(parse(block_inputs.text(512, 192, of, KINDS[kind.inputs])), TARGETS[chip])
    jobs = [job_of(step, TARGETS[chip], words=False) for p in (product, blocks) for step in p.steps]
    for found in compile_offline(jobs):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"


def test_a_row_of_other_length_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    transconv.quantize_(model, "mxfp8_mxfp8")
    with pytest.raises(transconv.errors.TensorError, match=r"expected rows of 64 numbers, got \(2, 63\)"):
        model(torch.zeros(2, 63))
