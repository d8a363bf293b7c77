"""On the device every operation of one value, and its derivative, is within its declared bound over all
exponents. Chips take some numbers as 0 that are below the smallest normal one; there are none here."""

from __future__ import annotations

import pytest

from tests.bounds import BOUNDS, EXPONENTS, bound_of, emitted, excess, points, powers, wrong_edges
from tests.compute.test_bounds import rows
from transconv import ir

pytestmark = pytest.mark.gpu
# Of a unit more than exact functions of a CPU have: what a chip's exp, its quotient and its root are off.
CHIP = 2.5


@pytest.mark.parametrize("dtype", [ir.f32, ir.f64], ids=str)
@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_operations_are_within_their_bounds(name: str, dtype: ir.DType) -> None:
    bound, value = bound_of(name, dtype), rows()[name]
    x = points(bound, dtype)
    off = excess(bound, x, emitted(value, x, dtype, "cuda"), dtype)
    at = off.argmax()
    assert off[at] <= (CHIP if bound.units > 1 else 1), f"{name}({x[at]!r}): {off[at]} times its bound"


@pytest.mark.parametrize("dtype", [ir.f32, ir.f64], ids=str)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_powers_of_kernels_are_within_their_bound(exponent: float, dtype: ir.DType) -> None:
    x, got, off = powers(exponent, dtype, "cuda")
    at = off.argmax()
    assert off[at] <= CHIP, f"{x[at]!r}**{exponent} is {got[at]!r}: {off[at]} times its bound"


@pytest.mark.parametrize("dtype", [ir.f32, ir.f64], ids=str)
@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_edges_are_those_of_torch(name: str, dtype: ir.DType) -> None:
    assert wrong_edges(name, rows()[name], dtype, "cuda") == []
