"""Depthwise kernels for few and many samples give a sample the same bits: they add one term after another,
in tiles that lie inside of an image by one text and at its edge by another, which has masks. In f32, whose
products are rounded, machine code has to round ``a*b + c`` alike in both."""

from __future__ import annotations

import itertools

import pytest

from tests.gpu import cases as c
from transconv import ir
from transconv.compute import Alone, parse
from transconv.runtime import Plan, build
from transconv.schedule import Schedule
from transconv.selection import chain
from transconv.target import TARGETS, detect
from transconv.verify.invariance.drawn_batches import differing

pytestmark = pytest.mark.gpu
TEXT = """compute depthwise
    tensor X {dtype} [4, {side}, {side}, 32]
    tensor W {dtype} [32, 7, 7]
    axes   g=32 n=4 h={side} w={side} | kh=7 kw=7
    read   x = X[n, h + kh - 3, w + kw - 3, g]
    read   y = W[g, kh, kw]
    store  Y[n, h, w, g] = sum(x*y; kh kw)
"""
SCHEDULES = [
    Schedule.parse(f"{tile} g:16 | fma | {words} stages=1 warps=4")
    for tile, words in (
        ("n.h:32 w:8 kw:7", "regs=w.kw"),
        ("n.h:64 w:7 kw:7", "regs=w.kw"),
        ("h:16 w:4 kw:7", "regs=w.kw"),
        ("n.h.w:128", "unroll=1"),
    )
]
PAIRS = [*itertools.permutations(SCHEDULES, 2)]
SIDE = 28 if c.DEVICE == "cuda" else 10


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: " and ".join(str(s).partition(" |")[0] for s in pair)
)
def test_plans_of_one_order_of_terms(pair: tuple[Schedule, Schedule], dtype: str) -> None:
    workload = Alone(parse(TEXT.format(dtype=dtype, side=SIDE)))
    assert len({chain(s, workload.compute) for s in pair}) == 1
    assert [line for line in differing(workload, detect(), c.DEVICE, 3, 5, pair) if line] == []


def test_a_tile_has_two_texts() -> None:
    """Compiled for sm_90, wherever this runs: else the test above says little."""
    form = Alone(parse(TEXT.format(dtype="f32", side=28))).of_any_batch()[0]
    found = [build(form, TARGETS["sm_90"], s, None, True, Plan).steps[-1].kernel for s in SCHEDULES]
    assert any(ir.find(kernel, ir.If) for kernel in found)
