"""Masks that a release of Triton or its LLVM cannot be given, compiled."""

from __future__ import annotations

import pytest

from transconv import knobs
from transconv.backend_triton.offline import Resources, compile_offline
from transconv.config import Config
from transconv.matrix.jobs import jobs_of
from transconv.problem import ConvProblem, Prop
from transconv.target import TARGETS

# iw = ow + kw - 2 with two taps and one column: LLVM made `mov.pred %p13, 0` of every second mask.
ONE_COLUMN = ConvProblem.parse("mb3ic1ih1oc17oh4kh2ph2 dt=bf16 tag=nhwc")
GRADIENT = ("kh.kw:16 oc:16 mb:4 oh.ow:4 | mma | swap=1 order=mb.oh.ow group_m=3 programs=5 stages=4 "
            "warps=2")
# Taps that no phase has (tests/test_dead.py), in persistent kernels, of which the compiler died.
NO_TAPS = [
    ("g16mb4ic48id8ih8iw2oc48od2oh4ow2kd7kh2kw1sd3sh2sw3pd0ph0pw1 dt=f16",
     "g.rd.rw:2 rh.ic:16 td.oc:8 | fma | order=th.td.oc.tw programs=2 late=1 stages=1 warps=4"),
    ("g8mb5ic16id6ih4iw2oc8od2oh2ow2kd7kh4kw2sd2sh3sw4pd3ph1pw2 math=tf32x3",
     "g.rd.rh:8 rw:1 mb:1 qd.qh:8 th.oc:4 | fma | split_k=3 programs=5 regs=rw stages=4 warps=1"),
]


@pytest.mark.parametrize("passes", ["", "-simplify", "-hoist", "-simplify,-hoist,-lets,-tidy"])
def test_a_mask_of_one_column_is_not_folded(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.passes.name, passes)
    (found,) = compile_offline(jobs_of(ONE_COLUMN, Prop.BWD_W, TARGETS["sm_90"], Config.parse(GRADIENT),
                                       None, "ptx"))
    assert isinstance(found, Resources)
    ptx = found.texts["ptx"]
    assert "ld.global" in ptx and "mov.pred" not in ptx


@pytest.mark.parametrize("passes", ["", "-lets,-tidy", "-simplify"])
def test_a_persistent_kernel_without_taps_compiles(passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.passes.name, passes)
    jobs = [job for text, config in NO_TAPS for job in jobs_of(
        ConvProblem.parse(text), Prop.BWD_D, TARGETS["sm_90"], Config.parse(config))]
    for found in compile_offline(jobs):
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
