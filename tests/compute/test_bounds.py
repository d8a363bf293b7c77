"""Every operation of one value, and its derivative, is within its declared bound over all exponents, in
the IR's interpreter and as emitted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.bounds import (
    BOUNDS,
    EXPONENTS,
    LANES,
    bound_of,
    emitted,
    excess,
    interpreted,
    points,
    powers,
    wrong_edges,
)
from transconv import ir
from transconv.compute import OPS, execute, parse
from transconv.kernel import Group, kernel
from transconv.kernel.functions import FUNCTIONS

Value = Callable[[ir.Expr], ir.Expr]


def rows() -> dict[str, Value]:
    """The expression of each operation of one value, and those of the derivatives."""
    found: dict[str, Value] = {op.name: op for op in OPS.values() if op.arity == 1}
    for op in OPS.values():
        if op.arity == 1 and op.derivative is not None:
            found[f"{op.name}'"] = lambda x, of=op.derivative: of(x)[0]
    return found


def test_every_operation_of_one_value_has_a_bound() -> None:
    assert set(rows()) == set(BOUNDS)


@pytest.mark.every(15)  # of both types in turn
@pytest.mark.parametrize("dtype", [ir.f32, ir.f64], ids=str)
@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_operations_are_within_their_bounds(name: str, dtype: ir.DType) -> None:
    bound, value = bound_of(name, dtype), rows()[name]
    x = points(bound, dtype)
    for how in (interpreted, emitted):
        off = excess(bound, x, how(value, x, dtype), dtype)
        at = int(np.argmax(off))
        assert off[at] <= 1, f"{name}({x[at]!r}) in {dtype}, {how.__name__}: {off[at]} times its bound"


@pytest.mark.every(11)
@pytest.mark.parametrize("how", [interpreted, emitted])
@pytest.mark.parametrize("ends", [(-40.0, -8.0), (-8.0, -1.15), (-1.15, 0.0), (0.0, 9.0)], ids=str)
@pytest.mark.parametrize("name", ["ndtr", "gelu"])
def test_f64_is_at_least_as_exact_as_torch(
    name: str, ends: tuple[float, float], how: Callable[..., Any]
) -> None:
    """Torch adds 1 to an error function near -1, where the digits of what is left are lost."""
    x = np.sort(np.random.default_rng(3).uniform(*ends, LANES))
    one = replace(BOUNDS[name], units=1.0, inside=0.0)
    ours, torchs = (
        excess(one, x, y, ir.f64).max()
        for y in (how(rows()[name], x, ir.f64), OPS[name].function()(torch.from_numpy(x)).numpy())
    )
    assert ours <= min(bound_of(name, ir.f64).units, max(1.0, torchs))


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [ir.f16, ir.bf16], ids=str)
@pytest.mark.parametrize("name", ["tanh", "elu", "mish", "expm1", "gelu", "gelu'", "silu'", "tanh'"])
def test_numbers_of_16_bits_are_computed_in_f32(name: str, dtype: ir.DType) -> None:
    bound = BOUNDS[name]
    x = points(bound, dtype)
    got = emitted(rows()[name], x, dtype)
    assert excess(bound, x, got, dtype).max() <= 1


@pytest.mark.parametrize(
    ("name", "x", "right"),
    [
        ("tanh", 1e-9, 1e-9),
        ("elu", -1e-8, -1e-8),
        ("mish", -20.0, -4.122307236e-8),
        ("expm1", 1e-9, 1e-9),
        ("gelu", -5.0, -1.433257861e-6),
        ("gelu", -9.0, -1.0157295603e-18),
        ("tanh'", 12.0, 1.510053824e-10),
        ("sigmoid'", 25.0, 1.388794386e-11),
        ("gelu_tanh'", 1e20, 1.0),
        ("hardswish", 3e38, 3e38),
    ],
)
def test_nothing_cancels_or_overflows(name: str, x: float, right: float) -> None:
    for dtype in (ir.f32, ir.f64):
        given = np.resize(np.array([x], dtype.numpy), 4096)
        for how in (interpreted, emitted):
            assert np.allclose(how(rows()[name], given, dtype), right, rtol=3e-6, atol=0)


INPUTS = [
    ("tanh", 1e-9, 1e-9),
    ("elu", -1e-8, -1e-8),
    ("mish", -20.0, -4.122307236e-8),
    ("expm1", 1e-9, 1e-9),
    ("gelu", -5.0, -1.433257861e-6),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "x", "right"), INPUTS)
def test_of_a_text_and_of_a_graph(name: str, x: float, right: float, dtype: torch.dtype) -> None:
    transconv.config.cpu = "interpret"
    kind = "f64" if dtype is torch.float64 else "f32"
    text = f"compute c\n tensor X {kind} [5]\n axes n=5\n read x = X[n]\n store Y[n] = {name}(x)"
    given, want = torch.full((5,), x, dtype=dtype), torch.full((5,), right, dtype=torch.float64)
    transconv.stats(reset=True)
    found = transconv.computation(text)(given)
    torch.testing.assert_close(found.double(), want, rtol=3e-6, atol=0)
    assert transconv.stats().native and not transconv.stats().fallback
    function = {"tanh": torch.tanh, "expm1": torch.expm1}.get(name) or getattr(F, name)
    torch._dynamo.reset()
    made = torch.compile(lambda v: function(v) * 1.0, backend="transconv")
    torch.testing.assert_close(made(given).double(), want, rtol=3e-6, atol=0)


@kernel
def functions(group, X, Y):  # type: ignore[no-untyped-def]
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    group.store(Y[0, i:], np.expm1(x))
    group.store(Y[1, i:], np.tanh(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_of_a_kernel(dtype: torch.dtype) -> None:
    transconv.config.cpu = "interpret"
    x = torch.tensor([1e-9, -1e-9, 1e-30, -0.3, 0.49999, 0.50001, 3.0, -80.0], dtype=dtype)
    found = torch.zeros(2, 8, dtype=dtype)
    functions(Group(8, 8), x, found)
    want = torch.stack([torch.expm1(x), torch.tanh(x)])
    torch.testing.assert_close(found, want, rtol=4e-7 if dtype is torch.float32 else 1e-15, atol=0)


@pytest.mark.every(7)
@pytest.mark.parametrize("dtype", [ir.f32, ir.f64], ids=str)
@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_edges_are_those_of_torch(name: str, dtype: ir.DType) -> None:
    for device in ("", "cpu"):
        assert wrong_edges(name, rows()[name], dtype, device) == []


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [ir.f32, ir.f64], ids=str)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_powers_of_kernels_are_within_their_bound(exponent: float, dtype: ir.DType) -> None:
    x, got, off = powers(exponent, dtype)
    at = int(np.argmax(off))
    assert off[at] <= 1, f"{x[at]!r}**{exponent} is {got[at]!r}: {off[at]} times its bound"
    missing = np.isnan(got) & ~np.isnan(x)
    assert missing[x < 0].all() != float(exponent).is_integer() and not missing[x >= 0].any()


@pytest.mark.parametrize("dtype", [ir.f32, ir.f64], ids=str)
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 8])
def test_small_whole_powers_are_products(exponent: int, dtype: ir.DType) -> None:
    x = points(BOUNDS["exp2"], dtype)
    got = emitted(lambda v: OPS["pow"](v, ir.Const(float(exponent), dtype)), x, dtype)
    want = np.ones_like(x)
    with np.errstate(all="ignore"):
        for _ in range(exponent):
            want = want * x
    np.testing.assert_array_equal(got, want)


def test_whole_powers_of_numbers_below_zero() -> None:
    x = np.resize(np.array([-2.0, -1.5, 3.0, -0.0], np.float32), 4096)
    for exponent in (9.0, 12.0, 33.0):
        got = emitted(lambda v, e=exponent: OPS["pow"](v, ir.Const(e, ir.f32)), x, ir.f32)
        assert np.allclose(got, x.astype(np.float64) ** exponent, rtol=1e-5)


@pytest.mark.parametrize(("a", "b", "right"), [(1e-30, 1e-20, -1e10), (1e30, 1e25, -1e-20)])
def test_the_derivative_of_a_quotient_needs_no_square(a: float, b: float, right: float) -> None:
    derivative = OPS["div"].derivative
    assert derivative is not None
    x = np.resize(np.array([b], np.float32), 4096)
    got = emitted(lambda v: derivative(ir.Const(a, ir.f32), v)[1], x, ir.f32)
    assert np.allclose(got, right, rtol=1e-6, atol=0)


KERNELS = {"absolute": "abs", "fabs": "abs", "negative": "neg", "rint": "round"}
EXACT = {"positive", "sign", "square", "reciprocal", "isnan", "logical_not", "invert"}


def test_every_function_of_kernels_is_one_of_the_table() -> None:
    """Functions of one value in kernels have the expression of the table's row, or one exact operation."""
    for name, row in FUNCTIONS.items():
        if row.arity == 1 and name not in EXACT:
            x = ir.Var("x", ir.f32)
            assert row.expression(x) == OPS[KERNELS.get(name, name)](x)


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_axis_that_neither_factor_has(count: int) -> None:
    """Each product is added as often as the axis is long; none where it has no points, as in a phase of a
    stride that no tap meets."""
    compute = parse(f"""compute product
        tensor a f32 [m=4, k=5]
        tensor b f32 [k=5, n=6]
        axes   m=4 n=6 | k=5 r={count}
        read   x = a[m, k]
        read   w = b[k, n]
        store  y[m, n] = sum(x*w; k r)""")
    rng = np.random.default_rng(1)
    a, b = rng.integers(-5, 5, (4, 5)).astype(float), rng.integers(-5, 5, (5, 6)).astype(float)
    found = execute(compute, {"a": a, "b": b}, share=1e-6)["y"]
    np.testing.assert_array_equal(found.value, count * (a @ b))
    np.testing.assert_allclose(found.error, count * 1e-6 * (np.abs(a) @ np.abs(b)))
