"""How far a kernel may be off follows from the steps of its computation."""

from __future__ import annotations

import numpy as np
import pytest

from transconv.compute import Compute, execute, parse
from transconv.compute.errors import SUMMED, TF32
from transconv.verify.computation import Case

SUM = "compute rows\n axes n=5 | k=40\n read x = X[n, k]\n let s = sum(x; k)\n store Y[n] = "
X = np.random.default_rng(0).standard_normal((5, 40))
S = np.abs(X).sum(1)


def error(text: str, share: float = SUMMED) -> np.ndarray:
    return execute(parse(text), {"X": X}, share)["Y"].error


@pytest.mark.parametrize(("behind", "slope"), [
    ("s", 1.0), ("s*100", 100.0), ("s / 8", 0.125), ("s + s*3", 4.0), ("tanh(s*0.001)", 0.001),
    ("relu(s - 1000)", 0.0), ("max(s, 1000)", 0.0)])
def test_an_error_grows_as_the_steps_behind_a_sum_do(behind: str, slope: float) -> None:
    found = error(SUM + behind)
    rounding = 8 * 2.0**-22 * np.maximum(1.0, slope * np.abs(X.sum(1)) + 1000 * ("1000" in behind))
    assert (found >= 0.99 * slope * SUMMED * S).all()
    assert (found <= 1.01 * slope * SUMMED * S + rounding).all()
    assert (error(SUM + behind, 0.0) == 0).all()


def test_errors_pass_through_later_sums() -> None:
    text = """compute norm
        axes n=5 | k=40
        read x = X[n, k]
        let  m = sum(x; k) / 40
        let  v = sum((x - m)**2; k) / 40
        store Y[n, k] = (x - m) * rsqrt(v)"""
    found = error(text)
    assert found.shape == X.shape and (found > 0).all() and (found < 1e-3).all()


def test_what_is_not_known_is_not_bounded() -> None:
    """The square root of a sum that is nothing but rounding error has no useful bound, and the bound
    is that large."""
    flat = {"X": np.ones((5, 40))}
    text = SUM.replace("sum(x; k)", "sum(x - 1; k)") + "rsqrt(s)"
    made = execute(parse(text), flat, SUMMED)["Y"]
    assert np.isinf(made.error).all() or np.isinf(made.value).all()


def test_a_product_of_one_term_in_tf32_behind_a_steep_function() -> None:
    """Its sum is off by tf32's rounding, times what hardswish makes of it: no constant is needed."""
    made = parse("""compute one
        axes m=16 n=16 | k=1
        read x = X[m, k]
        read w = W[n, k]
        let  s = sum(x*w; k)
        store Y[m, n] = hardswish(s)""")
    case = Case(made, "float")
    rng = np.random.default_rng(1)
    for name in case.given:  # operands as far off as rounding to tf32 may make them
        case.given[name] = case.given[name] * (1 + 2.0**-11 * rng.uniform(-1, 1, case.given[name].shape))
    got = {n: a.value.astype(np.float32).astype(np.float64)
           for n, a in execute(made, case.given).items()}
    assert not case.judged(got).problem
    doubled = {n: v * (1 + 40 * TF32) for n, v in got.items()}
    assert case.judged(doubled).problem


def test_a_steep_function_is_bounded_as_far_as_it_goes() -> None:
    """A result that is off by less than a constant would allow is still found."""
    made: Compute = parse(SUM + "s / 64")
    case = Case(made, "float")
    wrong = {"Y": case.answers["Y"].value + 0.5 * SUMMED * np.abs(case.given["X"]).sum(1)}
    assert case.judged(wrong).problem
