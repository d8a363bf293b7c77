"""Products of a matrix and a vector: lanes run along the sum, and kernels store what the texts mean."""

from __future__ import annotations

import pytest

from tests.compute.test_kernels import PRODUCT
from transconv.compute import parse
from transconv.cost import estimate
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.matrix_vector import matrix_vector
from transconv.support import knobs
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase

SM90 = TARGETS["sm_90"]
MATRIX = """compute matrix
    tensor W f16 [n=21, k=70]
    tensor X f16 [k=70]
    axes   n=21 | k=70
    read   x = X[k]
    read   w = W[n, k]
    let    s = sum(x*w; k)
    store  Y[n] = relu(s)"""
COLUMN = """compute column
    tensor X bf16 [m=37, k=33]
    tensor W bf16 [k=33]
    axes   m=37 | k=33
    read   x = X[m, k]
    read   w = W[k]
    store  Y[m] = sum(x*w; k)"""
WINDOW = """compute window
    tensor X f16 [b=2, h=9, w=18, c=20]
    tensor W f16 [kh=3, kw=3, c=20]
    axes   b=2 h={h} w={w} | kh=3 kw=3 c=20
    read   x = X[b, h*{step} + kh - 1, w*{step} + kw - 1, c]
    read   v = W[kh, kw, c]
    let    s = sum(x*v; kh kw c)
    store  Y[b, h, w] = tanh(s)"""
TEXTS = {
    "matrix": MATRIX,
    "column": COLUMN,
    "window": WINDOW.format(h=9, w=18, step=1),
    "strided": WINDOW.format(h=4, w=8, step=2),
}


def legal(text: str) -> list[Schedule]:
    compute = parse(text)
    return [s for s in dict.fromkeys(matrix_vector(compute, SM90)) if not why_not(s, compute, SM90)]


@pytest.mark.every(3)
@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "window" else n for n in TEXTS]
)
def test_proposed_kernels_store_what_the_text_means(name: str) -> None:
    schedules, case = legal(TEXTS[name]), ComputationCase(parse(TEXTS[name]))
    assert len(schedules) > 4
    for schedule in schedules[:: max(1, len(schedules) // 4)]:
        plan = build_compute(case.compute, TARGETS["interpreter"], schedule)
        assert case.launched(plan, "cpu").problem == "", schedule


def test_lanes_along_the_sum_are_chosen() -> None:
    """With lanes along n a warp reads 32 rows at once: estimated at 50 times as long."""
    long = parse(MATRIX.replace("n=21", "n=4096").replace("k=70", "k=4096"))
    found = heuristics.default(long, SM90)
    lanes = next(b for b in found.blocks if b.first == "k")
    assert lanes.extent >= 128 and found.late
    rows = Schedule.parse("n:128 | fma | split_k=4 stages=2 warps=4")
    assert estimate(rows, long, SM90) > 20 * estimate(found, long, SM90)


def test_products_of_matrices_and_other_orders_have_none() -> None:
    assert not [*matrix_vector(parse(PRODUCT), SM90)]
    other = MATRIX.replace("W f16 [n=21, k=70]", "W f16 [k=70, n=21]").replace("W[n, k]", "W[k, n]")
    assert not [*matrix_vector(parse(other), SM90)]
    assert not [*matrix_vector(parse(MATRIX), TARGETS["interpreter"])]
