"""Indices and loads that mean the same get one name, as far as that name is in sight."""

from __future__ import annotations

import numpy as np
import pytest

from transconv import ir
from transconv.ir import Var, f32
from transconv.ir.interp.kernel import run
from transconv.ir.rules.verifier import verify
from transconv.passes.scalar.cse import reuse

src, dst = (ir.Tensor(name, ("n",), (16,), ir.Layout.dense(f32, (16,))) for name in ("src", "dst"))
first, second, program, i, j, k = map(Var, ("first", "second", "program", "i", "j", "k"))
x = Var("x", f32)


def copied(step: Var, at: ir.Expr, to: int) -> ir.Stmt:
    """A loop that names where it reads, and stores four elements behind ``to``."""
    read = (ir.Let(i, at), ir.Let(x, ir.Load(src, i, ir.TRUE)))
    return ir.For(step, 4, ir.seq(*read, ir.store(dst, step + to, x)))


@pytest.mark.parametrize("at", [ir.as_expr(5) + 2, j + 1], ids=["a number", "another name"])
def test_loops_beside_one_another_share_names_and_not_what_they_mean(at: ir.Expr) -> None:
    """``i`` of the first loop is 7, or ``k``; ``i`` of the second is another."""
    loops = (copied(first, at, 0), copied(second, second * 2, 4))
    body = ir.For(program, 1, ir.seq(ir.Let(j, program + 3), ir.Let(k, j + 1), *loops))
    kernel = ir.Kernel("k", (src, dst), body)
    verify(kernel)
    made = reuse(kernel)
    verify(made)
    found = [
        run(kernel, {"src": np.arange(16, dtype=np.float32), "dst": np.zeros(16, np.float32)}).buffers[
            "dst"
        ]
        for kernel in (kernel, made)
    ]
    assert made is not kernel
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("first", "second", "loads", "selects"),
    [((1,), (2, 1), 1, 1), ((1,), (1, 0), 1, 0), ((2,), (1,), 2, 0)],
    ids=["stronger", "equal", "weaker"],
)
def test_an_element_is_loaded_once_under_the_weakest_mask(
    first: tuple[int, ...], second: tuple[int, ...], loads: int, selects: int
) -> None:
    """And selected by what a later mask says beyond it. ``first``: how far a row must reach behind it."""
    n, y, z = Var("N"), Var("y", f32), Var("z", f32)
    one, two = (ir.Load(src, i, ir.all_of([i + far < n for far in mask])) for mask in (first, second))
    body = ir.For(
        program,
        16,
        ir.seq(
            ir.Let(i, program + 0), ir.Let(y, one), ir.Let(z, two), ir.store(dst, program, y * 100 + z)
        ),
        "grid",
    )
    kernel = ir.Kernel("k", (src, dst), body, sizes=ir.Sizes((ir.Size("N", 9, 1, 16),)))
    made = reuse(kernel)
    assert (len(ir.find(made, ir.Load)), len(ir.find(made, ir.Select))) == (loads, selects)
    for size in (1, 2, 9):
        found = [
            run(
                k.at({"N": size}),
                {"src": np.arange(1, 17, dtype=np.float32), "dst": np.zeros(16, np.float32)},
            ).buffers["dst"]
            for k in (kernel, made)
        ]
        np.testing.assert_array_equal(*found)
