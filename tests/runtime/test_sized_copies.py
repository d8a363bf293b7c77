"""Copies of tensors whose sizes are arguments: ``pack`` of any size."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv.backend_triton import KernelStart, Resources, TritonKernel, compile_offline
from transconv.compute import Compute, parse
from transconv.conv import (
    ConvProblem,
    ConvWorkload,
    Epilogue,
    LayerRegistry,
    Prop,
    any_size,
    computes,
    marked,
)
from transconv.cost import AtSizes, count, estimate
from transconv.ir import Mod, find, value_at
from transconv.runtime import Plan, build, build_compute, job_of, plan_cache, plans
from transconv.runtime.launch import apart
from transconv.schedule import Schedule, Scheduled, is_copy, why_not
from transconv.schedule.tiles.packing import copy_of
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase, after_every_pass
from transconv.verify.machine import executable

SM90 = Target.parse("sm_90")
LINE = "mb2?ic16iw9?oc16ow9kw3pw1 dt=f16 tag=ncw"
LONG = "mb2?ic64iw9?oc64ow9kw3pw1 dt=f16 tag=ncw"
LAYERS = {
    "operands": (
        LINE,
        Prop.FWD,
        "ow:16 oc:16 ic:16 | mma | a=box b=box | pack=a.b swap=1 stages=2 warps=4",
    ),
    "result": (
        LINE,
        Prop.FWD,
        "ow:16 oc:16 ic:16 | mma | a=box b=box | c=box pack=a.b.c swap=1 stages=2 warps=4",
    ),
    "gradient": (
        LONG,
        Prop.BWD_D,
        "iw:64 ic:64 oc:32 | mma | a=box b=box | pack=a.b swap=1 programs=3 stages=2 warps=4 via=gluon",
    ),
    "weight": (
        LONG.replace("mb2", "mb4"),
        Prop.BWD_W,
        "kw.ic:64 oc:64 ow:16 | mma | a=box b=box | "
        "pack=a.b.c swap=1 split_k=3 stages=2 warps=4 via=gluon",
    ),
    "padded": (
        "mb2?ic12iw9?oc20ow9kw3pw1 dt=f16 tag=ncw",
        Prop.FWD,
        "ow:16 oc:16 ic:16 | mma | a=box b=gather | c=box pack=a.c swap=1 stages=2 warps=4",
    ),
    "fused": (
        "mb2?ic16iw9?oc12ow9kw1 dt=f16 tag=ncw",
        Prop.FWD,
        "mb.ow:16 oc:16 ic:16 | mma | a=box b=box | c=box pack=a.c swap=1 stages=2 warps=4",
    ),
    "planes": (
        "mb2?ic16iw9?oc16ow5kw1sw2pw0 dt=f16 tag=ncw",
        Prop.FWD,
        "ow:16 oc:16 ic:16 | mma | a=box b=box | pack=a swap=1 stages=2 warps=4",
    ),
    "turned": (
        "mb2?ic16ih5?iw6?oc16oh5ow6kh1kw1 dt=f16",
        Prop.FWD,
        "mb.oh.ow:32 oc:16 ic:16 | mma | a=box b=box | pack=a swap=1 programs=3 stages=2 warps=4",
    ),
    "image": (
        "mb2?ic16ih5?iw6?oc16oh5ow6kh3kw3ph1pw1 dt=f16 tag=nchw",
        Prop.FWD,
        "oh:4 ow:4 oc:16 ic:16 | mma | a=box b=box | pack=a.b swap=1 stages=2 warps=4",
    ),
    "rounded": (
        "mb2?ic16iw9?oc16ow9kw3pw1 dt=f32 tag=nwc math=tf32",
        Prop.FWD,
        "mb.ow:16 oc:16 ic:16 | mma | a=gather b=gather | pack=a.b stages=2 warps=4",
    ),
    "bytes": (
        "mb2?ic32iw9?oc32ow9kw3pw1 dt=f8e4m3:f8e4m3:f32 tag=ncw",
        Prop.FWD,
        "ow:16 oc:16 ic:32 | mma | a=gather b=gather | pack=a.b.f16 stages=2 warps=4",
    ),
}
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


@pytest.mark.every(8)
@pytest.mark.parametrize("name", LAYERS)
def test_drawn_sizes_edges_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the IR's interpreter, which reads beyond no tensor and finds padding that was read, and in
    Triton's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compute, plan = built(name)
    assert any(s.does == "pack" and s.triton.sizes is not None for s in plan.steps)
    for n, drawn in enumerate(sizes.drawn(compute, 4)):
        case = ComputationCase(compute.at(**drawn))
        if n < 3:
            judged = case.interpreted(
                *(s.kernel.at(drawn) if s.kernel.sizes else s.kernel for s in plan.steps)
            )
        elif name in INTERPRETED:
            judged = case.launched(built(name, executable(SM90, "cpu"))[1], "cpu")
        assert not judged.problem, (drawn, judged.problem)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["weight", "padded", "image", "turned"])
def test_every_pass(name: str) -> None:
    compute, plan = built(name)
    for stage, judged in after_every_pass(compute, plan, sizes.drawn(compute, 2)[1]):
        assert not judged.problem, (stage, judged.problem)


@pytest.mark.slow
def test_a_copy_has_the_places_of_the_copy_for_given_sizes() -> None:
    for name, (_, _, schedule) in LAYERS.items():
        compute, plan = built(name)
        for drawn in sizes.drawn(compute, 4):
            exact = Scheduled(compute.at(**drawn), Schedule.parse(schedule), SM90)
            for space in exact.workspaces:
                sized = plan.workspaces[space.name]
                assert sized.at(drawn).layout == space.layout, (name, drawn)
                assert value_at(sized.room, drawn) >= space.layout.span
    images = copy_of(built("padded")[0].a.tensor, 0)  # rows as long as there are images
    assert [value_at(p, {"MB": 3, "IW": 9}) for p in images.pitches] == [1, 8 * 9, 8]
    assert [value_at(p, {"MB": 9, "IW": 7}) for p in images.pitches] == [1, 16 * 7, 16]


def test_workspaces_are_as_long_as_the_sizes_say() -> None:
    plan = built("padded")[1]
    names = [*plan.workspaces]
    rooms = dict(zip(names, (room for (room,) in plan.numbers(3, 40)[-1]), strict=True))
    assert rooms == {"src_packed": 3 * 40 * 16, "dst_packed": 3 * 40 * 24}


@pytest.mark.slow
def test_rows_as_long_as_a_size_begin_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a matrix that is read along its columns: boxes of the copy need it, whatever K is."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    compute = parse(MATRICES)
    text = "m:16 n:16 k:16 | mma | a=box b=box | {}swap=1 stages=2 warps=4"
    reason = why_not(Schedule.parse(text.format("")), compute, SM90)
    assert reason and "16 bytes" in reason
    plan = build_compute(compute, executable(SM90, "cpu"), Schedule.parse(text.format("pack=a.b ")))
    assert [s.does for s in plan.steps] == ["pack", "pack", "compute"]
    for drawn in ({"M": 1, "N": 1, "K": 1}, {"M": 5, "N": 20, "K": 24}, {"M": 17, "N": 3, "K": 33}):
        case = ComputationCase(compute.at(**drawn))
        kernels = [s.kernel.at(drawn) for s in plan.steps]
        for judged in (case.launched(plan, "cpu"), case.interpreted(*kernels)):
            assert not judged.problem, (drawn, judged.problem)


def test_stride_phases_share_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plain, names = marked("mb2?ic16iw9?oc16ow5kw3sw2pw1 dt=f16 tag=ncw")
    workload = ConvWorkload(ConvProblem.parse(plain), Prop.BWD_D, Epilogue(), names)
    schedule = Schedule.parse("qw:16 ic:16 oc:16 | mma | a=box b=box | pack=a.b swap=1 stages=2 warps=4")
    plan = build(workload, executable(SM90, "cpu"), schedule, None, False, Plan)
    assert sorted(s.compute.name for s in plan.steps) == ["bwd_d", "pack_dst", "pack_wei"]
    for drawn in ({"MB": 1, "IW": 2}, {"MB": 3, "IW": 9}, {"MB": 2, "IW": 40}):
        phases = [ComputationCase(c.at(**drawn)) for c in workload.computations]  # of the same data
        given = phases[0].tensors("cpu")
        plan.launch(**given)
        for case in phases:
            want, got = case.answers["src"].value, given["src"].double().numpy()
            assert ((got == want) | np.isnan(want)).all() and np.isnan(want).any(), drawn
        assert not np.isnan(given["src"].numpy()).any()


@pytest.mark.slow
def test_plans_lie_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    plain, names = marked("mb8?ic128iw4096?oc128ow4096kw3pw1 dt=bf16 tag=ncw")
    workload = ConvWorkload(ConvProblem.parse(plain), Prop.FWD, Epilogue(), names)
    plan = build(workload, SM90, None, None, False, Plan)
    assert plan.schedule.pack == "a.b"
    plan_cache.keep(plan)
    again = plan_cache.find(workload, SM90, False, Plan, lambda: pytest.fail("made again"))
    assert again is not None and again.numbers(3, 50) == plan.numbers(3, 50)
    assert {n: t.extents for n, t in again.workspaces.items()} == {
        n: t.extents for n, t in plan.workspaces.items()
    }
    assert again.formulas()[0].us == plan.formulas()[0].us


def test_only_copies_of_given_sizes_are_made_once() -> None:
    """A frozen weight's is; that of an image whose size is an argument is made at every call."""
    plan = built("operands")[1]
    assert apart(plan, "src") is None
    halves = apart(plan, "wei")
    assert halves and [s.does for s in halves.rest.steps] == ["pack", "compute"]
    assert halves.rest.numbers(2, 5)[-1] == ((2 * 5 * 16,),)


def test_the_estimate_counts_the_elements_that_are_copied() -> None:
    (compute,) = layer("mb8?ic64iw4096?oc64ow4096kw3pw1 dt=bf16 tag=ncw", Prop.FWD)
    schedule = Schedule.parse("ow:128 oc:64 ic:64 | mma | a=box b=box | pack=a.b swap=1 stages=4 warps=4")
    at = AtSizes(schedule, compute, SM90)
    for drawn in ({"MB": 8, "IW": 4096}, {"MB": 3, "IW": 20000}):
        us = at.us(*(value_at(n, drawn) for n in at.counts))
        exact = estimate(schedule, compute.at(**drawn), SM90)
        assert us == pytest.approx(exact, rel=0.02), drawn
    assert estimate(schedule, compute, SM90) == pytest.approx(
        estimate(schedule, compute.at(MB=8, IW=4096), SM90), rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("prop", [Prop.FWD, pytest.param(Prop.BWD_W, marks=pytest.mark.slow)])
def test_kernels_of_a_layer_share_copies(prop: Prop) -> None:
    """At most six kernels, as everywhere: copies do not depend on the example that a plan is for."""
    problem = ConvProblem.parse("mb2ic64iw99oc128ow99kw3pw1 dt=bf16 tag=ncw")
    made = LayerRegistry(problem, prop, SM90, Epilogue(), True, False)
    made.complete()
    plans = [k.plan for k in made.there.values() if k.plan.schedule.pack]
    copies = {s.digest for p in plans for s in p.steps if is_copy(s.compute)}
    assert plans and len(copies) == 2 and len(made.kernels) <= 6
    long = made.choose((4, 60001), "now").plan
    assert {"a", "b"} <= {*long.schedule.pack.split(".")} and long.schedule.a == "box"
    assert long.required and "1 <= MB" not in str(long.required.sizes)
    if prop is Prop.FWD:  # rows of multiples of 16 bytes are written in boxes
        assert long.schedule.c == "gather"
        assert made.choose((4, 60000), "now").plan.schedule.c == "box"


def test_a_copy_requires_what_concerns_its_tensor_alone() -> None:
    """Not what divides a size, nor that the other tensor has elements: kernels that need it share it."""
    for text, least in (
        ("mb2?ic16iw9?%8oc16ow9kw3pw1 dt=f16 tag=ncw", {"src": 1, "dst": 1}),
        ("mb2?ic16iw9?oc16ow5kw5 dt=f16 tag=ncw", {"src": 1, "dst": 5}),
    ):
        (compute,) = layer(
            text.replace("iw9", "iw16").replace("ow9", "ow16").replace("ow5", "ow12"), Prop.BWD_W
        )
        schedule = Schedule.parse("ic:16 oc:16 ow:16 | mma | a=box b=box | pack=a.b stages=2 warps=4")
        for copy in Scheduled(compute, schedule, SM90).copies:
            assert copy.named is not None and not any(find(c, Mod) for c in copy.named.where)
            assert copy.named.each[1].least == least[copy.a.tensor.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["operands", "gradient", "weight"])
def test_machine_code(name: str) -> None:
    for found in compile_offline([job_of(s, SM90, words=False) for s in built(name)[1].steps]):
        assert isinstance(found, Resources) and not found.flaw, found


@pytest.mark.slow
def test_a_start_takes_workspaces_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its sizes say, and hands them to the kernels that take them: not to the weight's copy."""
    plan = built("operands")[1]
    begun: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        KernelStart, "__call__", lambda self, sizes, at, given, stream: begun.append((*sizes, *given))
    )
    monkeypatch.setattr(
        TritonKernel, "begun", lambda self, *_: KernelStart(None, None, sizes=len(self.names))
    )  # as where Triton starts kernels
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: device, raising=False)
    monkeypatch.setattr(plans.torch_internals, "quickest", lambda: lambda shape, stride, dtype: shape[0])
    start = plan.starter_at(0, True, ("src", "wei", "dst"))
    assert start is not None
    start((3, 50))(1, 2, 3)
    packed, weight = 3 * 50 * 16, 16 * 3 * 16
    assert begun == [(3, 50, 1, packed), (2, weight), (3, 50, packed, weight, 3)]
    assert [room for room, _ in plan.at({"MB": 1, "IW": 7}).spaces()] == [(7 * 16,), (weight,)]


@pytest.mark.slow
def test_results_that_begin_anywhere_are_stored_one_by_one() -> None:
    """By a kernel of Gluon, which stores sums as the matrix unit leaves them: rows of an odd length, or of
    a length that is an argument; not rows of a multiple of 16 bytes."""
    words = "mma | a=box b=box | pack=a.b swap=1 programs=132 stages=6 warps=4 via=gluon"
    schedule = Schedule.parse(f"ow:128 oc:128 ic:64 | {words}")
    text = "mb8ic128iw{0}oc128ow{0}kw3pw1 dt=bf16 tag=ncw"
    odd, even = (computes(ConvProblem.parse(text.format(n)), Prop.FWD)[0] for n in (4097, 4096))
    stored = [count(schedule, c, SM90).stored.alone for c in (odd, even)]
    assert stored == [True, False]
    marks = (
        text.format("4096?").replace("ow4096?", "ow4096").replace("mb8", "mb8?"),
        text.format("4096?%8").replace("ow4096?%8", "ow4096").replace("mb8", "mb8?"),
    )
    assert [count(schedule, layer(m, Prop.FWD)[0], SM90).stored.alone for m in marks] == [True, False]
    assert estimate(schedule, odd, SM90) > 1.2 * estimate(schedule, even, SM90)


@pytest.mark.slow
def test_the_compiler_is_told_of_multiples() -> None:
    """It then stores two neighbours at once, with one mask; else products wait, for want of registers."""
    words = "mma | a=box b=box | pack=a.b swap=1 programs=132 consumers=2 stages=6 warps=4 via=gluon"
    schedule = Schedule.parse(f"iw:128 ic:128 oc:64 | {words}")
    jobs = []
    for share in ("", "%8"):
        (compute,) = layer(f"mb8?ic128iw4096?{share}oc256ow4096kw3pw1 dt=bf16 tag=ncw", Prop.BWD_D)
        step = build_compute(compute, SM90, schedule).steps[-1]
        assert step.source.count("IW = IW // 8 * 8") == (3 if share else 0), "in each role"
        jobs.append(job_of(step, SM90))
    free, told = compile_offline(jobs)
    assert isinstance(free, Resources) and isinstance(told, Resources)
    assert free.words["STG"] == 2 * told.words["STG"] and free.serialised and not told.serialised
    assert free.spill_bytes > told.spill_bytes == 0
