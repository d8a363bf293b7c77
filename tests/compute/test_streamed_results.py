"""Several results of a product whose steps are divided evenly among programs (``reduce=stream``)."""

from __future__ import annotations

import pytest

from transconv.compute import parse
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import Target
from transconv.verify.computation import after_every_pass

TEXT = """compute product
    tensor A bf16 [{m}, 64]
    tensor B bf16 [32, 64]
    axes   m={m} n=32 | k=64
    read   a = A[m, k]
    read   b = B[n, k]
    let    s = sum(a*b; k)
    store  Y[m, n] = bf16(s)
    store  Z[n, m] = relu(s)
"""


@pytest.mark.parametrize(("m", "programs"), [(192, 2), (64, 3)])
def test_all_results_of_tiles_that_one_program_has(m: int, programs: int) -> None:
    """The kernel that adds up parts leaves these tiles alone: they have no parts, in no result. With three
    programs for one tile there are no such tiles."""
    made = parse(TEXT.format(m=m))
    schedule = Schedule.parse(
        f"m:64 n:32 k:16 | mma | a=box b=box via=gluon reduce=stream group_m=1 programs={programs}"
    )
    plan = build_compute(made, Target.parse("sm_90"), schedule)
    assert len(plan.steps) == 2
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []
