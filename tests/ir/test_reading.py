"""The text of IR for people: the same values, without types and parentheses that need not be read."""

from __future__ import annotations

import ast

import pytest

from tests.expressions import Draw
from transconv import ir
from transconv.ir.printer import readable

A, B, C = ir.Var("a"), ir.Var("b"), ir.Var("c")
ZERO = ir.Const(0)
T = ir.Tensor("t", ("n",), (8,), ir.Layout.dense(ir.f16, (8,)))


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (ir.Add(A, ir.Const(-3)), "a - 3"),
        (ir.Add(ir.Neg(A), B), "b - a"),
        (ir.Add(ir.Mul(ZERO, ir.Const(3)), A), "a"),
        (ir.Sub(A, ir.Mul(B, ZERO)), "a"),
        (ir.Add(ir.Add(A, ir.Const(1)), ir.Const(1)), "a + 2"),
        (ir.Sub(ZERO, A), "0 - a"),
        (ir.Mul(ir.Mod(A, ir.Const(2)), ir.Const(64)), "(a % 2)*64"),
        (ir.Mul(ir.FloorDiv(A, ir.Const(2)), ir.Const(64)), "(a // 2)*64"),
        (ir.Mod(ir.Mul(A, ir.Const(2)), ir.Const(64)), "a*2 % 64"),
        (ir.Mul(ir.Mul(A, B), C), "a*b*c"),
    ],
)
def test_expressions(e: ir.Expr, text: str) -> None:
    assert readable(e) == text


def test_a_long_mask_is_broken_between_conditions() -> None:
    mask = ir.all_of([ir.Var(f"a_long_name_{i}") < 56 for i in range(4)])
    lines = readable(ir.Let(ir.Var("x", ir.f16), ir.Load(T, A, mask))).splitlines()
    assert len(lines) == 3 and all(line.rstrip(")").endswith(("and", "< 56", ",")) for line in lines)
    assert " ".join(line.strip() for line in lines) == (
        "let x = load(t, a, mask=a_long_name_0 < 56 and a_long_name_1 < 56 and a_long_name_2 < 56"
        " and a_long_name_3 < 56)"
    )


def test_only_products_of_f32_say_how_they_are_rounded() -> None:
    def product(t: ir.DType) -> str:
        return readable(
            ir.FuncCall(ir.dot("tf32"), (ir.Var("acc", ir.f32), ir.Var("x", t), ir.Var("y", t)))
        )

    assert product(ir.bf16) == "dot(acc, x, y)"
    assert product(ir.f32) == "dot[precision=tf32](acc, x, y)"


WORDS = {"min": min, "max": max, "select": lambda cond, yes, no: yes if cond else no, "abs": abs}
VALUES: dict[str, int | float] = {"a": 3, "b": -5, "c": 2, "x": 0.75, "y": -2.5, "z": 4.0}


class Logical(ast.NodeTransformer):
    """``~`` of conditions, which are Python's own here."""

    def visit_UnaryOp(self, at: ast.UnaryOp) -> ast.UnaryOp:
        self.generic_visit(at)
        return ast.UnaryOp(ast.Not(), at.operand) if isinstance(at.op, ast.Invert) else at


def computed(text: str) -> object:
    tree = Logical().visit(ast.parse(text.replace(":f64", ""), mode="eval"))
    return eval(compile(ast.fix_missing_locations(tree), "text", "eval"), {**WORDS, **VALUES})


@pytest.mark.parametrize("kind", ["whole", "float", "truth"])
def test_drawn_expressions_mean_what_they_are(kind: str) -> None:
    """To Python, whose precedence people have in mind; numbers may have their types behind them."""
    leaves = [ir.Var(n, ir.index if n in "abc" else ir.f64) for n in VALUES]
    for seed in range(300):
        e = Draw(seed, leaves, bits=False, calls=seed % 2 == 0).of(kind, 1 + seed % 5)
        try:
            want = computed(str(e))
        except ZeroDivisionError:
            continue
        assert computed(readable(e)) == want, f"{e}\n{readable(e)}"
