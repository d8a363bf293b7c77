"""The answer that results are compared with, the data, and what counts as right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.proving.shapes import PROBLEMS, operands
from tests.reference import convolve
from tests.strategies import problems
from transconv.ir import Layout
from transconv.problem import ConvProblem, Prop
from transconv.proving.data import OPERANDS, RESULT, Guarded, allocate, density, fill, terms
from transconv.proving.oracle import judge, pieces


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
    a, b = (tensors[n].view for n in OPERANDS[prop])
    kept = float((a != 0).double().mean())
    assert kept == pytest.approx(share if share < 1 else 1, abs=0.25 if share == 1 else 0.02)
    (_, most), = pieces(p, prop, a, b, absolute=True)
    (_, want), = pieces(p, prop, a, b)
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
    a, b = (tensors[n].view for n in OPERANDS[prop])
    got = tensors[RESULT[prop]].view
    want = convolve(p, prop, a.double().numpy(), b.double().numpy())
    got.copy_(torch.from_numpy(want))
    return a, b, got


@pytest.mark.parametrize("mode", ["exact", "float"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("prop", list(Prop))
def test_a_rounded_answer_is_right_and_a_damaged_one_is_not(prop: Prop, dtype: str,
                                                            mode: str) -> None:
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
        part = torch.einsum("nchw,oc->nohw", a[:, c:c + 8].float(), b[:, c:c + 8, 0, 0].float())
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


def test_guard_bands() -> None:
    p = PROBLEMS["groups"].with_layout("nhwc")
    made = Guarded.make(p.src.layout, p.shapes["src"], "cpu")
    assert made.view.isnan().all()
    made.view.fill_(1)
    assert made.intact()
    start = made.view.storage_offset()
    for at in (start - 1, start + made.view.numel()):
        made.memory[at] = 0
        assert not made.intact()
        made.poison()
        assert made.intact()
    with pytest.raises(ValueError, match="blocked"):
        Guarded.make(Layout.parse("nChw16c", p.src.dtype, (1, 16, 4, 4)), (1, 16, 4, 4), "cpu")
