"""The text of IR: one spelling for dumps, golden files and errors."""

from __future__ import annotations

import pytest

from transconv import ir

A, B, C = ir.Var("a"), ir.Var("b"), ir.Var("c")
T = ir.Tensor("t", ("n",), (8,), ir.Layout.dense(ir.f16, (8,)))
M = ir.Lane("m", 16, 1)


def test_the_first_example() -> None:
    assert str(2 * (A + B) - A) == "((2 * (a + b)) - a)"


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (A // 2 % 3, "((a // 2) % 3)"),
        (-A, "-a"),
        (~(A < B), "~(a < b)"),
        (A / B, "(a / b)"),
        (A >= B, "(b <= a)"),
        (ir.eq(A, B), "(a == b)"),
        (ir.ne(A, B), "(a != b)"),
        ((A < 1) & (B < 1) | (A ^ B), "(((a < 1) & (b < 1)) | (a ^ b))"),
        (A << 1 >> 2, "((a << 1) >> 2)"),
        (ir.minimum(A, ir.maximum(B, 0)), "min(a, max(b, 0))"),
        (ir.select(A < B, A, B), "select((a < b), a, b)"),
        (ir.Cast(A + B, ir.f16), "f16(a + b)"),
        (ir.Call("fma", (A, B, A + C)), "fma(a, b, a + c)"),
        (M * 4, "(m[0:16] * 4)"),
        (ir.Load(T, A + 1, ir.TRUE), "load(t, a + 1)"),
        (ir.Load(T, A, A < 8), "load(t, a, mask=a < 8)"),
        (ir.Reduce("sum", M * 2, M), "sum(m[0:16] * 2, over=m[0:16])"),
        (ir.Const(0.5, ir.f32), "0.5"),
        (ir.TRUE, "True"),
        (ir.Const(-3), "-3"),
        (ir.Neg(ir.Const(3)), "-(3)"),
        (ir.Const(3, ir.i32), "3:i32"),
        (ir.Const(3, ir.f32), "3:f32"),
        (ir.Const(3.0, ir.f16), "3.0:f16"),
        (ir.Const(True, ir.index), "True:index"),
        (ir.Load(T, A, ir.TRUE, -0.0), "load(t, a, fill=-0.0)"),
        (ir.Load(T, A, ir.TRUE, 1 / 3), "load(t, a, fill=0.3333333333333333)"),
        (ir.Spread(A * 2, (M,)), "spread(a * 2, over=[m[0:16]])"),
        (ir.Renamed(A, (M,), (ir.Lane("n", 16, 1),)), "renamed(a, old=[m[0:16]], new=[n[0:16]])"),
        (ir.Running("sum", M * 2, M), "running_sum(m[0:16] * 2, over=m[0:16])"),
        (ir.Gather(M * 2, (M,), (A + 1,)), "gather(m[0:16] * 2, along=[m[0:16]], at=[a + 1])"),
        (ir.Call("max", (A,)), "call max(a)"),
        (ir.Call("f16", (A,)), "call f16(a)"),
        # Parentheses that only look like a pair around the whole are kept.
        (ir.Cast((A + B) * (A - B), ir.i64), "i64((a + b) * (a - b))"),
    ],
)
def test_expressions(e: ir.Expr, text: str) -> None:
    assert str(e) == text


def test_a_kernel() -> None:
    acc, x = ir.Var("acc", ir.f32), ir.Var("x", ir.f16)
    kernel = ir.Kernel(
        "scale",
        (T,),
        ir.For(
            A,
            2,
            ir.seq(
                ir.Comment("first line\nsecond line"),
                ir.Alloc(acc, (M,), ir.Const(0.0, ir.f32), "shared"),
                ir.Alloc(C),
                ir.For(
                    B,
                    3,
                    ir.seq(
                        ir.Let(x, ir.Load(T, A * 4 + B, A < 2)),
                        ir.Update(acc, acc + x),
                        ir.FuncCall(ir.dot("tf32"), (acc, x, x + 1)),
                    ),
                    stages=2,
                ),
                ir.If(A < 1, ir.Store(T, A, acc, A < 1), ir.FuncCall(ir.FENCE, ())),
                ir.If(A < 1, ir.FuncCall(ir.ATOMIC_ADD, (T, A, acc, ir.TRUE))),
            ),
            "grid",
        ),
        ("one note",),
    )
    lines = str(kernel).splitlines()
    assert lines[0] == "# one note"
    assert lines[1] == "kernel scale(t: f16):"
    assert lines[2].startswith("    # t: ") and lines[2].endswith("[n=8]")
    assert (
        "\n".join(lines[3:])
        == """\
    lanes m[0:16 axis=1]
    for a in 0..2 grid:
        # first line
        #| second line
        shared acc: f32[m:16] = 0.0
        register c: index = 0
        for b in 0..3 stages=2:
            let x = load(t, (a * 4) + b, mask=a < 2)
            acc = acc + x
            dot[precision=tf32](acc, x, x + 1)
        if a < 1:
            store(t, a, acc, mask=a < 1)
        else:
            fence()
        if a < 1:
            atomic_add(t, a, acc, True)"""
    )


def test_a_class_without_text_says_so() -> None:
    @ir.node
    class Odd(ir.Expr):
        x: ir.Expr

    with pytest.raises(TypeError, match="no text form for the node class Odd"):
        str(Odd(A))
