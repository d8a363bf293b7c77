"""Neighbouring groups seen as one: the same sums after every pass, chosen where groups are narrow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import convolve, integers, pack, unpack
from tests.stages import DRAWN, SM90, launches_of, shapes, small_schedules, wrong_stages
from tests.strategies import problems
from transconv.compute import describe
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.descriptor import parse_descriptor
from transconv.conv.relation import computes
from transconv.cost.model import estimate
from transconv.cost.work import count
from transconv.ir.interp.evaluate import Memory
from transconv.ir.interp.kernel import run
from transconv.passes import PIPELINE
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.copy_kernels import Scheduled, copies
from transconv.schedule.tiles.merging import merged, why_not_merged
from transconv.selection import choice, fitted
from transconv.selection.proposals import heuristics
from transconv.target.records import TARGETS

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
NHWC = "dt=f16 tag=axb"
RESNEXT = ConvProblem.parse("g32mb64ic128ih56oc128oh56kh3ph1 dt=bf16 tag=nhwc")

# -- every pass keeps the meaning -----------------------------------------------------------------

EXPLICIT = "a=box b=box swap=1 via=gluon stages=2 warps=4"
CASES = [
    (f"g4mb2ic16ih5oc16oh5kh3ph1 {NHWC}", FWD, "oh.ow:16 oc:16 ic:16 | mma | merge=4"),
    (f"g4mb2ic16ih5oc16oh5kh3ph1 {NHWC}", FWD, "oh.ow:16 oc:16 ic:16 | mma | merge=2 pack=b"),
    ("g4mb2ic16ih5oc16oh5kh3ph1 dt=f16", FWD, "oh.ow:16 oc:16 ic:16 | mma | merge=4 pack=a.b.c"),
    (f"g4mb2ic8ih5oc24oh5kh3ph1 {NHWC}", FWD, "oh.ow:16 oc:16 ic:16 | mma | merge=4 split_k=3"),
    (f"g4mb2ic8ih5oc24oh5kh3ph1 {NHWC}", FWD, "oh.ow:8 g:2 oc:4 | fma | merge=2"),
    (f"g8mb2ic8ih5oc8oh5kh3ph1 {NHWC}", FWD, "oh.ow:16 oc:16 ic:16 | mma | merge=8 pack=b"),
    (f"g6mb1ic12iw9oc18ow7kw3 {NHWC}", FWD, "ow:16 oc:16 ic:16 | mma | merge=3"),
    (f"g4mb1ic16id4oc16od4kd3pd1 {NHWC}", FWD, "oh.ow:16 oc:16 ic:16 | mma | merge=4 pack=b"),
    (
        f"g4mb2ic64ih4oc64oh4kh3ph1 {NHWC}",
        FWD,
        f"mb:1 oh:4 ow:4 oc:64 ic:64 | mma | {EXPLICIT} c=box merge=4 pack=b programs=2",
    ),
    (
        "g4mb2ic64ih4oc64oh4kh3ph1 dt=f16",
        FWD,
        f"mb:1 oh:4 ow:4 oc:64 ic:32 | mma | {EXPLICIT} merge=4 pack=a.b.c",
    ),
    (
        f"g8mb2ic32ih4oc128oh4kh3ph1 {NHWC}",
        FWD,
        f"mb:1 oh:4 ow:4 oc:64 ic:16 | mma | {EXPLICIT} merge=4 pack=b",
    ),
    (
        f"g4mb2ic16ih6oc16oh6kh3ph1 {NHWC}",
        FWD,
        "mb:1 oh:4 ow:4 oc:16 ic:16 | mma | a=box b=box c=box swap=1 merge=4 pack=b",
    ),
    (
        f"g4mb2ic16ih6oc16oh6kh3ph1 {NHWC}",
        FWD,
        "mb:1 oh:4 ow:4 oc:16 ic:16 | mma | a=box b=gather c=box swap=1 merge=4 programs=3",
    ),
    (f"g4mb2ic16ih5oc8oh5kh3ph1 {NHWC}", BWD_D, "ih.iw:16 ic:16 oc:16 | mma | merge=4 pack=b"),
    (f"g4mb2ic4ih5oc8oh5kh3ph1 {NHWC}", BWD_D, "ih.iw:16 ic:16 oc:16 | mma | merge=4"),  # ic=1
    (f"g4mb2ic16ih7oc16oh4kh3sh2ph1 {NHWC}", BWD_D, "qh.qw:16 ic:16 oc:16 | mma | merge=4 pack=b"),
    (
        f"g4mb2ic64ih8oc64oh4kh3sh2ph1 {NHWC}",
        BWD_D,
        f"mb:1 qh:4 qw:4 ic:64 oc:64 | mma | {EXPLICIT} merge=4 pack=b",
    ),
    (f"g4mb2ic16ih8oc16oh4kh2sh2 {NHWC}", BWD_D, "qh.qw:16 ic:16 oc:16 | mma | merge=2 pack=b"),
    (f"g4mb2ic16ih5oc16oh5kh3ph1 {NHWC}", BWD_W, "ic:16 oc:16 mb.oh.ow:16 | mma | merge=4"),
    (
        "g4mb2ic16ih5oc16oh5kh3ph1 dt=f16",
        BWD_W,
        "ic:16 oc:16 mb.oh.ow:16 | mma | merge=4 pack=a.b split_k=3",
    ),
    (f"g4mb2ic8ih5oc24oh5kh3ph1 {NHWC}", BWD_W, "kw.ic:16 oc:16 mb.oh.ow:16 | mma | merge=4"),
    (
        f"g4mb2ic64ih4oc64oh4kh3ph1 {NHWC}",
        BWD_W,
        f"kh.kw.ic:128 oc:64 mb:1 oh:4 ow:4 | mma | {EXPLICIT} merge=4 split_k=2",
    ),
    (
        f"g4mb2ic64ih4oc64oh4kh3ph1 {NHWC}",
        BWD_W,
        f"ic:64 oc:64 mb:1 oh:4 ow:4 | mma | {EXPLICIT} merge=4 reduce=stream programs=5 group_m=1",
    ),
]


@pytest.mark.every(10)
@pytest.mark.parametrize(
    ("text", "prop", "schedule"), CASES, ids=[f"{i}-{c[1]}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_merged_groups(text: str, prop: Prop, schedule: str) -> None:
    p = ConvProblem.parse(text)
    steps = compiler.plan_steps(p, prop, SM90, Schedule.parse(schedule), Epilogue())
    assert wrong_stages(p, prop, launches_of(steps)) == []


@settings(DRAWN, max_examples=12)
@given(
    st.data(),
    problems(),
    st.sampled_from(list(Prop)),
    st.integers(2, 4),
    st.sampled_from(["", "b", "a.b"]),
    st.integers(0, 2**32 - 1),
)
def test_every_pass_keeps_the_meaning(
    data: st.DataObject, p: ConvProblem, prop: Prop, merge: int, pack_: str, seed: int
) -> None:
    """Any problem, with several times its groups, of which ``merge`` are seen as one."""
    shape = parse_descriptor(p.shape_text)
    shape = replace(shape, g=p.g * merge, ic=p.ic * merge, oc=p.oc * merge)
    p = ConvProblem.of_descriptor(shape, "f16", data.draw(st.sampled_from(["abx", "axb"])))
    first = computes(p, prop)[0]
    if not all(x.size for x in first.axes) or why_not_merged(first, merge):
        return
    schedule = replace(small_schedules(merged(first, merge), data.draw), merge=merge)
    schedule = c if why_not(c := replace(schedule, pack=pack_), first, SM90) is None else schedule
    if any(
        why_not(fitted(schedule, a, SM90), a, SM90)
        for a in computes(p, prop)
        if all(x.size for x in a.axes)
    ):
        return  # another stride phase refuses what was drawn for the first
    switches = {s.name: data.draw(st.booleans()) for s in PIPELINE if s.optional}
    steps = compiler.plan_steps(p, prop, SM90, schedule, Epilogue())
    assert wrong_stages(p, prop, launches_of(steps, switches), seed) == []


def test_bias_counts_all_channels() -> None:
    p = ConvProblem.parse(f"g4mb1ic16ih5oc16oh5kh3ph1 {NHWC}")
    schedule = Schedule.parse("oh.ow:16 oc:16 ic:16 | mma | merge=4")
    ((compute, chosen),) = compiler.plan_steps(p, FWD, SM90, schedule, Epilogue.parse("bias"))
    rng = np.random.default_rng(1)
    values = {n: integers(rng, shapes(p)[n], 2) for n in ("src", "wei")}
    bias = np.arange(16.0)
    expected = convolve(p, FWD, values["src"], values["wei"]) + bias[:, None, None]
    for _, kernel in compiler.lower(compute, chosen, SM90, "conv", "ieee"):
        buffers = {n: pack(v, getattr(p, n).layout) for n, v in values.items()}
        buffers |= {"bia": bias.astype("float16"), "dst": np.zeros(p.dst.layout.span, "float16")}
        run(kernel, memory := Memory(buffers))
        assert np.array_equal(unpack(memory.buffers["dst"], p.dst.layout, shapes(p)["dst"]), expected)


def test_the_copy_has_zeros_around_its_blocks() -> None:
    p = ConvProblem.parse(f"g6mb1ic12ih3oc18oh3kh1 {NHWC}")
    (copy,) = copies(merged(computes(p, FWD)[0], 3), "b")
    made = np.full(copy.c.tensor.layout.span, np.nan, "float16")
    filters = np.arange(1, 37, dtype="float16")  # [oc=18, ic=2]
    kernel = compiler.lower(copy, heuristics.default(copy, SM90), SM90, "copy")[-1][1]
    run(kernel, memory := Memory({"wei": filters, "wei_packed3": made}))
    got = unpack(memory.buffers["wei_packed3"], copy.c.tensor.layout, copy.c.tensor.shape).reshape(18, 6)
    for oc in range(18):
        group = oc // 3 % 3  # one of three groups that are merged
        expected = np.zeros(6)
        expected[group * 2 : group * 2 + 2] = filters.reshape(18, 2)[oc]
        assert np.array_equal(got[oc], expected), oc


# -- when it is legal -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "prop", "schedule", "said"),
    [
        ("mb1ic16ih4oc16oh4kh3ph1", FWD, "merge=2", "merge=2, but fwd has no groups"),
        ("g6mb1ic12ih4oc12oh4kh3ph1", FWD, "merge=4", "merge=4 does not divide the 6 groups"),
        ("g6mb1ic12ih4oc12oh4kh3ph1", FWD, "merge=0", "merge=0: at least one group is seen as one"),
        ("g8mb1ic8ih4oc16oh4kh3ph1", BWD_W, "merge=4", "groups have one ic"),
        ("g8mb1ic16ih4oc16oh4kh3ph1", BWD_W, "merge=4 pack=c", "only the blocks of wei are stored"),
        ("g8mb1ic16ih4oc16oh4kh3ph1", FWD, "merge=2", "the matrix unit takes 16 or more"),
        (
            "g8mb1ic64ih4oc64oh4kh3ph1",
            FWD,
            "ic:16 oc:16 oh.ow:16 a=gather b=box merge=4 swap=1",
            "the mask ((ic // 8) == (oc // 8)) says more than that ic is inside",
        ),
        ("g8mb1ic64ih4oc64oh4kh3ph1", FWD, "ic:16 oc:16 oh.ow:16 pack=b", "wei already has ic innermost"),
    ],
)
def test_why_not(text: str, prop: Prop, schedule: str, said: str) -> None:
    compute = computes(ConvProblem.parse(f"{text} {NHWC}"), prop)[0]
    reason = why_not(Schedule.parse(schedule), compute, SM90)
    assert reason is not None and said in reason


def test_text_form() -> None:
    schedule = Schedule.parse("oc:64 ic:64 | mma | merge=16 pack=b")
    assert schedule.merge == 16 and Schedule.parse(str(schedule)) == schedule
    assert "merge" not in str(Schedule())


def test_merging_twice_is_merging_once() -> None:
    compute = computes(RESNEXT, FWD)[0]
    once = merged(compute, 16)
    assert merged(once, 16) is once is merged(once, 1)
    assert why_not_merged(once, 8) == "merge=8, but fwd has 16 groups merged already"
    assert once.sizes["g"] == 2 and once.sizes["ic"] == once.sizes["oc"] == 64


def test_the_page_of_a_merged_compute() -> None:
    page = describe(merged(computes(RESNEXT, FWD)[0], 16))
    assert "A = src[mb, ic = g*64 + ic, ih = oh + kh - 1, iw = ow + kw - 1]" in page
    assert "B = wei[oc = g*64 + oc, ic = ic % 4, kh, kw]" in page
    assert "kept:        ic // 4 == oc // 4" in page


# -- where it is chosen ---------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize("text", ["g32mb64ic128ih56oc128oh56kh3ph1", "g32mb64ic256ih28oc256oh28kh3ph1"])
def test_chosen_for_narrow_groups(text: str, prop: Prop) -> None:
    """As boxes of 64 channels, estimated to take a third of the time at most."""
    compute = computes(ConvProblem.parse(f"{text} dt=bf16 tag=nhwc"), prop)[0]
    schedule = heuristics.default(compute, SM90)
    assert schedule.merge * compute.sizes["ic"] == 64 and schedule.a == "box"
    explicit = next(c for c in heuristics.candidates(compute, SM90) if c.via == "gluon")
    assert explicit.merge == schedule.merge and explicit.pack == ("" if prop is BWD_W else "b")
    alone = [
        c
        for c in heuristics.proposals(compute, SM90)
        if c.merge == 1 and why_not(c, compute, SM90) is None
    ]
    assert min(estimate(c, compute, SM90) for c in alone) > 3 * estimate(schedule, compute, SM90)


@pytest.mark.parametrize("name", ["sm_80", "sm_120", "gfx942", "interpreter"])
def test_chosen_on_other_chips(name: str) -> None:
    compute = computes(RESNEXT, FWD)[0]
    schedule = heuristics.default(compute, TARGETS[name])
    assert schedule.merge > 1 and schedule.via == "tl"


@pytest.mark.parametrize(
    "text",
    [
        "mb8ic64ih14oc64oh14kh3ph1",
        "g2mb8ic128ih14oc128oh14kh3ph1",
        "g32mb8ic32ih14oc32oh14kh3ph1",
        "g32mb8ic128ih14oc128oh14kh3ph1 dt=f32 math=ieee",
        "g32mb8ic128ih14oc128oh14kh3ph1 dt=f64",
    ],
)
def test_not_proposed(text: str) -> None:
    """No groups; wide ones; one channel a group; products that the cores would have to make."""
    dtype = "" if "dt=" in text else "dt=bf16"
    for prop in Prop:
        compute = computes(ConvProblem.parse(f"{text} {dtype} tag=nhwc"), prop)[0]
        assert all(c.merge == 1 for c in heuristics.proposals(compute, SM90))


def test_products_grow_and_bytes_do_not() -> None:
    compute = computes(RESNEXT, FWD)[0]
    blocks = "mb.oh.ow:128 oc:16 ic:16"
    alone, wide = (count(Schedule.parse(f"{blocks} | merge={m}"), compute, SM90) for m in (1, 16))
    assert wide.traffic == alone.traffic
    assert wide.tiles * wide.steps == 16 // 4 * 16 // 4 * alone.tiles * alone.steps // 16
    said = choice.parts(Schedule.parse(f"{blocks} | merge=16"), compute, SM90)
    assert "29.6 GFLOP" in said and "16 times the products" in said


def test_the_copy_is_of_the_weights_alone() -> None:
    compute = computes(RESNEXT, FWD)[0]
    over = Scheduled(compute, Schedule(merge=16, pack="b"), SM90).main
    assert over.a is merged(compute, 16).a and over.b is not None
    assert over.b.tensor.shape == (128, 64, 3, 3) and over.b.tensor.name == "wei_packed16"


@pytest.mark.parametrize("prop", [FWD, BWD_D])
def test_phases_with_other_merges_have_other_copies(prop: Prop) -> None:
    """A workspace is found by its name, so that copies that differ have names that do."""
    compute = computes(RESNEXT, prop)[0]
    made = [next(copies(merged(compute, m), "b")) for m in (1, 8, 16)]
    assert [c.name for c in made] == ["pack_wei", "pack_blocks8_wei", "pack_blocks16_wei"]
    assert [c.c.tensor.name for c in made] == ["wei_packed", "wei_packed8", "wei_packed16"]
    assert not any(c.phase for c in made)


def test_stride_phases_of_merged_groups_are_one_launch() -> None:
    problem = ConvProblem.parse("g32mb64ic256ih56oc256oh28kh3ph1sh2 dt=bf16 tag=nhwc")
    schedule = Schedule.parse(
        "mb:16 qh:4 qw:4 ic:64 oc:64 | a=box b=box c=box merge=8 pack=b swap=1 "
        "programs=132 stages=4 warps=4 via=gluon"
    )
    made = compiler.build(problem, BWD_D, SM90, schedule)
    assert [s.compute.name for s in made.steps] == ["pack_blocks8_wei", "bwd_d"]
    assert [*made.workspaces] == ["wei_packed8"]
