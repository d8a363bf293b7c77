"""How far a kernel may be off follows from the steps of its computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transconv.compute import (
    OPS,
    Compute,
    examine,
    execute,
    is_tf32,
    parse,
    pointwise,
    rounds_once,
    share_of,
)
from transconv.compute.analysis.pointwise import CONDITIONS
from transconv.compute.autodiff.reverse import name_of
from transconv.compute.error_bounds import SUMMED, TF32
from transconv.ir import Call, Const, Div, DType, Evaluator, Expr, Memory, Mul, Var, bf16, f16, f32, find
from transconv.verify.computation import ComputationCase

SUM = "compute rows\n axes n=5 | k=40\n read x = X[n, k]\n let s = sum(x; k)\n store Y[n] = "
X = np.random.default_rng(0).standard_normal((5, 40))
S = np.abs(X).sum(1)


def test_sums_in_16_bits_round_at_each_step() -> None:
    wide, short = (
        parse(
            f"compute p math=ieee ;; tensor X f16 [m=4, k=8] ;; tensor W f16 [n=4, k=8] ;; "
            f"tensor C f32 [m=4, n=4] ;; axes m=4 n=4 k=8 ;; read x = X[m, k] ;; "
            f"read w = W[n, k] ;; let s = sum({of}; k) ;; store C[m, n] = s"
        )
        for of in ("x*w", "f16(-x)*f16(w*2)")
    )
    assert share_of(wide) == SUMMED and share_of(short) == 8 * f16.spacing


def error(text: str, share: float = SUMMED) -> np.ndarray:
    return execute(parse(text), {"X": X}, share)["Y"].error


@pytest.mark.parametrize(
    ("behind", "slope"),
    [
        ("s", 1.0),
        ("s*100", 100.0),
        ("s / 8", 0.125),
        ("s + s*3", 4.0),
        ("tanh(s*0.001)", 0.001),
        ("relu(s - 1000)", 0.0),
        ("max(s, 1000)", 0.0),
    ],
)
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
    case = ComputationCase(made, "float")
    rng = np.random.default_rng(1)
    for name in case.given:  # operands as far off as rounding to tf32 may make them
        case.given[name] = case.given[name] * (1 + 2.0**-11 * rng.uniform(-1, 1, case.given[name].shape))
    got = {n: a.value.astype(np.float32).astype(np.float64) for n, a in execute(made, case.given).items()}
    assert not case.judged(got).problem
    doubled = {n: v * (1 + 40 * TF32) for n, v in got.items()}
    assert case.judged(doubled).problem


def test_a_steep_function_is_bounded_as_far_as_it_goes() -> None:
    """A result that is off by less than a constant would allow is still found."""
    made: Compute = parse(SUM + "s / 64")
    case = ComputationCase(made, "float")
    wrong = {"Y": case.answers["Y"].value + 0.5 * SUMMED * np.abs(case.given["X"]).sum(1)}
    assert case.judged(wrong).problem


ENDS = np.logspace(-30, 8, 200)
POINTS = np.concatenate([np.linspace(-87, 87, 4001), ENDS, -ENDS, [0.0]]).astype(np.float32).astype(float)


def in_type(e: Expr, x: np.ndarray, type: DType) -> np.ndarray:
    """An expression of x, evaluated by NumPy in a type."""
    at = Evaluator(Memory({}), {}, 1)
    at.env[Var("x", type)] = x.astype(type.numpy)
    with np.errstate(all="ignore"):
        return np.asarray(at.compute(e), np.float64)


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.arity == 1])
def test_what_f32_makes_of_an_operation_is_within_its_bound(name: str) -> None:
    """At every point, also where numbers cancel that are far greater than the result; and the bound is
    not much more than what arithmetic in f32 does."""
    text = f"compute c\n axes n={len(POINTS)}\n read x = X[n]\n store Y[n] = {name}(x)"
    answer = execute(parse(text), {"X": POINTS}, SUMMED)["Y"]
    with np.errstate(invalid="ignore"):
        off = np.abs(in_type(OPS[name](Var("x", f32)), POINTS, f32) - answer.value)
    known = np.isfinite(answer.value) & (np.abs(answer.value) < 1e38)
    assert (off <= answer.error + 2.0**-24 * np.abs(answer.value))[known].all()
    near = known & (np.abs(POINTS) < 4)
    assert (answer.error <= 2.0**-18 * np.maximum(1, np.abs(answer.value)))[near].all() or name == "round"


def test_a_cancelled_result_is_not_expected_to_be_rounded_once() -> None:
    """At -5 this is the 1e-6 that is left of 1 - erf(3.5), in whole steps of 6e-8: no kernel can round it
    to bf16 as if it were known. Where nothing cancels each does, but for the few that are as close to the
    middle of two numbers as f32 can tell."""
    text = (
        f"compute c\n axes n={len(POINTS)}\n read x = X[n]\n"
        " store Y[n] = x*0.5*(1.0 + erf(x*0.7071067811865476))"
    )
    answer = execute(parse(text), {"X": POINTS}, SUMMED)["Y"]
    sure = rounds_once(answer.value, answer.error, bf16)
    assert not sure[(POINTS > -5.8) & (POINTS < -4.5)].any()
    assert sure[(POINTS > -3) & (np.abs(POINTS) > 1e-20)].mean() > 0.995


def test_errors_that_an_expression_cancels_do_not_count() -> None:
    """softplus is log(u) t / (u - 1) with u = 1 + t rounded, and only a few half units off."""
    text = f"compute c\n axes n={len(POINTS)}\n read x = X[n]\n store Y[n] = softplus(x)"
    answer = execute(parse(text), {"X": POINTS}, SUMMED)["Y"]
    low = (POINTS < -1) & (POINTS > -20)
    assert (answer.error < 2.0**-18 * answer.value)[low].all()


FUSED = "compute t\n axes n=5 k=40\n read x = X[n, k]\n let p = x*x\n store Y[n, k] = "


@pytest.mark.parametrize("behind", ["p - p", "x*x - x*x", "(p - p)*x"])
def test_a_product_may_be_added_without_its_rounding(behind: str) -> None:
    """fma(x, x, -p): as if the product were there twice, by other names."""
    apart = FUSED.replace("let p = x*x", "let p = x*x\n let q = x*x") + behind.replace(
        "x*x - x*x", "p - p"
    ).replace("p", "q", 1)
    found, twice = error(FUSED + behind), error(apart)
    scale = np.abs(X) if behind.startswith("(") else 1.0
    assert (found >= 1.99 * f32.spacing / 2 * X**2 * scale).all()
    assert np.allclose(found, twice, rtol=1e-2)


@pytest.mark.parametrize("behind", ["p - x", "p + x*3", "p*x - x", "x - p*p"])
def test_bounds_of_other_sums_are_those_of_their_roundings(behind: str) -> None:
    """A product that one sum uses is rounded once, or not at all."""
    apart = FUSED.replace("let p = x*x", "let p = x*x\n let q = x*x") + behind.replace("p", "q", 1)
    assert np.allclose(error(FUSED + behind.replace("p*p", "p")), error(apart.replace("q*p", "q")))


def test_a_fused_difference_in_front_of_a_norm_is_right_and_a_wrong_one_is_not() -> None:
    text = """compute t
        tensor X f32 [8, 64]
        tensor Y f32 [8, 64]
        axes   i=8 | j=64
        read   x = X[i, j]
        let    p = x*x
        let    d = p - p
        let    v = sum(d*d; j) / 64.0
        let    y = d*rsqrt(v + 0.00001)
        store  Y[i, j] = y"""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 30
    p = x * x
    d = (x.double() * x.double() - p.double()).float()
    y = d * torch.rsqrt((d * d).mean(1, keepdim=True) + 1e-5)
    assert y.abs().max() > 0.01
    assert not examine(parse(text), {"X": x, "Y": y}).reason
    assert examine(parse(text), {"X": x, "Y": 100 * y}).reason
    assert examine(parse(text.replace("p - p", "p - x*x*0.9999")), {"X": x, "Y": y}).reason


def test_an_element_type_that_is_less_exact_on_the_way_counts() -> None:
    text = SUM + "bf16(s) - s"
    assert (error(text) >= 2.0**-9 * np.abs(X.sum(1))).all()


def test_truths_that_a_rounding_turns_over_may_be_either() -> None:
    """What is compared is near: the truth is known to within one, and so is what it chooses."""
    text = """compute positive
        axes n=4
        read x = X[n]
        read y = Y[n]
        let  s = bf16(x) - y
        let  p = s > 0
        let  w = where(p, y, 0)
        store P[n] = p
        store W[n] = w"""
    x = np.array([1.0 + 2.0**-9, 1.0 - 2.0**-9, 3.0, -2.0])
    found = execute(parse(text), {"X": x, "Y": np.ones(4)}, SUMMED)
    assert np.allclose(found["P"].error, [1, 1, 0, 0], atol=1e-6)
    assert (found["W"].error[:2] >= 1).all() and (found["W"].error[2:] < 1e-6).all()


def test_rounded_values_may_equal_what_unrounded_ones_do_not() -> None:
    """The largest of computed values is compared with them: a square in f32 equals its stored rounding,
    in f64 it does not. What is further away is as unequal as before."""
    text = parse(
        "compute found ;; tensor X f32 [n=64] ;; tensor M f32 [n=64] ;; axes n=64 ;; "
        "tensor Y boolean [n=64] ;; tensor Z f32 [n=64] ;; read x = X[n] ;; read m = M[n] ;; "
        "let square = x*x ;; let y = m == square ;; store Y[n] = y ;; "
        "store Z[n] = where(m != square, m, -m)"
    )
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    m, far = x * x, torch.arange(64) % 2 == 1
    m = torch.where(far, m * 1.001, m)
    tensors = {"X": x, "M": m, "Y": ~far, "Z": torch.where(far, m, -m)}
    assert not examine(text, tensors).reason
    assert "Y are wrong" in examine(text, tensors | {"Y": torch.ones_like(far)}).reason
    assert "Z are wrong" in examine(text, tensors | {"Z": -m}).reason


CHAIN = parse("""compute chain
    tensor C f16 [16, 2]
    axes m=16 n=2
    read y = Y[m, n]
    read z = Z[n]
    store C[m, n] = sub(z, y) + y""")


@pytest.mark.parametrize("above", [2.0**-24, 2.0**-14])
@pytest.mark.parametrize(("difference", "wrong"), [(f32, False), (f16, True)])
def test_near_the_middle_of_two_numbers_either_is_right(
    above: float, difference: DType, wrong: bool
) -> None:
    """All rows have the same two answers. One is an eighth of a place above the middle of two numbers of
    f16, or so little that the roundings of z - y decide. A difference in f16 shows in the other."""
    case = ComputationCase(CHAIN, "float")
    case.given["Z"] = np.array([0.5 + 2.0**-12 + above, np.float32(-1.0912)])
    case.answers = execute(CHAIN, case.given, SUMMED)
    y, z = (case.given[n].astype(np.float32) for n in "YZ")
    made = (z - y).astype(difference.numpy).astype(np.float32) + y
    sixteen = made.astype(np.float16).astype(np.float64)
    assert above > 2.0**-20 or wrong or len(set(sixteen[:, 0])) == 2
    assert ("rounded once" in case.judged({"C": sixteen}).problem) == wrong


@pytest.mark.parametrize(("terms", "known"), [(10, True), (100, False)])
def test_a_product_may_be_too_small_for_its_type(terms: int, known: bool) -> None:
    """What f64 has above zero is zero in f32, and so is what is compared with it."""
    text = f"""compute rows
        axes n=3 | k={terms}
        read x = X[n, k]
        read v = V[n]
        let  s = prod(x; k)
        store Y[n] = where(v < s, 1, 0)
        store Z[n] = s"""
    x = np.full((3, terms), 0.1)
    x[2, 0] = 0  # nothing gets lost where all is nothing
    found = execute(parse(text), {"X": x, "V": np.array([0.0, 1, 0])}, SUMMED)
    assert (found["Y"].error > 0.5).tolist() == [not known, False, False]
    assert (found["Z"].error < 1e-14).all() and found["Z"].error[2] == 0


def test_a_factor_too_few_shows_in_long_products() -> None:
    """Products of 833 numbers as they are drawn for sums would all be zero."""
    text = "compute rows\n axes n=9 k=833\n read x = X[n, k]\n store Y[n] = prod(x; k)"
    case = ComputationCase(parse(text), "float")
    right = np.prod(case.given["X"].astype(np.float32), 1).astype(np.float64)
    assert (np.abs(right) > 1e-3).all() and not case.judged({"Y": right}).problem
    x = case.given["X"].copy()
    x[4, 832] = 1
    assert case.judged({"Y": np.prod(x, 1)}).problem


def test_functions_may_take_small_operands_as_zero() -> None:
    """``floor`` of less than the smallest normal number is 0 on a GPU, where f64 may have -1."""
    x = np.array([-1e-40, 1e-40, -1e-37, -0.5, 0.0])
    found = {
        f: execute(parse(f"compute c\n axes n=5\n read x = X[n]\n store Y[n] = {f}(x)"), {"X": x}, SUMMED)[
            "Y"
        ].error
        for f in ("floor", "ceil", "abs")
    }
    assert (found["floor"] >= [1, 0, 0, 0, 0]).all() and (found["floor"][2:] == 0).all()
    assert (found["ceil"] >= [0, 1, 0, 0, 0]).all() and (found["ceil"][2:] == 0).all()
    assert (found["abs"] == 0).all()


def test_a_product_among_several_kernels_is_as_exact_as_one_alone() -> None:
    """Its first result was rejected: a matrix unit rounds factors of f32 to tf32 there as well."""
    twice = parse(
        "compute twice\n axes m=32 n=13 k=5\n read x = X[m, n]\n read w = W[n, k]\n"
        "let s = sum(x*w; n)\n store Y[m] = sum(s; k)"
    )
    assert share_of(twice) == TF32 and is_tf32(twice)
    alone = parse(
        "compute rows\n axes m=32 n=13 k=5\n read x = X[m, n, k]\n let s = sum(x; n)\n"
        "store Y[m] = sum(s; k)"
    )
    assert share_of(alone) == SUMMED and not is_tf32(alone)


def test_numbers_that_change_nothing_leave_no_operation() -> None:
    """A product with 1, a quotient by 1 and a sum with 0 are left out of every row of one operand."""
    x = Var("x", f32)
    for row in OPS.values():
        if row.arity == 1:
            made = row(x)
            ones = [
                e
                for e in find(made, (Mul, Div))
                if (isinstance(e.b, Const) and e.b.value == 1)
                or (isinstance(e, Mul) and isinstance(e.a, Const) and e.a.value == 1)
            ]
            assert not ones, (row.name, str(made))


def test_functions_that_round_are_not_exact() -> None:
    """Of every row that rounds, also of whole numbers that f32 holds."""
    for row in OPS.values():
        if row.name not in (*CONDITIONS, "where"):
            text = f"{row.name}({', '.join(['acc', 'arg0'][: row.arity])})"
            assert pointwise(text).is_exact is row.exact, text
    assert pointwise("acc + arg0").is_exact and pointwise("acc * 0.5").is_exact


def test_an_operation_without_a_derivative_is_named() -> None:
    x = Var("x", f32)
    assert [name_of(e) for e in (Call("erf", (x,)), Call("fma", (x, x, x)), x * 2, x + 1)] == [
        "erf",
        "fma",
        "mul",
        "add",
    ]
