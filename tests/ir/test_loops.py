"""Where loops start and end: the interpreter, the passes and the emitters agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from transconv import ir
from transconv.backend_triton.emitters.triton import TlEmitter
from transconv.passes.lowering.legalization import final
from transconv.passes.scalar.hoist import hoist
from transconv.passes.scalar.index_width import narrow
from transconv.passes.scalar.simplification import simplify_kernel
from transconv.passes.scalar.unroll import unroll

I, N = ir.Var("i"), ir.Var("n")  # noqa: E741
T = ir.Tensor("t", ("n", "i"), (3, 8), ir.Layout.dense(ir.f32, (3, 8)))


def counting(**bounds: object) -> ir.Kernel:
    """Every iteration of the inner loop writes its own number plus one."""
    inner = replace(ir.For(I, 8, ir.store(T, N * 8 + I * 1, ir.Cast(I * 1 + 1, ir.f32))), **bounds)
    return ir.Kernel("count", (T,), ir.For(N, 3, inner, "grid"))


def written(kernel: ir.Kernel) -> list[list[int]]:
    ir.verify(kernel)
    data = np.zeros(24, np.float32)
    ir.run(kernel, {"t": data})
    return [[int(x) - 1 for x in row if x] for row in data.reshape(3, 8)]


BOUNDS = {
    "start": (dict(start=ir.Const(2)), [range(2, 8)] * 3),
    "start unrolled": (dict(start=ir.Const(2), kind="unroll"), [range(2, 8)] * 3),
    "start jammed": (dict(start=ir.Const(6), kind="jam"), [range(6, 8)] * 3),
    "one iteration": (dict(start=ir.Const(7)), [range(7, 8)] * 3),
    "none": (dict(start=ir.Const(8)), [range(0)] * 3),
    "a start of the program's": (dict(start=N * 3), [range(0, 8), range(3, 8), range(6, 8)]),
    "and unrolled": (dict(start=N * 3, kind="unroll"), [range(0, 8), range(3, 8), range(6, 8)]),
    "until": (dict(until=N * 3 + 1), [range(1), range(4), range(7)]),
    "until, one iteration at most": (dict(stop=1, until=ir.minimum(N, 1)), [range(0), range(1), range(1)]),
    "both": (dict(start=N, until=N * 3 + 1), [range(1), range(1, 4), range(2, 7)]),
    "dealt": (dict(start=N, kind="dealt", programs=3), [range(0, 8, 3), range(1, 8, 3), range(2, 8, 3)]),
}
PASSES: tuple[Callable[[ir.Kernel], ir.Kernel], ...] = (unroll, simplify_kernel, hoist, narrow, final)


@pytest.mark.parametrize("name", BOUNDS)
def test_every_pass_keeps_the_bounds(name: str) -> None:
    bounds, expected = BOUNDS[name]
    kernel = counting(**bounds)
    assert written(kernel) == [list(r) for r in expected]
    for step in PASSES:
        kernel = step(kernel)
        assert written(kernel) == [list(r) for r in expected], step.__name__


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (dict(), "tl.range(0, 8)"),
        (dict(start=ir.Const(2)), "tl.range(2, 8)"),
        (dict(start=N * 3, stages=2), "tl.range(n * 3, 8, num_stages=2)"),
        (dict(until=N + 1), "tl.range(0, n + 1)"),
        (dict(start=N, until=N + 4), "tl.range(n, n + 4)"),
        (dict(start=N, kind="dealt", programs=3), "tl.range(n, 8, 3)"),
    ],
)
def test_the_triton_text_says_the_same(bounds: dict[str, object], text: str) -> None:
    lines = TlEmitter().lines(counting(**bounds).body)
    assert f"for i in {text}:" in lines


@pytest.mark.parametrize("kind", ["grid", "parallel", "tile"])
def test_independent_loops_start_at_0(kind: str) -> None:
    loop = ir.For(I, 8, ir.store(T, I, ir.Const(1.0, ir.f32)), kind, start=ir.Const(2))
    with pytest.raises(ir.VerifyError, match=f"a {kind} loop starts at 0, not at `2`"):
        ir.verify(ir.Kernel("k", (T,), loop))


def test_a_loop_of_many_iterations_at_once_ends_at_one_place() -> None:
    inner = ir.For(I, 8, ir.store(T, N * 8 + I, ir.Const(1.0, ir.f32)), start=N, kind="tile")
    with pytest.raises(ir.InterpError, match="should start at one place, not at 0..2"):
        written_anyway = ir.Kernel("k", (T,), ir.For(N, 3, inner, "tile"))
        ir.run(written_anyway, {"t": np.zeros(24, np.float32)})
