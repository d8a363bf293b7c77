"""Results that are rounded up or down at random: the bits of every interpreter, unbiased means, errors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import transconv
from tests.verify.judging import case_of, interpreted
from transconv import ir, quantized
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.errors import ScheduleError, TensorError
from transconv.ir.functions import rounding
from transconv.support import knobs
from transconv.verify.benchdnn_job import RefusedRequest, job_of
from transconv.verify.benchdnn_requests import Driver
from transconv.verify.case import ProblemCase
from transconv.verify.judgement import Judgement

# The factor has few digits, so that f32 holds products of exact data and results do not.
CASES = [
    ("mb2ic16ih7oc24oh7kh3ph1 dt=bf16 tag=nhwc", "bwd_d", "mul:0.65625+stochastic"),
    ("mb2ic16ih7oc24oh7kh3ph1 dt=f32:bf16:f32", "bwd_w", "mul:0.65625+stochastic"),
    pytest.param(
        "mb1ic16ih8oc24oh4kh3sh2ph1 dt=f16", "bwd_d", "mul:0.65625+stochastic", marks=pytest.mark.slow
    ),
    ("mb1ic8ih5oc16oh5kh3ph1 dt=f8e4m3:f8e5m2:f8e4m3", "fwd", "bias+mul:0.65625+stochastic"),
    ("mb2ic16iw7oc24ow7kw3pw1 dt=u8:s8:bf16", "fwd", "zero:src+mul:f32:per_oc+stochastic"),
]


def judged(problem: str, prop: str, words: str, numpy: bool) -> tuple[Judgement, torch.Tensor]:
    case = case_of(problem, prop, words, numpy)
    found = case.judge(case.plan(), "exact", 3)
    return found, case.tensors[Prop(prop).result].view.double().clone()


@pytest.mark.parametrize(("problem", "prop", "words"), CASES)
def test_every_bit_is_that_of_the_reference(problem: str, prop: str, words: str) -> None:
    """In the interpreter of the IR, and where there is one in Triton's."""
    found, made = judged(problem, prop, words, numpy=True)
    assert found.reason == "" and found.nonzero > 0.02
    if knobs.interpret():
        again, same = judged(problem, prop, words, numpy=False)
        assert again.reason == "" and torch.equal(made, same)


@pytest.mark.parametrize(
    ("problem", "prop", "tile"),
    [
        ("g8mb2ic16iw66oc32ow16kw3sw4pw0 dt=f8e4m3:f8e5m2:f8e5m2 tag=nwc", "fwd", "mb.ow:16 oc:16 ic:16"),
        ("g4mb2ic16iw9oc16ow9kw3pw1 dt=bf16 tag=nwc", "bwd_d", "mb.iw:16 ic:16 oc:16"),
        ("g4mb2ic16iw9oc16ow9kw3pw1 dt=f16:bf16:f16 tag=nwc", "bwd_w", "ic:16 oc:16 mb.ow:16"),
    ],
)
def test_places_of_merged_groups_are_those_of_the_result(problem: str, prop: str, tile: str) -> None:
    """The random word of an element is told by its place in the result, whatever the kernel sees as one
    group."""
    case = ProblemCase(ConvProblem.parse(problem), Prop(prop), "mul:0.65625+stochastic", "cpu", numpy=True)
    for merge in (1, 2, 4):
        found = case.judge(case.plan(f"{tile} | mma | merge={merge}"), "exact", 3)
        assert found.reason == "" and found.nonzero > 0.5, merge


@pytest.mark.parametrize(
    "planted",
    [
        {"numpy": lambda seed, element: rounding.numpy_bits(seed, element + 1)},
        {"numpy": lambda seed, element: rounding.numpy_bits(seed * 0, element)},
    ],
    ids=["place", "seed"],
)
def test_other_words_are_found(planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ir.CALLS, "random_bits", replace(ir.CALLS["random_bits"], **planted))
    assert "wrong" in judged(*CASES[0], numpy=True)[0].reason


@interpreted
def test_words_are_those_of_triton() -> None:
    """``tl.randint`` of the seed and the place, which are Philox-4x32-10."""
    import triton
    import triton.language as tl

    @triton.jit
    def words(out: Any, seed: Any, n: tl.constexpr) -> None:
        i = tl.arange(0, n)
        tl.store(out + i, tl.randint(tl.load(seed), i).to(tl.int64))

    found = torch.zeros(256, dtype=torch.int64)
    words[(1,)](found, torch.tensor([123456789], dtype=torch.int32), 256)
    assert torch.equal(found & 0xFFFFFFFF, rounding.random_words(123456789, torch.arange(256)))
    bits = rounding.numpy_bits(np.array([123456789], np.int32), np.arange(256, dtype=np.int32))
    assert bits.tolist() == [n - (n >> 31 << 32) for n in (found & 0xFFFFFFFF).tolist()]


@pytest.mark.parametrize("dtype", rounding.SHORT, ids=str)
def test_the_mean_is_the_number(dtype: ir.DType) -> None:
    """Each result is a neighbour, and the mean of 4,000 is within 5 deviations; subnormal numbers, too."""
    x = torch.tensor([1.0 + 0.3 * dtype.spacing, -3.7, 2 * dtype.tiny * 1.25, 0.9 * dtype.tiny, 0.0, 2.0])
    x = x.double()[:, None].expand(-1, 4000)
    chance = rounding.chances(5, torch.arange(x.numel()).view(x.shape))
    made = rounding.one_of_two(x, chance, dtype, torch)
    held = getattr(torch, dtype.torch)
    assert torch.equal(made.to(held).double(), made)
    apart = made.amax(1) - made.amin(1)
    share = (x[:, 0] - made.amin(1)) / torch.where(apart > 0, apart, 1.0)
    assert (apart[:4] > 0).all() and (apart[4:] == 0).all()
    allowed = 5 * apart * (share * (1 - share) / 4000) ** 0.5
    assert ((made.mean(1) - x[:, 0]).abs() <= allowed).all()


def test_kernels_round_to_neighbours_and_keep_what_is_no_number() -> None:
    for dtype in rounding.SHORT:
        callee = ir.CALLS[f"stochastic_{dtype}"]
        given = np.array([np.inf, -np.inf, np.nan, 0.0, 3e-42], np.float32)
        made = callee.numpy(given, np.full(5, 0.5, np.float32)).astype(np.float32)
        assert made[0] == np.inf and made[1] == -np.inf and np.isnan(made[2]) and not made[3:].any()
        assert callee.helper.count("{jit}") == 1


def test_a_seed_is_an_argument_of_calls() -> None:
    """Other seeds need no other kernel; a seed gives the same bits again, also by torch."""
    generator = torch.Generator().manual_seed(1)
    x, w = (
        torch.randint(-128, 128, s, dtype=torch.int8, generator=generator)
        for s in ((1, 16, 6, 6), (16, 16, 3, 3))
    )
    made = {}
    for way in ["fallback", "interpret"][: 1 + knobs.interpret()]:
        transconv.config.cpu = way
        seeds = (torch.tensor([7], dtype=torch.int32), torch.tensor(8), torch.tensor([7]))
        made[way] = [
            quantized.conv2d(x, w, input_scale=0.01, output_dtype=torch.bfloat16, rounding_seed=seed)
            for seed in seeds
        ]
        first, other, again = made[way]
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert (first - other).abs().max() <= first.abs().max() * 2**-7
    assert all(
        torch.equal(a, b) for kept in made.values() for a, b in zip(kept, made["fallback"], strict=True)
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounding_seed": 3}, "rounding_seed: expected an integer tensor of one element, got 3"),
        ({"rounding_seed": torch.ones(1)}, "expected an integer tensor of one element, got torch.float32"),
        (
            {"rounding_seed": torch.tensor([1]), "output_dtype": torch.float32},
            "rounding_seed: it is for results of f8e4m3 f8e5m2 f16 bf16; output_dtype is torch.float32",
        ),
    ],
)
def test_wrong_seeds(given: dict[str, Any], said: str) -> None:
    x = torch.zeros(1, 4, 5, 5, dtype=torch.int8)
    with pytest.raises(TensorError, match=said):
        quantized.conv2d(
            x, torch.zeros(4, 4, 3, 3, dtype=torch.int8), **{"output_dtype": torch.bfloat16, **given}
        )


def test_the_word_is_the_last_one() -> None:
    assert str(Epilogue.parse("bias+relu+stochastic")) == "bias+relu+stochastic"
    with pytest.raises(ScheduleError, match="expected it last"):
        Epilogue.parse("stochastic+relu")


@pytest.mark.parametrize(
    ("words", "epilogue"),
    [
        (["--dir=BWD_D", "--dt=bf16", "--attr-rounding-mode=diff_src:stochastic"], "stochastic"),
        (["--dir=BWD_W", "--dt=bf16", "--attr-rounding-mode=diff_weights:stochastic"], "stochastic"),
        (["--dir=FWD_D", "--dt=f16", "--attr-rounding-mode=dst:environment"], ""),
        (
            ["--dir=FWD_D", "--dt=f16", "--attr-post-ops=relu", "--attr-rounding-mode=dst:stochastic"],
            "relu+stochastic",
        ),
        (
            ["--dir=BWD_D", "--dt=f32", "--attr-rounding-mode=diff_src:stochastic"],
            "results of f32 are not",
        ),
        (["--dir=BWD_D", "--dt=bf16", "--attr-rounding-mode=diff_weights:stochastic"], "rounds src alone"),
        (["--dir=FWD_D", "--dt=f16", "--attr-rounding-mode=dst:up"], "dst:up is unknown"),
    ],
)
def test_benchdnns_option(words: list[str], epilogue: str) -> None:
    request = next(Driver().requests([*words, "mb1ic16ih5oc16oh5kh3ph1"]))
    try:
        assert job_of(request).epilogue == epilogue
    except RefusedRequest as refusal:
        assert " " in epilogue and epilogue in str(refusal)


class Lanes(np.ndarray):
    """A tile as the helper's text has it: NumPy, with the casts of Triton."""

    def to(self, dtype: type, bitcast: bool = False) -> Lanes:
        return self.view(dtype) if bitcast else self.astype(dtype)


def test_the_text_of_the_helper_rounds_to_neighbours() -> None:
    """One of the two f16 around a number, the upper one if its share is above chance: of all magnitudes,
    those below the smallest number with all digits too."""
    random = np.random.default_rng(0)
    x = (random.standard_normal(4000) * 2.0 ** random.integers(-27, 15, 4000)).astype(np.float32)
    chance = random.random(4000).astype(np.float32)
    tl = SimpleNamespace(abs=np.abs, floor=np.floor, int32=np.int32, float32=np.float32)
    tl.where = lambda c, a, b: np.where(c, a, b).astype(np.result_type(a, np.float32)).view(Lanes)
    scope: dict[str, Any] = {"tl": tl}
    text = rounding.helper(ir.f16).replace("@{jit}", "").replace("{tl}", "tl")
    exec(text, scope)
    made = np.asarray(scope["stochastic_f16"](x.view(Lanes), chance), np.float64)
    size = np.abs(x)
    near = size.astype(np.float16)
    below = np.where(near > size, np.nextafter(near, np.float16(0)), near)
    above = np.nextafter(below, np.float16(np.inf)).astype(np.float64)
    share = (size - below.astype(np.float64)) / (above - below)
    assert np.array_equal(made, np.copysign(np.where(share > chance, above, below), x))
