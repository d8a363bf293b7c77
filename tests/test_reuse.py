"""Indices and loads that mean the same get one name, as far as that name is in sight."""

from __future__ import annotations

import numpy as np
import pytest

from transconv import ir
from transconv.ir import Var, f32
from transconv.ir.interp.kernel import run
from transconv.ir.verify import verify
from transconv.passes.reuse import reuse

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
    found = [run(kernel, {"src": np.arange(16, dtype=np.float32), "dst": np.zeros(16, np.float32)})
             .buffers["dst"] for kernel in (kernel, made)]
    assert made is not kernel
    np.testing.assert_array_equal(*found)
