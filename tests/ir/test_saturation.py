"""Conversions that saturate, beside Python's own numbers: around the ends of each type and at halves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from transconv import ir
from transconv.ir import Const, DType, f16, f32, f64, i8, i32, i64, u8
from transconv.ir.functions.saturation import saturated

FLOATS, WHOLE = (f16, f32, f64), (i8, u8, i32)


def value_of(e: ir.Expr, dtype: DType) -> int:
    out = ir.Tensor("t", ("x",), (1,), ir.Layout.dense(dtype, (1,)))
    data = np.zeros(1, dtype.numpy)
    ir.run(ir.Kernel("value", (out,), ir.store(out, 0, e)), {"t": data})
    return int(data[0])


def around(dtype: DType, to: DType) -> list[float]:
    """Floats of a type at the ends of another one and beside them, halves, and large ones."""
    own = np.dtype(dtype.numpy).type
    with np.errstate(all="ignore"):
        found = [own(end + x) for end in (*to.limits, 0) for x in (0, 0.5, -0.5, 1.5, -1.5, 1)]
    found += [np.nextafter(x, own(s)) for x in found for s in (-np.inf, np.inf)]
    found += [own(x) for x in (1e4, -1e4, 3e38 if dtype is not f16 else 6e4, np.inf, -np.inf)]
    return [float(x) for x in found]


@pytest.mark.parametrize("to", WHOLE, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_rounded_to_even_and_clamped(dtype: DType, to: DType) -> None:
    low, high = to.limits
    for x in around(dtype, to):
        want = low if x < low else high if x > high else min(high, max(low, round(x)))
        assert value_of(saturated(Const(x, dtype), to), to) == want, x
        assert value_of(saturated(Const(x, dtype) + Const(0.0, dtype), to), to) == want, x
    assert value_of(saturated(Const(math.nan, dtype), to), to) == 0


@pytest.mark.parametrize("to", WHOLE, ids=str)
@pytest.mark.parametrize("dtype", [i8, u8, i32, i64], ids=str)
def test_integers_are_clamped(dtype: DType, to: DType) -> None:
    low, high = to.limits
    least, most = dtype.limits
    for x in {n + d for n in (low, high, least, most, 0) for d in (-1, 0, 1)}:
        if least <= x <= most:
            assert value_of(saturated(Const(x, dtype), to), to) == min(high, max(low, x)), x
