"""Constants and counters cast to every type, in the text of a kernel: what the interpreter of the IR makes
of them, in Triton's interpreter, as written and simplified, and compiled for a chip."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import casts, constants
from transconv import ir
from transconv.backend_triton import CompileJob, Resources, compile_offline, emit
from transconv.backend_triton.emitters.triton import ExprSpeller
from transconv.compute import Alone, parse
from transconv.ir import Cast, Const, DType, Expr, boolean, f64, i64
from transconv.kernel.functions import cast
from transconv.passes.scalar.simplification import simplify_kernel
from transconv.runtime import Plan, build
from transconv.schedule import Schedule
from transconv.support import knobs
from transconv.target import TARGETS

TYPES = tuple(t for t in ir.DTYPES.values() if t.torch and t.within is None)
WHOLE = (
    0,
    1,
    -1,
    5,
    127,
    128,
    -128,
    -129,
    200,
    255,
    256,
    300,
    -300,
    2**31 - 1,
    -(2**31),
    2**32 + 7,
    2**63 - 1,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.1, 100.7, 1e-3, 65504.0, 3e38, float("inf"), float("nan"))
LANE, PID = ir.Lane("m", 16, 1), ir.Var("pid")
STEP, OUT = ir.Var("step"), "out"


def numbers(own: DType) -> list[Const]:
    """Constants that a type holds."""
    if own is boolean:
        return [Const(False, own), Const(True, own)]
    if own.kind == "float":
        held = np.float32 if own is ir.f32 else float  # of f32 numbers of Python are not rounded
        return [
            Const(float(held(x)), own) for x in FLOATS if not abs(x) > own.largest or own.largest == np.inf
        ]
    return [Const(n, own) for n in WHOLE if ir.wrapped(n, own) == n]


def is_defined(value: float, to: DType) -> bool:
    """Whether languages say what a number is as an integer."""
    return to.kind != "int" or not isinstance(value, float) or to.limits[0] <= value <= to.limits[1]


def wide_type(to: DType) -> DType:
    """A type with all numbers of another one, to which chips convert it."""
    return ir.f32 if to.is_short else f64 if to.kind == "float" else i64


def tile_of(to: DType) -> Expr:
    """Zeros, which come from memory."""
    read = ir.Load(GIVEN, LANE, ir.TRUE)
    return Cast(Cast(read, ir.f32) if to.is_short else read, to)


def cases(own: DType, to: DType) -> list[Expr]:
    """Casts, each each alone and beside a tile, as a type that holds them."""
    wide = wide_type(to)
    made: list[Expr] = []
    for c in numbers(own):
        if is_defined(c.value, to):
            made.append(Cast(Cast(c, to), wide))
            chosen = ir.Select(LANE < 3, Cast(c, to), ir.FALSE if to is boolean else tile_of(to))
            made.append(Cast(chosen if to is boolean or to.is_short else Cast(c, to) + tile_of(to), wide))
    return made


def counted(to: DType) -> list[Expr]:
    """The same of a loop's counter, which Triton's interpreter holds as a number of Python."""
    through = ir.f32 if to.is_short else to
    made = (STEP * 100 - 150, STEP, STEP + 250)
    return [Cast(Cast(Cast(e, through), to), wide_type(to)) for e in made]


GIVEN = ir.Tensor("given", ("m",), (16,), ir.Layout.dense(ir.i8, (16,)))


def every(to: DType) -> list[Expr]:
    """Those of all types."""
    return [e for own in (ir.index, *TYPES) for e in cases(own, to)]


def kernel(to: DType, simple: bool) -> ir.Kernel:
    exprs, last = every(to), counted(to)
    count = (len(exprs) + 3 * len(last)) * 16
    out = ir.Tensor(OUT, ("x",), (count,), ir.Layout.dense(exprs[0].dtype, (count,)))
    stores = [ir.store(out, i * 16 + LANE, e) for i, e in enumerate(exprs)]
    behind = [
        ir.store(out, (STEP * len(last) + len(exprs) + i) * 16 + LANE, e) for i, e in enumerate(last)
    ]
    made = ir.Kernel(
        "typed", (out, GIVEN), ir.For(PID, 1, ir.seq(*stores, ir.For(STEP, 3, ir.seq(*behind))), "grid")
    )
    return simplify_kernel(made) if simple else made


def given(made: ir.Kernel) -> dict[str, Any]:
    out = made.params[0]
    return {OUT: np.zeros(out.shape, out.dtype.numpy), "given": np.zeros(16, np.int8)}


@pytest.mark.every(4)
@pytest.mark.parametrize("simple", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", TYPES, ids=str)
@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_in_triton_s_interpreter(to: DType, simple: bool, tmp_path: Path) -> None:
    import torch

    from transconv.backend_triton.launch.interpreter import prepare_interpreter

    prepare_interpreter()
    made = kernel(to, simple)
    want = given(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ir.run(kernel(to, False), want)
    path = tmp_path / "typed.py"
    path.write_text(emit(made))
    spec = importlib.util.spec_from_file_location("typed", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    got = {n: torch.from_numpy(a) for n, a in given(made).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.typed[(1,)](got[OUT], got["given"])
    names = [str(e) for e in (*every(to), *counted(to) * 3)]
    for name, a, b in zip(names, *(x.reshape(-1, 16) for x in (got[OUT].numpy(), want[OUT])), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize(
    "to", [ir.u8, *(pytest.param(t, marks=pytest.mark.slow) for t in TYPES if t is not ir.u8)], ids=str
)
def test_compiled_for_a_chip(to: DType) -> None:
    made = kernel(to, False)
    params = tuple((t.dtype.name, ()) for t in made.params)
    (found,) = compile_offline(
        [CompileJob(emit(made), "typed", params, "sm_90", "cuda", 90, 32, words=False)]
    )
    assert isinstance(found, Resources), found


@pytest.mark.parametrize("row", [2**31 - 1, 2**31, 2**31 + 5])
@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_numbers_of_any_size_are_subtracted_from_addresses(row: int) -> None:
    """Rows of gigabytes, of which a few elements alone are touched."""
    import torch

    text = f"""compute far
        tensor X u8 [3, {row}]
        axes   d=2 n=2 h=8 | k=2
        read   x = X[n + k - 1, d + h]
        store  Y[n, h, d] = sum(x; k)
    """
    x, y, first = torch.empty(3, row, dtype=torch.uint8), torch.empty(2, 8, 2), torch.arange(9)
    x[:, :9] = first * torch.tensor([[1], [2], [4]])
    schedule = Schedule.parse("h:4 d:2 | fma | unroll=1")  # two loads share the terms of their addresses
    build(Alone(parse(text)), TARGETS["interpreter"], schedule, None, True, Plan).launch(X=x, Y=y)
    sums = first.unfold(0, 2, 1) * torch.tensor([1, 3])[:, None, None]
    assert torch.equal(y, sums.float())


def test_constants_of_kernels_are_those_of_their_types() -> None:
    """The casts of a kernel's source, which are constants where their operand is one."""
    for own in TYPES:
        for to in TYPES:
            for c in numbers(own):
                if is_defined(c.value, to) and to is not boolean:
                    made, out = cast(c, to), np.zeros(2, to.numpy)
                    tensor = ir.Tensor(OUT, ("x",), (2,), ir.Layout.dense(to, (2,)))
                    stores = (ir.store(tensor, i, e) for i, e in enumerate((made, Cast(c, to))))
                    with np.errstate(all="ignore"):
                        ir.run(ir.Kernel("k", (tensor,), ir.seq(*stores)), {OUT: out})
                    np.testing.assert_array_equal(out[0], out[1], err_msg=f"{c} of {own} as {to}")


@pytest.mark.parametrize("dtype", [ir.i8, ir.u8, ir.i32], ids=str)
def test_sums_of_equal_numbers_wrap_around(dtype: DType, tmp_path: Path) -> None:
    """Nothing of them varies along the lane: the text multiplies."""
    speller = ExprSpeller()
    lane = ir.Lane("n", 256, 1)
    for op, want in (("sum", 5 * 256), ("prod", 5**256)):
        assert speller.text(ir.Reduce(op, Const(5, dtype), lane)) == str(ir.wrapped(want, dtype))
    x = ir.Var("x", dtype)
    assert speller.text(ir.Reduce("sum", x, lane)) == f"x * {ir.wrapped(256, dtype)}"


@pytest.mark.every(12)
@pytest.mark.parametrize("simple", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", TYPES, ids=str)
@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_constants_in_every_place(of: DType, simple: bool) -> None:
    assert constants.wrong(of, simple=simple) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("of", casts.TYPES, ids=str)
@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_casts_to_every_type(of: DType) -> None:
    assert casts.wrong(of) == []
