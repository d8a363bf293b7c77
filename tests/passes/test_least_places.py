"""The least of places that are chosen, written out from the last one on: right after every pass, without a
minimum but the first, and left alone where places do not rise."""

from __future__ import annotations

import pytest

from tests.stages import SM90
from transconv import ir
from transconv.compute import parse
from transconv.passes import pipeline
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.verify.computation import after_every_pass

POOL = """compute pool
    tensor X {dtype} [n=1, c=4, h={h}, w={w}] nhwc
    tensor Y {dtype} [n=1, c=4, a={a}, b={b}] nhwc
    tensor I i32 [n=1, c=4, a={a}, b={b}] nhwc
    axes   n=1 c=4 a={a} b={b} | i={i} j={j}
    read   x = X[n, c, a*2 + i - 1, b*2 + j - 1] else -inf
    let    m = max(x; i j)
    let    at = {at}
    store  Y[n, c, a, b] = m
    store  I[n, c, a, b] = at"""
FIRST = "argmax(x; i j)"
SCHEDULE = Schedule.parse("n.a.b.c:64 | fma | unroll=1 stages=1 warps=2")


def pool(i: int, j: int, dtype: str = "f16", at: str = FIRST, h: int = 7, w: int = 6) -> str:
    a, b = (h + 2 - i) // 2 + 1, (w + 2 - j) // 2 + 1
    return POOL.format(i=i, j=j, dtype=dtype, at=at, h=h, w=w, a=a, b=b)


def least(text: str) -> list[ir.Expr]:
    """The minima that the kernel takes of integers."""
    made = dict(pipeline.lower(parse(text), SCHEDULE, SM90, "k", "ieee"))["unroll"]
    updates = [u.value for u in ir.find(made, ir.Update) if u.value.dtype.is_integer]
    return [e for e in updates if isinstance(e, ir.Min)]


@pytest.mark.parametrize("text", [pool(3, 3), pool(2, 3, "bf16"), pool(3, 2, "f32", h=5, w=9)])
def test_every_pass_gives_the_answer(text: str) -> None:
    found = after_every_pass(parse(text), build_compute(parse(text), SM90, SCHEDULE))
    assert not [(stage, judged.problem) for stage, judged in found if judged.problem]
    assert len(least(text)) == 1


@pytest.mark.parametrize("at", ["min(where(x == m, i32(8 - i*3 - j), 9); i j)", "min(i32(x); i j)"])
def test_others_are_left_alone(at: str) -> None:
    """Places that fall, and what is no choice."""
    text = pool(3, 3, at=at) if "where" in at else pool(3, 3, "i32", at).replace("else -inf", "")
    assert len(least(text)) == 9
