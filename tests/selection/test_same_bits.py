"""Schedules where the same bits are asked for: sums that end at an argument are grouped alike for all."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from transconv.compute import Alone, in_bands, parse, with_reference
from transconv.conv import ConvProblem, ConvWorkload, Prop
from transconv.cost import estimate
from transconv.runtime import Plan, build
from transconv.schedule import Schedule
from transconv.selection import (
    chain,
    grouped_alike,
    grouping,
    same_bits,
    shortlist,
    tuning_db,
    with_same_bits,
)
from transconv.support import ScheduleError
from transconv.target import TARGETS, Target
from transconv.verify.invariance.proof import reduction_tree

SM90 = TARGETS["sm_90"]
PROBLEM = ConvProblem.parse("mb8ic64ih28oc64oh28kh3ph1 dt=f16 tag=nhwc")
ANY = ConvWorkload(PROBLEM, Prop.BWD_W, open=frozenset({"mb"}))
BLOCKS = "ic:64 oc:64"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("mb.oh.ow:64 | mma | stages=3", "mb.oh.ow:64 | mma | stages=3"),
        ("mb.oh.ow:64 | mma | split_k=4", "mb.oh.ow:64 | mma | split_k=4 deal=1"),
        ("ow:32 | mma | order=oh.mb.ow", "ow:32 | mma | order=mb.oh.ow"),
        ("ow:32 | mma | order=oh.ow.mb split_k=2", "ow:32 | mma | order=mb.oh.ow split_k=2 deal=1"),
        ("oh.mb:32 | mma | order=oh.mb.ow", None),
        ("mb.oh.ow:64 | mma | split_k=4 reduce=atomic", None),
    ],
)
def test_samples_come_first_and_steps_are_dealt_out(given: str, wanted: str | None) -> None:
    found = grouped_alike(Schedule.parse(f"{BLOCKS} {given}"), ANY.computations[0])
    assert found == (None if wanted is None else Schedule.parse(f"{BLOCKS} {wanted}"))


def test_sums_of_a_number_of_steps_are_as_they_were() -> None:
    schedule = Schedule.parse(f"{BLOCKS} ow:32 | mma | order=oh.mb.ow split_k=2")
    assert grouped_alike(schedule, ConvWorkload(PROBLEM, Prop.BWD_W).computations[0]) == schedule


def test_the_choice_is_dealt_out() -> None:
    chosen = build(ANY, SM90, None, None, True, Plan).schedule
    assert chosen.split_k > 1 and chosen.deal == 1
    assert build(ANY, SM90, None, None, False, Plan).schedule.deal == 0


def test_a_given_schedule_that_groups_by_the_number_is_refused() -> None:
    given = Schedule.parse(f"{BLOCKS} mb.oh.ow:64 | mma | split_k=4")
    with pytest.raises(ScheduleError, match="the same bits were asked for"):
        build(ANY, SM90, given, None, True, Plan)


@pytest.mark.parametrize("rest", ["split_k=1 deal=1", "split_k=4 reduce=atomic deal=1"])
def test_only_parts_that_a_second_kernel_adds_are_dealt_out(rest: str) -> None:
    problem = ConvProblem.parse("mb8ic64ih28oc64oh28kh3ph1")
    with pytest.raises(ScheduleError, match="deal=1 deals out the steps of a split sum"):
        build(
            ConvWorkload(problem, Prop.BWD_W),
            SM90,
            Schedule.parse(f"{BLOCKS} mb.oh.ow:64 | mma | {rest}"),
            None,
            False,
            Plan,
        )


@pytest.mark.parametrize("prop", [Prop.FWD, Prop.BWD_D])
def test_few_and_many_samples_have_other_tiles_and_one_grouping(prop: Prop) -> None:
    """Also the stride phases of a gradient, which may then be one launch."""
    problem = ConvProblem.parse("mb1ic64ih14oc64oh7kh3sh2ph1 dt=bf16 tag=nhwc")
    chosen: dict[str, list[Schedule]] = {}
    groups: dict[str, set[object]] = {}
    for batch in (1, 64, 256):
        form, _ = ConvWorkload(problem, prop).with_batch(batch).of_any_batch()
        for compute in form.computations:
            listed = with_same_bits(3, compute, SM90, form)
            chosen.setdefault(compute.name, []).append(listed[0].schedule)
            groups.setdefault(compute.name, set()).update(grouping(k.schedule, compute) for k in listed)
    assert all(len(found) == 1 for found in groups.values())
    assert any(len({s.blocks for s in each}) > 1 for each in chosen.values())


def test_factors_of_all_plans_are_rounded_to_tf32_or_cut() -> None:
    """A copy and registers round them, the matrix unit cuts what it reads from a box."""
    problem = ConvProblem.parse("g2mb4ic328ih10iw19oc304oh10ow19kh1kw1 tag=nhwc:oihw:nhwc math=tf32")
    form = ConvWorkload(problem, Prop.BWD_D).of_any_batch()[0]
    found = set()
    for count in (1, 16, 128):
        of = form.with_batch(count)
        for listed in with_same_bits(3, of.computations[0], SM90, of):
            found.add((listed.schedule.pack, listed.schedule.a, listed.schedule.b))
    assert len(found) == 1
    compute = form.with_batch(16).computations[0]
    tile = "mb.ih.iw:128 ic:64 oc:32 | mma"
    rounded, cut = (
        reduction_tree(compute, Schedule.parse(f"{tile} | {rest}"))
        for rest in ("a=gather b=gather | warps=4", "a=box b=box | swap=1 stages=4 warps=4 via=gluon")
    )
    assert rounded != cut  # the certificate, too, has no such plans


DEPTHWISE = parse("""compute depthwise
    sizes  S=2 in 1..64
    tensor X bf16 [S, 3, 5, 6, 8]
    tensor W bf16 [8, 2, 3, 3]
    axes   g=8 n=S h=5 w=6 | kd=2 kh=3 kw=3
    read   x = X[n, kd + 1, h + kh - 1, w + kw - 1, g]
    read   y = W[g, kd, kh, kw]
    store  Y[n, h, w, g] = sum(x*y; kd kh kw)
""")
CHAINS = {
    "n.h.w:16 g:8 | fma | unroll=1": "kd kh kw",
    "n.h.w:16 g:8 | fma | order=kw.kh.kd": "kw kh kd",
    "n.h:8 w:3 kw:3 g:8 | fma | regs=w.kw": "kd kh kw",
    "n.h:8 w:3 kh:3 g:8 | fma | regs=w.kh": "kd kw kh",
    "n.h:8 w:3 kh:3 kw:3 g:8 | fma | regs=w.kh.kw": "kd kw kh",
    "n.h:8 w:3 kw:3 kh:3 g:8 | fma | regs=kw.w.kh": "kd kw kh",
    "n.h:8 w:3 kd:2 kh:3 kw:3 g:8 | fma | regs=w.kd.kh.kw": "kw kh kd",
    "n.h:8 kh:3 kw:3 g:8 | fma | regs=kh.kw order=kw.kh.kd": "kd kh kw",
    "n.h.w:16 kw:4 g:8 | fma": "",  # in lanes
    "n.h:8 w:3 kw:2 g:8 | fma | regs=w.kw": "",
}


@pytest.mark.parametrize("text", CHAINS)
def test_terms_are_added_one_after_another(text: str) -> None:
    """In the order that the grouping says: by adding them up in NumPy."""
    schedule, generator = Schedule.parse(text), torch.Generator().manual_seed(1)
    order = chain(schedule, DEPTHWISE)
    assert " ".join(order) == CHAINS[text]
    assert grouping(schedule, DEPTHWISE) == (order or schedule)
    if not order:
        return
    x, w = (torch.randn(s, generator=generator).bfloat16() for s in ((2, 3, 5, 6, 8), (8, 2, 3, 3)))
    y = torch.empty(2, 5, 6, 8)
    build(Alone(DEPTHWISE), TARGETS["interpreter"], schedule, None, True, Plan).at({"S": 2}).launch(
        X=x, W=w, Y=y
    )
    padded, total = np.pad(x.float().numpy(), ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))), np.float32(0)
    for at in itertools.product(*[range(DEPTHWISE.size(a)) for a in order]):
        kd, kh, kw = (dict(zip(order, at, strict=True))[a] for a in ("kd", "kh", "kw"))
        seen = padded[:, kd + 1, kh : kh + 5, kw : kw + 6]
        total = total + seen * w[:, kd, kh, kw].float().numpy()
    assert np.array_equal(y.numpy(), total)


def test_depthwise_kernels_for_few_and_many_samples_add_alike() -> None:
    compute = parse(str(DEPTHWISE).replace("S=2 in 1..64", "S=2 in 1..65536"))
    each = [with_reference(compute, "S", n) for n in in_bands(compute)]
    chosen = [with_same_bits(3, c, SM90, Alone(c)) for c in each]
    assert len(each) > 1 and len({k.schedule for own in chosen for k in own}) > 1
    assert len({chain(k.schedule, compute) for own in chosen for k in own}) == 1
    assert chain(chosen[0][0].schedule, compute)


def test_one_schedule_for_all_batches_is_weighed_for_few_and_many() -> None:
    """A norm with features last behind an image in torch's order: for 8 samples, but not for one, rows of
    one warp are as good."""
    norm = parse("""compute norm
        sizes  S=8 in 1..65536
        tensor X bf16 [S, 512, 16384]
        tensor Y bf16 [S, 512, 16384] acb
        axes   n=S g=32 | c=16 p=16384
        read   x = X[n, g*16 + c, p]
        let    mean = sum(x; c p) / 262144.0
        let    d = x - mean
        let    v = sum(d*d; c p)
        store  Y[n, g*16 + c, p] = d*rsqrt(v)
    """)
    (chosen,) = with_same_bits(1, norm, SM90, Alone(norm))
    for count in (1, 2, 8, 32):
        at = norm.at(S=count)
        best = shortlist(1, at, SM90, Alone(at))[0].schedule
        assert estimate(chosen.schedule, at, SM90) <= 1.1 * estimate(best, at, SM90), count


def test_a_grouping_has_several_schedules() -> None:
    """Where the kernel of the first one spills, or is not right, another one is taken."""
    problem = ConvProblem.parse("mb8ic168ih40iw23oc2oh41ow25kh2kw1ph1pw1 dt=f16")
    form = ConvWorkload(problem, Prop.BWD_W).with_batch(128).of_any_batch()[0]
    (compute,) = form.computations
    listed = [k.schedule for k in with_same_bits(8, compute, SM90, form)]
    assert len({grouping(s, compute) for s in listed}) == 1 and len({*listed}) == len(listed) > 1


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("mb:2 oh:8 ow:8 oc:128 ic:64 | mma | a=box b=box | swap=1 stages=6 via=gluon", True),
        ("mb.oh.ow:64 oc:64 ic:32 | mma", False),
        ("mb.oh.ow:64 oc:64 ic:64 | mma | order=kw.kh.ic", False),
        ("mb.oh.ow:64 oc:64 ic:64 | mma | split_k=2", False),
        ("mb.oh.ow:16 oc:64 ic:64 | mma", False),  # an instruction of one warp
        ("mb.oh.ow:8 oc:8 ic:64 | fma", False),
    ],
)
def test_groupings_are_told_apart(other: str, same: bool) -> None:
    compute = ConvWorkload(PROBLEM, Prop.FWD).computations[0]
    one = grouping(Schedule.parse("mb.oh.ow:64 oc:64 ic:64 | mma"), compute)
    assert (one == grouping(Schedule.parse(other), compute)) == same


SPLIT = [
    ("mb8ic512ih7oc512oh7kh3ph1 dt=bf16 tag=nhwc", Prop.FWD),
    pytest.param("mb8ic64ih14oc64oh14kh3ph1 dt=bf16 tag=nhwc", Prop.BWD_W, marks=pytest.mark.slow),
    pytest.param("mb8ic256ih14oc1024oh14kh1 dt=bf16 tag=nhwc", Prop.BWD_W, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("text", "prop"), SPLIT)
def test_a_file_pins_the_grouping_for_chips_of_other_sizes(
    text: str, prop: Prop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are of plans, by the texts of their forms; without it each chip has its own grouping."""
    form = ConvWorkload(ConvProblem.parse(text), prop).of_any_batch()[0]
    plans = [form.with_batch(n) for n in in_bands(form.computations[0])]
    smaller, file = replace(SM90, sms=114), tmp_path / "pinned.csv"

    def chosen(chip: Target, rows: str) -> dict[ConvWorkload, Schedule]:
        monkeypatch.setenv("TRANSCONV_TUNED", rows)
        same_bits.forget()
        return {of: with_same_bits(1, of.computations[0], chip, of)[0].schedule for of in plans}

    def groupings(found: dict[ConvWorkload, Schedule]) -> set[Hashable]:
        return {grouping(schedule, of.computations[0]) for of, schedule in found.items()}

    first = chosen(SM90, "0")
    tuning_db.save(file, [tuning_db.make(of, smaller, str(s), 1.0, 1) for of, s in first.items()])
    assert groupings(chosen(smaller, "0")) != groupings(first)
    assert groupings(chosen(smaller, str(file))) == groupings(first)
    same_bits.forget()
