"""Well-formedness: a well-formed kernel passes, and each rule has kernels that break it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transconv import ir
from transconv.ir import f32, verify
from transconv.ir.rules.forms import Site, statements
from transconv.ir.rules.verifier import OF_STATEMENTS, RULES, Rule

I, J, K = (ir.Var(n) for n in ("i", "j", "k"))  # noqa: E741
ACC, X = ir.Var("acc", f32), ir.Var("x", f32)
HELD = ir.Const(3, ir.i32)  # as a tensor could hold it
ZERO = ir.Const(0.0, f32)
M, KK, N = ir.Lane("m", 16, 1), ir.Lane("kk", 8, 2), ir.Lane("n", 4, 3)
ROW, COLUMN = ir.Lane("row", 16, 1), ir.Lane("column", 8, 2, "N")
T = ir.Tensor("t", ("d",), (64,), ir.Layout.dense(f32, (64,)))
OTHER = ir.Tensor("other", ("d",), (64,), ir.Layout.dense(f32, (64,)))
DOT = ir.dot("ieee")


def load(offset: ir.Expr, mask: ir.Expr = ir.TRUE) -> ir.Expr:
    return ir.Load(T, offset, mask)


def kernel(*body: ir.Stmt, name: str = "k", params: tuple[ir.Tensor, ...] = (T,)) -> ir.Kernel:
    return ir.Kernel(name, params, ir.seq(*body))


SOUND = kernel(
    ir.Let(K, ir.ONE),
    ir.For(
        I,
        4,
        ir.seq(
            ir.Let(J, I * 16 + M),
            ir.Alloc(ACC, (M,), ZERO),
            ir.For(
                ir.Var("s"),
                0,
                ir.seq(
                    ir.Let(X, ir.Cast(ir.select(J < 3, load(J, J < 60), 0.0), f32)),
                    ir.Update(ACC, ACC + X * 2.0),
                ),
                stages=2,
            ),
            ir.For(ir.Var("s"), 2, ir.seq(ir.Let(X, ZERO), ir.Update(ACC, ACC - X))),
            ir.If(I < 3, ir.Let(X, ZERO), ir.Let(X, ZERO)),
            ir.FuncCall(ir.ASSUME, (I < 4,)),
            ir.Store(T, J, ACC, J < 64),
        ),
        "grid",
    ),
)

BREACHES = {
    "var-bound-before-use": [
        kernel(ir.store(T, I, ZERO)),
        kernel(ir.For(I, 4, ir.Let(J, I)), ir.store(T, J, ZERO)),
        kernel(ir.If(ir.TRUE, ir.Let(J, ir.ONE)), ir.store(T, J, ZERO)),
        kernel(ir.For(I, 4, ir.store(T, ir.Var("i", ir.index64), ZERO))),
        kernel(ir.Let(I, I + 1)),
    ],
    "var-bound-once": [
        kernel(ir.Let(I, ir.ONE), ir.Let(I, ir.ZERO)),
        kernel(ir.For(I, 4, ir.For(I, 4, ir.Comment("x")))),
        kernel(ir.Let(I, ir.ONE), ir.If(ir.TRUE, ir.Let(ir.Var("i", ir.i32), ir.ONE))),
    ],
    "update-only-allocated": [
        kernel(ir.Update(ACC, ZERO)),
        kernel(ir.Let(ACC, ZERO), ir.Update(ACC, ZERO)),
        kernel(ir.Let(ACC, M * N * ZERO), ir.FuncCall(DOT, (ACC, M * KK, KK * N))),
        kernel(ir.For(I, 2, ir.Alloc(ACC, (), ZERO)), ir.Update(ACC, ZERO)),
    ],
    "constant-is-of-its-type": [
        kernel(ir.store(T, 0, ir.Const(300, ir.u8))),
        kernel(ir.store(T, 0, ir.Const(-1, ir.u8))),
        kernel(ir.store(T, 0, ir.Const(0.1, ir.f16))),
        kernel(ir.store(T, 0, ir.Const(1e39, ir.f32))),
        kernel(ir.store(T, 0, ir.Const(float("inf"), ir.f8e4m3))),
        kernel(ir.store(T, 0, ir.Const(2.5, ir.i32))),
        kernel(ir.Let(X, ir.Load(T, ir.ZERO, ir.TRUE, 1e300))),
    ],
    "mask-is-boolean": [
        kernel(ir.store(T, 0, ZERO, ir.ONE)),
        kernel(ir.Let(X, load(ir.ZERO, ir.ONE))),
        kernel(ir.If(ir.ONE, ir.Comment("x"))),
        kernel(ir.Let(I, ir.Select(ir.ONE, ir.ONE, ir.ZERO))),
        kernel(ir.FuncCall(ir.ATOMIC_ADD, (T, ir.ZERO, ZERO, ir.ONE))),
        kernel(ir.FuncCall(ir.ASSUME, (ir.ONE,))),
    ],
    "truth-is-apart": [
        kernel(ir.Let(ir.Var("x", ir.boolean), ir.Not(ir.ONE))),
        kernel(ir.Let(X, ir.select(ir.Not(M % 2), ZERO, 1.0))),
        kernel(ir.Let(ir.Var("x", ir.i32), ir.And(HELD, ir.TRUE))),
        kernel(ir.Let(ir.Var("x"), ir.Or(ir.TRUE, ir.ONE))),
        kernel(ir.Let(ir.Var("x"), ir.Xor(M, M < 2))),
    ],
    "index-is-apart": [
        kernel(ir.Let(ir.Var("x", ir.i32), ir.Add(HELD, ir.ONE))),
        kernel(ir.Let(ir.Var("x", ir.boolean), ir.Lt(ir.ONE, HELD))),
        kernel(ir.Let(ir.Var("x", ir.i32), ir.Select(ir.TRUE, ir.ONE, HELD))),
        kernel(ir.store(T, ir.Cast(ir.Mul(HELD, ir.ONE), ir.index), ZERO)),
    ],
    "stored-is-no-index": [kernel(ir.store(T, 0, ir.ONE)), kernel(ir.store(T, M, M))],
    "offset-is-index": [
        kernel(ir.store(T, HELD, ZERO)),
        kernel(ir.Store(T, ZERO, ZERO)),
        kernel(ir.Let(X, load(ir.TRUE))),
        kernel(ir.FuncCall(ir.ATOMIC_ADD, (T, ZERO, ZERO, ir.TRUE))),
    ],
    "tensor-is-parameter": [
        kernel(ir.store(OTHER, 0, ZERO)),
        kernel(ir.Let(X, ir.Load(OTHER, ir.ZERO, ir.TRUE))),
        kernel(ir.store(ir.Tensor("t", ("d",), (32,), T.layout), 0, ZERO)),
        kernel(ir.FuncCall(ir.ATOMIC_ADD, (OTHER, ir.ZERO, ZERO, ir.TRUE))),
    ],
    "known-function": [
        kernel(ir.FuncCall(ir.Func("sneeze"), ())),
        kernel(ir.FuncCall(ir.FENCE, (ir.ONE,))),
        kernel(ir.Alloc(ACC), ir.FuncCall(DOT, (ACC, ZERO))),
        kernel(ir.FuncCall(ir.ATOMIC_ADD, (ZERO, ir.ZERO, ZERO, ir.TRUE))),
        kernel(ir.FuncCall(DOT, (T, ZERO, ZERO))),
        kernel(ir.Let(X, ir.Call("sneeze", (ZERO,)))),
        kernel(ir.Let(X, ir.Call("fma", (ZERO, ZERO)))),
        kernel(ir.Let(X, ir.Reduce("median", M * ZERO, M))),
        kernel(ir.Let(X, ir.Running("median", M * ZERO, M))),
    ],
    "renamed-is-one-to-one": [
        kernel(ir.Let(X, ir.Renamed(M * ZERO, (M,), (N,)))),
        kernel(ir.Let(X, ir.Renamed(M * ZERO, (M, M), (M, ROW)))),
        kernel(ir.Let(X, ir.Renamed(KK * COLUMN * ZERO, (KK,), (COLUMN,)))),
    ],
    "places-are-along-lanes": [
        kernel(ir.Let(X, ir.Gather(M * ZERO, (M,), (N, N)))),
        kernel(ir.Let(X, ir.Gather(M * N * ZERO, (M, M), (ROW, ROW)))),
        kernel(ir.Let(X, ir.Gather(M * ZERO, (M,), (N * ZERO,)))),
    ],
    "lanes-agree": [
        kernel(ir.store(T, 0, M * ZERO)),
        kernel(ir.store(T, M, ZERO, M * 4 + N < 9)),
        kernel(ir.Let(X, M * ZERO), ir.store(T, N, X)),
        kernel(ir.Alloc(ACC, (M,), N * ZERO)),
        kernel(ir.Alloc(ACC, (M,), ZERO), ir.Update(ACC, N * ZERO)),
        kernel(ir.FuncCall(ir.ATOMIC_ADD, (T, M, N * ZERO, ir.TRUE))),
        kernel(ir.Alloc(ACC, (M, N), ZERO), ir.FuncCall(DOT, (ACC, M * ZERO, N * ZERO))),
        kernel(ir.Alloc(ACC, (N,), ZERO), ir.FuncCall(DOT, (ACC, M * KK * ZERO, KK * N * ZERO))),
        kernel(ir.Alloc(ACC, (M, N), ZERO), ir.FuncCall(DOT, (ACC, M * COLUMN * ZERO, COLUMN * N * ZERO))),
    ],
    "lane-is-power-of-two": [
        kernel(ir.store(T, ir.Lane("m", 12, 0), ZERO)),
        kernel(ir.Alloc(ACC, (ir.Lane("m", 0, 0),), ZERO)),
    ],
    "origin-is-read": [kernel(ir.Let(X, load(ir.ZERO), "c")), kernel(ir.Let(X, ZERO, "a"))],
    "side-is-known": [
        kernel(ir.store(T, ir.Lane("m", 16, 1, "m"), ZERO)),
        kernel(ir.Alloc(ACC, (ir.Lane("m", 16, 1, "rows"),), ZERO)),
        kernel(ir.For(I, 4, ir.Comment("x"), side="M")),
        kernel(ir.For(I, 4, ir.Comment("x"), "tile", side="m")),
    ],
    "loop-is-simple": [
        kernel(ir.For(I, -1, ir.Comment("x"))),
        kernel(ir.For(I, True, ir.Comment("x"))),
        kernel(ir.For(I, 4, ir.Comment("x"), "spiral")),
        kernel(ir.For(X, 4, ir.Comment("x"))),
        kernel(ir.For(I, 4, ir.Comment("x"), stages=-1)),
    ],
    "one-grid": [
        kernel(ir.For(I, 4, ir.For(J, 4, ir.Comment("x"), "grid"))),
        kernel(ir.For(I, 4, ir.For(J, 4, ir.Comment("x"), "grid"), "grid")),
        kernel(ir.If(ir.TRUE, ir.For(I, 4, ir.Comment("x"), "grid"))),
        kernel(ir.For(I, 4, ir.Comment("x"), "grid"), ir.For(J, 4, ir.Comment("x"), "grid")),
    ],
    "names-are-identifiers": [
        kernel(name="2d"),
        kernel(name="a" * 161),
        kernel(ir.Let(ir.Var("in"), ir.ONE)),
        kernel(ir.For(ir.Var("i.j"), 4, ir.Comment("x"))),
        kernel(ir.Alloc(ir.Var(""))),
        kernel(ir.store(T, ir.Lane("m n", 4, 0), ZERO)),
        kernel(ir.Let(ir.Var("x\n"), ir.ONE)),
        kernel(params=(ir.Tensor("a-b", ("d",), (64,), T.layout),)),
        kernel(ir.Let(ir.Var("größe"), ir.ONE)),
    ],
    "workspace-is-of-a-tensor": [
        kernel(params=(replace(T, layout=replace(T.layout, dtype=ir.tf32)),)),
        kernel(params=(replace(T, copy_of="a", parts_of="b"),)),
    ],
    "ring-is-reserved": [
        kernel(ir.FuncCall(ir.WAIT, (ir.Barrier("landed", 2), ir.ZERO, ir.ZERO))),
        kernel(
            ir.Let(
                ir.Var("x", ir.f32),
                ir.SlotTile(ir.SmemRing("ring", ir.f32, 2, (16,)), ir.ZERO, ir.ZERO, (ir.ZERO,)),
            )
        ),
    ],
    "piece-fits-its-box": [
        kernel(
            ir.Shared(ir.SmemRing("ring", ir.f32, 2, (16, 16))),
            ir.Let(
                ir.Var("x", ir.f32),
                ir.SlotTile(ir.SmemRing("ring", ir.f32, 2, (16, 16)), ir.ZERO, ir.ZERO, (ir.ZERO,)),
            ),
        )
    ],
    "expression-holds-no-statement": [
        kernel(ir.Let(I, ir.Add(ir.ONE, ir.Comment("x")))),  # type: ignore[arg-type]
        kernel(ir.store(T, 0, ir.Call("exp", (ir.Let(I, ir.ONE),)))),  # type: ignore[arg-type]
    ],
}


def test_a_sound_kernel_passes() -> None:
    verify(SOUND)


@pytest.mark.parametrize(("rule", "broken"), [(r, k) for r, ks in BREACHES.items() for k in ks])
def test_breaking_one_rule(rule: str, broken: ir.Kernel) -> None:
    with pytest.raises(ir.VerifyError) as e:
        verify(broken)
    assert e.value.rules == {rule}
    assert f"  {rule}: `" in str(e.value)


def test_every_rule_is_broken_above() -> None:
    names = {rule.__name__.replace("_", "-") for rule in RULES}
    assert names | {"expression-holds-no-statement"} == set(BREACHES)


def test_all_breaches_are_listed_with_statement_and_reason() -> None:
    bad = kernel(ir.For(I, 4, ir.seq(ir.Let(J, K + 1), ir.store(OTHER, J, ZERO, ir.ONE))))
    with pytest.raises(ir.VerifyError) as e:
        verify(bad)
    assert (
        str(e.value)
        == """\
3 broken rules of the IR
  var-bound-before-use: `let j = k + 1`: k is not bound here
  mask-is-boolean: `store(other, j, 0.0, mask=1)`: the condition `1` is index
  tensor-is-parameter: `store(other, j, 0.0, mask=1)`: the store reaches other, which is no \
parameter of the kernel"""
    )


def test_a_tree_that_is_no_kernel_has_no_parameters_to_check() -> None:
    verify(ir.For(I, 4, ir.store(OTHER, I, ZERO)))
    with pytest.raises(ir.VerifyError, match="var-bound-before-use"):
        verify(ir.store(OTHER, I, ZERO))


def test_shared_expressions_are_looked_at_once() -> None:
    e: ir.Expr = ir.ONE
    for _ in range(60):
        e = e + e
    verify(kernel(ir.Let(I, e)))


GONE = ir.Var("gone")
RING, LANDED = ir.SmemRing("ring", f32, 2, (16,)), ir.Barrier("landed", 2)
PIECE, STRAY = (ir.SlotTile(RING, slot, ir.ZERO, (M,)) for slot in (ir.ZERO, GONE))


@pytest.mark.parametrize(
    "use",
    [
        ir.Let(X, load(GONE)),
        ir.Update(ACC, load(GONE)),
        ir.Alloc(ACC, (), load(GONE)),
        ir.If(I < GONE, ir.Comment("x"), ir.Comment("x")),
        ir.Store(T, GONE, ZERO, ir.TRUE),
        ir.Store(T, I, load(GONE), ir.TRUE),
        ir.Store(T, I, ZERO, I < GONE),
        ir.For(J, 4, ir.Comment("x"), start=GONE),
        ir.For(J, 4, ir.Comment("x"), until=GONE),
        ir.Fetch(T, (GONE,), PIECE, LANDED, I),
        ir.Fetch(T, (I,), STRAY, LANDED, I),
        ir.Fetch(T, (I,), PIECE, LANDED, GONE),
        ir.Put(STRAY, ZERO),
        ir.Put(PIECE, load(GONE)),
        ir.Send(T, (GONE,), PIECE),
        ir.Send(T, (I,), STRAY),
        ir.FuncCall(ir.ASSUME, (I < GONE,)),
    ],
    ids=str,
)
def test_a_variable_is_missed_wherever_a_statement_reads_it(use: ir.Stmt) -> None:
    with pytest.raises(ir.VerifyError, match="gone is not bound here"):
        verify(ir.For(I, 4, ir.seq(ir.Shared(RING), ir.Shared(LANDED), ir.Alloc(ACC, (), ZERO), use)))


class Blind(Site):
    """A site that shows its statement and nothing else."""

    def __getattribute__(self, name: str) -> object:
        assert name not in ("params", "scope", "lanes", "around"), name
        return super().__getattribute__(name)


@pytest.mark.parametrize("rule", sorted(OF_STATEMENTS, key=lambda r: r.__name__), ids=lambda r: r.__name__)
def test_a_rule_of_statements_looks_at_nothing_else(rule: Rule) -> None:
    broken = BREACHES[rule.__name__.replace("_", "-")] if rule in RULES else []
    for root in (SOUND, *broken):
        for s in statements(root):
            list(rule(Blind(s, None, {}, {}, ())))


def test_a_statement_that_was_right_elsewhere_is_asked_again_where_it_is_used() -> None:
    let = ir.Let(J, I + M)
    verify(ir.For(I, 4, let))
    with pytest.raises(ir.VerifyError, match="i is not bound here"):
        verify(let)
    with pytest.raises(ir.VerifyError, match="speaks of lanes"):
        verify(ir.For(I, 4, let), "tiles")
