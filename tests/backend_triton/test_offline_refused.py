"""Kernels on which a release of Triton, or its LLVM, crashed or failed, compiled."""

from __future__ import annotations

import re

import pytest

from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.schedule.schedule import Schedule
from transconv.support import knobs
from transconv.target.records import TARGETS
from transconv.verify.matrix import jobs_of

# iw = ow + kw - 2 with two taps and one column: LLVM made `mov.pred %p13, 0` of every second mask.
ONE_COLUMN = ConvProblem.parse("mb3ic1ih1oc17oh4kh2ph2 dt=bf16 tag=nhwc")
GRADIENT = (
    "kh.kw:16 oc:16 mb:4 oh.ow:4 | mma | swap=1 order=mb.oh.ow group_m=3 programs=5 stages=4 warps=2"
)
# Taps that no stride phase has (tests/passes/test_sums_without_elements.py), in persistent kernels that
# crashed the compiler.
NO_TAPS = [
    (
        "g16mb4ic48id8ih8iw2oc48od2oh4ow2kd7kh2kw1sd3sh2sw3pd0ph0pw1 dt=f16",
        "g.rd.rw:2 rh.ic:16 td.oc:8 | fma | order=th.td.oc.tw programs=2 late=1 stages=1 warps=4",
    ),
    (
        "g8mb5ic16id6ih4iw2oc8od2oh2ow2kd7kh4kw2sd2sh3sw4pd3ph1pw2 math=tf32x3",
        "g.rd.rh:8 rw:1 mb:1 qd.qh:8 th.oc:4 | fma | split_k=3 programs=5 regs=rw stages=4 warps=1",
    ),
]
# Addresses with products that are not simplified to a number.
UNSIMPLIFIED = [
    (
        Prop.BWD_W,
        "g3mb1ic48ih4oc48oh4kh1ph1dh2 dt=f16 tag=nhwc",
        "ic:16 oc:16 ow:64 | mma | order=mb.oh.ow group_m=3 programs=2 stages=4 warps=8",
    ),
    (
        Prop.BWD_D,
        "mb1ic16ih1iw4oc32oh1ow2kh5kw1sh2sw3ph4pw0dh1dw1 dt=bf16",
        "qw:16 ic:16 oc:32 | mma | order=oc.tw.th stages=4 warps=4",
    ),
]


@pytest.mark.parametrize(
    ("passes", "live"), [("", 16), ("-simplify", 7), ("-hoist", 7), ("-simplify,-hoist,-lets", 7)]
)
def test_a_mask_of_one_column_is_not_folded(
    passes: str, live: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four images of a step is not there. Where the steps are written out, two of four see one of
    two rows of taps each: 4 loads of src and 12 of dst are left."""
    monkeypatch.setenv(knobs.passes.name, passes)
    (found,) = compile_offline(
        jobs_of(
            ONE_COLUMN, Prop.BWD_W, TARGETS["sm_90"], Schedule.parse(GRADIENT), None, "ptx", words=False
        )
    )
    assert isinstance(found, Resources)
    ptx = found.texts["ptx"]
    never = set(re.findall(r"mov\.pred\s+(%p\d+), 0;", ptx))
    loads = re.findall(r"@(%p\d+) ld\.global", ptx)
    assert sum(mask not in never for mask in loads) == live


@pytest.mark.every(3)
@pytest.mark.parametrize("passes", ["", "-lets", "-simplify"])
def test_a_persistent_kernel_without_taps_compiles(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.passes.name, passes)
    jobs = [
        job
        for text, schedule in NO_TAPS
        for job in jobs_of(
            ConvProblem.parse(text), Prop.BWD_D, TARGETS["sm_90"], Schedule.parse(schedule), words=False
        )
    ]
    for found in compile_offline(jobs):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"


@pytest.mark.slow
def test_addresses_that_nobody_has_simplified_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.passes.name, "-simplify,-hoist,-reuse")
    jobs = [
        job
        for prop, text, schedule in UNSIMPLIFIED
        for job in jobs_of(
            ConvProblem.parse(text), prop, TARGETS["sm_90"], Schedule.parse(schedule), words=False
        )
    ]
    assert all("0 * 3" in job.source or "* 3 + " in job.source for job in jobs[:2])
    for found in compile_offline(jobs):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
