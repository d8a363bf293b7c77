"""Sums by fused multiply-adds, compiled: they are not moved to the matrix unit, which would truncate
operands to tf32."""

from __future__ import annotations

import re

import pytest

from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS
from transconv.verify.matrix import jobs_of

PROBLEM = ConvProblem.parse("mb2ic16ih8oc16oh8kh3ph1 dt=f32 tag=nhwc math=ieee")
SCHEDULES = {
    Prop.FWD: "mb.oh.ow:16 oc:16 ic:4 | fma | stages=3 warps=2",
    Prop.BWD_D: "mb.ih.iw:32 ic:16 oc:16 | fma | swap=1 stages=2 warps=4",
    Prop.BWD_W: "kw.ic:16 oc:16 oh.ow:4 | fma | split_k=4 stages=4 warps=4",
}


@pytest.mark.every(2)
@pytest.mark.parametrize("chip", ["sm_90", "sm_80"])
def test_a_sum_stays_a_sum(chip: str) -> None:
    jobs = [
        job
        for prop, schedule in SCHEDULES.items()
        for job in jobs_of(
            PROBLEM, prop, TARGETS[chip], Schedule.parse(schedule), None, "ttgir", words=False
        )
    ]
    seen = 0
    for job, found in zip(jobs, compile_offline(jobs), strict=True):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
        assert "tt.dot " not in found.texts["ttgir"], job.source
        seen += "axis=" in job.source
    assert seen == len(SCHEDULES)


def test_pairs_begin_at_even_addresses() -> None:
    """Taps lie side by side, and so do columns: no two taps of every column begin at 8 bytes."""
    p = ConvProblem.parse("mb5ic16ih12oc32oh8kh2ph0 dt=f32 tag=nchw:oIhw4i:nChw4c")
    schedule = "mb:2 oh.ow:8 oc:2 kh.kw:16 ic:1 | fma | swap=1 stages=4 warps=1"
    (found,) = compile_offline(
        jobs_of(p, Prop.FWD, TARGETS["sm_90"], Schedule.parse(schedule), None, "ptx", words=False)
    )
    assert isinstance(found, Resources)
    copied = re.findall(r"cp\.async\.ca\.shared\.global [^;]*, (0x\w+),", found.texts["ptx"])
    assert set(copied) == {"0x4"}
