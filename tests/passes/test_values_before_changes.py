"""Passes keep a value from before a change apart from the one behind it, in kernels that assign freely."""

from __future__ import annotations

import numpy as np

from transconv import ir
from transconv.ir import f32
from transconv.passes.scalar.cse import cse, optimise_lets
from transconv.passes.scalar.hoist import hoist

ACC, OLD, A, B = (ir.Var(n, f32) for n in ("acc", "old", "a", "b"))
P, K = ir.Var("p"), ir.Var("k")
T = ir.Tensor("t", ("d",), (64,), ir.Layout.dense(f32, (64,)))
TWO, ONE = ir.Const(2.0, f32), ir.Const(1.0, f32)
M, N, L = ir.Lane("m", 2, 1), ir.Lane("n", 2, 3), ir.Lane("l", 2, 2)


def kernel(*body: ir.Stmt) -> ir.Kernel:
    made = ir.Kernel("changing", (T,), ir.For(P, 1, ir.seq(*body), "grid"))
    ir.verify(made, "lanes")
    return made


def values(made: ir.Kernel) -> list[float]:
    memory = {"t": np.zeros(64, np.float32)}
    ir.run(made, memory)
    return list(memory["t"][:4])


def test_a_name_of_a_value_that_changes_stays() -> None:
    made = kernel(
        ir.Alloc(ACC, (), ONE),
        ir.Let(OLD, ACC),
        ir.Update(ACC, ACC + TWO),
        ir.store(T, 0, OLD),
        ir.store(T, 1, ACC),
    )
    assert values(optimise_lets(made)) == values(made) == [1, 3, 0, 0]


def test_a_name_of_a_value_that_does_not_change_goes() -> None:
    made = optimise_lets(
        kernel(ir.Alloc(ACC, (), ONE), ir.Update(ACC, ACC + TWO), ir.Let(OLD, ACC), ir.store(T, 0, OLD))
    )
    assert not ir.find(made, ir.Let)


def test_equal_values_around_a_change_are_not_merged() -> None:
    made = kernel(
        ir.Alloc(ACC, (), ONE),
        ir.Let(A, ACC * TWO),
        ir.Update(ACC, ACC + TWO),
        ir.Let(B, ACC * TWO),
        ir.store(T, 0, A),
        ir.store(T, 1, B),
    )
    assert values(cse(made)) == values(made) == [2, 6, 0, 0]


def test_values_of_the_iteration_before_are_not_merged() -> None:
    made = kernel(
        ir.Alloc(ACC, (), ONE),
        ir.Let(A, ACC * TWO),
        ir.store(T, 3, A),
        ir.For(K, 2, ir.seq(ir.Let(B, ACC * TWO), ir.store(T, K, B), ir.Update(ACC, ACC + TWO))),
    )
    assert values(cse(made)) == values(made) == [2, 6, 0, 2]


def test_what_mentions_a_sum_of_products_stays_in_its_loop() -> None:
    x, y = ir.Var("x", f32), ir.Var("y", f32)
    made = kernel(
        ir.Alloc(ACC, (M, N), ir.Const(0.0, f32)),
        ir.Let(x, ir.Spread(ONE, (M, L))),
        ir.Let(y, ir.Spread(ONE, (L, N))),
        ir.For(
            K,
            2,
            ir.seq(
                ir.Let(A, ir.Reduce("sum", ir.Reduce("sum", ACC, M), N)),
                ir.store(T, K, A),
                ir.FuncCall(ir.dot("ieee"), (ACC, x, y)),
            ),
        ),
    )
    assert values(hoist(made)) == values(made) == [0, 8, 0, 0]


def test_lanes_change_places() -> None:
    row, col = ir.Lane("row", 4, 1), ir.Lane("col", 4, 2)
    x = ir.Var("x", f32)
    made = kernel(
        ir.Let(x, ir.Cast(row * 10 + col, f32)),
        ir.store(T, row * 4 + col, ir.Renamed(x, (row, col), (col, row))),
    )
    memory = {"t": np.zeros(64, np.float32)}
    ir.run(made, memory)
    wanted = 10.0 * np.arange(4) + np.arange(4)[:, None]
    assert memory["t"][:16].reshape(4, 4).tolist() == wanted.tolist()
    assert ir.Kernel.parse(str(made)) is made
