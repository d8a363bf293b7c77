"""Sampled elements against f64 sums: right results pass, and every kind of wrong one is caught."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.reference import convolve
from tests.strategies import problems
from transconv.compute import ACTIVATIONS
from transconv.conv import Epilogue, spotcheck
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.spotcheck import POINTS, Axes, choose, examine

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
Tensors = dict[str, torch.Tensor]

PROBLEMS = {
    "plain": ConvProblem.make(2, 5, 6, (7, 6), (3, 3), pad=1),
    "groups": ConvProblem.make(3, 4, 6, (7, 6), (3, 2), (2, 1), (1, 2), (1, 2), g=2, layout="nhwc"),
    "depthwise": ConvProblem.make(2, 4, 4, (7, 6), (3, 2), stride=(2, 1), pad=1, g=4, dtype="f16"),
    "1d": ConvProblem.make(2, 8, 4, (17,), (3,), stride=2, dilation=2, pad=3, dtype="bf16"),
    "3d": ConvProblem.make(1, 3, 4, (5, 4, 3), (3, 2, 1), stride=(2, 1, 3), pad=1, layout="ndhwc"),
    "asymmetric": ConvProblem.make(2, 4, 4, (7, 6), (4, 2), pad=(1, 0), o=(8, 7), math="ieee"),
    "double": ConvProblem.make(2, 4, 4, (9, 9), (3, 3), o=(5, 5), dtype="f64"),
}
# Too large to compare all elements.
LARGE = ConvProblem.make(4, 24, 32, (20, 20), (3, 3), pad=1, dtype="f16", layout="nhwc")


def laid_out(values: torch.Tensor, p: ConvProblem, name: str) -> torch.Tensor:
    """A tensor in the problem's layout, in the middle of other memory."""
    spec = p.specs[name]
    strides = spec.layout.strides() or values.contiguous().stride()
    span = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
    memory = torch.full((span + 7,), float("nan"), dtype=TORCH[spec.dtype.name])
    return memory.as_strided(values.shape, strides, 5).copy_(values)


def right(p: ConvProblem, prop: Prop, seed: int = 0) -> Tensors:
    """Random operands and the result they have."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: laid_out(torch.randn(p.shapes[name], generator=generator), p, name) for name in prop.operands
    }
    a, b = (made[name].double().numpy() for name in prop.operands)
    made[prop.result] = laid_out(torch.from_numpy(convolve(p, prop, a, b)), p, prop.result)
    return made


def told(p: ConvProblem, prop: Prop, tensors: Tensors, epilogue: str = "") -> str | None:
    return examine(p, prop, Epilogue.parse(epilogue), tensors, tensors[prop.result]).reason or None


@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize("name", PROBLEMS)
def test_right_results_pass_and_one_wrong_element_does_not(name: str, prop: Prop) -> None:
    p = PROBLEMS[name]
    tensors = right(p, prop)
    assert told(p, prop, tensors) is None
    result = tensors[prop.result]
    for place in [
        (0,) * result.ndim,
        tuple(n - 1 for n in result.shape),
        tuple(n // 2 for n in result.shape),
    ]:
        saved = result[place].clone()
        for wrong in (saved + 0.1 * result.abs().max(), torch.tensor(float("nan"))):
            result[place] = wrong
            reason = told(p, prop, tensors)
            assert reason is not None and "1 of" in reason and str(place) in reason
        result[place] = saved


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.sampled_from(list(Prop)), st.integers(0, 10**6))
def test_any_small_problem(p: ConvProblem, prop: Prop, at: int) -> None:
    """Small results are checked as a whole."""
    tensors = right(p, prop, at)
    assert told(p, prop, tensors) is None
    result = tensors[prop.result]
    assume(result.numel() <= POINTS)  # larger ones are sampled
    place = np.unravel_index(at % result.numel(), result.shape)
    result[tuple(map(int, place))] += 1 + abs(result).max()
    assert told(p, prop, tensors) is not None


@pytest.mark.parametrize("prop", list(Prop))
def test_large_results_are_sampled(prop: Prop) -> None:
    tensors = right(LARGE, prop)
    assert told(LARGE, prop, tensors) is None
    result = tensors[prop.result]
    saved = result.clone()
    for place in [(0,) * 4, tuple(n - 1 for n in result.shape), (0, result.shape[1] - 1, 0, 0)]:
        result[place] += 1 + result.abs().max()
        assert told(LARGE, prop, tensors), place
        result.copy_(saved)
    for share in (0.01, 0.3):
        bad = torch.rand(result.shape, generator=torch.Generator().manual_seed(7)) < share
        result[bad] += 0.2 * result.double().std().half()
        assert told(LARGE, prop, tensors), share
        result.copy_(saved)


@pytest.mark.parametrize("what", ["last image", "last channel", "last row", "a tap missing"])
def test_large_results_wrong_in_places(what: str) -> None:
    tensors = right(LARGE, Prop.FWD)
    result = tensors["dst"]
    if what == "a tap missing":
        weights = tensors["wei"].clone()
        weights[:, :, 2, 2] = 0
        a, b = tensors["src"].double().numpy(), weights.double().numpy()
        result.copy_(torch.from_numpy(convolve(LARGE, Prop.FWD, a, b)))
    else:
        wrong = {"last image": result[-1], "last channel": result[:, -1], "last row": result[-1, :, -1]}[
            what
        ]
        wrong.copy_(wrong.roll(1, -1))
    assert told(LARGE, Prop.FWD, tensors)


@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize("name", ["groups", "3d", "double", "depthwise"])
def test_long_sums_in_pieces(name: str, prop: Prop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that meet columns, a few images or channels at a time."""
    p = PROBLEMS[name]
    monkeypatch.setattr(spotcheck, "MOST_PRODUCTS", 50)
    monkeypatch.setattr(spotcheck, "PIECE", 50)
    at = choose(Axes.of(p, prop), 1024)
    assert at.rows[0].shape[1] * at.columns.shape[1] > 1
    tensors = right(p, prop)
    found = examine(p, prop, Epilogue(), tensors, tensors[prop.result])
    assert not found.reason and found.checked >= 24 and not found.weak
    for place in ((0,), (-1,)):
        saved = tensors[prop.result].clone()
        tensors[prop.result][place * saved.ndim] += 1 + saved.abs().max()
        assert told(p, prop, tensors), place
        tensors[prop.result].copy_(saved)


@pytest.mark.every(2)
@pytest.mark.parametrize("words", ["bias", "res", "bias+res+relu", *ACTIVATIONS])
@pytest.mark.parametrize("name", ["plain", "depthwise", "double"])
def test_epilogues(name: str, words: str) -> None:
    from transconv.verify.judgement import after

    p = PROBLEMS[name]
    tensors = right(p, Prop.FWD)
    kind = tensors["dst"].dtype
    tensors["bia"] = torch.randn(p.oc).to(kind)
    tensors["res"] = laid_out(torch.randn(p.shapes["dst"]), p, "dst")
    a, b = (tensors[n].double().numpy() for n in ("src", "wei"))
    plain = torch.from_numpy(convolve(p, Prop.FWD, a, b))
    tensors["dst"].copy_(after(plain, slice(None), words, tensors))
    assert told(p, Prop.FWD, tensors, words) is None
    if "bias" in words:
        tensors["bia"][-1] += 0.5
    elif "res" in words:
        tensors["res"][-1] += 0.5
    else:
        tensors["dst"].copy_(plain)
    assert told(p, Prop.FWD, tensors, words) is not None


@pytest.mark.parametrize("prop", list(Prop))
def test_numbers_that_are_none(prop: Prop) -> None:
    """NaN and infinity in the operands, and results too large for their type, prove nothing."""
    p = PROBLEMS["depthwise"]
    tensors = right(p, prop)
    first, second = (tensors[n] for n in prop.operands)
    first[0, 0], second[-1, -1] = float("nan"), float("inf")
    a, b = first.double().numpy(), second.double().numpy()
    with np.errstate(invalid="ignore"):
        tensors[prop.result].copy_(torch.from_numpy(convolve(p, prop, a, b)))
    assert told(p, prop, tensors) is None
    tensors = right(p, prop)
    for name in prop.operands:
        tensors[name] *= 1000
    tensors[prop.result].fill_(float("nan"))
    assert examine(p, prop, Epilogue(), tensors, tensors[prop.result]).checked < 200


def test_data_that_would_hide_mistakes() -> None:
    p, prop = PROBLEMS["plain"], Prop.FWD
    tensors = right(p, prop)
    assert not examine(p, prop, Epilogue(), tensors, tensors["dst"]).weak
    for value in (0.0, 1.0, float("nan")):
        a, b = np.full(p.shapes["src"], value), tensors["wei"].double().numpy()
        dull = {**tensors, "src": torch.full_like(tensors["src"], value)}
        dull["dst"] = torch.from_numpy(convolve(p, prop, a, b)).float()
        found = examine(p, prop, Epilogue(), dull, dull["dst"])
        assert found.weak and not found.reason


@pytest.mark.parametrize("kind", ["mixed", "positive", "first half positive"])
def test_very_long_sums(kind: str) -> None:
    """A sum in f32, term after term, passes; one that lost a sixteenth of its terms does not."""
    p = ConvProblem.make(1, 4, 4, (200_000,), (1,), math="ieee")
    generator = torch.Generator().manual_seed(1)
    tensors = {n: torch.randn(p.shapes[n], generator=generator) for n in ("src", "dst")}
    if kind != "mixed":
        tensors = {n: t.abs() for n, t in tensors.items()}
    if kind == "first half positive":
        tensors["src"][..., 100_000:] *= -1
    products = (tensors["dst"][0, :, None] * tensors["src"][0, None]).numpy()
    sums = np.add.accumulate(products, axis=-1, dtype=np.float32)
    tensors["wei"] = torch.from_numpy(sums[..., -1:]).clone()
    assert told(p, Prop.BWD_W, tensors) is None
    tensors["wei"] = torch.from_numpy(sums[..., -12_500:-12_499]).clone()
    assert told(p, Prop.BWD_W, tensors) is not None


def test_tf32_is_allowed_where_it_is_used() -> None:
    p = ConvProblem.make(4, 64, 64, (8, 8), (3, 3), pad=1)
    tensors = right(p, Prop.FWD)
    near = {n: ((tensors[n].view(torch.int32) + 4096) & -8192).view(torch.float32) for n in ("src", "wei")}
    a, b = near["src"].double().numpy(), near["wei"].double().numpy()
    tensors["dst"].copy_(torch.from_numpy(convolve(p, Prop.FWD, a, b)))
    assert told(p, Prop.FWD, tensors) is None
    exact = ConvProblem.make(4, 64, 64, (8, 8), (3, 3), pad=1, math="ieee")
    assert told(exact, Prop.FWD, tensors) is not None


SIZES = Axes(4, 32, (8, 56, 56), (64, 3, 3))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("summed", [(64, 3, 3), (32, 200, 200)])
def test_points_reach_every_edge(summed: tuple[int, ...], wide: bool) -> None:
    axes = Axes(SIZES.groups, SIZES.columns, SIZES.rows, summed)
    first, again = choose(axes, 1024, wide), choose(axes, 1024, wide)
    together = first.rows[0].shape[1] * first.columns.shape[1]
    count = len(first.group) * together
    assert 16 <= count <= 1024 + together
    if together == 1:
        assert count * prod(summed) <= spotcheck.MOST_PRODUCTS or count == 16
    for drawn, same, size in zip(
        (first.columns, *first.rows), (again.columns, *again.rows), (axes.columns, *axes.rows), strict=True
    ):
        assert torch.equal(drawn, same)
        assert 0 == drawn.min() and drawn.max() == size - 1
        if together == 1 and count > 100:
            ends = {0, 1, size - 2, size - 1} | ({15, 16} if size > 16 else set())
            assert ends <= set(drawn.flatten().tolist())
            assert len(set(drawn.flatten().tolist())) > size * 0.9


def test_the_same_bits_may_be_asked_for(monkeypatch: Any) -> None:
    """Matrix products refuse to run then; they are not used."""
    p, prop = PROBLEMS["plain"], Prop.BWD_W
    monkeypatch.setattr(spotcheck, "MOST_PRODUCTS", 2000)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.Tensor, "__matmul__", None)
    assert told(p, prop, right(p, prop)) is None


def test_a_sum_over_no_images_is_zero() -> None:
    p = ConvProblem.make(0, 4, 4, (6, 6), (3, 3), pad=1)
    tensors = {name: torch.zeros(shape) for name, shape in p.shapes.items()}
    assert not examine(p, Prop.BWD_W, Epilogue(), tensors, tensors["wei"]).reason
    assert examine(p, Prop.BWD_W, Epilogue(), tensors, tensors["wei"] + 1).reason


def test_sums_of_8_bit_floats_have_13_bits() -> None:
    """Too small by 2^-11 of the absolute terms for each 32 of them; if sums move to f32, for 4 times."""
    x, w = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((2, 512, 6, 6), (32, 512, 1, 1)))
    sums, size = (
        torch.nn.functional.conv2d(*t)
        for t in ((x.double(), w.double()), (x.double().abs(), w.double().abs()))
    )
    for steps, words, right in (
        (16, "", True),
        (16, " math=ieee", False),
        (4, " math=ieee", True),
        (50, "", False),
    ):
        p = ConvProblem.parse(f"mb2ic512ih6oc32oh6kh1 dt=f8e4m3:f8e4m3:f32{words}")
        got = (sums - 2.0**-11 * steps * size).float()
        assert (told(p, Prop.FWD, {"src": x, "wei": w, "dst": got}) is None) is right
    wide = ConvProblem.parse("mb2ic512ih6oc32oh6kh1 dt=bf16:bf16:f32")
    given = {"src": x.bfloat16(), "wei": w.bfloat16(), "dst": (sums - 2.0**-11 * size).float()}
    assert told(wide, Prop.FWD, given) is not None


def test_no_number_as_an_integer_is_any_integer() -> None:
    """A scale of 0 under a sum of 0; other elements are looked at."""
    p = ConvProblem.parse("mb1ic1iw2oc1ow2kw1 dt=f32:f32:i8")
    tensors = {"src": torch.tensor([[[float("nan"), 3.0]]]), "wei": torch.ones(1, 1, 1)}
    assert told(p, Prop.FWD, tensors | {"dst": torch.tensor([[[7, 3]]], dtype=torch.int8)}) is None
    found = told(p, Prop.FWD, tensors | {"dst": torch.tensor([[[7, 4]]], dtype=torch.int8)})
    assert found is not None and "4 instead of 3" in found


def test_one_drawn_number_may_divide() -> None:
    from transconv.runtime.operands import draw

    drawn = [torch.empty(1) for _ in range(40)]
    for seed, memory in enumerate(drawn):
        draw(memory, seed)
    assert {float(x) for x in drawn} == {1.0, 2.0}
    many = torch.empty(100)
    draw(many, 1)
    assert many.unique().tolist() == [-2, -1, 0, 1, 2]
