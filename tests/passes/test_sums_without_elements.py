"""Sums of elements whose mask is always false are removed; other sums stay."""

from __future__ import annotations

import pytest

from tests.stages import SM90, launches_of, wrong_stages
from transconv import ir
from transconv.conv import Epilogue
from transconv.conv.compiler import plan_steps
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir import FALSE, Var, f32
from transconv.passes.scalar.simplification import drop_dead_sums
from transconv.schedule.schedule import Schedule

# Stride phases whose taps lie beyond the filter: kw is never 0.
DEAD = [
    (
        "g4mb2ic12id8ih8iw2oc12od2oh4ow2kd7kh2kw1sd3sh2sw3pd0ph0pw1 dt=f16",
        "g.rd.rw:2 rh.ic:16 td.oc:8 | fma | order=th.td.oc.tw programs=2 late=1 stages=1",
    ),
    (
        "g2mb2ic4id6ih4iw2oc2od2oh2ow2kd7kh4kw2sd2sh3sw4pd3ph1pw2",
        "g.rd.rh:8 rw:1 mb:1 qd.qh:8 th.oc:4 | fma | split_k=3 programs=5 regs=rw stages=4 warps=1",
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "schedule"), DEAD, ids=[text for text, _ in DEAD])
@pytest.mark.parametrize("off", ["", "lets", "unroll"])
def test_nothing_is_read(text: str, schedule: str, off: str) -> None:
    p = ConvProblem.parse(text)
    steps = plan_steps(p, Prop.BWD_D, SM90, Schedule.parse(schedule), Epilogue())
    launches = launches_of(steps, dict.fromkeys(off.split(), False))
    assert wrong_stages(p, Prop.BWD_D, launches) == []
    kernel = launches[0][-1][1]
    assert not ir.find(kernel, ir.Load) and [x.kind for x in ir.find(kernel, ir.For)] == ["grid"]
    assert any("kw < " in note and "is never true: rw + " in note for note in kernel.notes)


src = ir.Tensor("src", ("n",), (4,), ir.Layout.dense(f32, (4,)))
acc, other, a, b, c = (Var(name, f32) for name in ("acc", "other", "a", "b", "c"))


def summed(*updates: ir.Stmt, mask: ir.Expr = FALSE) -> ir.Kernel:
    """A loop that loads a, c under a mask, and b, and adds some of them."""
    step = Var("step")
    lets = [ir.Let(v, ir.Load(src, step, mask if v is not b else ir.TRUE)) for v in (a, b, c)]
    loop = ir.For(step, 4, ir.seq(*lets, *updates))
    sums = [ir.Alloc(v, (), ir.Const(0.0, f32)) for v in (acc, other)]
    return ir.Kernel("k", (src,), ir.seq(*sums, loop, ir.store(src, 0, acc + other)))


def added(to: Var, product: ir.Expr) -> ir.Stmt:
    return ir.Update(to, to + product)


def dot(to: Var, left: Var, right: Var) -> ir.Stmt:
    return ir.FuncCall(ir.dot("ieee"), (to, ir.Spread(left, ()), ir.Spread(right, ())))


@pytest.mark.parametrize(
    "update",
    [
        added(acc, a),
        added(acc, a * b),
        added(acc, ir.Cast(b, f32) * ir.Cast(a, f32)),
        added(acc, ir.Reduce("sum", a * b, ir.Lane("k", 4, 2))),
        dot(acc, a, b),
        dot(acc, b, a),
    ],
    ids=str,
)
def test_a_product_with_nothing_is_nothing(update: ir.Stmt) -> None:
    made = drop_dead_sums(summed(update))
    assert not ir.find(made, ir.For) and len(ir.find(made, ir.Store)) == 1
    beside = summed(update, added(other, b))
    assert drop_dead_sums(beside) is not beside
    assert ir.find(drop_dead_sums(beside), ir.Update) == [added(other, b)]
    assert [s.var for s in ir.find(drop_dead_sums(beside), ir.Let)] == [b]


@pytest.mark.parametrize(
    "update",
    [
        added(acc, b),
        added(acc, a + b),
        dot(acc, b, b),
        ir.Update(acc, a * b),
        added(acc, ir.Reduce("max", a, ir.Lane("k", 4, 2))),
    ],
    ids=str,
)
def test_everything_else_stays(update: ir.Stmt) -> None:
    made = drop_dead_sums(summed(update))
    assert update in ir.find(made, ir.Update) + ir.find(made, ir.FuncCall) and ir.find(made, ir.For)
    read = summed(added(acc, a * b), mask=Var("m", ir.boolean))
    assert drop_dead_sums(read) is read
