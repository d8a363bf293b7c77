"""The relation: kinds from membership, stride phases, and the corner cases of addresses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import convolve, integers, pack, unpack
from tests.stages import launches_of, wrong_stages
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.errors import ScheduleError
from transconv.ir import Load, find, index64
from transconv.ir.interp.evaluate import Memory
from transconv.ir.interp.kernel import run
from transconv.passes.lowering import split_k
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS

SM90 = TARGETS["sm_90"]


def kinds(text: str, prop: Prop) -> dict[str, str]:
    compute = computes(ConvProblem.parse(text), prop)[0]
    return {kind: " ".join(x.name for x in compute.axes_of(kind)) for kind in "BMNK"}


def test_kinds_are_membership() -> None:
    text = "g2mb2ic8id4oc4od4kd3pd1"
    assert kinds(text, Prop.FWD) == {"B": "g", "M": "mb od oh ow", "N": "oc", "K": "kd kh kw ic"}
    assert kinds(text, Prop.BWD_D) == {"B": "g", "M": "mb id ih iw", "N": "ic", "K": "kd kh kw oc"}
    text = "g2mb2ic32id4oc16od4kd3pd1"
    assert kinds(text, Prop.BWD_W) == {"B": "g", "M": "kd kh kw ic", "N": "oc", "K": "mb od oh ow"}


@pytest.mark.parametrize(
    ("text", "over"),
    [
        ("mb2ic8ih5oc4oh5kh3ph1", "i"),
        ("mb2ic8ih5oc4oh3kh2dh2", "i"),
        ("g2mb2ic8ih5oc4oh5kh3ph1", "i"),
        ("mb2ic7ih5oc4oh5kh3ph1", "o"),
        ("mb2ic8ih5oc4oh3kh3sh2ph1", "o"),
        ("mb2ic64ih5oc16oh5kh3ph1", "o"),
        ("g4mb2ic4ih5oc4oh5kh3ph1", "o"),
    ],
)
def test_taps_are_columns_next_to_few_channels_of_dst(text: str, over: str) -> None:
    found = kinds(text, Prop.BWD_W)
    assert found["K"] == f"mb {over}h {over}w"
    assert (found["M"], found["N"]) == (("ic", "kh kw oc") if over == "i" else ("kh kw ic", "oc"))


def test_phases_without_padding_are_columns() -> None:
    assert kinds("mb2ic5ih8oc6oh4kh2sh2ph0", Prop.BWD_D) == {
        "B": "",
        "M": "mb qh qw",
        "N": "rh rw ic",
        "K": "th tw oc",
    }


@pytest.mark.parametrize("words", ["split_k=2", "reduce=stream programs=132", "reduce=stream"])
def test_a_schedule_of_the_other_sum_is_refused_in_words(words: str) -> None:
    problem = ConvProblem.parse("mb2ic32ih8oc4oh8kh3ph1 dt=f16 tag=nhwc")
    schedule = Schedule.parse(f"ic:32 oc:16 oh.ow:32 | mma | {words}")
    with pytest.raises(ScheduleError, match="there is no axis 'oh' in bwd_w_over_src; its axes are"):
        compiler.build(problem, Prop.BWD_W, SM90, schedule)


def test_a_phase_knows_which_part_of_the_result_it_makes() -> None:
    text = "mb2ic8ih7oc8oh4kh3sh2ph1"
    parts = [a.part for a in computes(ConvProblem.parse(text), Prop.BWD_D)]
    assert parts == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(a.phase for a in computes(ConvProblem.parse(text), Prop.BWD_D))
    assert not any(
        a.phase for prop in (Prop.FWD, Prop.BWD_W) for a in computes(ConvProblem.parse(text), prop)
    )
    steps = compiler.plan(
        ConvProblem.parse(text),
        Prop.BWD_D,
        SM90,
        "mb.qh.qw:16 ic:16 oc:16 | mma | split_k=2 reduce=partials",
    ).steps
    assert [(s.compute.part, s.compute.does) for s in steps if s.schedule.split_k == 1][-1] == (
        (1, 1),
        "add",
    )
    assert not any(s.compute.phase for s in steps if s.compute.does == "add")


# How many computations: one where every phase has as many taps, or where there are many phases.
PHASED = {
    "mb2ic5ih8oc6oh4kh4sh2ph1": 1,
    "mb2ic5ih7oc6oh4kh3sh2ph1": 4,
    "mb2ic3ih15oc6oh3kh5sh5ph0": 1,
    "mb1ic3ih17oc4oh4kh7sh5ph3": 1,
    "g2mb2ic4ih8oc6oh4kh4sh2ph2": 1,
    "mb1ic2ih9oc3oh5kh3sh2ph1dh1": 4,
    "mb2ic3id4ih6iw6oc5od2oh2ow2kd2kh3kw3sd2sh3sw3": 1,
    "mb2ic3ih9oc4oh5kh1sh2ph0": 4,
}


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "count"), PHASED.items())
def test_phases_cover_the_result_once(text: str, count: int) -> None:
    p = ConvProblem.parse(text)
    assert len(computes(p, Prop.BWD_D)) == count
    rng = np.random.default_rng(0)
    dst, wei = (integers(rng, p.shapes[n]) for n in ("dst", "wei"))
    buffers = {
        "dst": pack(dst, p.dst.layout),
        "wei": pack(wei, p.wei.layout),
        "src": np.full(p.src.layout.span, np.nan, np.float32),
    }
    steps = compiler.plan_steps(p, Prop.BWD_D, SM90, None, Epilogue())
    for compute, schedule in steps:
        if schedule.split_k > 1:
            parts = split_k.workspace(compute, schedule.split_k)
            buffers["partials"] = np.full(parts.layout.span, np.nan, np.float32)
    memory = Memory(buffers)
    for compute, schedule in steps:
        if len(steps) > count:
            memory.new_launch()
        run(compiler.lower(compute, schedule, SM90, "conv", "ieee")[-1][1], memory)
    got = unpack(buffers["src"], p.src.layout, p.shapes["src"])
    assert np.array_equal(got, convolve(p, Prop.BWD_D, dst, wei))


def test_to_one_output_every_position_meets_one_tap() -> None:
    """No sum over taps of which all but one miss; other dimensions are solved as ever."""
    assert kinds("mb2ic5id3ih6iw6oc6od1oh6ow6kd3kh3kw3pd0ph1pw1", Prop.BWD_D) == {
        "B": "",
        "M": "mb qd ih iw",
        "N": "rd ic",
        "K": "td kh kw oc",
    }
    p = ConvProblem.parse("mb2ic5id3ih6iw6oc6od1oh6ow6kd3kh3kw3pd0ph1pw1")
    assert {x.name: x.size for x in computes(p, Prop.BWD_D)[0].axes_of("K")}["td"] == 1
    assert len(computes(ConvProblem.parse("mb1ic4ih3iw9oc4oh1ow4kh3kw3sh2sw2"), Prop.BWD_D)) == 2


@pytest.mark.every(11)
@pytest.mark.parametrize("i", [1, 2, 5])
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("pad", [0, 1, 3])
@pytest.mark.parametrize("stride", [1, 3])
def test_one_output_wherever_it_lies(i: int, k: int, pad: int, stride: int) -> None:
    p = ConvProblem.make(2, 3, 4, (i, 4), (k, 2), stride=(stride, 2), pad=(pad, 0), o=(1, 2))
    summed = {x.name: x.size for x in computes(p, Prop.BWD_D)[0].axes_of("K")}
    if i + pad <= k:  # else some positions meet none
        assert summed["th"] == 1
    steps = compiler.plan_steps(p, Prop.BWD_D, SM90, None, Epilogue())
    assert wrong_stages(p, Prop.BWD_D, launches_of(steps)) == []


@pytest.mark.parametrize("prop", [Prop.BWD_D, Prop.BWD_W])
def test_an_expanded_operand_keeps_its_lanes(prop: Prop) -> None:
    """The gradient of a sum is one number, expanded: its address does not vary along any lane."""
    p = ConvProblem.parse("mb2ic16ih8oc16oh8kh1 tag=abx:abx:strides(0,0,0,0) math=ieee")
    plan = compiler.plan(
        p, prop, SM90, "mb.ih.iw:16 ic:16 oc:16" if prop is Prop.BWD_D else "ic:16 oc:16 mb.oh.ow:16"
    )
    assert "tl.broadcast_to(" in plan.source
    rng = np.random.default_rng(0)
    other = "wei" if prop is Prop.BWD_D else "src"
    made = "src" if prop is Prop.BWD_D else "wei"
    values = {other: integers(rng, p.shapes[other]), "dst": np.full(p.shapes["dst"], 3.0)}
    buffers = {
        other: pack(values[other], getattr(p, other).layout),
        "dst": np.full(1, 3, np.float32),
        made: np.zeros(getattr(p, made).layout.span, np.float32),
    }
    run(plan.steps[0].kernel, buffers)
    order = ("dst", "wei") if prop is Prop.BWD_D else ("src", "dst")
    expected = convolve(p, prop, values[order[0]], values[order[1]])
    assert np.array_equal(unpack(buffers[made], getattr(p, made).layout, p.shapes[made]), expected)


def test_every_part_of_a_wide_address_is_wide() -> None:
    """A 32-bit part that is multiplied by 2^31 next to a part that is wide already."""
    p = ConvProblem.parse("mb1ic2ih1024iw1048576oc2oh1024ow1048576kh1kw1 dt=f16")
    plan = compiler.plan(p, Prop.BWD_W, SM90, "ic:16 oc:16 mb.oh.ow:64 | split_k=396")
    assert all(x.offset.dtype is index64 for x in find(plan.steps[0].kernel, Load))
    assert "mb.to(tl.int64) * 2147483648" in plan.source


@pytest.mark.slow
def test_a_sum_over_nothing_has_a_legal_schedule() -> None:
    p = ConvProblem.parse("mb9ic336ih9oc304oh5kh1sh2")
    assert any(x.size == 0 for a in computes(p, Prop.BWD_D) for x in a.axes_of("K"))
    plan = compiler.plan(p, Prop.BWD_D, SM90)
    assert len(plan.steps) >= 4
