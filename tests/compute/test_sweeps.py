"""Rows that are passed over several times: which steps each sweep takes, and that every schedule of it
computes what the text means, after every pass and in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from transconv.compute import Compute, parse
from transconv.ir import Load, find
from transconv.passes import lower
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.target import Target
from transconv.verify.computation import ComputationCase, after_every_pass

SM90 = Target.parse("sm_90")
INTERPRETER = Target.parse("interpreter")

SOFTMAX = """compute softmax
    axes   n=5 | k=77
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total"""
LAYER_NORM = """compute layer_norm
    axes   n=6 | h=5 c=7
    read   x = X[n, c, h]
    read   r = R[n, c, h]
    let    y = x + r
    store  S[n, c, h] = y
    let    mean = sum(y; h c) / 35
    let    d = y - mean
    let    v = sum(d*d; h c) / 35
    let    scale = rsqrt(v + 1)
    read   gamma = G[c]
    read   m = M[n]
    store  Y[n, c, h] = d * scale * gamma + m
    store  V[n] = v"""
MOMENTS = """compute moments
    axes   n=9 | k=40
    read   x = X[k, n]
    let    s = sum(x; k)
    let    q = sum(x*x; k)
    store  Y[n] = q - s*s/40"""
BACKWARD = """compute softmax_backward
    axes   b=2 n=5 | k=33
    read   y = Y[b, n, k]
    read   g = G[b, n, k]
    let    s = sum(y*g; k)
    store  X[b, n, k] = y * (g - s)"""
POOLED = """compute pooled
    axes   n=4 c=6 | k=3
    read   x = X[n, c*2 + k - 1] else -inf
    let    m = max(x; k)
    store  Y[n, c, k] = where(x < m, 0.0, 1.0)"""

SCHEDULES = {
    SOFTMAX: (
        "k:128 | fma",
        "n:2 k:128 | fma",
        "k:32 | fma",
        "n:4 k:16 | fma | late=1",
        "n:8 | fma",
        "n:2 k:128 | fma | late=1 warps=1",
    ),
    LAYER_NORM: (
        "h.c:64 | fma",
        "n:4 h.c:16 | fma | late=1",
        "n:2 c:4 | fma",
        "h:8 c:8 | fma",
        "n:8 | fma",
    ),
    MOMENTS: ("n:4 k:64 | fma", "n:16 k:8 | fma | late=1", "n:8 | fma | unroll=1"),
    BACKWARD: ("k:64 | fma", "b.n:4 k:16 | fma | late=1"),
    POOLED: ("n.c:8 k:4 | fma", "n.c:16 | fma | unroll=1", "c:4 | fma"),
}
CASES = [(text, schedule) for text, many in SCHEDULES.items() for schedule in many]


def kinds(made: Compute) -> list[tuple[list[str], list[str]]]:
    named = [([*map(_name, s.before)], [*map(_name, s.steps)]) for s in made.sweeps.each]
    return [*named, ([*map(_name, made.sweeps.behind)], [])]


def _name(step: object) -> str:
    return getattr(step, "name", "") or step.view.tensor.name  # type: ignore[attr-defined,no-any-return]


def test_the_sweeps_of_a_norm() -> None:
    """A residual's sum is stored in the first one, rows are read where they are needed first."""
    first, second, third, behind = kinds(parse(LAYER_NORM))
    assert first[1][:4] == ["x", "r", "y", "S"] and len(first[1]) == 5
    assert [s for s in second[1] if len(s) == 1] == ["x", "r", "y", "d"] and "S" not in second[1]
    assert {"m", "V"} < {*third[0]} and "gamma" in third[1] and third[1][-1] == "Y"
    assert behind == ([], [])


def test_moments_are_one_sweep() -> None:
    assert [len(s.steps) for s in parse(MOMENTS).sweeps.each] == [3]


@pytest.mark.every(8)
@pytest.mark.parametrize(("text", "schedule"), CASES, ids=lambda x: x.split("\n")[0][8:])
def test_every_pass_keeps_the_meaning(text: str, schedule: str) -> None:
    made = parse(text)
    plan = build_compute(made, SM90, Schedule.parse(schedule))
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []


@pytest.mark.every(2)
@pytest.mark.parametrize("text", SCHEDULES, ids=lambda x: x.split("\n")[0][8:])
def test_tritons_interpreter_agrees(text: str) -> None:
    made = parse(text)
    for schedule in SCHEDULES[text][:2]:
        plan = build_compute(made, INTERPRETER, Schedule.parse(schedule))
        for data in ("exact", "float"):
            assert not ComputationCase(made, data).launched(plan, "cpu").problem


def test_a_row_that_fits_is_loaded_once() -> None:
    """Held: one load for three sweeps. Again: one in each."""
    loads = {}
    for schedule in ("k:128 | fma", "k:32 | fma"):
        kernel = lower(parse(SOFTMAX), Schedule.parse(schedule), SM90, "softmax")[-1][1]
        loads[schedule] = len(find(kernel, Load))
    assert loads == {"k:128 | fma": 1, "k:32 | fma": 3}


def test_sums_of_loaded_elements_that_are_used_twice_wait() -> None:
    """Triton's pass for the locality of threads asserts one use of what such a loop leaves."""
    text = (
        "compute twice ;; tensor A f32 [g=64, k=256] ;; axes g=64 | k=256 ;; read a = A[g, k] ;; "
        "let s = sum(a; k) ;; store S[g] = s"
    )
    once, twice = parse(text), parse(f"{text} ;; store Q[g] = s*2")
    early, late = (Schedule.parse(f"g:16 k:64 | fma | {word}warps=4") for word in ("", "late=1 "))
    assert why_not(early, once, SM90) is None and why_not(late, twice, SM90) is None
    assert "OptimizeThreadLocality" in str(why_not(early, twice, SM90))
    doubled = parse(text.replace("S[g] = s", "S[g] = s + s"))
    assert "OptimizeThreadLocality" in str(why_not(early, doubled, SM90))


@pytest.mark.parametrize(("row", "flat"), [(0, True), (-1, False)])
def test_loops_over_tiles_that_read_nothing_are_not_flattened(row: int, flat: bool) -> None:
    """Triton's pass FuseNestedLoops ends the process there."""
    made = parse(
        f"compute least ;; tensor X f32 [n=6, k=5] ;; tensor Y f32 [n=6] ;; axes n=6 | k=5 ;; "
        f"read x = X[n*0 + {row}, k] else inf ;; let s = min(x; k) ;; store Y[n] = s"
    )
    words = Schedule.parse("k:2 | fma | programs=2 stages=4 warps=1")
    assert ("flatten=True" in build_compute(made, SM90, words).source) is flat


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("k:16 | fma | split_k=2", "elements of a row are needed again"),
        ("k:16 | fma | pack=a", "elements of a row are needed again"),
        ("n:16 k:16 | mma", "no second operand"),
        ("m:16 n:16 k:16 | mma", "the matrix unit adds in 32 bits, not in bf16"),
    ],
)
def test_refusals(schedule: str, reason: str) -> None:
    made = parse(BACKWARD if "mma" in schedule else SOFTMAX)
    if "m:16" in schedule:  # both factors of a product are rounded
        made = parse(
            "compute rounded ;; tensor X f32 [m=16, k=16] ;; tensor W f32 [k=16, n=16] ;; "
            "axes m=16 n=16 k=16 ;; read x = X[m, k] ;; read w = W[k, n] ;; "
            "let s = sum(bf16(x*2)*bf16(-w); k) ;; store C[m, n] = s"
        )
    assert reason in str(why_not(Schedule.parse(schedule), made, SM90))


def test_nan_reaches_its_row_alone() -> None:
    made = parse(SOFTMAX.replace("n=5", "n=2"))
    plan = build_compute(made, INTERPRETER, Schedule.parse("k:128 | fma"))
    import torch

    x, y = torch.zeros(2, 77), torch.empty(2, 77)
    x[1, 5] = np.nan
    plan.launch(X=x, Y=y)
    assert y[1].isnan().all() and torch.equal(y[0], torch.full((77,), 1 / 77))
