"""Walking and rewriting: what changes is rebuilt, and what does not is the same object."""

from __future__ import annotations

from typing import Any

import pytest

from transconv import ir

A, B, ROW, COL = (ir.Var(n) for n in ("a", "b", "row", "col"))
T = ir.Tensor("t", ("n",), (16,), ir.Layout.dense(ir.f32, (16,)))
ACC = ir.Var("acc", ir.f32)
NEST = ir.For(
    ROW,
    4,
    ir.seq(
        ir.Alloc(ACC, (), ir.Const(0.0, ir.f32)),
        ir.For(COL, 4, ir.Update(ACC, ACC + ir.Load(T, ROW * 4 + COL, ir.TRUE))),
        ir.If(ROW < 3, ir.Store(T, ROW, ACC), ir.Comment("the last is left")),
    ),
)
KERNEL = ir.Kernel("rows", (T,), NEST)


class LoopCounter(ir.Visitor):
    def __init__(self, nested: bool) -> None:
        self.loops = 0
        self.nested = nested

    def visit_For(self, loop: ir.For) -> None:
        self.loops += 1
        if self.nested:
            self.generic(loop)


def test_loop_counter() -> None:
    outer, inner = LoopCounter(nested=False), LoopCounter(nested=True)
    outer.visit(KERNEL)
    inner.visit(KERNEL)
    assert (outer.loops, inner.loops) == (1, 2)


def test_walk_sees_parents_first_and_repeats() -> None:
    e = (A + B) * A
    assert list(ir.walk(e)) == [e, A + B, A, B, A]
    assert ir.find(e, ir.Var) == [A, B]
    assert ir.free_vars(e) == {A, B}
    assert ir.bound_vars(KERNEL) == [ROW, ACC, COL]


def test_a_mutator_that_changes_nothing_returns_the_node() -> None:
    nested = ir.Seq((ir.Seq((ir.Let(A, ir.ONE), ir.Comment("x"))), ir.Seq((ir.Comment("y"),))))
    for root in (KERNEL, NEST, A + B, nested, ir.Seq(())):
        assert ir.Mutator().mutate(root) is root
        assert ir.ExprMutator().mutate(root) is root
        assert ir.substitute(root, {ir.Var("absent"): A}) is root
        assert ir.rewrite(root, lambda e: e) is root


def test_only_the_path_to_a_change_is_rebuilt() -> None:
    branch = NEST.body.stmts[2]  # type: ignore[attr-defined]
    made = ir.substitute(NEST, {COL: B})
    assert made is not NEST
    assert made.body.stmts[2] is branch  # type: ignore[attr-defined]
    assert made.body.stmts[1].var is B  # type: ignore[attr-defined]


def test_none_removes_and_a_sequence_is_spliced() -> None:
    class Edit(ir.Mutator):
        def mutate_Comment(self, s: ir.Comment) -> ir.Stmt | None:
            if s.text == "twice":
                return ir.seq(ir.Comment("one"), ir.Comment("two"))
            return None

    body = ir.seq(ir.Comment("gone"), ir.Let(A, ir.ONE), ir.Comment("twice"))
    made = Edit().mutate(body)
    assert made is ir.seq(ir.Let(A, ir.ONE), ir.Comment("one"), ir.Comment("two"))
    lone = ir.For(ROW, 2, ir.Comment("gone"))
    assert Edit().mutate(lone) is ir.For(ROW, 2, ir.Seq(()))


def test_rewrite_goes_children_first() -> None:
    def fold(e: ir.Expr) -> ir.Expr:
        match e:
            case ir.Add(ir.Const(a), ir.Const(b)):
                return ir.Const(a + b)
        return e

    one = ir.ONE
    assert ir.rewrite(A * ((one + one) + (one + one)), fold) is A * 4


def test_substitution_does_not_look_into_what_it_put() -> None:
    assert ir.substitute(A + B, {A: B, B: A}) is B + A
    assert ir.substitute(A * 2, {A: A + 1}) is (A + 1) * 2
    assert ir.substitute(A + B, {A + B: ROW}) is ROW


def test_shared_expressions_are_rewritten_once() -> None:
    calls = 0

    class Count(ir.ExprMutator):
        def mutate_Var(self, e: ir.Var) -> Any:
            nonlocal calls
            calls += 1
            return e

    e: ir.Expr = A
    for _ in range(40):
        e = e + e
    assert Count().mutate(e) is e
    assert calls == 1


def test_seq_is_flat() -> None:
    c = [ir.Comment(x) for x in "abc"]
    assert ir.seq(c[0], None, ir.seq(c[1], c[2])) is ir.Seq(tuple(c))
    assert ir.seq(c[0]) is c[0]
    assert ir.statements(c[0]) == (c[0],)
    assert ir.statements(ir.Seq(tuple(c))) == tuple(c)


@pytest.mark.parametrize("kind", [ir.Var, ir.Load, ir.Update])
def test_find_agrees_with_walk(kind: type[ir.Node]) -> None:
    assert set(ir.find(KERNEL, kind)) == {n for n in ir.walk(KERNEL) if isinstance(n, kind)}
