"""What torch's f64 loses in a tail, its exact form has: the eager check hands no right kernel to torch."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import mpmath
import pytest
import torch
import torch.nn.functional as F

from transconv.graph.verification.fx_reference import EXACT

aten = torch.ops.aten
HOW = ("none", "tanh")


def slopes(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return torch.as_tensor(EXACT[aten.gelu_backward](torch.ones_like(x), x, approximate=approximate))


@pytest.mark.parametrize("approximate", HOW)
def test_forms_are_torchs_where_it_loses_nothing(approximate: str) -> None:
    x = torch.linspace(-1, 6, 99, dtype=torch.float64)
    torch.testing.assert_close(
        EXACT[aten.gelu](x, approximate=approximate),
        F.gelu(x, approximate=approximate),
        rtol=1e-14,
        atol=1e-15,
    )
    torch.testing.assert_close(
        slopes(x, approximate),
        aten.gelu_backward(torch.ones_like(x), x, approximate=approximate),
        rtol=1e-13,
        atol=1e-14,
    )
    torch.testing.assert_close(EXACT[aten.special_ndtr](x), torch.special.ndtr(x), rtol=1e-14, atol=0)


def _inner(v: mpmath.mpf) -> mpmath.mpf:
    return (v + mpmath.mpf("0.044715") * v**3) * 2 * mpmath.sqrt(2 / mpmath.pi)


def gelu(v: mpmath.mpf, approximate: str) -> mpmath.mpf:
    if approximate == "tanh":
        return v / (1 + mpmath.exp(-_inner(v)))
    return v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize("approximate", HOW)
def test_forms_have_the_digits_of_a_tail(approximate: str) -> None:
    x = torch.linspace(-14, -4, 41, dtype=torch.float64)
    with mpmath.workdps(40):
        want = [gelu(mpmath.mpf(v), approximate) for v in x.tolist()]
        slope = [mpmath.diff(lambda v: gelu(v, approximate), mpmath.mpf(v)) for v in x.tolist()]
    right = torch.tensor([float(v) for v in want], dtype=torch.float64)
    torch.testing.assert_close(EXACT[aten.gelu](x, approximate=approximate), right, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        slopes(x, approximate),
        torch.tensor([float(v) for v in slope], dtype=torch.float64),
        rtol=1e-12,
        atol=0,
    )
    assert ((F.gelu(x, approximate=approximate) - right) / right).abs().max() > 1e-3  # what torch loses


HARD = {"hardsigmoid": aten.hardsigmoid, "hardswish": aten.hardswish}


@pytest.mark.parametrize("name", HARD)
def test_hard_forms_are_torchs(name: str) -> None:
    """At the edges, too, and for infinities and NaN; within them torch has a sixth in f32."""
    forward, backward = HARD[name], getattr(aten, f"{name}_backward")
    special = [-3.0, 3.0, 0.0, float("inf"), -float("inf"), float("nan")]
    x = torch.cat(
        [torch.linspace(-7, 7, 99, dtype=torch.float64), torch.tensor(special, dtype=torch.float64)]
    )
    g = torch.linspace(0.5, 2, len(x), dtype=torch.float64)
    for form, given in ((forward, (x,)), (backward, (g, x))):
        torch.testing.assert_close(EXACT[form](*given), form(*given), rtol=1e-7, atol=1e-7, equal_nan=True)


def test_hard_forms_have_a_sixth_in_f64() -> None:
    x, one = torch.tensor([-1.7, 0.3, 2.9], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    want = torch.tensor([float(Fraction(v) / 6 + Fraction(1, 2)) for v in x.tolist()], dtype=torch.float64)
    close = partial(torch.testing.assert_close, rtol=1e-15, atol=1e-16)
    close(EXACT[aten.hardsigmoid](x), want)
    close(EXACT[aten.hardswish](x), want * x)
    close(EXACT[aten.hardsigmoid_backward](one, x), one / 6)
    close(EXACT[aten.hardswish_backward](one, x), 2 * want - 0.5)
