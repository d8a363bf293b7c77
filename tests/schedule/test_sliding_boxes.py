"""Steps of a sum that share boxes (``slide=``): answers, what is fetched, why others share none."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import mean

import pytest

from tests.passes.test_explicit import BWD_D, BWD_W, FWD, ROLE, kernels, right_in_any_order
from tests.stages import SM90
from transconv import ir
from transconv.backend_triton.emitters.kernel_text import emit
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import any_size, computes
from transconv.cost import estimate
from transconv.schedule import Schedule, shared_bytes, why_not, word_rules
from transconv.support import knobs
from transconv.verify.case import ProblemCase

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "h200_slide_trials.csv"
H = f"{ROLE} order=kw.ic.kh slide=kh"
TILE = "oh:8 ow:8 oc:16 ic:16 |"
CASES = [  # with the rows of a slot, and the tiles of the other operand
    ("mb2ic32ih8oc24oh8kh3ph1", FWD, f"{TILE} {H} c=box stages=2", 10, 3),
    ("mb2ic32ih9oc24oh9kh3ph1", FWD, f"oh:4 ow:16 oc:16 ic:16 | {H} c=box stages=3 programs=3", 6, 3),
    ("mb2ic32ih8oc64oh8kh3ph1", FWD, f"oh:4 ow:8 oc:64 ic:16 | {H} swap=1 programs=3", 6, 3),
    ("mb3ic32ih8oc24oh8kh3ph1", FWD, f"{TILE} {H} consumers=2 programs=2 stages=3", 10, 3),
    ("mb2ic16ih11oc16oh7kh3dh1", FWD, f"{TILE} {H}", 12, 3),
    (
        "mb2ic16ih8oc32oh8kh3ph1",
        BWD_D,
        f"ih:8 iw:8 ic:16 oc:16 | {ROLE} c=box order=kw.oc.kh slide=kh",
        10,
        3,
    ),
    ("g2mb2ic32ih7oc48oh7kh3ph1", FWD, f"{TILE} {H}", 10, 3),
    (
        "mb1ic16id4ih8iw8oc16od4oh8ow8kd3kh3kw3pd1ph1pw1",
        FWD,
        f"od:4 oh:2 ow:8 oc:16 ic:16 | {ROLE} order=kh.kw.ic.kd slide=kd programs=2",
        6,
        3,
    ),
    (
        "mb1ic16id3ih8iw8oc16od3oh8ow8kd3kh3kw3pd2ph1pw1",
        FWD,
        f"{TILE} {ROLE} order=kd.kw.ic.kh slide=kh c=box",
        10,
        3,
    ),
]


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("text", "prop", "schedule", "rows", "others"),
    CASES,
    ids=[f"{i}-{c[1]}-{c[0]}" for i, c in enumerate(CASES)],
)
def test_the_answer_is_right_whoever_goes_first(
    text: str, prop: Prop, schedule: str, rows: int, others: int
) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag=axb")
    (kernel,) = right_in_any_order(p, prop, schedule)
    rings = [
        s.what
        for s in ir.find(kernel, ir.Shared)
        if isinstance(s.what, ir.SmemRing) and s.what.name.endswith("_ring")
    ]
    (moved,) = (r for r in rings if r.name[:3] == prop.operands[0][:3])
    (other,) = (r for r in rings if r is not moved)
    assert moved.members * next(e for e in moved.extents if e > 1) == rows and other.members == others
    (compute,) = computes(p, prop)
    assert sum(r.slots * r.members * r.box_bytes for r in rings) == shared_bytes(
        Schedule.parse(schedule), compute
    )


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("dtypes", "wide", "epilogue"),
    [
        ("i8", 32, "mul:f32:per_oc+add:s32:common"),
        ("f8e4m3:f8e5m2:bf16", 32, "mul:f32:common"),
        ("f8e4m3:f8e5m2:bf16 math=ieee", 32, "mul:f32:common"),
        ("f32", 16, ""),
    ],
)
def test_types_of_all_widths_share(dtypes: str, wide: int, epilogue: str) -> None:
    p = ConvProblem.parse(f"mb2ic64ih9oc64oh9kh3ph1 dt={dtypes} tag=nhwc")
    case = ProblemCase(p, FWD, epilogue, where="cpu", target=SM90, numpy=True)
    plan = case.plan(f"oh:4 ow:16 oc:64 ic:{wide} | {H} swap=1 consumers=2 programs=3 stages=2")
    for data in ("exact", "float"):
        found = case.judge(plan, data)
        assert found.right, f"{data}: {found.reason}"


@pytest.mark.every(2)
@pytest.mark.parametrize("stages", [2, 3])
def test_sums_that_move_are_parts_of_a_group(stages: int) -> None:
    """A part has one step, or as many as 128 products and the ring have; what is left is a part, too."""
    p = ConvProblem.parse("mb2ic64ih8oc64oh8kh3ph1 dt=f8e4m3:f8e4m3:f32 tag=axb math=ieee")
    (kernel,) = right_in_any_order(p, FWD, f"oh:8 ow:8 oc:32 ic:32 | {H} stages={stages} programs=2")
    parts = {s.var.name for s in ir.find(kernel, ir.Alloc) if s.var.name.startswith("part")}
    assert len(parts) == (3 if stages == 2 else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("mb2ic64ih16oc16oh8kh4sh2ph1", 1),  # two steps along th in each phase: one launch
        ("mb2ic64ih16oc16oh8kh3sh2ph1", 2),  # one or two
    ],
)
def test_stride_phases_share_what_they_can(text: str, shared: int) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag=axb")
    schedule = f"qh:4 qw:16 ic:16 oc:16 | {ROLE} order=tw.oc.th slide=th programs=3 stages=2"
    launches = right_in_any_order(p, BWD_D, schedule)
    counts = {
        max(s.what.members for s in ir.find(k, ir.Shared) if isinstance(s.what, ir.SmemRing))
        for k in launches
    }
    assert len(counts) == shared


def test_the_text_reads_a_window_of_the_rows() -> None:
    text, prop, schedule, *_ = CASES[0]
    (kernel,) = kernels(ConvProblem.parse(f"{text} dt=f16 tag=axb"), prop, schedule)
    source = emit(kernel)
    assert source.count("hopper.warpgroup_mma(") == 3 and "warpgroup_mma_wait(3," in source
    assert all(
        f"pile(src_ring_rows.index(slot * 10 + {kh}), src_ring_rows.dtype," in source for kh in range(3)
    )
    assert source.count("fetch_box(src_box") == 5, "10 rows, 2 in a box"
    assert "pile = gl.shared_memory_descriptor.reinterpret" in source


@pytest.mark.parametrize(
    ("text", "prop", "schedule", "reason"),
    [
        ("ic32ih8oc16oh8kh3ph1", FWD, f"{TILE} a=box b=box order=kw.ic.kh slide=kh", "via=gluon"),
        ("ic32ih8oc16oh8kh3ph1", FWD, f"{TILE} {ROLE} slide=kh", "the innermost axis of the sum"),
        ("ic32ih8oc16oh8kh3ph1", FWD, f"{TILE} {ROLE} slide=kd", "names no axis"),
        ("ic32ih8oc16oh8kh3ph1", FWD, f"{TILE} {ROLE} order=kh.kw.ic slide=ic", "names no axis"),
        ("ic32ih8oc16oh8kh3ph1", FWD, f"{TILE} {ROLE} order=kh.ic.kw slide=kw", "by whole rows of a box"),
        (
            "ic32ih16oc16oh8kh3sh2ph1",
            FWD,
            f"{TILE} {ROLE} order=kw.ic.kh slide=kh",
            "by whole rows of a box",
        ),
        (
            "ic32ih8iw64oc16oh8ow64kh3kw3ph1pw1",
            FWD,
            f"oh:1 ow:64 oc:16 ic:16 | {H}",
            "by whole rows of a box",
        ),
        ("ic32ih16oc16oh16kh3ph1", FWD, f"oh:16 ow:4 oc:16 ic:16 | {H}", "by whole rows of a box"),
        ("mb2ic32ih8oc16oh8kh3ph1", FWD, f"mb:2 oh:4 ow:8 oc:16 ic:16 | {H}", "by whole rows of a box"),
        ("ic32ih8oc16oh8kh3ph1", FWD, f"{TILE} {H} split_k=2", "whole sums"),
        ("ic32ih8oc16oh8kh3ph1", FWD, f"{TILE} {H} keep=b programs=1", "fetches both"),
        ("mb4ic32ih8oc64oh8kh3ph1", BWD_W, f"ic:16 oc:64 oh:8 ow:8 | {ROLE} slide=kh", "names no axis"),
    ],
)
def test_why_steps_share_nothing(text: str, prop: Prop, schedule: str, reason: str) -> None:
    (compute,) = computes(ConvProblem.parse(f"{text} dt=f16 tag=axb"), prop)
    told = why_not(Schedule.parse(schedule), compute, SM90)
    assert told is not None and reason in told, told


@pytest.mark.parametrize(
    ("release", "wide"), [("3.6.0", True), ("3.7.1", True), ("3.8.0", False), ("3.10.0+git1", False)]
)
def test_releases_that_refuse_wide_views_share_nothing(
    release: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their compilers do: without the rule such a kernel is chosen, and torch computes in its place."""
    for module in (knobs, word_rules):
        monkeypatch.setattr(module, "triton_version", lambda: release)
    (compute,) = computes(ConvProblem.parse(f"{CASES[0][0]} dt=f16 tag=axb"), FWD)
    told = why_not(Schedule.parse(CASES[0][2]), compute, SM90)
    assert told is None if wide else told is not None and f"Triton {release}" in told


def test_tiles_that_are_transposed_share_nothing() -> None:
    (compute,) = computes(ConvProblem.parse("ic64ih8oc64oh8kh3ph1 dt=bf16:f8e4m3:f8e5m2 tag=nhwc"), BWD_D)
    words = f"ih:8 iw:8 ic:64 oc:64 | {ROLE} order=kw.oc.kh slide=kh swap=1 stages=2"
    told = why_not(Schedule.parse(words), compute, SM90)
    assert told is not None and "multiplied as they lie" in told, told


def test_boxes_that_take_every_second_position_share_nothing() -> None:
    """Of any size: the rows of one step are not those of the next."""
    (compute,) = any_size(ConvProblem.parse("mb1ic64ih14oc64oh7kh4sh2ph1 dt=bf16 tag=nhwc"), FWD)
    told = why_not(Schedule.parse(f"oh:8 ow:16 oc:64 ic:64 | {H} swap=1 stages=3"), compute, SM90)
    assert told is not None and "by whole rows of a box" in told, told


@pytest.mark.slow
def test_the_estimate_ranks_what_was_measured() -> None:
    """Of each problem the schedule with the least estimate, with shared boxes or without, takes little
    more than the fastest one; with fewer stages than are proposed they wait for boxes."""
    chip = replace(SM90, bandwidth_gbs=4800.0)
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with MEASURED.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            made = computes(ConvProblem.parse(row["problem"]), Prop(row["direction"]))
            if len(made) > 1 or row["behind"] or not row["us"] or not row["schedule"]:
                continue
            schedule = Schedule.parse(row["schedule"])
            if not schedule.slide or schedule.stages >= 3:
                us = estimate(schedule, made[0], chip)
                found[row["problem"], row["direction"]].append((us, float(row["us"])))
    taken = [min(each)[1] / min(us for _, us in each) for each in found.values() if len(each) > 1]
    assert len(taken) > 40 and max(taken) < 1.15 and exp(mean(map(log, taken))) < 1.02
