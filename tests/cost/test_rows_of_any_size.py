"""Estimates of 1x1 layers in torch's own order whose sizes are arguments: what is in shared memory at
once, where rows begin, and what they choose among kernels that were timed on an H100, by
``python -m bench schedules bench/problems/nchw_trials.csv``."""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, Prop, any_size, computes, marked
from transconv.cost import estimate
from transconv.cost.fetches import stored
from transconv.schedule import Schedule, shared_bytes, why_not
from transconv.target import Target

SM90 = Target.parse("sm_90")
ROWS = Path(__file__).parents[2] / "bench" / "results" / "h100_nchw_trials.csv"
NEAR = 1.16  # of the fastest
PRODUCT = parse("""compute product
    sizes  M=64 in 1..640, N=64 in 1..640, K=32 in 8..640, K % 8 == 0
    tensor A f16 [M, K]
    tensor B f16 [N, K]
    axes m=M n=N | k=K
    read a = A[m, k]
    read b = B[n, k]
    store C[m, n] = sum(f32(a)*f32(b); k)""")


@cache
def layer(text: str, prop: Prop = Prop.FWD) -> Compute:
    plain, names = marked(text)
    problem = ConvProblem.parse(plain)
    (found,) = any_size(problem, prop, names) if names else computes(problem, prop)
    return found


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("ic:64 | mma | stages=3", 1),
        ("ic:32 | mma | stages=3", 3),
        ("ic:64 | mma | programs=132 stages=3", 3),  # tiles follow one another
        ("ic:64 | mma | a=box b=box pack=a swap=1 stages=3 via=gluon", 3),
    ],
)
def test_a_sum_of_one_step_has_one_place(words: str, places: int) -> None:
    """As 36 kernels that Triton compiled have it."""
    schedule = Schedule.parse(f"mb.oh.ow:64 oc:128 {words} warps=4")
    depth = 64 if "ic:64" in words else 32
    compute = layer("mb8?ic64ih56?iw56?oc256oh56ow56kh1kw1 dt=bf16")
    assert shared_bytes(schedule, compute) == places * (64 + 128) * depth * 2


@pytest.mark.parametrize(("depth", "reason"), [(32, None), (128, "262144")])
def test_a_sum_of_any_length_has_places_for_all_stages(depth: int, reason: str | None) -> None:
    """Also where the example is one step: without them a kernel would be taken that has no room."""
    schedule = Schedule.parse(f"m:128 n:128 k:{depth} | mma | stages=4 warps=4")
    assert shared_bytes(schedule, PRODUCT) == 4 * 2 * 128 * depth * 2
    told = why_not(schedule, PRODUCT, SM90)
    assert told is None if reason is None else told is not None and reason in told


def test_rows_of_any_size_begin_anywhere() -> None:
    """Also where those of the example do not."""
    schedule = Schedule.parse("mb.oh.ow:32 oc:64 ic:64 | mma | stages=3 warps=4")
    sizes = ("mb8ic64ih56oc256oh56kh1", "mb8ic64ih57oc256oh57kh1", "mb8?ic64ih56?iw56?oc256oh56ow56kh1kw1")
    even, odd, every = (stored(schedule, layer(f"{s} dt=bf16")).bytes for s in sizes)
    assert even < odd == every


def test_what_is_chosen_was_among_the_fastest() -> None:
    """Of forward kernels without copies, which are launches of their own."""
    timed: dict[str, dict[str, float]] = defaultdict(dict)
    with ROWS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if "pack=" not in row["schedule"] and row["direction"] == "fwd" and row["verdict"] == "right":
                timed[row["problem"]][row["schedule"]] = float(row["us"])
    assert sum(map(len, timed.values())) > 60
    for problem, us in timed.items():
        compute = layer(problem)
        chosen = min(us, key=lambda s: estimate(Schedule.parse(s), compute, SM90))
        assert us[chosen] < NEAR * min(us.values()), (problem, chosen, us[chosen])
