"""Copies of tensors whose sizes are arguments: ``pack`` of any size."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from transconv.backend_triton import Resources, SizedLauncher, compile_offline
from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop, Registry, any_size, marked
from transconv.cost import AtSizes, estimate
from transconv.ir import value_at
from transconv.runtime import Plan, apart, build, build_compute, kept
from transconv.schedule import Schedule, Scheduled, is_copy, why_not
from transconv.schedule.packing import copy_of
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.case import executable
from transconv.verify.computation import Case, after_every_pass
from transconv.verify.matrix.jobs import job_of

SM90 = Target.parse("sm_90")
LINE = "mb2?ic16iw9?oc16ow9kw3pw1 dt=f16 tag=ncw"
LONG = "mb2?ic64iw9?oc64ow9kw3pw1 dt=f16 tag=ncw"
LAYERS = {
    "operands": (LINE, Prop.FWD, "ow:16 oc:16 ic:16 | mma | a=box b=box | pack=a.b swap=1 stages=2 warps=4"),
    "result": (LINE, Prop.FWD, "ow:16 oc:16 ic:16 | mma | a=box b=box | c=box pack=a.b.c swap=1 stages=2 warps=4"),
    "gradient": (LONG, Prop.BWD_D, "iw:64 ic:64 oc:32 | mma | a=box b=box | pack=a.b swap=1 programs=3 "
                 "stages=2 warps=4 via=gluon"),
    "weight": (LONG.replace("mb2", "mb4"), Prop.BWD_W, "kw.ic:64 oc:64 ow:16 | mma | a=box b=box | pack=a.b.c swap=1 split_k=3 "
               "stages=2 warps=4 via=gluon"),
    "padded": ("mb2?ic12iw9?oc20ow9kw3pw1 dt=f16 tag=ncw", Prop.FWD,
               "ow:16 oc:16 ic:16 | mma | a=box b=gather | c=box pack=a.c swap=1 stages=2 warps=4"),
    "fused": ("mb2?ic16iw9?oc12ow9kw1 dt=f16 tag=ncw", Prop.FWD,
              "mb.ow:16 oc:16 ic:16 | mma | a=box b=box | c=box pack=a.c swap=1 stages=2 warps=4"),
    "image": ("mb2?ic16ih5?iw6?oc16oh5ow6kh3kw3ph1pw1 dt=f16 tag=nchw", Prop.FWD,
              "oh:4 ow:4 oc:16 ic:16 | mma | a=box b=box | pack=a.b swap=1 stages=2 warps=4"),
    "rounded": ("mb2?ic16iw9?oc16ow9kw3pw1 dt=f32 tag=nwc math=tf32", Prop.FWD,
                "mb.ow:16 oc:16 ic:16 | mma | a=gather b=gather | pack=a.b stages=2 warps=4"),
    "bytes": ("mb2?ic32iw9?oc32ow9kw3pw1 dt=f8e4m3:f8e4m3:f32 tag=ncw", Prop.FWD,
              "ow:16 oc:16 ic:32 | mma | a=gather b=gather | pack=a.b.f16 stages=2 warps=4")}
INTERPRETED = [n for n, (_, _, words) in LAYERS.items() if "gluon" not in words]
MATRICES = """compute product
    sizes  M=8 in 1..64, N=16 in 1..64, K=12 in 1..64
    tensor A f16 [M, K]
    tensor B f16 [N, K] ba
    axes m=M n=N | k=K
    read a = A[m, k]
    read b = B[n, k]
    store C[m, n] = sum(f32(a)*f32(b); k)"""


def layer(text: str, prop: Prop) -> tuple[Compute, ...]:
    plain, names = marked(text)
    return any_size(ConvProblem.parse(plain), prop, names)


@cache
def built(name: str, target: Target = SM90) -> tuple[Compute, Plan]:
    text, prop, schedule = LAYERS[name]
    (compute,) = layer(text, prop)
    return compute, build_compute(compute, target, Schedule.parse(schedule))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", LAYERS)
def test_drawn_sizes_edges_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the IR's interpreter, which reads beyond no tensor and finds padding that was read, and in
    Triton's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compute, plan = built(name)
    assert any(s.does == "pack" and isinstance(s.launcher, SizedLauncher) for s in plan.steps)
    for n, drawn in enumerate(sizes.drawn(compute, 5)):
        case = Case(compute.at(**drawn))
        if n < 3:
            judged = case.interpreted(*(s.kernel.at(drawn) if s.kernel.sizes else s.kernel
                                        for s in plan.steps))
        elif name in INTERPRETED:
            judged = case.launched(built(name, executable(SM90, "cpu"))[1], "cpu")
        assert not judged.problem, (drawn, judged.problem)


@pytest.mark.parametrize("name", ["weight", "padded", "image"])
def test_every_pass(name: str) -> None:
    compute, plan = built(name)
    for stage, judged in after_every_pass(compute, plan, sizes.drawn(compute, 2)[1]):
        assert not judged.problem, (stage, judged.problem)
