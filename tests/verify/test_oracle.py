"""The answer that results are compared with, the data, and what counts as right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench import reference
from tests.reference import convolve
from tests.strategies import problems
from tests.verify.shapes import PROBLEMS, operands
from transconv.compute import ACTIVATIONS, in_torch
from transconv.conv import Epilogue, computes
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir import Layout
from transconv.ir.dtype import DTYPES
from transconv.torch_ops.fused import fused_route
from transconv.verify.case import ProblemCase
from transconv.verify.data import GUARD, Guarded, allocate, density, fill, terms
from transconv.verify.judgement import given_to, judge, pieces, reached


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.sampled_from(list(Prop)), st.integers(1, 10**4))
def test_the_oracle_is_the_definition(p: ConvProblem, prop: Prop, size: int) -> None:
    a, b = operands(p, prop)
    found = [want for _, want in pieces(p, prop, a, b, size)]
    want = convolve(p, prop, a.numpy(), b.numpy())
    got = torch.cat(found).numpy() if found else np.zeros(want.shape)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_terms() -> None:
    p = PROBLEMS["groups"]
    assert [terms(p, prop) for prop in Prop] == [3 * 2 * 2, 3 * 2 * 3, 3 * 4 * 8]


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("prop", list(Prop))
def test_exact_data_are_exact(dtype: str, prop: Prop) -> None:
    """Sums of absolute products stay below what the accumulator holds, results below (nearly
    always) what their type holds, and enough of them are not zero."""
    p = ConvProblem.make(8, 96, 80, (14, 14), (3, 3), pad=1, dtype=dtype)
    share = density(p, prop)
    assert (share < 1) == (dtype != "f32")
    tensors = allocate(p, "cpu")
    fill(tensors, p, prop, "exact", seed=3)
    a, b = (tensors[n].view for n in prop.operands)
    kept = float((a != 0).double().mean())
    assert kept == pytest.approx(share if share < 1 else 1, abs=0.25 if share == 1 else 0.02)
    ((_, most),) = pieces(p, prop, a, b, absolute=True)
    ((_, want),) = pieces(p, prop, a, b)
    assert most.max() < 2**24
    rounded = want.to(a.dtype).double()
    assert (rounded == want).double().mean() > 0.999
    assert (want != 0).double().mean() > 0.3


def test_density_is_the_safe_count_over_the_terms() -> None:
    p = ConvProblem.make(1, 64, 64, (8, 8), (3, 3), pad=1, dtype="bf16")
    assert density(p, Prop.FWD) == (2**8 / 4) / (9 * 64)
    assert density(p.with_dtype("f16"), Prop.FWD) == (2**11 / 4) / (9 * 64)
    assert density(p.with_dtype("f32"), Prop.FWD) == 1


def run_right(p: ConvProblem, prop: Prop, mode: str) -> tuple[torch.Tensor, ...]:
    tensors = allocate(p, "cpu")
    fill(tensors, p, prop, mode, seed=1)
    a, b = (tensors[n].view for n in prop.operands)
    got = tensors[prop.result].view
    want = convolve(p, prop, a.double().numpy(), b.double().numpy())
    got.copy_(torch.from_numpy(want))
    return a, b, got


@pytest.mark.every(5)
@pytest.mark.parametrize("mode", ["exact", "float"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("prop", list(Prop))
def test_a_rounded_answer_is_right_and_a_damaged_one_is_not(prop: Prop, dtype: str, mode: str) -> None:
    p = ConvProblem.make(3, 8, 16, (6, 5), (3, 3), pad=1, dtype=dtype, layout="nhwc", math="ieee")
    a, b, got = run_right(p, prop, mode)
    found = judge(p, prop, a, b, got, mode)
    assert found.right, found
    assert found.nonzero > 0.3
    at = tuple(n // 2 for n in got.shape)
    good = got[at].clone()
    got[at] = float("nan")
    assert "1 of" in judge(p, prop, a, b, got, mode).reason
    got[at] = good * 1.125 + 1
    assert "1 of" in judge(p, prop, a, b, got, mode).reason
    got[at] = good
    got += 1 if mode == "exact" else 0.25 * float(got.double().abs().mean())
    assert not judge(p, prop, a, b, got, mode).right


def test_low_precision_sums_are_noticed() -> None:
    """Sums kept in bf16 pass no test of single elements by much, but not the 2-norm."""
    p = ConvProblem.make(1, 512, 8, (6, 6), (1, 1), dtype="bf16")
    a, b, got = run_right(p, Prop.FWD, "float")
    total = torch.zeros(got.shape, dtype=torch.bfloat16)
    for c in range(0, 512, 8):
        part = torch.einsum("nchw,oc->nohw", a[:, c : c + 8].float(), b[:, c : c + 8, 0, 0].float())
        total = total + part.bfloat16()
    assert not judge(p, Prop.FWD, a, b, total, "float").right


def test_epilogue_of_the_answer() -> None:
    p = ConvProblem.make(2, 4, 8, (5, 5), (3, 3), dtype="f32", math="ieee")
    a, b, got = run_right(p, Prop.FWD, "exact")
    bias, residual = torch.arange(8.0) - 4, torch.ones(got.shape)
    done = torch.relu(got + bias.view(-1, 1, 1) + residual)
    extra = {"bia": bias, "res": residual}
    assert judge(p, Prop.FWD, a, b, done, "exact", "bias+res+relu", extra).right
    assert not judge(p, Prop.FWD, a, b, got, "exact", "bias+res+relu", extra).right


@pytest.mark.parametrize(
    "words",
    ["bias+relu", "sum:0.5", "res+relu", "add:f32+mul:f32:per_oc", "prelu:per_tensor", "add:f32:15"],
)
def test_a_piece_of_the_answer_meets_its_own_part_of_what_is_read(words: str) -> None:
    p, epilogue = ConvProblem.make(5, 4, 6, (5, 5), (3, 3), dtype="f32"), Epilogue.parse(words)
    want = torch.randn(p.shapes["dst"], dtype=torch.float64)
    of = next(s.c.tensor for s in computes(p, Prop.FWD))
    extra = {t.name: torch.randn(t.shape) for t in epilogue.tensors(of)}
    whole = in_torch(epilogue.function, given_to(epilogue, want, slice(0, 5), extra))
    for at in (slice(0, 2), slice(2, 3), slice(3, 5)):
        part = in_torch(epilogue.function, given_to(epilogue, want[at], at, extra))
        assert torch.equal(part, whole[at])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("tag", ["nchw", "nhwc", "nChw16c"])
def test_guards_see_every_write_that_is_none_of_the_result(tag: str, dtype: str) -> None:
    p = ConvProblem.make(2, 20, 8, (3, 3), (3, 3), pad=1, dtype=dtype)
    p = p.with_layout((tag, "oihw", tag))
    for shift in (0, 1):
        made = Guarded.make(p.src.layout, p.shapes["src"], "cpu", shift)
        assert made.view.shape == p.shapes["src"] and made.view.isnan().all()
        assert (
            made.argument.data_ptr()
            == made.memory.data_ptr() + (GUARD + shift) * made.memory.element_size()
        )
        values = torch.randn(p.shapes["src"])
        made.put(values)
        assert made.intact() and torch.equal(made.view, values.to(made.memory.dtype))
        for at in (made.start - 1, made.start + p.src.layout.span, 0, -1):
            for value in (0.0, float("nan")):  # arithmetic's NaN is not the poison
                made.memory[at] = value
                assert not made.intact()
                made.poison()
                assert made.intact()


def test_guards_between_elements_and_sealed_operands() -> None:
    layout = Layout.from_strides(DTYPES["f16"], (2, 3), (8, 2))
    made = Guarded.make(layout, (2, 3), "cpu")
    made.put(torch.ones(2, 3))
    assert made.intact()
    made.memory[made.start + 1] = 1.0
    assert not made.intact()
    made.poison()
    made.put(torch.ones(2, 3))
    made.seal()
    assert made.intact()
    made.view[1, 1] = 2
    assert not made.intact()


def test_an_expanded_operand_takes_the_first_values() -> None:
    layout = Layout.from_strides(DTYPES["f32"], (3, 2), (0, 1))
    made = Guarded.make(layout, (3, 2), "cpu")
    made.put(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert made.view.tolist() == [[1.0, 2.0]] * 3
    assert made.intact()


@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize(
    "p",
    [
        ConvProblem.make(2, 3, 4, (9, 6), (1, 2), stride=(4, 3), o=(2, 2)),
        ConvProblem.make(1, 2, 2, (2,), (5,), pad=4, o=(6,)),
        ConvProblem.make(1, 2, 2, (7,), (2,), dilation=3, stride=2),
    ],
    ids=str,
)
def test_reached_elements_are_those_that_ones_make_nonzero(p: ConvProblem, prop: Prop) -> None:
    a, b = (np.ones(p.shapes[n]) for n in prop.operands)
    want = convolve(p, prop, a, b)
    assert reached(p, prop) == pytest.approx((want != 0).mean())


def test_approximated_functions_have_room_for_one_rounding_only() -> None:
    p = ConvProblem.make(2, 4, 8, (5, 5), (3, 3), dtype="f16")
    a, b, got = run_right(p, Prop.FWD, "exact")
    done = torch.nn.functional.silu(got.double()).half()
    assert judge(p, Prop.FWD, a, b, done, "exact", "silu").right
    at = done.abs().argmax()
    done.view(-1)[at] *= 1 + 2.0**-8
    assert "1 of" in judge(p, Prop.FWD, a, b, done, "exact", "silu").reason


def test_bf16_is_rounded_and_not_cut_off() -> None:
    p = ConvProblem.make(1, 64, 8, (5, 5), (1, 1), dtype="bf16:bf16:bf16".split(":"))
    a, b, _ = run_right(p, Prop.FWD, "exact")
    for name, value in (("src", 2.0), ("wei", 2.0)):
        {"src": a, "wei": b}[name].fill_(value)
    a[:, 0] = 1.0  # 63 * 4 + 2 = 254, and with one more:
    a[0, 1:4, 0, 0] = 3.0  # 254 + 6 = 260
    a[0, 4, 0, 0] = 2.5  # 261 is between 260 and 262 of bf16
    a[0, 5, 0, 0] = 3.0  # 263 would be cut off to 262, and is rounded to 264
    want = torch.einsum("nchw,ock->nohw", a.double(), b.double()[..., 0])
    assert float(want[0, 0, 0, 0]) == 263.0
    assert judge(p, Prop.FWD, a, b, want.bfloat16(), "exact").right
    cut = ((want.float().view(torch.int32) & -65536).view(torch.float32)).bfloat16()
    assert float(cut[0, 0, 0, 0]) == 262.0
    assert not judge(p, Prop.FWD, a, b, cut, "exact").right


def test_data_repeat_with_their_seed() -> None:
    p = PROBLEMS["groups"]
    made = []
    for seed in (3, 3, 4):
        case = ProblemCase(p, Prop.FWD, "bias+res", where="cpu")
        case.fill("exact", seed)
        made.append([t.view.clone() for t in (*case.tensors.values(), *case.beside.values())])
    same = [torch.equal(x, y) for x, y in zip(made[0], made[1], strict=True)]
    other = [torch.equal(x, y) for x, y in zip(made[0], made[2], strict=True)]
    assert same == [True, True, False, True, True]  # the result is poison
    assert not any(other)


@pytest.mark.parametrize("module", [fused_route, reference])
def test_answers_are_made_of_every_activation_that_kernels_have(module: Any) -> None:
    assert {*module.ACTIVATIONS} - {""} == {*ACTIVATIONS}
