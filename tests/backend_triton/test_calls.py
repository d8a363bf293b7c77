"""Every function that kernels may call is spelled, compiles for chips of two makers, and in Triton's
interpreter computes what it computes in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import quotients
from transconv import ir
from transconv.backend_triton.emitters import gluon, triton
from transconv.backend_triton.launch.interpreter import prepare_interpreter
from transconv.backend_triton.launch.jit_module import load
from transconv.backend_triton.offline_compilation import CompileJob, Resources, compile_offline
from transconv.compute import OPS
from transconv.ir.functions.calls import CALLS
from transconv.target import TARGETS

N = 128
FAR = (
    -1e4,
    -88.0,
    -20.0,
    -1.0,
    -0.7,
    -0.625,
    -0.62,
    -1e-3,
    -1e-6,
    0.0,
    1e-6,
    0.3,
    0.624,
    0.63,
    1.0,
    9.0,
    30.0,
    1e4,
)
POSITIVE = ("log", "log2", "sqrt", "rsqrt")
UNARY = [op for op in OPS.values() if op.arity == 1]


def tensor(name: str, dtype: ir.DType = ir.f32) -> ir.Tensor:
    return ir.Tensor(name, ("x",), (N,), ir.Layout.dense(dtype, (N,)))


def kernel(
    value: object, dtype: ir.DType = ir.f32, stored: ir.DType | None = None, alone: bool = False
) -> ir.Kernel:
    """y[i] = value(x[i]) for all i at once, or ``alone``, for one number."""
    x, y = tensor("x", dtype), tensor("y", stored or dtype)
    program, held = ir.Var("pid"), ir.Var("v", dtype)
    at = program if alone else program * N + ir.Lane("i", N, 1)
    body = ir.seq(ir.Let(held, ir.Load(x, at, ir.TRUE)), ir.Store(y, at, value(held), ir.TRUE))  # type: ignore[operator]
    return ir.Kernel("each", (x, y), ir.For(program, 1, body, kind="grid"))


def called(name: str) -> object:
    row = CALLS[name]
    return lambda v: ir.Call(name, tuple(ir.Cast(v, t) for t in row.takes) or (v,) * row.arity)


def is_portable(name: str) -> bool:
    """Whether a function is written in the language: Triton's interpreter has no machine code."""
    return "asm" not in CALLS[name].helper


def points(name: str) -> np.ndarray:
    given = np.resize(np.array(FAR, np.float32), N)
    return np.abs(given) + np.float32(1e-3) if name in POSITIVE else given


def emitted(value: object, x: np.ndarray) -> np.ndarray:
    """The result in Triton's interpreter."""
    function = load(triton.emit(kernel(value)), "each")
    prepare_interpreter()
    out = torch.full((N,), float("nan"))
    function[(1,)](torch.from_numpy(x), out)
    return out.numpy()


@pytest.mark.parametrize(
    "name", sorted(n for n, c in CALLS.items() if not c.floats and c.arity == 2 and is_portable(n))
)
def test_calls_of_integers_in_triton_s_interpreter(name: str) -> None:
    x = np.arange(N, dtype=np.int32) * 100_003
    value = kernel(lambda v: ir.Call(name, (v, v // ir.Const(3, ir.i32) + ir.Const(1, ir.i32))), ir.i32)
    function = load(triton.emit(value), "each")
    prepare_interpreter()
    out = torch.full((N,), -1, dtype=torch.int32)
    function[(1,)](torch.from_numpy(x), out)
    np.testing.assert_array_equal(out.numpy(), CALLS[name].numpy(x, x // 3 + 1))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", sorted(n for n, c in CALLS.items() if c.floats))
def test_calls_in_triton_s_interpreter(name: str) -> None:
    x = points(name)
    with np.errstate(all="ignore"):
        given = [ir.convert(x, t) for t in CALLS[name].takes] or [x] * CALLS[name].arity
        want = CALLS[name].numpy(*given).astype(np.float32)
    np.testing.assert_allclose(emitted(called(name), x), want, rtol=2e-6, atol=2e-7)


@pytest.mark.every(2)
@pytest.mark.parametrize("op", UNARY, ids=str)
def test_operations_in_triton_s_interpreter(op: object) -> None:
    x = points(str(op))
    want = op.function()(torch.from_numpy(x)).numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(emitted(op, x), want, rtol=1e-5, atol=1e-6)


def test_the_hyperbolic_tangent_is_right_near_zero_and_far_from_it() -> None:
    x = np.resize(np.array([1e-30, 1e-6, -1e-3, 0.01, 0.6249, 0.6251, 20, -3e38, np.inf], np.float32), N)
    np.testing.assert_allclose(emitted(called("tanh"), x), np.tanh(x), rtol=1e-6)
    assert np.isnan(emitted(called("tanh"), np.full(N, np.nan, np.float32))).all()


def test_what_a_function_does_not_take_is_refused_in_words() -> None:
    with pytest.raises(ir.VerifyError, match="exp takes 32-bit floats or 64-bit floats, not f16"):
        ir.verify(kernel(called("exp"), ir.f16))
    ir.verify(kernel(called("abs"), ir.f16))


def test_gluon_has_the_functions_that_are_spelled() -> None:
    gl = pytest.importorskip("triton.experimental.gluon.language")
    for callee in CALLS.values():
        if not callee.helper and "{" not in callee.gluon:
            assert hasattr(gl, callee.gluon)
    assert gluon.GluonEmitter.space == "gl"


@pytest.mark.every(3)
@pytest.mark.parametrize("alone", [False, True], ids=["tile", "number"])
@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_every_function_compiles(chip: str, alone: bool) -> None:
    t, jobs = TARGETS[chip], []
    for dtype in ("f32", "f64", "i32"):
        names = [n for n in sorted(CALLS) if not CALLS[n].why_not(ir.DTYPES[dtype]) and is_portable(n)]

        def all_of(v: ir.Expr, names: list[str] = names) -> ir.Expr:
            return ir.sum_of([called(n)(v) for n in names])  # type: ignore[operator]

        made = kernel(all_of, ir.DTYPES[dtype], alone=alone)
        ir.verify(made)
        jobs.append(
            CompileJob(
                triton.emit(made),
                "each",
                ((dtype, ()), (dtype, ())),
                chip,
                t.backend,
                t.arch,
                t.warp_size,
                words=False,
            )
        )
    for found in compile_offline(jobs):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"


@pytest.mark.every(8)
@pytest.mark.parametrize("name", filter(is_portable, sorted(CALLS)))
def test_every_function_compiles_in_gluon(name: str) -> None:
    """In a kernel of its own, emitted as the expressions of a warp-specialised role are. No explicit
    kernel calls machine code."""
    speller = gluon.GluonEmitter((), 4, 0, False)
    dtype = next((t for t in (ir.f32, ir.f64) if t.bits in CALLS[name].floats), ir.i32)
    lane, v = ir.Lane("i", N, 1), ir.Var("v", dtype)
    speller.scope[v] = (lane,)
    text = speller.text(called(name)(v))  # type: ignore[operator]
    layout = "gl.BlockedLayout([1], [32], [4], [0])"
    source = "\n".join(
        [
            "from triton.experimental import gluon",
            "from triton.experimental.gluon import language as gl",
            *ir.helpers({name}, set(), set(), "gluon.jit", "gl"),
            "",
            "",
            "@gluon.jit",
            "def each(x, y):",
            f"    i = gl.arange(0, {N}, {layout})",
            "    v = gl.load(x + i)",
            f"    gl.store(y + i, {text})",
            "",
        ]
    )
    t = TARGETS["sm_90"]
    (found,) = compile_offline(
        [
            CompileJob(
                source,
                "each",
                ((dtype.name, ()),) * 2,
                "sm_90",
                t.backend,
                t.arch,
                t.warp_size,
                explicit=True,
                words=False,
            )
        ]
    )
    assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"


# -- casts to a type that brings its own rounding ---------------------------------------------------


@pytest.mark.parametrize("given", [ir.f16, ir.f32, ir.f64], ids=str)
def test_rounding_to_tf32_is_a_cast(given: ir.DType) -> None:
    """The emitted text and the interpreter round as the type's row says; the cast back to f32 is a
    no-op."""
    made = kernel(lambda v: ir.Cast(ir.Cast(v, ir.tf32), ir.f32), given, ir.f32)
    ir.verify(made)
    wide = "v" if given is ir.f32 else "v.to(tl.float32)"
    assert f", nearest_tf32({wide}))" in triton.emit(made)
    x = np.resize(np.array([1 + 3 * 2.0**-12, -1 - 2.0**-11, 3.0, np.inf, np.nan, 0.0, 1e-3]), N)
    x = x.astype(given.numpy)
    out = torch.full((N,), float("nan"))
    load(triton.emit(made), "each")[(1,)](torch.from_numpy(x), out)
    assert np.array_equal(out.numpy(), ir.convert(x, ir.tf32), equal_nan=True)
    buffers = {"x": x, "y": np.zeros(N, np.float32)}
    ir.run(made, ir.Memory(buffers))
    assert np.array_equal(buffers["y"], out.numpy(), equal_nan=True)


def test_the_error_function_is_off_by_less_than_two_units() -> None:
    """Of both polynomials and where they meet; of what is no number, none; at the ends 1 and -1."""
    x = np.linspace(-6.0, 6.0, N - 8, dtype=np.float32)
    x = np.append(x, np.array([0.9, 0.8999999, -0.9, np.inf, -np.inf, np.nan, 1e30, -1e-30], np.float32))
    want, got = CALLS["erf"].numpy(x.astype(np.float64)), emitted(called("erf"), x)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~known)
    units = np.spacing(np.abs(want[known]).astype(np.float32))
    assert (np.abs(got[known] - want[known]) < 2 * units).all()


@pytest.mark.parametrize(
    "name",
    [n for n, c in CALLS.items() if c.arity == 1 and 32 in c.floats and not c.takes and c.result is None],
)
def test_zeros_have_signs(name: str) -> None:
    """Of an odd function -0 is of -0, as in torch, and what is rounded to 0 keeps its sign."""
    x = np.array([-0.0, 0.0, -0.3, 0.3] * (N // 4), np.float32)
    with np.errstate(all="ignore"):
        want, got = CALLS[name].numpy(x.astype(np.float64)), emitted(called(name), x)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


@pytest.mark.parametrize(("name", "function"), [("sin", np.sin), ("cos", np.cos)])
@pytest.mark.parametrize("numbers", ["quarters", "far", "ends"])
def test_circular_functions_of_numbers_of_any_size(name: str, function: np.ufunc, numbers: str) -> None:
    """Where a quarter of a circle ends the result is near 0; beyond 2**16 the language's own is called."""
    random = np.random.default_rng(2)
    x = {
        "quarters": (np.pi / 2 * random.integers(1, 41_000, N)).astype(np.float32),
        "far": np.ldexp(random.uniform(1, 2, N), random.integers(15, 128, N)).astype(np.float32),
        "ends": np.resize(
            np.array([0, -0.0, 65536, 65537, 105615, 3.4e38, 1e-40, np.inf, np.nan], np.float32), N
        ),
    }[numbers]
    x[::2] *= -1
    with np.errstate(invalid="ignore"):
        want, got = function(x.astype(np.float64)), emitted(called(name), x)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~known)
    units = np.spacing(np.abs(want[known]).astype(np.float32))
    assert (np.abs(got[known] - want[known]) < 1.5 * units).all()


@pytest.mark.parametrize(
    "divisor",
    [
        3.0,
        0.1,
        1.9999999,
        7.0e-5,
        0.0338,
        1e30,
        1e-38,
        3e-39,
        -1e-45,
        2.0**-64,
        5e-20,
        2.0**127,
        -3.4e38,
        0.0,
        np.inf,
        np.nan,
    ],
)
def test_quotients_are_rounded_once(divisor: float) -> None:
    """Also those that lie between two numbers, or are not finite, and by numbers that are not normal."""
    random, by = np.random.default_rng(1), np.float32(divisor)
    with np.errstate(all="ignore"):
        x = (random.standard_normal(N) * 10.0 ** random.integers(-6, 6, N)).astype(np.float32)
        x[64:] *= by
        x[:8] = by * np.array([0.5, 1.5, 2.5, 127.5, -3.5, 0.0, np.inf, -np.inf], np.float32)
        want = x / by
        got = emitted(lambda v: ir.Call("divided", (v, ir.Const(by, ir.f32))), x)
    large = ~(np.abs(want) < 2.0**-39)
    np.testing.assert_array_equal(got[large], want[large])
    assert (np.abs(got[~large] - want[~large]) <= np.spacing(np.abs(want[~large]))).all()


def test_quotients_of_any_bits_are_rounded_once() -> None:
    """Dividends and divisors with drawn signs, exponents and digits, as many of each as there are."""
    prepare_interpreter()
    large, wrong = quotients.wrong(1 << 16, 2, "cpu")
    assert wrong == 0 and large > 1 << 15
