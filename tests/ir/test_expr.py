"""Building expressions: operators, conversions of Python numbers, types."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np
import pytest

from transconv import ir
from transconv.ir import bf16, boolean, f16, f32, f64, i8, i32, i64, index, promote

A, B = ir.Var("a"), ir.Var("b")
X, H = ir.Var("x", f32), ir.Var("h", f16)


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (A + 1, ir.Add(A, ir.Const(1))),
        (1 + A, ir.Add(ir.Const(1), A)),
        (A - 1, ir.Sub(A, ir.Const(1))),
        (1 - A, ir.Sub(ir.Const(1), A)),
        (A * B, ir.Mul(A, B)),
        (2 * A, ir.Mul(ir.Const(2), A)),
        (A // 2, ir.FloorDiv(A, ir.Const(2))),
        (2 // A, ir.FloorDiv(ir.Const(2), A)),
        (A % 2, ir.Mod(A, ir.Const(2))),
        (2 % A, ir.Mod(ir.Const(2), A)),
        (X / 2.0, ir.Div(X, ir.Const(2.0, f32))),
        (-A, ir.Neg(A)),
        (A < B, ir.Lt(A, B)),
        (A <= B, ir.Le(A, B)),
        (A > B, ir.Lt(B, A)),
        (A >= B, ir.Le(B, A)),
        (ir.eq(A, 0), ir.Eq(A, ir.ZERO)),
        (ir.ne(A, 0), ir.Ne(A, ir.ZERO)),
        ((A < 1) & (B < 1), ir.And(A < 1, B < 1)),
        ((A < 1) | True, ir.Or(A < 1, ir.TRUE)),
        (A ^ B, ir.Xor(A, B)),
        (A << 1, ir.Shl(A, ir.ONE)),
        (A >> 1, ir.Shr(A, ir.ONE)),
        (~(A < B), ir.Not(A < B)),
        (ir.minimum(A, 3), ir.Min(A, ir.Const(3))),
        (ir.maximum(A, 3), ir.Max(A, ir.Const(3))),
        (ir.select(A < B, 1, A), ir.Select(A < B, ir.ONE, A)),
    ],
)
def test_operators_build_nodes(built: ir.Expr, expected: ir.Expr) -> None:
    assert built is expected


def test_python_numbers() -> None:
    assert ir.as_expr(True) is ir.TRUE
    assert ir.as_expr(False) is ir.FALSE
    assert ir.as_expr(0) is ir.ZERO
    assert ir.as_expr(0.5) is ir.Const(0.5, f32)
    assert ir.as_expr(A) is A


@pytest.mark.parametrize(
    ("number", "const"),
    [
        (3, ir.Const(3)),
        (0.5, ir.Const(0.5, f32)),
        (True, ir.TRUE),
        (np.int64(3), ir.Const(3)),
        (np.uint8(3), ir.Const(3)),
        (np.float16(0.5), ir.Const(0.5, f32)),
        (np.float64(0.5), ir.Const(0.5, f32)),
        (np.bool_(True), ir.TRUE),
    ],
    ids=lambda x: type(x).__name__,
)
def test_numbers_stand_on_either_side(number: Any, const: ir.Const) -> None:
    sides = {
        operator.add: ir.Add,
        operator.sub: ir.Sub,
        operator.mul: ir.Mul,
        operator.truediv: ir.Div,
        operator.floordiv: ir.FloorDiv,
        operator.mod: ir.Mod,
        operator.and_: ir.And,
        operator.or_: ir.Or,
        operator.xor: ir.Xor,
        operator.lshift: ir.Shl,
        operator.rshift: ir.Shr,
        operator.lt: ir.Lt,
        operator.le: ir.Le,
    }
    for operation, node in sides.items():
        assert operation(A, number) is node(A, const), operation.__name__
        assert operation(number, A) is node(const, A), operation.__name__
    assert (number > A) is (A < const) and (A > number) is (const < A)
    assert (number >= A) is (A <= const) and (A >= number) is (const <= A)
    assert ir.minimum(number, A) is ir.Min(const, A) and ir.eq(A, number) is ir.Eq(A, const)
    assert type(ir.Const(number).value) in (int, float, bool)


@pytest.mark.parametrize("wrong", ["text", None, 1j, np.zeros(2), np.complex64(1), [1]], ids=repr)
def test_what_is_no_number_is_named(wrong: Any) -> None:
    for use in (
        lambda: A + wrong,
        lambda: wrong - A,
        lambda: A / wrong,
        lambda: wrong // A,
        lambda: A < wrong,
        lambda: wrong & A,
        lambda: ir.select(A < 1, wrong, A),
        lambda: ir.Const(wrong),
    ):
        with pytest.raises(TypeError, match=re.escape(f"the operand {wrong!r} ({type(wrong).__name__})")):
            use()


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (i32, i64, i64),
        (index, i32, i32),
        (i32, index, i32),
        (index, i64, i64),
        (i8, index, i8),
        (boolean, i8, i8),
        (i64, f16, f16),
        (f16, f32, f32),
        (bf16, f32, f32),
        (f16, bf16, f32),
        (bf16, bf16, bf16),
        (f32, f64, f64),
        (boolean, boolean, boolean),
    ],
)
def test_promotion(a: ir.DType, b: ir.DType, both: ir.DType) -> None:
    assert promote(a, b) is both
    assert promote(b, a) is both


def test_types_of_expressions() -> None:
    tensor = ir.Tensor("t", ("n",), (4,), ir.Layout.dense(bf16, (4,)))
    lane = ir.Lane("m", 4, 0)
    table = {
        A + B: index,
        X * H: f32,
        A / B: f32,
        H / H: f16,
        A < B: boolean,
        ~(A < B): boolean,
        (A < B) & (B < A): boolean,
        -X: f32,
        ir.select(A < B, H, X): f32,
        ir.Cast(X, f16): f16,
        ir.Call("fma", (H, H, X)): f32,
        ir.Load(tensor, A, ir.TRUE): bf16,
        lane: index,
        ir.Reduce("sum", X * lane, lane): f32,
        A << 1: index,
        ir.minimum(H, X): f32,
    }
    for e, dtype in table.items():
        assert e.dtype is dtype, str(e)


def test_sums_and_masks_come_apart_and_together() -> None:
    parts = [A < 1, B < 2, A < 3]
    assert ir.conjuncts(ir.all_of(parts)) == parts
    assert ir.all_of([ir.TRUE, A < 1, A < 1, ir.TRUE]) is (A < 1)
    assert ir.all_of([]) is ir.TRUE
    assert ir.conjuncts(ir.TRUE) == []
    terms = [A, B, A * B]
    assert ir.addends(ir.sum_of(terms)) == terms
    assert ir.sum_of([]) is ir.ZERO


def test_lanes_of_an_expression() -> None:
    m, k, n = ir.Lane("m", 4, 1), ir.Lane("k", 8, 2), ir.Lane("n", 2, 3)
    assert ir.lanes_of(n * 2 + m) == (m, n)
    assert ir.lanes_of(ir.Reduce("sum", m * k, k)) == (m,)
    assert ir.lanes_of(A + n, {A: (m, k)}) == (m, k, n)
    assert ir.lanes_of(A + B) == ()


def test_view_has_an_offset_and_a_mask() -> None:
    tensor = ir.Tensor("t", ("n", "w"), (4, 8), ir.Layout.dense(f16, (4, 8)))
    view = ir.View(tensor, (ir.ViewDim(A), ir.ViewDim(B - 1, (B - 1 >= 0) & (B - 1 < 8))))
    assert str(view.offset()) == "((a * 8) + ((b - 1) * 1))"
    assert view.mask() is ir.all_of([B - 1 >= 0, B - 1 < 8])
    assert str(view) == "t[n = a, w = (b - 1)] where ((0 <= (b - 1)) & ((b - 1) < 8))"
