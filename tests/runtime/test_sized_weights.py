"""Weight gradients of any size in explicit kernels: sums that end at sizes, in boxes and in parts."""

from __future__ import annotations

from functools import cache

import pytest

from transconv.backend_triton import Resources, compile_offline
from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, ConvWorkload, Prop, any_size, marked
from transconv.conv.relation import every
from transconv.ir import Fetch, find
from transconv.runtime import Plan, build_compute, compiler, job_of
from transconv.schedule import Schedule, why_not
from transconv.selection.proposals import heuristics
from transconv.support import is_direct
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase

SM90 = Target.parse("sm_90")
WINDOW = "mb2?ic64ih9?oc64oh9kh3ph1 dt=f16 tag=nhwc"
STRIDED = "mb2?ic64ih9?oc64oh5kh3sh2ph1 dt=f16 tag=nhwc"
GROUPS = "g8mb2?ic64ih9?oc64oh9kh3ph1 dt=bf16 tag=nhwc"
WORDS = "mma | a=box b=box | swap=1"
KERNELS = (  # one part, parts of which some are empty, a step of 2, piles, merged groups, two warp groups
    (WINDOW, f"ic:64 oc:64 mb:1 oh:4 ow:16 | {WORDS} stages=3 warps=4 via=gluon"),
    (WINDOW, f"ic:64 oc:64 mb:2 oh:4 ow:8 | {WORDS} split_k=3 stages=3 warps=4 via=gluon"),
    (STRIDED, f"ic:64 oc:64 oh:4 ow:8 | {WORDS} split_k=4 stages=3 warps=4 via=gluon"),
    (WINDOW, f"kh.kw.ic:128 oc:64 oh:4 ow:16 | {WORDS} split_k=2 stages=2 warps=4 via=gluon"),
    (GROUPS, f"kh.kw.ic:64 oc:64 oh:4 ow:16 | {WORDS} merge=8 stages=2 warps=4 via=gluon"),
    (WINDOW, f"kh.kw.ic:128 oc:64 oh:8 ow:8 | {WORDS} split_k=2 stages=2 warps=8 via=gluon"),
)


@cache
def built(text: str, words: str) -> tuple[Compute, Plan]:
    plain, names = marked(text)
    (compute,) = any_size(ConvProblem.parse(plain), Prop.BWD_W, names)
    assert why_not(Schedule.parse(words), compute, SM90) is None
    return compute, build_compute(compute, SM90, Schedule.parse(words))


def problem(compute: Compute, plan: Plan, drawn: dict[str, int]) -> str:
    """What is wrong with the result of a plan's kernels for some sizes."""
    return (
        ComputationCase(compute.at(**drawn)).interpreted(*[s.kernel.at(drawn) for s in plan.steps]).problem
    )


@pytest.mark.every(8)
@pytest.mark.parametrize(("text", "words"), KERNELS)
def test_edges_and_drawn_sizes(text: str, words: str) -> None:
    """The least sizes first: of these most parts have no step, and most lanes are beyond the end."""
    if text is STRIDED and not is_direct():
        pytest.skip("this release of Triton has no such descriptors")
    compute, plan = built(text, words)
    assert len([*find(plan.steps[0].kernel, Fetch)]) >= 2
    least = {s.name: s.least for s in compute.named.each} if compute.named else {}
    for drawn in (least, *sizes.drawn(compute, 3)):
        assert not problem(compute, plan, drawn), drawn


def test_one_factor_has_to_end_where_the_sum_ends() -> None:
    text = """compute product
        sizes K=64 in 8..4096, K % 8 == 0
        tensor X f16 [K+8, 64]
        tensor W f16 [{rows}, 64]
        tensor Y f16 [64, 64]
        axes m=64 n=64 | k=K
        read x = X[k + 8, m]
        read w = W[k{shift}, n]
        store Y[m, n] = sum(x*w; k)"""
    schedule = Schedule.parse("m:64 n:64 k:64 | mma | a=box b=box | swap=1 stages=2 warps=4 via=gluon")
    assert why_not(schedule, parse(text.format(rows="K", shift="")), SM90) is None
    reason = why_not(schedule, parse(text.format(rows="K+8", shift=" + 4")), SM90)
    assert reason is not None and "goes on beyond it" in reason
    given = why_not(schedule, parse(text.format(rows="K", shift="")).at(K=72), SM90)
    assert given is not None and "goes on beyond it" in given, "given sizes: positions alone"


def test_two_warp_groups_do_not_wait_after_each_product() -> None:
    """As those of Triton's own loops do that end at a size."""
    (found, *_) = compile_offline([job_of(built(*KERNELS[-1])[1].steps[0], SM90, words=False)])
    assert isinstance(found, Resources) and not found.serialised and not found.spill_bytes
    compute = built(*KERNELS[-1])[0]
    words = "ic:64 oc:64 mb.oh.ow:64 | mma | a=gather b=gather | stages=3 warps=8"
    assert "wait in such a loop" in (why_not(Schedule.parse(words), compute, SM90) or "")


def test_the_estimate_prefers_boxes() -> None:
    plain, names = marked("mb8?ic64ih56?oc64oh56kh3ph1 dt=bf16 tag=nhwc")
    (compute,) = any_size(ConvProblem.parse(plain), Prop.BWD_W, names)
    best = heuristics.default(compute, SM90)
    assert best.via == "gluon" and best.split_k > 1 and not best.programs


def test_tiles_of_other_proportions_share_the_kernel_that_adds_parts() -> None:
    """It has no sizes that are arguments, so examples of these are no part of it."""
    made = []
    for sides, tile in (("ih56iw56oc64oh56ow56", "oh:8 ow:8"), ("ih400iw96oc64oh400ow96", "oh:32 ow:2")):
        p = ConvProblem.parse(f"mb8ic64{sides}kh3kw3ph1pw1 dt=bf16 tag=nhwc")
        words = f"kh.kw.ic:128 oc:64 {tile} | {WORDS} split_k=26 stages=4 warps=4 via=gluon"
        workload = ConvWorkload(p, Prop.BWD_W, open=every(p))
        made.append(compiler.build(workload, SM90, Schedule.parse(words), None, False, Plan))
    (first, adds), (other, again) = (plan.steps for plan in made)
    assert first.digest != other.digest and adds.digest == again.digest and adds.source == again.source
