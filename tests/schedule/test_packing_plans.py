"""Copies in plans of several kernels: once for all that need them, where what they copy is there; and when
they are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.reference import integers, pack, unpack
from tests.stages import SM90, SM100, launches_of, wrong_stages
from transconv import runtime
from transconv.compute import Alone, parse
from transconv.compute.compute import Compute
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.cost import model as cost
from transconv.ir import convert, tf32
from transconv.ir.interp.evaluate import Memory
from transconv.ir.interp.kernel import run
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.copy_kernels import is_copy
from transconv.schedule.tiles.packing import copy_of, over_copies, why_not_copied
from transconv.selection.proposals import heuristics
from transconv.target.records import Target
from transconv.verify.case import ProblemCase

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W

# -- plans ----------------------------------------------------------------------------------------


def test_a_plan_copies_once_for_all_phases() -> None:
    p = ConvProblem.parse("mb4ic16ih8oc16oh4kh3sh2ph1 dt=f16")
    schedule = Schedule.parse("mb:2 qh:2 qw:4 oc:16 ic:16 | mma | a=box b=box | pack=a.b.c swap=1")
    plan = compiler.build(p, BWD_D, SM100, schedule)
    names = [s.compute.name for s in plan.steps]
    assert names == [
        "pack_dst",
        "pack_wei",
        *(f"bwd_d_{r}_{s}" for r in (0, 1) for s in (0, 1)),
        "unpack_src",
    ]
    assert set(plan.workspaces) == {"dst_packed", "wei_packed", "src_packed"}
    assert plan.schedule == schedule
    assert plan.workspaces["src_packed"].layout == copy_of(computes(p, BWD_D)[0].c.tensor).layout


def test_phases_agree_about_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy back is of all elements: no phase may have written them to the result itself."""
    p = ConvProblem.parse("mb4ic16ih8oc16oh4kh3sh2ph1 dt=f16")
    packed = Schedule.parse("mb:2 qh:2 qw:4 oc:16 ic:16 | mma | a=box b=box | pack=a.b.c swap=1")
    direct = Schedule.parse("mb:2 qh:2 qw:4 oc:16 ic:16 | mma")

    def choose(compute: Compute, target: object) -> Schedule:
        if is_copy(compute):
            return heuristics.default(compute, SM100)
        return direct if compute.name.endswith("_1_1") else packed

    steps = compiler.plan_steps(p, BWD_D, SM100, None, Epilogue(), choose)
    mains = [c for a, c in steps if not is_copy(a)]
    assert len(mains) == 4 and all(c.unpacks for c in mains)
    assert wrong_stages(p, BWD_D, launches_of(steps, target=SM100)) == []


SUMS = ConvProblem.parse("mb1ic3ih4oc64oh4kh3ph1 dt=s8:s8:s32 tag=nchw")


def test_what_another_kernel_reads_is_not_copied_with_the_result() -> None:
    """Kernels that store other tensors than the result need not agree about a copy."""
    schedule = Schedule.parse("mb.oh.ow:16 oc:16 ic:32 | mma | pack=c")
    steps = compiler.plan_steps(SUMS, FWD, SM90, schedule, Epilogue.parse("zero:src"))
    assert [a.name for a, _ in steps] == ["zero_src", "zero_src_sum", "fwd", "unpack_dst"]


def test_a_copy_between_two_kernels() -> None:
    """What one stores to a copy is copied back before the other reads it."""
    case = ProblemCase(SUMS, FWD, "zero:src", "cpu", target=SM90, numpy=True)

    def choose(compute: Compute, target: Target) -> Schedule:
        packs = compute.does == "compute" and why_not_copied(compute, "c") is None
        return Schedule.parse("ow:8 | fma | pack=c") if packs else heuristics.default(compute, target)

    plan = compiler.build(SUMS, FWD, SM90, None, case.after, choose)
    assert [s.compute.name for s in plan.steps] == [
        "zero_src",
        "unpack_src_zero_sums",
        "fwd",
        "unpack_dst",
    ]
    assert case.judge(plan, "exact").reason == ""


CHAIN = parse("""
compute chain
    tensor X f32 [n=2, c=3, h=4, w=4] nchw
    tensor W f32 [o=6, c=3, kh=1, kw=1] nchw
    tensor V f32 [p=5, o=6, kh=1, kw=1] nchw
    tensor Y f32 [n=2, p=5, h=4, w=4] nchw
    axes   n=2 h=4 w=4 p=5 o=6 | c=3
    read   a = X[n, c, h, w]
    read   b = W[o, c, 0, 0]
    let    y = sum(a*b; c)
    read   v = V[p, o, 0, 0]
    store  Y[n, p, h, w] = sum(y*v; o)
""")


@pytest.mark.slow
def test_a_copy_of_what_an_earlier_kernel_stored() -> None:
    """It follows that kernel, and the copy back of what is packed again."""

    def choose(compute: Compute, target: Target) -> Schedule:
        letters = [
            x
            for x in "abc"
            if compute.does == "compute"
            and (x != "b" or compute.b is not None)
            and why_not_copied(compute, x) is None
        ]
        chosen = "n.h.w:16 | fma | pack=" + ".".join(letters)
        return Schedule.parse(chosen) if letters else heuristics.default(compute, target)

    plan = runtime.build(Alone(CHAIN), SM90, None, choose, False, runtime.Plan)
    names = [s.compute.name for s in plan.steps]
    assert names[names.index("chain_1") :] == [
        "chain_1",
        "unpack_y_kept",
        "pack_exact_y_kept",
        "chain_2",
        "unpack_Y",
    ]
    rng = np.random.default_rng(0)
    given = {t.name: integers(rng, t.shape) for t in CHAIN.tensors}
    buffers = {n: v.astype(np.float32).ravel() for n, v in given.items()}
    buffers |= {n: np.full(t.layout.span, np.nan, np.float32) for n, t in plan.workspaces.items()}
    memory = Memory(buffers)
    for step in plan.steps:
        memory.new_launch()
        run(step.kernel, memory)
    y = np.einsum("nchw,oc,po->nphw", given["X"], given["W"][..., 0, 0], given["V"][..., 0, 0])
    assert np.array_equal(memory.buffers["Y"], y.ravel())


@pytest.mark.slow
def test_each_unit_reads_its_own_copy() -> None:
    """The matrix unit multiplies what was rounded to tf32, products element by element all of f32, also
    where phases of one plan mix both: none may be given the copy of the other."""
    p = ConvProblem.parse("mb4ic16ih8oc16oh4kh3sh2ph1 dt=f32")
    blocks = "mb.qh.qw:16 ic:16 oc:16"

    def choose(compute: Compute, target: object) -> Schedule:
        if is_copy(compute):
            return heuristics.default(compute, SM90)
        return Schedule.parse(f"{blocks} | {'fma' if compute.part == (1, 1) else 'mma'} | pack=a.b")

    steps = compiler.plan_steps(p, BWD_D, SM90, None, Epilogue(), choose)
    assert [a.name for a, _ in steps if is_copy(a)] == [
        "pack_dst",
        "pack_wei",
        "pack_exact_dst",
        "pack_exact_wei",
    ]
    plan = compiler.build(p, BWD_D, SM90, None, None, choose)
    assert set(plan.workspaces) == {f"{t}_packed{e}" for t in ("dst", "wei") for e in ("", "_exact")}
    rng = np.random.default_rng(0)
    given = {"dst": rng.standard_normal((4, 16, 4, 4)), "wei": rng.standard_normal((16, 16, 3, 3))}
    near = {n: v.astype(np.float32) for n, v in given.items()}
    exact = {f"{n}_packed_exact": v for n, v in near.items()}
    rounded = {f"{n}_packed": convert(v, tf32) for n, v in near.items()}
    buffers = {n: pack(v, getattr(p, n).layout) for n, v in near.items()}
    buffers |= {n: np.full(t.layout.span, np.nan, np.float32) for n, t in plan.workspaces.items()}
    memory = Memory(buffers | {"src": np.zeros(p.src.layout.span, np.float32)})
    for step in plan.steps:
        memory.new_launch()
        run(step.kernel, memory)
        read = {t.name for t in step.kernel.params if t.copy_of}
        if step.compute.does == "compute":
            assert read == set(exact if step.schedule.unit == "fma" else rounded)
    for name, values in (exact | rounded).items():
        made = unpack(memory.buffers[name], plan.workspaces[name].layout, values.shape)
        assert np.array_equal(made, values), name


@pytest.mark.slow
def test_phases_share_the_longest_partials() -> None:
    p = ConvProblem.parse("mb1ic16ih8oc64oh4kh3sh2ph1 dt=f16")

    def choose(compute: Compute, target: object) -> Schedule:
        if compute.b is None:
            return heuristics.default(compute, SM90)
        split = 4 if compute.name.endswith("_0_0") else 2
        return Schedule.parse(f"mb.qh.qw:16 ic:16 oc:16 | mma | split_k={split}")

    plan = compiler.build(p, BWD_D, SM90, None, None, choose)
    assert plan.workspaces["partials"].shape[0] == 4


def test_problems_share_the_copies_of_their_tensors() -> None:
    p = ConvProblem.parse("mb4ic16ih8oc16oh8kh3ph1 dt=f16")
    schedule = "mb.oh.ow:16 oc:16 ic:16 | mma | pack=a"
    forward, weights = (compiler.build(p, prop, SM90, Schedule.parse(schedule)) for prop in (FWD, BWD_W))
    assert forward.steps[0].source == weights.steps[0].source
    assert forward.steps[0].digest == weights.steps[0].digest
    assert "pack_src of src: " in forward.steps[0].source


# -- the choice -----------------------------------------------------------------------------------


@pytest.mark.every(16)
@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize(
    "shape", ["mb32ic256ih56oc256oh56kh3ph1", "mb128ic512ih7oc512oh7kh3ph1", "ic128id32oc128od32kd3pd1"]
)
def test_large_channels_first_problems_pack(shape: str, prop: Prop) -> None:
    compute = computes(ConvProblem.parse(f"{shape} dt=bf16 tag=abx"), prop)[0]
    best = heuristics.default(compute, SM90)
    assert best.pack.startswith("a.b"), str(best)
    plain = next((c for c in heuristics.candidates(compute, SM90) if not c.pack), None)
    assert plain is None or cost.estimate(plain, compute, SM90) > cost.estimate(best, compute, SM90)


def test_pointwise_layers_take_channels_first_as_they_are() -> None:
    """Images of 56x56 are whole rows of pixels: boxes of them need no copy."""
    p = ConvProblem.parse("mb128ic64ih56oc256oh56kh1 dt=bf16 tag=abx")
    best = heuristics.default(computes(p, FWD)[0], SM90)
    assert (best.pack, best.a, best.b, best.c) == ("", "box", "box", "box")
    assert best.blocks[0].axes == ("oh", "ow")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "text",
    [
        "mb1ic16ih8oc16oh8kh3ph1 dt=bf16 tag=abx",
        "mb32ic256ih56oc256oh56kh3ph1 dt=bf16 tag=axb",
        "mb32ic256ih56oc256oh56kh3ph1 dt=f32 tag=abx math=ieee",
    ],
)
def test_others_do_not(text: str) -> None:
    for prop in Prop:
        compute = computes(ConvProblem.parse(text), prop)[0]
        assert heuristics.default(compute, SM90).pack == "", text


@pytest.mark.slow
def test_weights_alone() -> None:
    """A channels-last input and weights as torch makes them."""
    p = ConvProblem.parse("mb32ic256ih56oc256oh56kh3ph1 dt=bf16 tag=axb:abx:axb")
    best = heuristics.default(computes(p, FWD)[0], SM90)
    assert (best.pack, best.a, best.b, best.c) == ("b", "box", "box", "box")


def test_the_estimate_adds_the_copies() -> None:
    compute = computes(ConvProblem.parse("mb32ic256ih56oc256oh56kh3ph1 dt=bf16"), FWD)[0]
    schedule = Schedule.parse(
        "mb:4 oh:8 ow:8 oc:128 ic:64 | mma | a=box b=box | c=box pack=a.b.c swap=1 "
        "programs=132 stages=3 warps=8"
    )
    main = replace(schedule, pack="")
    over = over_copies(compute, schedule.pack)
    added = cost.estimate(schedule, compute, SM90) - cost.estimate(main, over, SM90)
    moved = 4 * 32 * 256 * 56 * 56 * 2 + 2 * 256 * 256 * 9 * 2
    assert added == pytest.approx(
        3 * SM90.rates.triton.copy_us + moved / (SM90.bandwidth_gbs * 1e3 * SM90.rates.triton.memory_share)
    )


@pytest.mark.parametrize("pack", ["b.b", "b.a"])
def test_an_operand_is_copied_once(pack: str) -> None:
    compute = computes(ConvProblem.parse("mb4ic16ih8oc16oh8kh3ph1 dt=f16"), FWD)[0]
    schedule = replace(Schedule.parse("mb.oh.ow:32 oc:16 ic:16 | mma"), pack=pack)
    assert "each operand is copied once" in str(why_not(schedule, compute, SM90))


# -- layers whose windows do not overlap ------------------------------------------------------------

PATCHES = "mb64ic3ih4oc32oh1kh4sh4ph0"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("types", "prop", "schedule"),
    [
        ("i8", BWD_D, "mb:64 rh.rw.ic:64 oc:32 | mma | a=box b=box | pack=b stages=3 warps=4 via=gluon"),
        ("bf16:f8e4m3:f8e5m2", BWD_D, "mb:64 rh.rw.ic:16 oc:32 | mma | pack=b stages=3 warps=4"),
        (
            "f8e4m3:f32:f8e5m2",
            BWD_W,
            "kh.kw.ic:64 oc:32 mb:64 | mma | a=box b=box | pack=a.b stages=3 warps=4 via=gluon",
        ),
    ],
)
def test_copies_of_bytes_keep_patches_together(types: str, prop: Prop, schedule: str) -> None:
    """What is summed lies innermost, features next to it, and the window before them: one block of columns
    runs along the window and the features, as in memory."""
    case = ProblemCase(
        ConvProblem.parse(f"{PATCHES} dt={types} tag=nhwc"), prop, where="cpu", target=SM90, numpy=True
    )
    plan = case.plan(schedule)
    letter = "wei_packed" if prop is BWD_D else "src_packed"
    inner = 32 if prop is BWD_D else 64
    assert plan.workspaces[letter].layout.strides() == (1, inner, 12 * inner, 3 * inner)
    assert case.judge(plan, "exact", 3).reason == ""


def test_copies_of_bytes_beneath_windows_that_overlap_have_features_outermost() -> None:
    compute = computes(ConvProblem.parse("mb64ic16ih4oc32oh4kh3ph1 dt=i8 tag=nhwc"), BWD_D)[0]
    made = over_copies(compute, "b").b
    assert made is not None and made.tensor.layout.strides() == (1, 9 * 32, 3 * 32, 32)
