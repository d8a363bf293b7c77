"""Two ping-pong consumer warp groups, compiled: both multiply by wgmma, no register spills, and there
is no wait after every product."""

from __future__ import annotations

import pytest

from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.compute import parse
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.runtime import build_compute, job_of
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS
from transconv.verify.matrix import jobs_of

SM90 = TARGETS["sm_90"]
BOXES = "mma | a=box b=box | swap=1 programs=132 consumers=2 warps=4 via=gluon"
CASES = [  # and how the products of a consumer are cut, and how many of them there are in a step
    (
        "mb32ic64ih224oc64oh224kh3ph1",
        Prop.FWD,
        f"oh:8 ow:32 oc:64 ic:64 | {BOXES} c=box stages=4",
        "64x256x16",
        4,
    ),
    (
        "mb16ic128ih160oc256oh80kh3sh2ph1",
        Prop.BWD_D,
        f"qh:8 qw:16 ic:128 oc:64 | {BOXES} c=box stages=5",
        "64x128x16",
        8 * 4,
    ),  # four phases
    (
        "ic1280ih32oc1280oh32kh3ph1",
        Prop.BWD_W,
        f"ic:128 oc:128 oh:8 ow:8 | {BOXES} stages=6",
        "64x128x16",
        8,
    ),
]
WARPS = 12  # two consumers of four warps, and the producer, which is given four


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "prop", "schedule", "shape", "products"), CASES, ids=[str(c[1]) for c in CASES]
)
def test_both_consumers_multiply(text: str, prop: Prop, schedule: str, shape: str, products: int) -> None:
    problem = ConvProblem.parse(f"{text} dt=bf16 tag=nhwc")
    (job,) = jobs_of(problem, prop, SM90, Schedule.parse(schedule), None, "sass")
    (found,) = compile_offline([job])
    assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
    assert not found.spill_bytes and not found.serialised and not found.warnings
    assert found.shared_bytes <= SM90.shared_bytes
    assert found.registers == SM90.regs // (WARPS * 32) // 8 * 8
    cut = [x for x in found.texts["sass"].splitlines() if "HGMMA" in x]
    assert len(cut) == 2 * products and all(f"HGMMA.{shape}" in x for x in cut)


MOMENTS = """compute conv
    tensor X bf16 [n=1, c=512, h=128, w=128] acdb
    tensor W bf16 [o=512, c=512, kh=3, kw=3] acdb
    tensor Y bf16 [n=1, o=512, h=128, w=128] acdb
    axes   n=1 h=128 w=128 o=512 | kh=3 kw=3 c=512
    read   x = X[n, c, h + kh - 1, w + kw - 1]
    read   k = W[o, c, kh, kw]
    let    s = sum(x*k; kh kw c)
    let    y = bf16(s)
    store  Y[n, o, h, w] = y
    store  M[n, o//16] sum= y
    store  D[n, o//16] squares= y
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        "h:2 w:128 o:128 c:64 | mma | a=box b=box | c=box swap=1 programs=128 stages=3 warps=8 via=gluon",
        "w:128 o:128 c:64 | mma | a=box b=box | c=box programs=132 stages=4 warps=4 consumers=2 via=gluon",
    ],
)
def test_moments_leave_without_spills(schedule: str) -> None:
    """Those of a group norm: warps that multiply meet at barriers of their own."""
    plan = build_compute(parse(MOMENTS), SM90, Schedule.parse(schedule))
    (found,) = compile_offline([job_of(plan.steps[0], SM90, "ptx")])
    assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
    assert not found.spill_bytes and not found.serialised
    assert "swap" in schedule or "bar.sync \t2, 128;" in found.texts["ptx"]
