"""Division rounds down in the IR, and towards zero in Triton: what the pass ``final`` leaves is right
under both rules, whether or not the simplifier has run before."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transconv import ir
from transconv.backend_triton.emitters.triton import emit
from transconv.ir.interp import evaluate
from transconv.passes.lowering.legalization import final
from transconv.passes.scalar.index_width import narrow
from transconv.passes.scalar.simplification import simplify_kernel
from transconv.support import knobs

A, B, X, Y, PID = (ir.Var(n) for n in ("a", "b", "x", "y", "pid"))
M = ir.Lane("m", 32, 1)
SMALL = range(-9, 10)
DIVISORS = [n for n in SMALL if n]
OUT = ir.Tensor(
    "out", ("n", "m"), (2 * len(DIVISORS), 32), ir.Layout.dense(ir.i32, (2 * len(DIVISORS), 32))
)
GIVEN = ir.Tensor("given", ("m",), (32,), ir.Layout.dense(ir.i32, (32,)))
BY = ir.Tensor("by", ("n",), (len(DIVISORS),), ir.Layout.dense(ir.i32, (len(DIVISORS),)))

NUMERATORS = {
    "lanes": M - 16,
    "read": ir.Cast(ir.Load(GIVEN, M, ir.TRUE), ir.index),
    "not negative": M + 0,
    "negative": M - 40,
    "again": M % 12 + ir.Cast(ir.Load(GIVEN, ir.Const(5), ir.TRUE), ir.index),
}


def kernel(numerator: str, divisors: str) -> ir.Kernel:
    """All quotients and remainders: constants are written one by one, other divisors are read, or
    counted by a loop that knows their sign."""

    def stores(n: int | ir.Expr, by: ir.Expr) -> ir.Stmt:
        quotient, rest = ir.Cast(X // by, ir.i32), ir.Cast(X % by, ir.i32)
        at = ir.as_expr(n) * 64 + M
        return ir.seq(ir.store(OUT, at, quotient), ir.store(OUT, at + 32, rest))

    half = len(DIVISORS) // 2
    body = {
        "constants": lambda: ir.seq(*(stores(n, ir.Const(by)) for n, by in enumerate(DIVISORS))),
        "read": lambda: ir.For(
            A, len(DIVISORS), ir.seq(ir.Let(B, ir.Cast(ir.Load(BY, A, ir.TRUE), ir.index)), stores(A, B))
        ),
        "counted": lambda: ir.seq(
            ir.For(A, half, stores(A, A - half)), ir.For(A, half, stores(A + half, A + 1))
        ),
    }[divisors]()
    return ir.Kernel(
        "divides", (OUT, GIVEN, BY), ir.For(PID, 1, ir.seq(ir.Let(X, NUMERATORS[numerator]), body), "grid")
    )


def arrays() -> dict[str, Any]:
    return {
        "out": np.zeros(OUT.layout.span, np.int32),
        "given": np.arange(-16, 16, dtype=np.int32),
        "by": np.array(DIVISORS, np.int32),
    }


def expected(numerator: str) -> Any:
    x = (
        np.arange(32)
        - {"lanes": 16, "read": 16, "not negative": 0, "negative": 40, "again": 11}[numerator]
    )
    x = np.arange(32) % 12 - 11 if numerator == "again" else x
    return np.concatenate([np.concatenate([x // by, x % by]) for by in DIVISORS])


CASES = [
    (n, d, simple)
    for n in NUMERATORS
    for d in ("constants", "read", "counted")
    for simple in (False, True)
]


def passed(numerator: str, divisors: str, simple: bool) -> ir.Kernel:
    made = kernel(numerator, divisors)
    made = final(narrow(simplify_kernel(made) if simple else made))
    ir.verify(made)
    return made


def towards_zero(a: Any, b: Any) -> Any:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


@pytest.mark.every(5)
@pytest.mark.parametrize("rounds", ["down", "towards zero"])
@pytest.mark.parametrize(("numerator", "divisors", "simple"), CASES)
def test_under_both_rules(
    numerator: str, divisors: str, simple: bool, rounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rounds == "towards zero":
        monkeypatch.setitem(evaluate._ARITHMETIC, ir.FloorDiv, towards_zero)
        monkeypatch.setitem(evaluate._ARITHMETIC, ir.Mod, np.fmod)
    data = arrays()
    ir.run(passed(numerator, divisors, simple), data)
    np.testing.assert_array_equal(data["out"], expected(numerator))


@pytest.mark.every(5)
@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("numerator", "divisors", "simple"), CASES)
def test_in_triton(numerator: str, divisors: str, simple: bool, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "divides.py"
    path.write_text(emit(passed(numerator, divisors, simple)))
    spec = importlib.util.spec_from_file_location("divides", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = {n: torch.from_numpy(a) for n, a in arrays().items()}
    module.divides[(1,)](data["out"], data["given"], data["by"])
    np.testing.assert_array_equal(data["out"].numpy(), expected(numerator))


def test_a_narrow_type_stays_narrow() -> None:
    small = ir.Tensor("s", ("m",), (32,), ir.Layout.dense(ir.i8, (32,)))
    x, y = (ir.Var(n, ir.i8) for n in ("x", "y"))
    load = ir.Load(small, M, ir.TRUE)
    made = final(ir.Kernel("k", (small,), ir.seq(ir.Let(x, load), ir.Let(y, x // x))))
    *_, quotient = ir.statements(made.body)
    assert isinstance(quotient, ir.Let) and quotient.value.dtype is ir.i8
