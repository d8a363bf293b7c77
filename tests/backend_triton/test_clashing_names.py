"""Names in the text of a kernel: what is called the same in the IR, or as a function, is told apart."""

from __future__ import annotations

import itertools

import pytest

from transconv import ir
from transconv.backend_triton.emitters.kernel_text import USED, distinct

NAMES = ("tl", "tl_", "float", "x", "x_", "triton", "box")


@pytest.mark.every(3)
@pytest.mark.parametrize(("one", "other", "tensor"), itertools.permutations(NAMES, 3))
def test_no_two_things_have_one_name(one: str, other: str, tensor: str) -> None:
    """Two variables, a tensor, and the functions that the text calls."""
    of = ir.Tensor(tensor, ("x",), (64,), ir.Layout.dense(ir.f32, (64,)))
    a, b = ir.Var(one), ir.Var(other)
    body = ir.For(a, 2, ir.For(b, 2, ir.Store(of, a * 2 + b, ir.Const(1.0, ir.f32), ir.TRUE)), "grid")
    made = distinct(ir.Kernel("named", (of,), body))
    names = [v.name for v in {*ir.find(made, ir.Var)}] + [t.name for t in made.params]
    assert len(names) == len({*names}) == 3 and not {*names} & USED
    store = next(s for s in ir.find(made, ir.Store))
    assert store.tensor is made.params[0] and len({*ir.find(store.offset, ir.Var)}) == 2
    if not {one, other, tensor} & USED:
        assert {*names} == {one, other, tensor}
